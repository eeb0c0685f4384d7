"""The servers that are compared: their commands, packages and protocols."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tierkit.errors import InvalidInput

__all__ = ["CONTENDERS", "MLSERVER_JSON", "TERRACE", "Contender", "Program", "Protocol", "choose", "cloud_node"]

_SERVERS = Path(__file__).parent / "servers"

Protocol = Literal["raw", "oip", "base64"]
"""Form of a request: raw pixels to /predict, the Open Inference Protocol with binary tensors, or the same protocol as
JSON with the pixels in base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program with a separate environment."""

    name: str
    title: str
    command: tuple[str, ...]
    """Words after the interpreter; those in braces are filled in."""
    requirements: tuple[str, ...] = ()
    """Packages that pip installs into its environment; without any it runs in Terrace's own."""
    distribution: str
    """Distribution that gives the version."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its processes."""

    def filled(self, python: Path, values: Mapping[str, str]) -> list[str]:
        """Its command, with `values` for the words in braces."""
        return [str(python), *(word.format(**values) for word in self.command)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender(Program):
    """One server of the comparison; its command may have {port}, {model} (its name) and {weights} (the folder)."""

    protocol: Protocol


TERRACE = Contender(
    name="terrace",
    title="Terrace end node",
    protocol="oip",
    command=("-m", "end_node", "--port", "{port}", "--model", "{model}", "--models", "{weights}", "--threads", "1"),
    distribution="terrace-inference",
)


def _peer(name: str, title: str, package: str, **other: Any) -> Contender:
    """A server with a script in `servers/`, and its package from PyPI."""
    known = {
        "protocol": "raw",
        "command": (str(_SERVERS / f"serve_{name}.py"),),
        "requirements": (package, "numpy", "onnxruntime"),
        "distribution": package.partition("[")[0],
    }
    return Contender(name=name, title=title, **{**known, **other})


CONTENDERS: tuple[Contender, ...] = (
    TERRACE,
    _peer(
        "fastapi",
        "naive FastAPI",
        "fastapi",
        requirements=("fastapi", "uvicorn[standard]", "numpy", "onnxruntime"),
    ),
    _peer("litserve", "LitServe", "litserve"),
    _peer(
        "bentoml",
        "BentoML",
        "bentoml",
        command=(
            *("-m", "bentoml", "serve", "serve_bentoml:Classifier", "--working-dir", str(_SERVERS)),
            *("--host", "127.0.0.1", "--port", "{port}"),
        ),
        environment={"BENTOML_DO_NOT_TRACK": "True"},
    ),
    _peer(
        "ray",
        "Ray Serve",
        "ray[serve]",
        environment={
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            # These two keep its many listeners on loopback.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_enable_metrics_collection": "false",
        },
    ),
    _peer(
        "pytriton",
        "Triton (nvidia-pytriton)",
        "nvidia-pytriton",
        protocol="oip",
        # Its Triton is linked against the interpreter's shared library and looks for it in the system's folders only.
        environment={"LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR") or f"{sys.base_prefix}/lib")},
    ),
    _peer("mlserver", "MLServer", "mlserver", protocol="base64"),
)

MLSERVER_JSON = _peer(
    "mlserver",
    "MLServer (JSON)",
    "mlserver",
    command=(str(_SERVERS / "serve_mlserver_json.py"),),
)
"""MLServer with tensors as JSON, the form that `terrace cloud --engine oip` sends; it shares the other one's
environment."""


def cloud_node(title: str, flags: tuple[str, ...]) -> Contender:
    """A cloud node with these flags and the common ones."""
    return replace(TERRACE, name="cloud", title=title, command=("-m", "cloud_node", *TERRACE.command[2:], *flags))


def choose(names: list[str]) -> list[Contender]:
    """The contenders of these names, in the order of the table; all of them without any.

    Raises:
        InvalidInput: an unknown name.
    """
    known = [contender.name for contender in CONTENDERS]
    for name in names:
        if name not in known:
            raise InvalidInput(f"no contender {name!r}: there are {', '.join(known)}")
    return [contender for contender in CONTENDERS if not names or contender.name in names]
