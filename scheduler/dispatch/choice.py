"""The choice of the next task and its end device; docs/scheduling.md states the rules.

Jobs share the fleet by start-time fair queueing (Goyal, Vin and Cheng, 1996), see `tags`; interactive requests go
first. In the schemes of the paper tasks go over the end devices in sequential order; a device whose window is full is
passed over. For the scheme `adaptive` the planner is asked about the next few devices that have room: of a few the best
is nearly as good as the best of all (Mitzenmacher: The power of two choices in randomized load balancing, 2001).

A task that has failed somewhere waits for another device, full windows or not, while one is alive: a device that fails
at once is always free, and would get all attempts of one task after the other. See `grade`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scheduler.core.device import Device, Node, SortKey
from scheduler.core.fleet import DeviceList
from scheduler.core.work import ActiveJob, ActiveTask
from scheduler.dispatch.attempt_state import AttemptStates
from scheduler.placement.adaptive.pilot import Pilot
from scheduler.placement.adaptive.planner import Ask, Hold, Outlook
from scheduler.placement.routes import Placement
from tierkit.types import Recovery, Scheme, Tier

__all__ = ["Choice", "Chooser", "RoundRobin", "grade", "tags", "turn"]

_PART = 8
"""End devices with room, and upstream nodes of each tier, that the scheme `adaptive` looks at for one task."""
_OUTLOOK_S, _OUTLOOK = 0.1, 0.05
"""How long a forecast for a large fleet stays valid: a minimum in seconds, and a fraction of the remaining time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Send this task to this end device."""

    job: ActiveJob
    task: ActiveTask
    device: Device
    reason: str
    upper: tuple[Node, ...] | None = None
    """The upstream nodes to ask, in this order; None: those of the device's route."""
    too_late: bool = False
    """No upstream node is asked because none would answer before the deadline."""


def turn(virtual: float, finish_tag: float, *, interactive: bool) -> tuple[bool, float]:
    """Key of a job: the smallest goes next. Arguments as for `tags`."""
    return not interactive, max(virtual, finish_tag)


def tags(virtual: float, finish_tag: float, images: int, weight: float) -> tuple[float, float]:
    """Start and finish tag of a job's next task.

    Args:
        virtual: virtual time: the start tag of the task sent last, of any job.
        finish_tag: of the job's task before; 0 for none.
    """
    start = max(virtual, finish_tag)
    return start, start + images / weight


def grade(*, tried: bool, on_trial: bool, cut_off: bool = False) -> int:
    """How well a device suits a task that has failed or just lacks its fine answer; it goes to the lowest grade.

    Args:
        tried: an attempt of it has failed on the device.
        on_trial: the device's last answer was wrong.
        cut_off: the fine answer is all that it lacks, and the device may ask no upstream node for it.
    """
    return 3 if cut_off else 2 if tried else 1 if on_trial else 0


class RoundRobin:
    """End devices in the order of the list; adding, removing and finding the next take O(log n)."""

    def __init__(self, devices: Iterable[Device] = ()) -> None:
        self._order = sorted((device.order, device.node_id) for device in devices)
        self._known = {node_id: order for order, node_id in self._order}

    def set(self, node_id: str, order: SortKey, *, member: bool) -> None:
        """A device belongs to the ring now, or does not."""
        if member and node_id not in self._known:
            self._known[node_id] = order
            insort(self._order, (order, node_id))
        elif not member and (known := self._known.pop(node_id, None)) is not None:
            del self._order[bisect_left(self._order, (known, node_id))]

    def __len__(self) -> int:
        return len(self._order)

    def after(self, last: SortKey | None, most: int, fits: Callable[[str], bool] | None = None) -> list[str]:
        """The next few devices in sequential order.

        Args:
            last: the device that the order goes on after.
            fits: leaves out others; None for none.
        """
        at = 0 if last is None else bisect_right(self._order, last, key=lambda one: one[0])
        found: list[str] = []
        for number in range(at, at + len(self._order)):
            node_id = self._order[number % len(self._order)][1]
            if fits is None or fits(node_id):
                found.append(node_id)
                if len(found) == most:
                    break
        return found


class Chooser:
    """Chooses the next task to send and its device.

    Args:
        window: tasks that an end device may have outstanding.
        devices: the device list.
        placement: routes over it.
        pilot: of the scheme `adaptive`.
        states: the attempts under way.
    """

    def __init__(
        self, *, window: int, devices: DeviceList, placement: Placement, pilot: Pilot, states: AttemptStates
    ) -> None:
        self._window = window
        self._devices = devices
        self._placement = placement
        self._pilot = pilot
        self._states = states
        self.look_at = math.inf
        """When a task that was held back may go."""
        self._virtual = 0.0
        """Virtual time of the fair queue, see `tags`."""
        self._last: SortKey | None = None
        """The device that got the last task."""
        self._changed: set[str] = set()
        self._free, self._open = RoundRobin(), RoundRobin()
        """Devices with room in their window; with room for a task of the scheme `adaptive`, as far as is known."""
        self._full: set[str] = set()
        """Devices that `adaptive` found to have enough to do."""
        self._last_part: SortKey | None = None
        self._part = 0
        self._outlooks: dict[str, tuple[float, Outlook]] = {}
        """By job: until when it is valid, and what it is."""

    def changed(self, node_id: str) -> None:
        """An end device may have come to have room, or no room."""
        self._changed.add(node_id)

    def forget_job(self, job_id: str) -> None:
        self._outlooks.pop(job_id, None)

    def look_again(self) -> None:
        """Time alone may have given room to devices that had enough to do."""
        self._changed |= self._full
        self._full.clear()

    def next(self, jobs: Iterable[ActiveJob], now: float) -> Choice | None:
        """The next task to send, or None when nothing can go now. A job that cannot go does not hold up another."""
        self._update_rings()
        if not self._free and self._devices.alive(Tier.END, now):
            jobs = (job for job in jobs if not job.keeps_window)
        ready = (job for job in jobs if job.ready)
        for job in sorted(ready, key=lambda job: turn(self._virtual, job.finish_tag, interactive=job.interactive)):
            for task in job.next_tasks():
                adaptive = job.policy.scheme is Scheme.ADAPTIVE
                choice = self._plan(job, task, now) if adaptive else self._in_order(job, task, now)
                if choice is not None:
                    return choice
        return None

    def sent(self, choice: Choice) -> None:
        """The choice was acted on."""
        self._last = choice.device.order
        job = choice.job
        if not job.interactive:
            images, weight = choice.task.images, job.policy.weight
            self._virtual, job.finish_tag = tags(self._virtual, job.finish_tag, images, weight)

    def _update_rings(self) -> None:
        changed, self._changed = self._changed, set()
        for node_id in changed:
            device = self._devices.find(node_id)
            listed = device is not None and device.tier is Tier.END and device.listed
            order = () if device is None else device.order
            self._free.set(node_id, order, member=listed and self._load(node_id) < self._window)
            self._open.set(node_id, order, member=listed)

    def _load(self, node_id: str) -> int:
        """Tasks that count against a device's window: those that `adaptive` has sent only while it owes them."""
        attempts = list(self._states.at(node_id))
        held = sum(attempt.job.policy.scheme is not Scheme.ADAPTIVE for attempt in attempts)
        return max(held, sum(attempt.owed for attempt in attempts))

    def _owed(self, node_id: str) -> int:
        return sum(attempt.owed for attempt in self._states.at(node_id))

    def _pool(self, job: ActiveJob, now: float) -> tuple[Sequence[Device], bool]:
        """The end devices that a job's tasks may go to, and whether they are those that are alive."""
        alive = self._devices.alive(Tier.END, now)
        if job.policy.recovery is Recovery.REASSIGN:
            if not job.regardless:
                job.regardless = frozenset(device.node_id for device in alive)
            return [device for device in map(self._devices.find, job.regardless) if device is not None], False
        return (alive, True) if alive else (self._devices.last_resort(Tier.END, now), False)

    def _fits(
        self, job: ActiveJob, task: ActiveTask, pool: Sequence[Device], now: float
    ) -> Callable[[str], bool] | None:
        """Which devices of the pool suit the task best; None for all."""
        # Going round over all devices is what `reassign` does, even if tasks have failed there.
        if job.policy.recovery is Recovery.REASSIGN or not (task.tried or task.has_coarse):
            return None

        def graded(device: Device) -> int:
            tried, on_trial = device.node_id in task.tried, device.wrong.count > 0
            cut_off = bool(task.has_coarse and device.registration.allowed_upstreams) and self._placement.is_cut_off(
                job.policy.scheme, device, now, job.privacy
            )
            return grade(tried=tried, on_trial=on_trial, cut_off=cut_off)

        # A clean record is common, so the first few devices tell.
        best = 0 if any(graded(device) == 0 for device in pool) else min(map(graded, pool), default=0)
        return lambda node_id: graded(self._devices.get(node_id)) <= best

    def _in_order(self, job: ActiveJob, task: ActiveTask, now: float) -> Choice | None:
        pool, alive = self._pool(job, now)
        fits = self._fits(job, task, pool, now)
        found = self._free.after(self._last, 1, fits) if alive else []
        if not found and (job.interactive or not alive):
            limit = self._window + job.interactive
            found = RoundRobin(device for device in pool if self._load(device.node_id) < limit).after(
                self._last, 1, fits
            )
        if not found:
            return None
        return Choice(job=job, task=task, device=self._devices.get(found[0]), reason="next in order with room")

    def _plan(self, job: ActiveJob, task: ActiveTask, now: float) -> Choice | None:
        pool, alive = self._pool(job, now)
        uppers = self._placement.uppers(now, job.privacy)
        fits = self._fits(job, task, pool, now)
        untried = [node for node in uppers if node.node_id not in task.tried] or uppers
        ends = self._some_ends(self._open, job, task, fits, now) if alive else []
        if not ends and (job.interactive or not alive):
            ends = self._some_ends(RoundRobin(pool), job, task, fits, now)
        ask = Ask(
            remaining=len(job.ready),
            interactive=job.interactive,
            deadline=job.deadline_of(task, now),
            job_deadline=job.deadline,
        )
        found = self._pilot.plan(
            ask,
            task.images,
            ends,
            self._some_upstreams([node for node in untried if any(end.may_ask(node) for end in ends)]),
            now,
            fine_only=task.has_coarse,
            known=self._outlook(job, task, untried, fits, now),
        )
        if found is None:
            return None
        if isinstance(found, Hold):
            job.held_back = found.reason
            self.look_at = min(self.look_at, found.until, now + _OUTLOOK_S)
            return None
        device = self._devices.get(found.end)
        return Choice(
            job=job, task=task, device=device, reason=found.reason, upper=found.upper, too_late=found.too_late
        )

    def _some_ends(
        self, ring: RoundRobin, job: ActiveJob, task: ActiveTask, fits: Callable[[str], bool] | None, now: float
    ) -> list[Node]:
        """The next few end devices of a ring that have room."""
        limit = self._window + job.interactive
        while some := ring.after(self._last_part, _PART, fits):
            self._last_part = self._devices.get(some[-1]).order
            nodes = [
                self._placement.node(self._devices.get(node_id)) for node_id in some if self._owed(node_id) < limit
            ]
            ends = self._pilot.with_room(nodes, task.images, now, fine_only=task.has_coarse)
            for node_id in set(some) - {end.node_id for end in ends}:
                ring.set(node_id, (), member=False)
                self._full.add(node_id)
            if ends:
                return ends
        return []

    def _some_upstreams(self, uppers: Sequence[Node]) -> list[Node]:
        """A few upstream nodes of each tier, other ones each time."""
        self._part += 1
        cut = bisect_left(uppers, True, key=lambda node: node.tier is Tier.CLOUD)
        chosen: list[Node] = []
        for nodes in (uppers[:cut], uppers[cut:]):
            first = self._part * _PART % max(1, len(nodes))
            chosen += [*nodes[first:], *nodes[:first]][:_PART]
        return chosen

    def _outlook(
        self,
        job: ActiveJob,
        task: ActiveTask,
        uppers: Sequence[Node],
        fits: Callable[[str], bool] | None,
        now: float,
    ) -> Outlook | None:
        """The forecast for all nodes that a task may go to; None without end devices or upstream nodes."""
        until, known = self._outlooks.get(job.job_id, (0.0, None))
        if known is not None and now < until and fits is None:
            return known
        ends = [node for node in self._placement.alive_ends(now) if fits is None or fits(node.node_id)]
        if not (ends and uppers):
            return None
        in_parts = len(ends) > _PART or len(uppers) > _PART
        known = self._pilot.outlook(len(job.ready), task.images, ends, uppers, now, in_parts=in_parts)
        if in_parts and fits is None:
            self._outlooks[job.job_id] = now + max(_OUTLOOK_S, _OUTLOOK * (known.last - now)), known
        return known
