"""Which task goes to which end device next. A pure function of a snapshot; `dispatcher` acts on it.

Which job: an interactive request goes before all jobs. Jobs share the fleet by start-time fair queueing (Goyal, Vin and
Cheng, 1996): each task of n images of a job with weight w has a start tag, the larger of the virtual time and of the
finish tag of the job's task before, and a finish tag n / w later; the smallest start tag goes first, and the virtual
time is the start tag of the task sent last. So jobs that always have tasks ready get images in proportion to their
weights, one that comes later begins beside the others and not before them, and none starves.

Which device, for the schemes of the paper: tasks go over the end devices in sequential order (section 3.4: #1, #2, ...,
N, #1, ...), except that a device whose window is full is passed over: the order of the paper is kept where all devices
are equally fast, and a slow one does not hold up the others. An interactive request may use one place more than the
window. For the scheme `adaptive` the planner is asked.

A task that has failed somewhere waits for another device, full windows or not, while one is alive. A device that fails
at once is always free: were tasks to go to whoever is free, it would get all attempts of one after the other. Devices
whose last answers were wrong get a task as a trial: its first attempt, while there are others for what has failed
already, or has its coarse answer and must just be passed on. See `eligible`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scheduler.placement.mapping import Node

__all__ = ["Choice", "FreePlaces", "Place", "Turn", "Want", "choose", "eligible", "in_order", "tags", "turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An end device as the choice sees it, in the order of the device list."""

    node_id: str
    outstanding: int
    """Tasks that it has now, those of the scheme `adaptive` apart."""
    owed: int = 0
    """Tasks of any scheme whose coarse answer it owes."""
    alive: bool
    """On the device list, not suspect, not draining, not asking to be left alone."""
    on_trial: bool = False
    """Its last answer was wrong: whether it is right again is to be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A job that has a task ready to go."""

    job_id: str
    task: int = 0
    """Its index."""
    interactive: bool
    tried: frozenset[str] = frozenset()
    """Nodes on which this very task has failed: it goes to them only when no other end device may receive tasks."""
    fine_only: bool = False
    """The coarse answer is there: the device just passes the task on."""
    regardless: frozenset[str] | None = None
    """With recovery `reassign`: the devices of the job's beginning, which receive tasks whatever their health. None:
    those that are alive."""
    adaptive: bool = False
    """Whether the planner says where the task goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Send a task of `job_id` to `node_id`."""

    job_id: str
    task: int = 0
    """Its index."""
    node_id: str
    reason: str
    upper: tuple[Node, ...] | None = None
    """The upper nodes to ask, in this order; None: those of the device's route."""
    too_late: bool = False
    """No upper node is asked because none would answer before the deadline."""


Planner = Callable[[Want], Choice | None]


Turn = tuple[bool, float]
"""Whose turn it is: the smallest goes first."""


def turn(virtual: float, finish_tag: float, *, interactive: bool) -> Turn:
    """Whose task goes next. Arguments as for `tags`."""
    return not interactive, max(virtual, finish_tag)


def tags(virtual: float, finish_tag: float, images: int, weight: float) -> tuple[float, float]:
    """Start and finish tag of a job's next task.

    Args:
        virtual: virtual time: the start tag of the task sent last, of whichever job.
        finish_tag: of the job's task before; 0 for none.
    """
    start = max(virtual, finish_tag)
    return start, start + images / weight


def eligible(want: Want, places: Sequence[Place]) -> list[Place]:
    """The end devices that a task may go to, with or without room: a device with a clean record that has not failed it,
    else one on trial, else one that has failed it. Its first attempt goes to any that is alive."""
    if want.regardless is not None:
        return [place for place in places if place.node_id in want.regardless]
    able = [place for place in places if place.alive]
    if not (want.tried or want.fine_only):
        return able
    untried = [place for place in able if place.node_id not in want.tried]
    return [place for place in untried if not place.on_trial] or untried or able


def choose(wants: Iterable[Want], *, in_order: Planner, plan: Planner) -> Choice | None:
    """The next task to send, or None when nothing can go now. A job that cannot go does not hold up another.

    Args:
        wants: jobs with a task that is ready, by their `turn`; read up to the first one that can go.
        in_order: for the schemes of the paper.
        plan: for the scheme `adaptive`.
    """
    for want in wants:
        choice = plan(want) if want.adaptive else in_order(want)
        if choice is not None:
            return choice
    return None


def in_order(want: Want, places: Sequence[Place], *, window: int, last_used: str | None) -> Choice | None:
    """The next device in sequential order that has room.

    Args:
        places: end devices in the order of the device list.
        window: tasks that a device may have outstanding.
        last_used: the device that got the task before; the sequential order goes on after it.
    """
    start = next((i + 1 for i, place in enumerate(places) if place.node_id == last_used), 0)
    in_turn = [*places[start:], *places[:start]]
    limit = window + want.interactive
    able = eligible(want, in_turn)
    place = next((place for place in able if max(place.outstanding, place.owed) < limit), None)
    if place is None:
        return None
    return _chosen(want, place.node_id, in_turn.index(place))


def _chosen(want: Want, node_id: str, passed_over: int) -> Choice:
    reason = f"next in order with room, {passed_over} passed over" if passed_over else "next in sequential order"
    return Choice(job_id=want.job_id, task=want.task, node_id=node_id, reason=reason)


Order = tuple[tuple[int, str | int], ...]
"""Of a device in the list, see `mapping.natural_order`."""


class FreePlaces:
    """The end devices that are alive and have room in their window, in the order of the list: `in_order` for most
    tasks of a large fleet, in O(log n) and the number of devices that do not fit."""

    def __init__(self) -> None:
        self._free: list[tuple[Order, str]] = []
        self._known: dict[str, Order] = {}

    def set(self, node_id: str, order: Order, *, free: bool) -> None:
        """A device has room now, or none."""
        if free and node_id not in self._known:
            self._known[node_id] = order
            insort(self._free, (order, node_id))
        elif not free and (known := self._known.pop(node_id, None)) is not None:
            del self._free[bisect_left(self._free, (known, node_id))]

    def __len__(self) -> int:
        return len(self._free)

    def after(self, last_used: Order | None, fits: Callable[[str], bool] | None = None) -> str | None:
        """The next one in sequential order; None where nobody has room.

        Args:
            fits: whether a task may go to a device; None where it may go to any.
        """
        at = 0 if last_used is None else bisect_right(self._free, last_used, key=lambda one: one[0])
        count = len(self._free)
        for number in range(at, at + count):
            node_id = self._free[number % count][1]
            if fits is None or fits(node_id):
                return node_id
        return None

    def some(self, last_used: Order | None, most: int) -> list[str]:
        """The next few in sequential order."""
        at = 0 if last_used is None else bisect_right(self._free, last_used, key=lambda one: one[0])
        found = self._free[at : at + most]
        return [node_id for _, node_id in [*found, *self._free[: min(at, most - len(found))]]]

    def choice(
        self,
        want: Want,
        last_used: Order | None,
        passed_over: Callable[[str], int],
        fits: Callable[[str], bool] | None = None,
    ) -> Choice | None:
        """As `in_order`, where a task may go to all devices that are alive and fit.

        Args:
            passed_over: how many devices stand between the last one and this one.
            fits: as for `after`.
        """
        node_id = self.after(last_used, fits)
        return None if node_id is None else _chosen(want, node_id, passed_over(node_id))
