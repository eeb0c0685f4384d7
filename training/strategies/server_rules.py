"""Asynchronous rules: each update changes the weights when it arrives, up to a bound on its staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from training.strategies.config import ServerConfig
from training.strategies.leases import Leases
from training.strategies.pool import Pooled
from training.strategies.protocol import Schedule, Strategy
from training.strategies.rules import Moment, UpdateRule, added_rule, applied, named
from training.units import Flat, UnitLease, Update, Verdict

__all__ = ["ServerRules"]

_TINY = np.float32(1e-7)


class ServerRules(Strategy):
    """`sgd`, `adagrad`, `dc-constant`, `dc-adaptive`, `average`, and the rules of packages.

    Args:
        workers: number of workers of the run. As many updates are judged together if the configuration judges updates
            without a number.
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
        left = max(0.0, 1 - workers * (1 - learner.config.momentum))
        own = config.rule in config.own_rules
        self._rule = _rule(config, left if config.momentum is None else config.momentum) if own else added_rule(config)
        self._memory = [np.zeros_like(self.weights) for _ in range(self._rule.keeps)]
        self._from: dict[int, tuple[Flat, int]] = {}
        """Weights by version, with the number of leases that start from them."""

    def _verdict(self, lease: UnitLease, update: Update) -> Verdict:
        if self.version - lease.unit.version > self.config.most_stale:
            return "stale"
        return super()._verdict(lease, update)

    def _granted(self, lease: UnitLease) -> None:
        if self._rule.needs_start:
            version = lease.unit.version
            weights, users = self._from.get(version) or (self.weights.copy(), 0)
            self._from[version] = weights, users + 1

    def _release(self, version: int) -> None:
        if self._rule.needs_start:
            weights, users = self._from.pop(version)
            if users > 1:
                self._from[version] = weights, users - 1

    def _vectors(self) -> dict[str, Flat]:
        return named("memory", self._memory)

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
        start = self._from[lease.unit.version][0] if self._rule.needs_start else None
        self._change(update.computed.values, update.steps.start, len(update.steps), start)
        # With one worker its statistics are the run's; with many each one moves them by its share.
        self.buffers += (update.computed.buffers - self.buffers) / np.float32(len(self.leases))
        self.version += 1

    def _apply_centre(self, values: Flat, buffers: Flat, of: Sequence[Pooled], weights: Sequence[float]) -> None:
        start = None
        if self._rule.needs_start:
            # They come from several versions: from the mean of these, as far as the rule asks.
            total, start = np.float32(sum(weights)), np.zeros_like(self.weights)
            for each, weight in zip(of, weights, strict=True):
                start += np.float32(weight) / total * self._from[each.version][0]
        self._change(values, of[-1].first, max(each.steps for each in of), start)
        self.buffers[:] = buffers

    def _change(self, values: Flat, step: int, steps: int, start: Flat | None) -> None:
        """Change the weights by a gradient or a change, at the rate of this step."""
        share = steps / (steps + self.config.period)
        rate = share if self.config.rule == "average" else self._factor * self._learner.rate(step)
        moment = Moment(version=self.version, steps=steps, rate=rate, start=start)
        applied(self._rule, self.weights, values, self._memory, moment)


class _Rule(UpdateRule):
    keeps = 1
    by_value = True


class _Sgd(_Rule):
    """Gradient descent with Nesterov momentum, equal to the sequential trainer's optimiser."""

    def __init__(self, momentum: float) -> None:
        self._momentum = np.float32(momentum)

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        (velocity,) = kept
        if self._momentum:
            velocity *= self._momentum
            velocity += update
            update = update + self._momentum * velocity
        weights -= np.float32(moment.rate) * update


class _AdaGrad(_Rule):
    """Duchi et al. 2011; its rates are kept at the server for all workers (Dean et al. 2012, section 4.1)."""

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        (squares,) = kept
        np.add(squares, update * update, out=squares)
        weights -= np.float32(moment.rate) * update / (np.sqrt(squares) + _TINY)


class _DcConstant(_Rule):
    """Zheng et al. 2016 (arXiv:1609.08326), equation 10."""

    needs_start = True

    def __init__(self, config: ServerConfig) -> None:
        self._strength = np.float32(config.delay_compensation)

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        assert moment.start is not None
        compensated = update + self._strength * update * update * (weights - moment.start)
        weights -= np.float32(moment.rate) * compensated


class _DcAdaptive(_Rule):
    """Delay compensation with a strength that follows the mean square of the gradients, equation 14."""

    needs_start = True

    def __init__(self, config: ServerConfig) -> None:
        self._strength, self._decay = np.float32(config.delay_compensation), np.float32(config.decay)

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        assert moment.start is not None
        (squares,) = kept
        square = update * update
        np.add(self._decay * squares, (1 - self._decay) * square, out=squares)
        compensated = update + self._strength / np.sqrt(squares + _TINY) * square * (weights - moment.start)
        weights -= np.float32(moment.rate) * compensated


class _Average(_Rule):
    """The mean of the worker's weights, by its steps, and the host's own, which count as a whole period (the
    volunteers' platform of 2018). Its rate is the worker's share."""

    needs_start = True

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        assert moment.start is not None
        weights += np.float32(moment.rate) * (moment.start - update - weights)


def _rule(config: ServerConfig, momentum: float) -> UpdateRule:
    """The rule of a configuration."""
    match config.rule:
        case "sgd":
            return _Sgd(momentum)
        case "adagrad":
            return _AdaGrad()
        case "dc-constant":
            return _DcConstant(config)
        case "dc-adaptive":
            return _DcAdaptive(config)
        case _:
            return _Average()
