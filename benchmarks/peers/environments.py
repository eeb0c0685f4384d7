"""One virtual environment per program, made when it is first needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.contenders import Program
from tierkit.errors import SetupError

__all__ = ["installed_version", "interpreter_of"]

_READY = "terrace-peer.json"
_INSTALL_S = 1200.0
_SHORT_S = 120.0


def interpreter_of(program: Program, folder: Path) -> Path:
    """The Python interpreter that runs this program; installs its environment below `folder` where it is missing.

    An environment counts as there when its installation was completed for the same requirements.

    Raises:
        SetupError: it cannot be installed; the message holds the reason that pip gave.
    """
    if not program.requirements:
        return Path(sys.executable)
    home = folder / program.name
    ready = home / _READY
    python = home / "bin" / "python"
    wanted = {"requirements": list(program.requirements), "python": sys.version}
    if ready.exists() and json.loads(ready.read_text()) == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(home)], f"no environment for {program.title}", _SHORT_S)
    pip = [str(python), "-m", "pip", "install", "--no-input", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *program.requirements], f"{program.title} cannot be installed", _INSTALL_S)
    ready.write_text(json.dumps(wanted))
    return python


def installed_version(python: Path, distribution: str) -> str:
    """Version of a distribution in an interpreter's environment; "unknown" where it does not say."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True, timeout=_SHORT_S)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _run(command: list[str], failure: str, timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise SetupError(f"{failure}: not done within {timeout_s:g} s") from None
    except OSError as exc:
        raise SetupError(f"{failure}: {exc}") from exc
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no reason given")
        raise SetupError(f"{failure}: {reason.removeprefix('ERROR: ').strip()}")
