"""Base class of the strategies, which grant leases and take updates. No I/O, and time is passed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from models.training.config import TrainConfig
from tierkit.types import WorkerOrder
from training.strategies.config import HostedConfig
from training.strategies.leases import Leases
from training.strategies.pool import Pool, Pooled
from training.trust.aggregate import centre_of
from training.trust.config import FEWEST
from training.trust.score import FIRST, Scores, are_valid
from training.units import Flat, UnitLease, Update, Verdict, is_finite

__all__ = ["Schedule", "Strategy"]


class Schedule(Protocol):
    """The steps of a run and their learning rates; see `training.learner.FlatLearner`."""

    config: TrainConfig
    steps: int

    def rate(self, step: int) -> float: ...


class Strategy(ABC):
    """The weights of a run, and what becomes of them. Times are seconds on any clock that goes forward.

    Args:
        start: weights and buffers to start from, which are copied.
        together: number of updates that are judged together, if the configuration judges any.

    Raises:
        InvalidInput: this number cannot be judged together.
    """

    def __init__(
        self,
        config: HostedConfig,
        start: tuple[Flat, Flat],
        leases: Leases,
        together: int,
    ) -> None:
        self.weights, self.buffers = (each.copy() for each in start)
        """Current weights and buffers. They are changed in place, so callers that keep them must copy them."""
        self.version = 0
        """Number of changes of the weights so far."""
        self.leases = leases
        self.trust = trust = config.trust
        self.sends, self.masking = config.sends, config.masking
        self.scores = Scores(trust)
        """Scores of the workers. Operators' orders count even if no updates are judged."""
        self._pool = None if trust is None else Pool(trust, together, sum(map(len, start)))

    @property
    def finished(self) -> bool:
        return self.leases.finished

    @np.errstate(over="ignore", invalid="ignore")  # as in `take`: a round may end here
    def grant(self, worker: str, now: float) -> UnitLease | None:
        """Grant a unit from the current weights; None if there is nothing to do at present.

        Raises:
            Forbidden: this worker is barred.
        """
        self.scores.check(worker)
        self.expire(now)
        self.leave(worker)
        if len(self.leases):
            self._settle(now)
        lease = None
        if self.scores.weight(worker) and (
            self._pool is None or self._pool.may_add(worker, others_compute=self.leases.in_time(now) > 0)
        ):
            lease = self._next(worker, now)
        if lease is not None:
            self._granted(lease)
        return lease

    def start_of(self, lease: UnitLease) -> tuple[Flat, Flat]:
        """Weights and buffers that a unit starts from, when it has just been granted; not copied."""
        return self.weights, self.buffers

    def expire(self, now: float) -> int:
        """Give back the leases whose time is up; how many there were."""
        expired = self.leases.expired(now)
        for lease in expired:
            self._give_back(lease)
        return len(expired)

    def leave(self, worker: str) -> None:
        """A worker gives back what it has, if it has something."""
        held = self.leases.held_by(worker)
        if held is not None:
            self._give_back(held)

    @np.errstate(over="ignore", invalid="ignore")
    def take(self, update: Update, now: float) -> Verdict:
        """Apply an update to the weights once, or return the reason why not. An extreme update can overflow the
        weights; evaluation detects it.
        """
        claimed = self.leases.claim(update, now)
        if isinstance(claimed, str):
            if claimed == "refused":
                self.refuse(update.worker)
            return claimed
        verdict = self._verdict(claimed, update)
        if verdict == "taken":
            if self._pool is None:
                self._apply(claimed, update)
                self._release(claimed.unit.version)
            else:
                self._pool.add(claimed, update)  # which needs what was kept for the lease until it is judged
            self.leases.fulfil(claimed, now)
            self.scores.taken(update.worker)
            self._settle(now, besides=claimed)
            self._expel()
        elif verdict == "refused":
            self.refuse(update.worker)
        else:
            self._give_back(claimed)
        return verdict

    def refuse(self, worker: str) -> None:
        """Count an invalid update of this worker. Its leases go to others, and its score falls."""
        self.leave(worker)
        self.scores.refused(worker)

    def order(self, worker: str, order: WorkerOrder) -> None:
        """Do what an operator wants with a worker.

        Raises:
            Overloaded: too many others must be remembered.
        """
        self.scores.order(worker, order)
        self._expel()

    def rechecked(self, worker: str, right: bool) -> None:
        """An update of this worker was computed again."""
        self.scores.rechecked(worker, right)
        self._expel()

    def _settle(self, now: float, besides: UnitLease | None = None) -> None:
        """Judge the updates that are kept, if it is time. Those that are overdue are not waited for: they count among
        the next ones.
        """
        pool = self._pool
        if pool is not None and len(pool):
            others_compute = self.leases.in_time(now, besides) > 0
            if self.finished or pool.is_whole(others_compute=others_compute):
                self._judge(pool.empty())

    def _judge(self, updates: Sequence[Pooled]) -> None:
        """Apply the centre of these updates to the weights. Each worker counts by its score, however many of the
        updates are its own. With fewer than three workers none can be outvoted. Then the mean of the workers without a
        bad record is applied, and no score changes.
        """
        assert self.trust is not None
        mine = Counter(each.worker for each in updates)
        full = max(each.steps for each in updates)
        counting = [each for each in updates if self.scores.weight(each.worker) > 0]
        few = len({each.worker for each in counting}) < FEWEST
        if few:
            counting = [each for each in counting if self.scores.score(each.worker) >= FIRST]
        if counting:
            weights = [self.scores.weight(each.worker) / mine[each.worker] * each.steps / full for each in counting]
            values, buffers = centre_of(
                [(each.values, each.buffers) for each in counting],
                weights,
                centre="trimmed-mean" if few else self.trust.centre,
                cheaters=0.0 if few else self.trust.cheaters,
            )
            self._apply_centre(values, buffers, counting, weights)
        alike = [each for each in counting if each.steps == full]  # one of fewer steps is shorter, whoever sends it
        if not few and len({each.worker for each in alike}) >= FEWEST:
            changes = [(each.values, each.buffers) for each in alike]
            valid = are_valid(changes, (values, buffers), deviation=self.trust.deviation)
            for each, good in zip(alike, valid, strict=True):
                self.scores.judge(each.worker, good)
        for each in updates:
            self._release(each.version)
        # Whoever waits for this is to hear of it, so it counts as a change even if it is none.
        self.version += 1

    def _expel(self) -> None:
        """Give the leases of barred workers to others."""
        if barred := self.scores.barred():
            for lease in self.leases:
                if lease.worker in barred:
                    self._give_back(lease)

    def _verdict(self, lease: UnitLease, update: Update) -> Verdict:
        for came, own in ((update.computed.values, self.weights), (update.computed.buffers, self.buffers)):
            if came.dtype != own.dtype or came.shape != own.shape or not is_finite(came):
                return "refused"
        return "taken"

    def _give_back(self, lease: UnitLease, overdue_at: float | None = None) -> None:
        self.leases.give_back(lease, overdue_at)
        self._release(lease.unit.version)

    def _next(self, worker: str, now: float) -> UnitLease | None:
        lease = self.leases.grant(worker, self.version, now)
        if lease is None and (overdue := self.leases.overdue(now)):
            self._give_back(overdue[0], overdue_at=now)
            lease = self.leases.grant(worker, self.version, now)
        return lease

    def _granted(self, lease: UnitLease) -> None:  # noqa: B027  # most keep nothing
        """Keep what the lease's update will need."""

    def _release(self, version: int) -> None:  # noqa: B027
        """One update less needs the weights of this version."""

    @property
    def failure(self) -> str:
        """Reason why the weights of a finished run are of no use; "" for none."""
        return ""

    def results(self) -> dict[str, float]:
        """Figures of the rule at the end of the run, by their names in the result."""
        return {}

    def state(self) -> tuple[dict[str, Flat], dict[str, Any]]:
        """Everything that changes: vectors, which are not copied, and the rest as JSON."""
        vectors = {"weights": self.weights, "buffers": self.buffers, **self._vectors()}
        figures = {"version": self.version, "leases": self.leases.state(), "scores": self.scores.state()}
        if self._pool is not None:
            vectors |= self._pool.vectors()
            figures["pool"] = self._pool.figures()
        return vectors, figures | self._figures()

    def restore(self, vectors: Mapping[str, Flat], figures: Mapping[str, Any]) -> None:
        """Continue from a result of `state`, exact to the bit.

        Raises:
            KeyError, ValueError: it is of another strategy or network.
        """
        self.version = figures["version"]
        self.leases.restore(figures["leases"])
        self.scores.restore(figures["scores"])
        if self._pool is not None:
            self._pool.restore(vectors, figures["pool"])
        for name, own in ({"weights": self.weights, "buffers": self.buffers} | self._vectors()).items():
            own[:] = vectors[name]

    @abstractmethod
    def _apply(self, lease: UnitLease, update: Update) -> None:
        """Change weights, buffers and version by one update."""

    @abstractmethod
    def _apply_centre(self, values: Flat, buffers: Flat, of: Sequence[Pooled], weights: Sequence[float]) -> None:
        """Change weights and buffers by the centre of these updates, with this weight."""

    @abstractmethod
    def _vectors(self) -> dict[str, Flat]:
        """Further vectors of the state, changed in place."""

    def _figures(self) -> dict[str, Any]:
        return {}
