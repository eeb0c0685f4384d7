"""A run as its host knows it: a strategy, its workers, and counters. It does no I/O and reads no clock.

The same calls with the same times give the same state, to the bit. So a host that was killed repeats them from its
journal (`training.host.journal`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tierkit.errors import Conflict, NotFound, Overloaded
from tierkit.types import TOLD_TO_GO, WorkerOrder
from training.messages import RunSpec, Times, UpdateHead, WorkerStatus, known_times
from training.payloads import unpack
from training.strategies.protocol import Strategy
from training.strategies.tournament import Score, Tournament
from training.trust.recheck import Rechecks
from training.units import Computed, Flat, UnitLease, Update, Verdict

__all__ = ["TrainingRun", "decoded"]

_MOST_WORKERS = 1_000
_MOST_SHOWN = 2_000
_FORGOTTEN_S, _NEVER_WORKED_S = 600.0, 30.0
"""A worker that was not heard for so long makes room for another one."""
_LOSSES = 100
_GONE = ""
"""Incarnation of a worker that has left, and is remembered."""
_NOTHING = np.zeros(0, np.float32)
_DOUBT = 5
"""Updates in a row that were refused: then the host looks whose fault it is."""


@dataclass(slots=True)
class _Worker:
    incarnation: str
    heard_at: float
    updates: int = 0
    staleness: int = 0
    """Sum over the updates."""
    bytes_sent: int = 0
    bytes_received: int = 0
    segments: list[int] | None = None
    """Numbers of the segments that it has; None if it has all training images."""
    steps: int = 0
    caller: str = ""


@dataclass(slots=True)
class _Totals:
    updates: int = 0
    staleness: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    faults: int = 0
    began_at: float | None = None
    """Time when the first lease was granted."""
    latest_at: float = 0.0
    """Time when the last update was taken."""
    times: Times = field(default_factory=dict)


class TrainingRun:
    """State of one training run, and the calls that change it.

    Times are seconds on one clock for the whole run, which stops while there is no host. Calls with a worker's name and
    incarnation raise Forbidden, NotFound or Conflict; see `check`.
    """

    def __init__(self, strategy: Strategy, *, most_workers: float = _MOST_WORKERS) -> None:
        self.strategy = strategy
        self._most_workers = most_workers
        self.totals = _Totals()
        self._workers: dict[str, _Worker] = {}
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._refused = 0
        """Updates in a row."""
        self._start_at, self._silent_s = 0, 0.0
        """Set by `gather`."""
        self.rechecks = Rechecks(None, lambda: 1.0)
        """The host's; a run that is repeated from its journal chooses nothing."""

    @property
    def doubtful(self) -> bool:
        """True if so many updates were refused in a row that these weights may give nothing else."""
        return self._refused >= _DOUBT

    def believe(self) -> None:
        """The weights give finite numbers: it was the workers' fault."""
        self._refused = 0

    @property
    def finished(self) -> bool:
        return self.strategy.finished

    def gather(self, workers: int, silent_s: float, now: float) -> None:
        """Grant no unit before `workers` workers are ready; 0 to grant immediately.

        Args:
            silent_s: a worker that was not heard for this long does not count. One that waits asks more often than
                that.
        """
        self._start_at, self._silent_s = workers, silent_s

    def missing(self, now: float) -> int | None:
        """Workers that must still be ready before the first unit is granted; None once it was, or without waiting."""
        if not self._start_at or self.totals.began_at is not None:
            return None
        standing = self.strategy.scores.standing
        ready = sum(
            each.incarnation != _GONE
            and each.segments != []
            and now - each.heard_at <= self._silent_s
            and standing(name) in ("active", "trusted")
            for name, each in self._workers.items()
        )
        return max(0, self._start_at - ready)

    def join(self, name: str, incarnation: str, now: float, fetches: bool = False, caller: str = "") -> None:
        """Add a worker. Leases of a former process of its name are given back.

        Args:
            fetches: True if it has no training images yet; it gets no work until it `holds` some.
            caller: the name of its token, or its address. In a full run, who has fewer workers takes the place of one
                of the caller with the most.

        Raises:
            Forbidden: this worker takes no part any more.
            Overloaded: there are too many workers.
        """
        self.strategy.scores.check(name)
        replaced: str | None = None
        if name not in self._workers and len(self._workers) >= self._most_workers:
            # A name that has brought nothing yet has little to lose, and costs whoever claims it nothing.
            left_s = {
                other: (_FORGOTTEN_S if each.updates else _NEVER_WORKED_S) - (now - each.heard_at)
                if each.incarnation != _GONE
                else -math.inf
                for other, each in self._workers.items()
            }
            replaced = min(left_s, key=left_s.__getitem__)
            if (wait_s := left_s[replaced]) > 0:
                callers = Counter(each.caller for each in self._workers.values())
                [(most, count)] = callers.most_common(1)
                if callers[caller] + 1 >= count:
                    raise Overloaded(
                        f"{len(self._workers):,} workers are in this run; join when one has left", retry_after_s=wait_s
                    )
                theirs = (other for other in left_s if self._workers[other].caller == most)
                replaced = min(theirs, key=left_s.__getitem__)
        self.strategy.scores.admit(name, caller)
        if replaced is not None:
            self._forget(replaced)
        self.strategy.leave(name)
        known = self._workers.get(name)
        if known is None:
            self._workers[name] = _Worker(incarnation, now, caller=caller)
        else:
            known.incarnation, known.heard_at, known.caller = incarnation, now, caller
        self._draw_from(name, [] if fetches else None)

    def leave(self, name: str, incarnation: str, now: float) -> None:
        """A worker goes, and gives back what it has; one that has done something, or is barred, is remembered.

        Raises:
            NotFound, Conflict: it has not joined, or another one has taken its name.
        """
        self._check_joined(name, incarnation)
        if self._workers[name].updates or name in self.strategy.scores.barred():
            self.strategy.leave(name)
            self._draw_from(name, None)
            self._workers[name].incarnation = _GONE
        else:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self.strategy.leave(name)
        self.strategy.leases.segments.pop(name, None)
        del self._workers[name]

    def hold(self, name: str, incarnation: str, segments: list[int] | None, now: float) -> None:
        """A worker has these segments of the training images, or all; its units are drawn from them."""
        self.check(name, incarnation)
        self._workers[name].heard_at = now
        self._draw_from(name, segments)

    def held(self, name: str) -> tuple[list[int] | None, int]:
        """The segments of a worker, None for all images; and the steps that it has computed."""
        worker = self._workers[name]
        return worker.segments, worker.steps

    def _draw_from(self, name: str, segments: list[int] | None) -> None:
        self._workers[name].segments = segments
        if segments:
            self.strategy.leases.segments[name] = tuple(segments)
        else:
            self.strategy.leases.segments.pop(name, None)

    def check(self, name: str, incarnation: str) -> None:
        """Check that a worker has joined.

        Raises:
            Forbidden: it is barred from this run.
            NotFound: no worker has joined under this name.
            Conflict: another process has taken its name since.
        """
        self.strategy.scores.check(name)
        self._check_joined(name, incarnation)

    def _check_joined(self, name: str, incarnation: str) -> None:
        known = self._workers.get(name)
        if known is None or known.incarnation == _GONE:
            raise NotFound(f"no worker called {name!r} has joined this run: join first")
        if known.incarnation != incarnation:
            raise Conflict(f"another worker called {name!r} has joined this run since: give this one another name")

    def grant(self, name: str, incarnation: str, size: int, now: float) -> UnitLease | None:
        """Its next unit; None where there is nothing to do at present.

        Args:
            size: bytes of the weights that go with it.
        """
        self.check(name, incarnation)
        worker, totals = self._workers[name], self.totals
        worker.heard_at = now
        totals.faults += self.strategy.expire(now)
        waits = worker.segments == [] or self.missing(now)
        lease = None if waits else self.strategy.grant(name, now)
        if lease is not None:
            totals.began_at = now if totals.began_at is None else totals.began_at
            totals.bytes_received += size
            worker.bytes_received += size
            self.rechecks.granted(lease, self.copies, self.strategy.leases)
        return lease

    def renew(self, name: str, incarnation: str, lease: int, shown: int, now: float) -> bool:
        """A worker shows progress; whether the lease is still its own."""
        self.check(name, incarnation)
        self._workers[name].heard_at = now
        return self.strategy.leases.renew(lease, name, shown, now)

    def expects(self, head: UpdateHead, now: float) -> bool:
        """True if these steps are due from this worker under this lease."""
        return isinstance(self.strategy.leases.claim(_update(head, _NOTHING, _NOTHING), now), UnitLease)

    def update(self, head: UpdateHead, body: bytes, spec: RunSpec, now: float) -> Update:
        """Decode an update of a worker. Numbers of an unexpected update are left out, because nothing reads them."""
        return decoded(head, body, spec) if self.expects(head, now) else _update(head, _NOTHING, _NOTHING)

    def take(self, incarnation: str, update: Update, size: int, times: Times, now: float) -> Verdict:
        """Apply an update to the weights.

        Args:
            size: bytes of the update.
            times: seconds that its worker has spent.
        """
        self.check(update.worker, incarnation)
        worker, totals, strategy = self._workers[update.worker], self.totals, self.strategy
        held = strategy.leases.held_by(update.worker)
        age = strategy.version - (strategy.version if held is None else held.unit.version)
        verdict = strategy.take(update, now)
        if verdict in ("taken", "stale", "refused"):  # the others change nothing that a journal would have to know
            worker.heard_at = now
            self._refused = self._refused + 1 if verdict == "refused" else 0
        if verdict == "taken":
            worker.updates += 1
            worker.steps += len(update.steps)
            worker.staleness += age
            worker.bytes_sent += size
            totals.updates += 1
            totals.staleness += age
            totals.bytes_sent += size
            totals.latest_at = now
            if math.isfinite(update.computed.loss):
                self._losses.append(update.computed.loss)
            self.spend(times)
        elif verdict != "duplicate":
            totals.faults += 1
        return verdict

    def is_news(self, verdict: Verdict, version: int) -> bool:
        """True if there may be work for those who wait, after an update that found this version of the weights."""
        strategy = self.strategy
        return strategy.version != version or verdict != "taken" or strategy.finished or not len(strategy.leases)

    def copies(self) -> tuple[Flat, Flat]:
        """Return copies of the current weights and buffers."""
        return self.strategy.weights.copy(), self.strategy.buffers.copy()

    def drop(self, name: str, now: float, refused: bool = False) -> None:
        """An update was not taken, and what its worker had is given back: `take` has done so, and this repeats it."""
        if refused:
            self.strategy.refuse(name)
        else:
            self.strategy.leave(name)
        self._workers[name].heard_at = now
        self.totals.faults += 1
        self._refused = self._refused + 1 if refused else 0

    def order(self, name: str, order: WorkerOrder, now: float) -> None:
        """Do what an operator wants with a worker.

        Raises:
            NotFound: there is none of this name.
            Overloaded: too many others must be remembered.
        """
        if name not in self._workers and not self.strategy.scores.knows(name):
            raise NotFound(f"no worker called {name!r} has worked for this run")
        self.strategy.order(name, order)

    def rechecked(self, name: str, right: bool, now: float) -> None:
        """An update of this worker was computed again by the host."""
        self.strategy.rechecked(name, right)

    def met(self, lineages: Sequence[int], scores: Sequence[Score], now: float) -> None:
        """Lineages of a tournament have been measured."""
        assert isinstance(self.strategy, Tournament)
        self.strategy.met(lineages, scores)

    def spend(self, times: Times) -> None:
        """Count time."""
        for name, seconds in times.items():
            self.totals.times[name] = self.totals.times.get(name, 0.0) + seconds

    @property
    def seconds(self) -> float:
        """Seconds from the first lease to the last update."""
        began_at = self.totals.began_at
        return 0.0 if began_at is None else max(0.0, self.totals.latest_at - began_at)

    @property
    def loss(self) -> float | None:
        """Mean of the last 100 updates."""
        return statistics.fmean(self._losses) if self._losses else None

    def counted(self) -> dict[str, Any]:
        """Seconds, loss and totals, by the names of `RunStatus`."""
        totals = asdict(self.totals)
        names = ("updates", "bytes_sent", "bytes_received", "faults", "times")
        return {"seconds": self.seconds, "loss": self.loss, **{name: totals[name] for name in names}}

    @property
    def staleness(self) -> float:
        """Mean over the updates."""
        return self.totals.staleness / max(1, self.totals.updates)

    def deserted(self, now: float, silent_s: float) -> bool:
        """True if all workers of the run were told to go, or are silent for this long.

        Args:
            silent_s: a worker that lives asks for work, or shows progress, more often than that; one that has no
                training images yet does neither.
        """
        scores = self.strategy.scores
        return all(
            each.incarnation == _GONE
            or scores.standing(name) in TOLD_TO_GO
            or (each.segments != [] and now - each.heard_at > silent_s)
            for name, each in self._workers.items()
        )

    def workers(self, now: float) -> tuple[WorkerStatus, ...]:
        """Return all workers in the run, then former workers that have done something or are barred."""
        barred = self.strategy.scores.barred()
        found = [self.worker(name, now) for name in [*self._workers, *sorted(barred - self._workers.keys())]]
        shown = (each for each in found if not each.left or each.updates or each.name in barred)
        return tuple(sorted(shown, key=lambda each: each.left)[:_MOST_SHOWN])

    def worker(self, name: str, now: float) -> WorkerStatus:
        """Return the status of a worker, including one that has left."""
        known, scores = self._workers.get(name, _Worker(_GONE, now)), self.strategy.scores
        return WorkerStatus(
            name=name,
            updates=known.updates,
            staleness=known.staleness / max(1, known.updates),
            bytes_sent=known.bytes_sent,
            bytes_received=known.bytes_received,
            idle_s=max(0.0, now - known.heard_at),
            left=known.incarnation == _GONE,
            score=scores.score(name),
            standing=scores.standing(name),
        )

    def repeat(self, call: Mapping[str, Any], body: bytes, spec: RunSpec) -> None:
        """Repeat a call from the journal.

        Raises:
            KeyError, TypeError, ValueError, MalformedMessage: it is not a valid call.
        """
        given = {name: value for name, value in call.items() if name != "do"}
        if call["do"] == "take":
            head = UpdateHead.model_validate(given["head"])
            self.take(head.incarnation, decoded(head, body, spec), given["size"], head.times, given["now"])
        else:
            known: dict[str, Callable[..., object]] = {
                "gather": self.gather,
                "join": self.join,
                "hold": self.hold,
                "leave": self.leave,
                "grant": self.grant,
                "renew": self.renew,
                "drop": self.drop,
                "order": self.order,
                "rechecked": self.rechecked,
                "met": self.met,
            }
            known[call["do"]](**given)

    def state(self) -> tuple[dict[str, Flat], dict[str, Any]]:
        """Everything that changes during the run. See `Strategy.state`."""
        vectors, figures = self.strategy.state()
        return vectors, {
            "strategy": figures,
            "totals": asdict(self.totals),
            "workers": {name: asdict(each) for name, each in self._workers.items()},
            "losses": list(self._losses),
            "refused": self._refused,
            "gather": [self._start_at, self._silent_s],
        }

    def restore(self, vectors: Mapping[str, Flat], figures: Mapping[str, Any]) -> None:
        """Continue from a result of `state`. See `Strategy.restore`."""
        self.strategy.restore(vectors, figures["strategy"])
        self.totals, self._refused = _Totals(**figures["totals"]), figures["refused"]
        self.totals.times = known_times(self.totals.times)
        self._workers = {name: _Worker(**each) for name, each in figures["workers"].items()}
        for name, each in self._workers.items():
            self._draw_from(name, each.segments)
        self._losses = deque(figures["losses"], maxlen=_LOSSES)
        self._start_at, self._silent_s = figures.get("gather", (0, 0.0))


def decoded(head: UpdateHead, body: bytes, spec: RunSpec) -> Update:
    """Decode an update of a worker.

    Raises:
        MalformedMessage: the body is not an update of this network.
    """
    return _update(head, *unpack(body, values=spec.values, buffers=spec.buffers))


def _update(head: UpdateHead, values: Flat, buffers: Flat) -> Update:
    return Update(
        lease=head.lease,
        worker=head.worker,
        steps=range(head.first, head.stop),
        computed=Computed(values=values, buffers=buffers, loss=math.nan if head.loss is None else head.loss),
    )
