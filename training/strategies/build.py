"""A strategy from its configuration."""

from __future__ import annotations

from collections.abc import Callable

from training.strategies.config import OuterConfig, StrategyConfig
from training.strategies.leases import Leases
from training.strategies.outer_rules import OuterRules
from training.strategies.protocol import Strategy
from training.strategies.server_rules import ServerRules
from training.units import Flat

__all__ = ["build_strategy"]


def build_strategy(
    config: StrategyConfig,
    weights: Flat,
    buffers: Flat,
    *,
    steps: int,
    rate: Callable[[int], float],
    peak_rate: float,
    momentum: float = 0.0,
    workers: int,
    lease_s: float,
    local_rate: float | None = None,
) -> Strategy:
    """The strategy of a run at its first step.

    Args:
        weights, buffers: to start from.
        steps: of the whole run.
        rate: learning rate of a step, as the network's configuration has it, `peak_rate` its highest, and `momentum`
            that of the configuration.
        workers: how many there will be, which says how many updates make a round.
        lease_s: how long a worker has for an update.
        local_rate: of the workers' steps at its highest, where the configuration has none.

    Raises:
        InvalidInput: so many updates of this network cannot be judged together.
    """
    local_rate = config.local_rate if config.local_rate is not None else local_rate
    leases = Leases(steps=steps, period=config.period, lease_s=lease_s, rate=local_rate)
    if isinstance(config, OuterConfig):
        return OuterRules(config, weights, buffers, leases, rate, workers=workers)
    factor = 1.0 if local_rate is None else local_rate / peak_rate
    return ServerRules(
        config, weights, buffers, leases, lambda step: factor * rate(step), momentum=momentum, workers=workers
    )
