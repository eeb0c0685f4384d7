"""Construction of a strategy from its configuration."""

from __future__ import annotations

from typing import Protocol

from models.training.config import TrainConfig
from training.strategies.config import OuterConfig, StrategyConfig
from training.strategies.leases import Leases
from training.strategies.outer_rules import OuterRules
from training.strategies.protocol import Strategy
from training.strategies.server_rules import ServerRules
from training.units import Flat, WorkUnit

__all__ = ["Schedule", "build_strategy"]


class Schedule(Protocol):
    """The steps of a run and their learning rates; see `training.learner.FlatLearner`."""

    config: TrainConfig
    steps: int

    def rate(self, step: int) -> float: ...


def build_strategy(
    config: StrategyConfig,
    start: tuple[Flat, Flat],
    learner: Schedule,
    *,
    workers: int,
    lease_s: float,
    unit: WorkUnit | None = None,
) -> Strategy:
    """The strategy of a run at its first step.

    Args:
        start: weights and buffers.
        workers: how many are expected, which is how many updates make a round.
        lease_s: seconds that a worker has for an update.
        unit: steps to hand out, and the rate of the workers' steps, for part of a run. Default: the whole run.

    Raises:
        InvalidInput: so many updates of this network cannot be judged together.
    """
    peak_rate = learner.config.peak_rate
    local_rate = config.local_rate if config.local_rate is not None or unit is None else unit.rate
    steps = learner.steps if unit is None else unit.steps
    leases = Leases(steps=steps, period=config.period, lease_s=lease_s, rate=local_rate)
    if isinstance(config, OuterConfig):
        return OuterRules(config, *start, leases, workers=workers)
    factor = 1.0 if local_rate is None else local_rate / peak_rate
    return ServerRules(
        config,
        *start,
        leases,
        lambda step: factor * learner.rate(step),
        momentum=learner.config.momentum,
        workers=workers,
    )
