"""Leases of units: each step is computed at least once, and its update is applied exactly once.

A lease expires unless its worker shows progress. An update that takes far longer than the last one of its worker is a
straggler: a round does not wait for it, and its steps are granted again once no others are left. A unit may also have
backup copies: then the first update counts, and the leases of the others end.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from training.units import UnitLease, Update, WorkUnit

__all__ = ["Leases"]

_REMEMBERED = 10_000
"""So many of the last leases that were fulfilled are known when their update comes again; older ones count as
late, which changes nothing either."""
_PATIENCE, _LEAST_S = 1.25, 1.0
"""An update is overdue when it takes this many times what the one before it took its worker, and at least this long."""
_MOST_TIMED = 1_000
"""Workers whose times are remembered."""


@dataclass(slots=True)
class _Held:
    lease: UnitLease
    shown: int
    """The first step that the worker has not shown to have computed."""
    until: float
    """Time when the lease expires, unless its worker shows progress before."""
    since: float
    """Time when the worker began with it."""


class Leases:
    """The steps of a run, cut into units.

    Args:
        lease_s: seconds that a worker has to show progress, from the grant or the last progress.
    """

    def __init__(self, *, steps: int, period: int, lease_s: float, rate: float | None = None) -> None:
        self._steps, self._period, self.rate = steps, period, rate
        self._first = 0
        self.until = steps
        """Later steps are not handed out yet."""
        self.most_copies = 1
        """Leases of a unit at a time."""
        self._lease_s = lease_s
        self._next_step = self._number = 0
        self._again: deque[range] = deque()
        self._held: dict[int, _Held] = {}
        self._fulfilled: dict[int, None] = {}
        self._took: dict[str, float] = {}
        """Seconds that its last update took each worker."""
        self.done = 0
        """Steps whose updates are there."""
        self.segments: dict[str, tuple[int, ...]] = {}
        """Segments of workers that lack part of the data set; their units are drawn from these."""

    @property
    def left(self) -> int:
        """Steps whose updates are still to come."""
        return self._steps - self._first - self.done

    @property
    def finished(self) -> bool:
        return not self.left

    def follow(self, former: Leases, steps: range) -> None:
        """Hand out these steps under numbers that continue after another instance's numbers. For a fresh instance
        only.
        """
        self._first = self._next_step = steps.start
        self._steps, self._number, self._took = steps.stop, former._number, former._took
        self.until = steps.stop

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[UnitLease]:
        """The leases that are out."""
        return iter([held.lease for held in self._held.values()])

    def __contains__(self, lease: object) -> bool:
        return isinstance(lease, UnitLease) and lease.number in self._held

    def grant(self, worker: str, version: int, now: float, rate: float | None = None) -> UnitLease | None:
        """The next unit, steps that were given back first; None while others compute all that is left.

        Args:
            rate: highest learning rate of its steps. Default: the same for all units.
        """
        if self._again:
            steps = self._again.popleft()
        elif self._next_step < (until := min(self.until, self._steps)):
            steps = range(self._next_step, min(self._next_step + self._period, until))
            self._next_step = steps.stop
        else:
            return None
        unit = WorkUnit(
            version=version,
            first=steps.start,
            steps=len(steps),
            rate=self.rate if rate is None else rate,
            segments=self.segments.get(worker, ()),
        )
        return self._hold(worker, unit, now)

    def grant_copy(self, worker: str, now: float) -> UnitLease | None:
        """A backup copy of the unit that is out for longest; None if no unit is out for much longer than units usually
        take, or each of these has `most_copies` leases."""
        due = self._copies_due()
        return self._hold(worker, due[0][2], now) if due and due[0][0] <= now else None

    def _copies_due(self) -> list[tuple[float, int, WorkUnit]]:
        """Time at which each unit that is out may have one more lease, its first step, and the unit; sorted. The usual
        time of a unit is the median of the workers' last ones."""
        if self.most_copies == 1 or not self._took:
            return []
        usual_s = _PATIENCE * statistics.median(self._took.values())
        latest = {held.lease.unit.first: held for held in self._held.values()}  # which is the last one in this order
        return sorted(
            (held.since + usual_s, first, held.lease.unit)
            for first, held in latest.items()
            if len(self._copies(held.lease)) < self.most_copies
        )

    def _hold(self, worker: str, unit: WorkUnit, now: float) -> UnitLease:
        self._number += 1
        lease = UnitLease(number=self._number, worker=worker, unit=unit)
        self._held[lease.number] = _Held(lease, unit.first, now + self._lease_s, since=now)
        return lease

    def claim(self, update: Update, now: float) -> UnitLease | Literal["duplicate", "late", "refused"]:
        """The lease that an update belongs to, if it covers its steps."""
        held = self._held.get(update.lease)
        if held is None:
            return "duplicate" if update.lease in self._fulfilled else "late"
        if held.lease.worker != update.worker:
            return "refused"
        if now >= held.until:
            return "late"
        return held.lease if update.steps == held.lease.unit.span else "refused"

    def fulfil(self, lease: UnitLease, now: float) -> None:
        """Its update is in the weights. Leases of copies of its unit end."""
        self._time(self._held.pop(lease.number), now)
        for number in self._copies(lease):
            del self._held[number]
        self.done += lease.unit.steps
        self._fulfilled[lease.number] = None
        if len(self._fulfilled) > _REMEMBERED:
            del self._fulfilled[next(iter(self._fulfilled))]

    def give_back(self, lease: UnitLease, overdue_at: float | None = None) -> None:
        """Its steps are for another worker, unless one computes a copy. If its update is overdue, its worker takes at
        least this long, and will be waited for longer next time."""
        held = self._held.pop(lease.number)
        if overdue_at is not None:
            self._time(held, overdue_at)
        if not self._copies(lease):
            self._again.append(lease.unit.span)

    def _copies(self, lease: UnitLease) -> list[int]:
        """Numbers of the leases that are out for the same steps."""
        return [number for number, held in self._held.items() if held.lease.unit.span == lease.unit.span]

    def renew(self, number: int, worker: str, shown: int, now: float) -> bool:
        """Record that the worker has computed the steps before `shown`, and extend its lease if this is progress.
        Return True if the lease still belongs to the worker.
        """
        held = self._held.get(number)
        if held is None or held.lease.worker != worker or now >= held.until:
            return False
        if held.shown < shown <= held.lease.unit.span.stop:
            held.shown, held.until = shown, now + self._lease_s
        return True

    def held_by(self, worker: str) -> UnitLease | None:
        """The lease that a worker has."""
        return next((lease for lease in self if lease.worker == worker), None)

    def expired(self, now: float) -> list[UnitLease]:
        """Leases whose time is up. The caller gives them back."""
        return [held.lease for held in self._held.values() if now >= held.until]

    def in_time(self, now: float, besides: UnitLease | None = None) -> int:
        """Number of leases, other than `besides`, whose updates are not overdue."""
        return len([due for held, due in self._due() if now < due and held.lease is not besides])

    def overdue(self, now: float) -> list[UnitLease]:
        """Leases whose updates are overdue, the longest overdue first."""
        late = sorted((due, held.lease.number) for held, due in self._due() if now >= due)
        return [self._held[number].lease for _, number in late]

    def next_change(self, now: float) -> float | None:
        """Time when the next current lease becomes overdue, expires or may be copied; None if there is none."""
        copies = [due for due, _, _ in self._copies_due() if due > now]
        return min(
            (*copies, *(due if now < due < held.until else held.until for held, due in self._due())), default=None
        )

    def _due(self) -> list[tuple[_Held, float]]:
        """The leases that are out, and when the update of each is overdue. A worker that has brought none is expected
        to be as fast as the others, by the median; until one has come, none is overdue."""
        others = None
        if self._took and any(held.lease.worker not in self._took for held in self._held.values()):
            others = statistics.median(self._took.values())
        found = []
        for held in self._held.values():
            took = self._took.get(held.lease.worker, others)
            due = held.until if took is None else held.since + max(_LEAST_S, _PATIENCE * took)
            found.append((held, due))
        return found

    def _time(self, held: _Held, now: float) -> None:
        """Note how long an update has taken its worker."""
        self._took.pop(held.lease.worker, None)
        self._took[held.lease.worker] = now - held.since
        if len(self._took) > _MOST_TIMED:
            del self._took[next(iter(self._took))]

    def state(self) -> dict[str, Any]:
        """Everything that changes, as JSON."""
        return {
            "next_step": self._next_step,
            "number": self._number,
            "done": self.done,
            "again": [[steps.start, steps.stop] for steps in self._again],
            "held": [
                {
                    "number": held.lease.number,
                    "worker": held.lease.worker,
                    "unit": asdict(held.lease.unit),
                    "shown": held.shown,
                    "until": held.until,
                    "since": held.since,
                }
                for held in self._held.values()
            ],
            "took": dict(self._took),
            "fulfilled": list(self._fulfilled),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`."""
        self._next_step, self._number, self.done = state["next_step"], state["number"], state["done"]
        self._again = deque(range(*steps) for steps in state["again"])
        self._fulfilled = dict.fromkeys(state["fulfilled"])
        self._took = dict(state["took"])
        self._held = {}
        for each in state["held"]:
            lease = UnitLease(
                number=each["number"],
                worker=each["worker"],
                unit=WorkUnit(**{**each["unit"], "segments": tuple(each["unit"]["segments"])}),
            )
            self._held[lease.number] = _Held(lease, each["shown"], each["until"], each["since"])
