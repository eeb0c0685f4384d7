"""Synchronous rounds: workers train independently from the same weights, and the mean of their changes is one step of
an outer optimiser. A round ends without its stragglers once it has a quorum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from training.strategies.config import BLOCK, OuterConfig
from training.strategies.leases import Leases
from training.strategies.pool import Pooled
from training.strategies.protocol import Strategy
from training.strategies.rules import Moment, UpdateRule, added_rule, applied, named
from training.units import Flat, UnitLease, Update

__all__ = ["OuterRules"]


class OuterRules(Strategy):
    """FedAvg (arXiv:1602.05629), BMUF (Chen and Huo 2016) and DiLoCo (arXiv:2311.08105) are its configurations."""

    def __init__(self, config: OuterConfig, start: tuple[Flat, Flat], leases: Leases, workers: int) -> None:
        self._size = config.workers or workers
        super().__init__(config, start, leases, together=self._size)
        self.config = config
        # Chen and Huo 2016: a block's momentum is 1 - 1/N.
        momentum = 1 - 1 / self._size if config.momentum == BLOCK else float(config.momentum)
        own = config.rule in config.own_rules
        self._rule = _Momentum(config, momentum) if own else added_rule(config)
        self._kept = [np.zeros_like(self.weights) for _ in range(self._rule.keeps)]
        self._sum, self._buffers_sum = np.zeros_like(self.weights), np.zeros_like(self.buffers)
        self._taken = 0
        self._by: set[str] = set()
        """The workers of these updates."""
        self._weight = 0.0
        """Weight of the updates in the sums. Each counts by its steps, in periods."""
        self._longest = 0
        """Steps of the longest of these updates."""

    def _next(self, worker: str, now: float) -> UnitLease | None:
        if self.config.once and worker in self._brought:
            if not len(self.leases):
                self._settle(now)  # the others of this round have left
            if worker in self._brought:
                return None
        # The steps of a lease that expired are granted again in whichever round it is.
        return None if self._is_full else super()._next(worker, now)

    @property
    def _brought(self) -> Collection[str]:
        """The workers whose updates are in this round."""
        return self._by if self._pool is None else self._pool.workers

    @property
    def _is_full(self) -> bool:
        """True if the updates taken and still computed make a round. Leases from a former round do not count."""
        taken = self._taken if self._pool is None else len(self._pool)
        return taken + sum(lease.unit.version == self.version for lease in self.leases) >= self._size

    def _settle(self, now: float, besides: UnitLease | None = None) -> None:
        super()._settle(now, besides)
        if self._pool is not None or not self._taken:
            return
        enough = (self._is_full or self.config.once) and self._taken >= self.config.quorum * self._size
        if self.finished or (enough and not self.leases.in_time(now, besides)):
            weight = np.float32(self._weight)
            self._step(self._sum / weight, self._buffers_sum / weight, self._longest)
            self._sum[:], self._buffers_sum[:] = 0, 0
            self._taken, self._weight, self._by, self._longest = 0, 0.0, set(), 0
            self.version += 1
            for lease in self.leases:
                if lease.unit.version < self.version - self.config.most_stale:
                    self._give_back(lease, overdue_at=now)

    def _apply(self, lease: UnitLease, update: Update) -> None:
        weight = np.float32(len(update.steps) / self.config.period)
        self._sum += weight * update.computed.values
        self._buffers_sum += weight * update.computed.buffers
        self._weight += float(weight)
        self._taken += 1
        self._by.add(update.worker)
        self._longest = max(self._longest, len(update.steps))

    def _vectors(self) -> dict[str, Flat]:
        return {**named("velocity", self._kept), "sum": self._sum, "buffers_sum": self._buffers_sum}

    def _figures(self) -> dict[str, Any]:
        return {"taken": self._taken, "weight": self._weight, "by": sorted(self._by), "longest": self._longest}

    def restore(self, vectors: Mapping[str, Flat], figures: Mapping[str, Any]) -> None:
        super().restore(vectors, figures)
        self._taken, self._weight = figures["taken"], figures["weight"]
        self._by = set(figures.get("by", ()))
        self._longest = figures.get("longest", self.config.period)

    def _apply_centre(self, values: Flat, buffers: Flat, of: Sequence[Pooled], weights: Sequence[float]) -> None:
        self._step(values, buffers, max(each.steps for each in of))

    def _step(self, mean: Flat, buffers: Flat, steps: int) -> None:
        """Do a step of the outer optimiser."""
        applied(self._rule, self.weights, mean, self._kept, Moment(version=self.version, steps=steps))
        self.buffers[:] = buffers


class _Momentum(UpdateRule):
    keeps = 1

    def __init__(self, config: OuterConfig, momentum: float) -> None:
        self._rate, self._momentum, self._nesterov = np.float32(config.rate), np.float32(momentum), config.nesterov

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        (velocity,) = kept
        velocity[:] = self._momentum * velocity + update
        step = self._momentum * velocity + update if self._nesterov else velocity
        weights -= self._rate * step
