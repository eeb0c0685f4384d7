"""The state of a training run, and how a report of its host changes it. Pure."""

from __future__ import annotations

from typing import Literal

from scheduler.core.curve import Point
from tierkit.types import RunState
from tierkit.wire.runs import RunReport

__all__ = ["SILENT_S", "point_of", "state_after", "state_now"]

SILENT_S = 10.0
"""A host reports every second. After this many seconds without a report it counts as gone, and may come back."""


def state_now(kept: RunState, silent_s: float) -> RunState:
    """The state of a run.

    Args:
        kept: running, stopping, or the end that it came to.
        silent_s: since the latest report of its host.
    """
    if kept.final or silent_s <= SILENT_S:
        return kept
    return RunState.STOPPED if kept is RunState.STOPPING else RunState.INTERRUPTED


def point_of(said: RunReport, at: float) -> Point:
    """The moment of a report on the curve of its run; the counts are sums over its workers, None if it names none.

    Args:
        at: seconds since 1970.
    """
    if not said.workers:
        return Point(at, said.done, said.loss, said.accuracy)
    updates = sum(worker.updates for worker in said.workers)
    staleness = sum(worker.staleness * worker.updates for worker in said.workers) / max(1, updates)
    bytes_moved = sum(worker.bytes_sent + worker.bytes_received for worker in said.workers)
    return Point(at, said.done, said.loss, said.accuracy, updates, bytes_moved, staleness)


def state_after(now: RunState, said: Literal["running", "finished", "failed"], *, complete: bool) -> RunState:
    """Return the state of a run to store after a report.

    Args:
        now: state from `state_now`.
        said: state in the host's report.
        complete: True if all steps are done.
    """
    if now.final:
        return now
    asked = now is RunState.STOPPING
    if said == "running":
        return RunState.STOPPING if asked else RunState.RUNNING
    if said == "failed":
        return RunState.FAILED
    return RunState.STOPPED if asked and not complete else RunState.FINISHED
