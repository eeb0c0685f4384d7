"""Which task goes to which end device next. A pure function of a snapshot; `dispatcher` acts on it.

Tasks go over the end devices in sequential order (section 3.4 of the paper: #1, #2, ..., N, #1, ...), except that a
device whose window is full is passed over: the order of the paper is kept where all devices are equally fast, and a
slow one does not hold up the others. Jobs take turns task by task; an interactive request goes before all jobs and may
use one place more than the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Choice", "Place", "Want", "choose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An end device as the choice sees it, in the order of the device list."""

    node_id: str
    outstanding: int
    """Tasks that it has now."""
    alive: bool
    """On the device list, not suspect, not draining, not asking to be left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A job that has a task ready to go."""

    job_id: str
    interactive: bool
    last_served: int
    """Turn at which this job was served last; 0 for never."""
    tried: frozenset[str] = frozenset()
    """End devices on which this very task has failed: others are better."""
    regardless: frozenset[str] | None = None
    """With recovery `reassign`: the devices of the job's beginning, which receive tasks whatever their health. None:
    those that are alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Send the next task of `job_id` to `node_id`."""

    job_id: str
    node_id: str
    reason: str


def choose(wants: Sequence[Want], places: Sequence[Place], *, window: int, last_used: str | None) -> Choice | None:
    """The next task to send, or None when nothing can go now.

    Args:
        wants: jobs with a task that is ready, in any order.
        places: end devices in the order of the device list.
        window: tasks that a device may have outstanding.
        last_used: the device that got the task before; the sequential order goes on after it.
    """
    start = next((i + 1 for i, place in enumerate(places) if place.node_id == last_used), 0)
    in_turn = [*places[start:], *places[:start]]
    for want in sorted(wants, key=lambda want: (not want.interactive, want.last_served)):
        limit = window + want.interactive
        free = [
            place
            for place in in_turn
            if place.outstanding < limit
            and (place.alive if want.regardless is None else place.node_id in want.regardless)
        ]
        if not free:
            continue
        untried = [place for place in free if place.node_id not in want.tried]
        place = (untried or free)[0]
        passed_over = in_turn.index(place)
        reason = f"next in order with room, {passed_over} passed over" if passed_over else "next in sequential order"
        return Choice(job_id=want.job_id, node_id=place.node_id, reason=reason)
    return None
