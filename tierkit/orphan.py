"""Ends a process when the launcher that started it ends, so that a killed launcher leaves no orphans.

The child asks for this itself, early in its start: a `preexec_fn` in the parent would force a slow fork and is unsafe
with threads. Linux only; elsewhere there is only the launcher's clean-up.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["PARENT_VARIABLE", "die_with_parent", "own_environment"]

PARENT_VARIABLE = "TERRACE_PARENT_PID"
"""Set by the launcher in the environment of what it starts."""

_PR_SET_PDEATHSIG = 1

_launcher: dict[str, str] = {}
"""The variable that names the launcher of this process, if it has one."""


def die_with_parent() -> None:
    """Be killed when the launcher named in the environment dies; at once if it is dead already."""
    # Taken out of the environment, or grandchildren would take us for dead.
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    _launcher[PARENT_VARIABLE] = parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher may have died between starting us and the line above: then no signal would come.
    if os.getppid() != int(parent):
        sys.exit(f"the launcher {parent} is gone")


def own_environment() -> dict[str, str]:
    """Return the environment in which this process was started, with which it can start itself again."""
    return {**os.environ, **_launcher}
