"""Attempts under way by node, and the end devices that have room for another."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from itertools import count

from scheduler.core.device import Device, SortKey
from scheduler.core.work import Attempt

__all__ = ["Assignments", "RoundRobin"]


class RoundRobin:
    """End devices in the order of the list; adding, removing and finding the next take O(log n)."""

    def __init__(self, devices: Iterable[Device] = ()) -> None:
        self._order = sorted((device.order, device.node_id) for device in devices)
        self._known = {node_id: order for order, node_id in self._order}
        self.stirred = 0
        """Another number whenever the work of a member has changed."""

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
            last: the device after which the search starts.
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


class Assignments:
    """The attempts under way. The work of a node is computed from them on request.

    Args:
        window: tasks that an end device may have outstanding.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.attempts: dict[int, Attempt] = {}
        """Attempts by id, oldest first."""
        self._at: dict[str, dict[int, Attempt]] = {}
        """Attempts by node: the end device, and the upstream nodes that are asked first."""
        self._listed: dict[str, Device] = {}
        """End devices that may receive tasks."""
        self._all: dict[str | None, RoundRobin] = {None: RoundRobin()}
        self._free: dict[str | None, RoundRobin] = {None: RoundRobin()}
        self._open: dict[str | None, RoundRobin] = {None: RoundRobin()}
        """Rings of end devices by site, and of all sites."""
        self._full: set[str] = set()
        self._touched: set[str] = set()
        """End devices whose room for tasks may have changed since the rings were last updated."""

    def add(self, attempt: Attempt) -> None:
        """An attempt begins."""
        facts = attempt.facts
        self.attempts[facts.id] = attempt
        for node_id in facts.nodes:
            self._at.setdefault(node_id, {})[facts.id] = attempt
        self._touched.add(facts.node_id)

    def remove(self, attempt: Attempt) -> None:
        """An attempt is over."""
        facts = attempt.facts
        del self.attempts[facts.id]
        for node_id in facts.nodes:
            there = self._at[node_id]
            del there[facts.id]
            if not there:
                del self._at[node_id]
        self._touched.add(facts.node_id)

    def touch(self, node_id: str) -> None:
        """A device owes less than before."""
        self._touched.add(node_id)

    def listed(self, device: Device, *, member: bool) -> None:
        """An end device may receive tasks now, or may not."""
        if member:
            self._listed[device.node_id] = device
            _enter(self._all, device, member=True)
            self._touched.add(device.node_id)
        elif self._listed.pop(device.node_id, None) is not None:
            for rings in (self._all, self._free, self._open):
                _enter(rings, device, member=False)

    def at(self, node_id: str) -> Iterable[Attempt]:
        """The attempts on an end device, or those that ask an upstream node first. Do not keep the result: the next
        event changes it."""
        return self._at[node_id].values() if node_id in self._at else ()

    def outstanding(self, node_id: str) -> int:
        """Number of tasks that an end device has now."""
        return sum(attempt.facts.node_id == node_id for attempt in self.at(node_id))

    def owed(self, node_id: str) -> int:
        """Number of tasks that wait for the end device itself."""
        return sum(attempt.facts.node_id == node_id and attempt.owed for attempt in self.at(node_id))

    def load(self, node_id: str) -> int:
        """Tasks that count against an end device's window: those that `adaptive` has sent only while it owes them."""
        held = sum(attempt.facts.node_id == node_id and not attempt.facts.planned for attempt in self.at(node_id))
        return max(held, self.owed(node_id))

    # --- an index: nothing in `step` depends on it --------------------------------------------------------------------

    def in_turn(self, site: str | None = None) -> RoundRobin:
        """End devices that may receive tasks, in a site or anywhere, with room in their window or without."""
        return self._all.get(site, _NOBODY)

    def with_room(self, site: str | None = None) -> RoundRobin:
        """End devices that may receive tasks and have room in their window, in a site or anywhere."""
        self._update()
        return self._free.get(site, _NOBODY)

    def not_full(self, site: str | None = None) -> RoundRobin:
        """End devices that may receive tasks and have, as far as is known, room for one of the scheme `adaptive`, in a
        site or anywhere."""
        self._update()
        return self._open.get(site, _NOBODY)

    def fill(self, node_id: str) -> None:
        """An end device was found to have enough to do, until one of its tasks ends or `look_again`."""
        if (device := self._listed.get(node_id)) is not None:
            _enter(self._open, device, member=False)
        self._full.add(node_id)

    def look_again(self) -> None:
        """Devices that had enough to do may have room by now."""
        self._touched |= self._full
        self._full.clear()

    def _update(self) -> None:
        touched, self._touched = self._touched, set()
        for node_id in touched:
            if (device := self._listed.get(node_id)) is not None:
                _enter(self._free, device, member=self.load(node_id) < self.window)
                _enter(self._open, device, member=True)


def _enter(rings: dict[str | None, RoundRobin], device: Device, *, member: bool) -> None:
    """A device belongs to the ring of all and to the ring of its site now, or does not."""
    rings[None].set(device.node_id, device.order, member=member)
    if not device.site:
        return  # no job names those of no site
    ring = rings.setdefault(device.site, RoundRobin()) if member else rings.get(device.site)
    if ring is not None:
        ring.set(device.node_id, device.order, member=member)
        ring.stirred = next(_stirs)
        if not ring:
            del rings[device.site]


_stirs = count(1)
"""A ring that is made again has no number that it had before."""


_NOBODY = RoundRobin()
