"""Asynchronous rules: each update changes the weights when it arrives, up to a bound on its staleness."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from training.strategies.config import ServerConfig
from training.strategies.leases import Leases
from training.strategies.pool import Pooled
from training.strategies.protocol import Schedule, Strategy
from training.units import Flat, UnitLease, Update, Verdict

__all__ = ["ServerRules"]

_TINY = np.float32(1e-7)

_PIECE = 1 << 16

_Rule = Callable[[Flat, Flat, np.float32, Flat, Flat | None], None]
"""Changes weights in place: weights, gradient or change, rate (of `average` the worker's share), what it keeps of the
gradients or their squares (in place, too), and the weights that the update comes from, where a rule keeps them."""


class ServerRules(Strategy):
    """`sgd`, `adagrad`, `dc-constant`, `dc-adaptive` and `average`.

    Args:
        workers: of the run; as many updates are judged together, where the configuration judges some and does not say
            how many.
    """

    def __init__(
        self,
        config: ServerConfig,
        start: tuple[Flat, Flat],
        leases: Leases,
        learner: Schedule,
        workers: int,
    ) -> None:
        trust = config.trust
        together = workers if trust is None or trust.updates is None else trust.updates
        super().__init__(config, start, leases, together)
        self.config, self._learner = config, learner
        self._factor = 1.0 if leases.rate is None else leases.rate / learner.config.peak_rate
        self._memory = np.zeros_like(self.weights)
        left = max(0.0, 1 - workers * (1 - learner.config.momentum))
        self._rule = _rule(config, left if config.momentum is None else config.momentum)
        self._keeps = config.rule in ("dc-constant", "dc-adaptive", "average")
        self._from: dict[int, tuple[Flat, int]] = {}
        """Weights by version, with the number of leases that start from them."""

    def _verdict(self, lease: UnitLease, update: Update) -> Verdict:
        if self.version - lease.unit.version > self.config.most_stale:
            return "stale"
        return super()._verdict(lease, update)

    def _granted(self, lease: UnitLease) -> None:
        if self._keeps:
            version = lease.unit.version
            weights, users = self._from.get(version) or (self.weights.copy(), 0)
            self._from[version] = weights, users + 1

    def _release(self, version: int) -> None:
        if self._keeps:
            weights, users = self._from.pop(version)
            if users > 1:
                self._from[version] = weights, users - 1

    def _vectors(self) -> dict[str, Flat]:
        return {"memory": self._memory}

    def _figures(self) -> dict[str, Any]:
        return {"from": {str(version): users for version, (_, users) in self._from.items()}}

    def state(self) -> tuple[dict[str, Flat], dict[str, Any]]:
        vectors, figures = super().state()
        return vectors | {f"from {version}": kept for version, (kept, _) in self._from.items()}, figures

    def restore(self, vectors: Mapping[str, Flat], figures: Mapping[str, Any]) -> None:
        super().restore(vectors, figures)
        self._from = {
            int(version): (vectors[f"from {version}"].copy(), users) for version, users in figures["from"].items()
        }

    def _apply(self, lease: UnitLease, update: Update) -> None:
        start = self._from[lease.unit.version][0] if self._keeps else None
        self._change(update.computed.values, update.steps.start, len(update.steps), start)
        # With one worker its statistics are the run's; with many each one moves them by its share.
        self.buffers += (update.computed.buffers - self.buffers) / np.float32(len(self.leases))
        self.version += 1

    def _apply_centre(self, values: Flat, buffers: Flat, of: Sequence[Pooled], weights: Sequence[float]) -> None:
        start = None
        if self._keeps:
            # They come from several versions: from the mean of these, as far as the rule asks.
            total, start = np.float32(sum(weights)), np.zeros_like(self.weights)
            for each, weight in zip(of, weights, strict=True):
                start += np.float32(weight) / total * self._from[each.version][0]
        self._change(values, of[-1].first, max(each.steps for each in of), start)
        self.buffers[:] = buffers

    def _change(self, values: Flat, step: int, steps: int, start: Flat | None) -> None:
        """Change the weights by a gradient or a change, at the rate of this step."""
        share = steps / (steps + self.config.period)
        rate = np.float32(share if self.config.rule == "average" else self._factor * self._learner.rate(step))
        # Piece by piece: what a rule computes on the way stays in the processor's cache, and is three times faster.
        for first in range(0, len(values), _PIECE):
            piece = slice(first, first + _PIECE)
            self._rule(
                self.weights[piece],
                values[piece],
                rate,
                self._memory[piece],
                None if start is None else start[piece],
            )


def _rule(config: ServerConfig, momentum: float) -> _Rule:
    """The rule of a configuration."""
    strength, keep = np.float32(config.delay_compensation), np.float32(momentum)

    def sgd(weights: Flat, gradient: Flat, rate: np.float32, velocity: Flat, start: Flat | None) -> None:
        """With Nesterov momentum as the sequential trainer's optimiser has it."""
        if keep:
            velocity *= keep
            velocity += gradient
            gradient = gradient + keep * velocity
        weights -= rate * gradient

    def adagrad(weights: Flat, gradient: Flat, rate: np.float32, squares: Flat, start: Flat | None) -> None:
        """Duchi et al. 2011; its rates are kept at the server for all workers (Dean et al. 2012, section 4.1)."""
        np.add(squares, gradient * gradient, out=squares)
        weights -= rate * gradient / (np.sqrt(squares) + _TINY)

    def dc_constant(weights: Flat, gradient: Flat, rate: np.float32, squares: Flat, start: Flat | None) -> None:
        """Zheng et al. 2016 (arXiv:1609.08326), equation 10."""
        assert start is not None
        weights -= rate * (gradient + strength * gradient * gradient * (weights - start))

    def dc_adaptive(weights: Flat, gradient: Flat, rate: np.float32, squares: Flat, start: Flat | None) -> None:
        """The same with a strength that follows the mean square of the gradients, equation 14."""
        assert start is not None
        square = gradient * gradient
        decay = np.float32(config.decay)
        np.add(decay * squares, (1 - decay) * square, out=squares)
        weights -= rate * (gradient + strength / np.sqrt(squares + _TINY) * square * (weights - start))

    def average(weights: Flat, change: Flat, share: np.float32, squares: Flat, start: Flat | None) -> None:
        """The mean of the worker's weights, by its steps, and the host's own, which count as a whole period (the
        volunteers' platform of 2018)."""
        assert start is not None
        weights += share * (start - change - weights)

    return {
        "sgd": sgd,
        "adagrad": adagrad,
        "dc-constant": dc_constant,
        "dc-adaptive": dc_adaptive,
        "average": average,
    }[config.rule]
