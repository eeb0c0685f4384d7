"""Who is compared, and how each one is started and spoken to."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tierkit.errors import InvalidInput

__all__ = ["CONTENDERS", "TERRACE", "Contender", "Protocol", "choose"]

_SERVERS = Path(__file__).parent / "servers"

Protocol = Literal["raw", "oip", "base64"]
"""What is sent: raw pixels to /predict, the Open Inference Protocol with binary tensors, or the same protocol as JSON
with the pixels in base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One server of the comparison."""

    name: str
    title: str
    protocol: Protocol
    command: tuple[str, ...]
    """After the interpreter; {port}, {model} (its name) and {weights} (the folder) are filled in."""
    requirements: tuple[str, ...] = ()
    """What pip installs into its environment; none: it runs in Terrace's own."""
    distribution: str
    """Whose version is shown."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its processes."""


def _script(name: str) -> tuple[str, ...]:
    return (str(_SERVERS / name),)


TERRACE = Contender(
    name="terrace",
    title="Terrace end node",
    protocol="oip",
    command=("-m", "end_node", "--port", "{port}", "--models", "{model}", "--weights", "{weights}", "--threads", "1"),
    distribution="terrace",
)

CONTENDERS: tuple[Contender, ...] = (
    TERRACE,
    Contender(
        name="fastapi",
        title="naive FastAPI",
        protocol="raw",
        command=_script("serve_fastapi.py"),
        requirements=("fastapi", "uvicorn[standard]", "numpy", "onnxruntime"),
        distribution="fastapi",
    ),
    Contender(
        name="litserve",
        title="LitServe",
        protocol="raw",
        command=_script("serve_litserve.py"),
        requirements=("litserve", "numpy", "onnxruntime"),
        distribution="litserve",
    ),
    Contender(
        name="bentoml",
        title="BentoML",
        protocol="raw",
        command=(
            *("-m", "bentoml", "serve", "serve_bentoml:Classifier", "--working-dir", str(_SERVERS)),
            *("--host", "127.0.0.1", "--port", "{port}"),
        ),
        requirements=("bentoml", "numpy", "onnxruntime"),
        distribution="bentoml",
        environment={"BENTOML_DO_NOT_TRACK": "True"},
    ),
    Contender(
        name="ray",
        title="Ray Serve",
        protocol="raw",
        command=_script("serve_ray.py"),
        requirements=("ray[serve]", "numpy", "onnxruntime"),
        distribution="ray",
        environment={
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            # These two keep its many listeners on loopback.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_enable_metrics_collection": "false",
        },
    ),
    Contender(
        name="pytriton",
        title="Triton (nvidia-pytriton)",
        protocol="oip",
        command=_script("serve_pytriton.py"),
        requirements=("nvidia-pytriton", "numpy", "onnxruntime"),
        distribution="nvidia-pytriton",
        # Its Triton is linked against the interpreter's shared library and looks for it in the system's folders only.
        environment={"LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR") or f"{sys.base_prefix}/lib")},
    ),
    Contender(
        name="mlserver",
        title="MLServer",
        protocol="base64",
        command=_script("serve_mlserver.py"),
        requirements=("mlserver", "numpy", "onnxruntime"),
        distribution="mlserver",
    ),
)


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
