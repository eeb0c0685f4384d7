"""The state of a training run, and how a report of its host changes it. Pure."""

from __future__ import annotations

from typing import Literal

from tierkit.types import RunState

__all__ = ["SILENT_S", "state_after", "state_now"]

SILENT_S = 10.0
"""A host reports every second; one that has not for so long is taken for gone, and may come back."""


def state_now(kept: RunState, silent_s: float) -> RunState:
    """The state of a run.

    Args:
        kept: running, stopping, or the end that it came to.
        silent_s: since the latest report of its host.
    """
    if kept.final or silent_s <= SILENT_S:
        return kept
    return RunState.STOPPED if kept is RunState.STOPPING else RunState.INTERRUPTED


def state_after(now: RunState, said: Literal["running", "finished", "failed"], *, complete: bool) -> RunState:
    """What is kept of a run after a report.

    Args:
        now: as `state_now` has it.
        said: by the host.
        complete: whether all steps are done.
    """
    if now.final:
        return now
    asked = now is RunState.STOPPING
    if said == "running":
        return RunState.STOPPING if asked else RunState.RUNNING
    if said == "failed":
        return RunState.FAILED
    return RunState.STOPPED if asked and not complete else RunState.FINISHED
