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
    workers: int,
    lease_s: float,
) -> Strategy:
    """The strategy of a run at its first step.

    Args:
        weights, buffers: to start from.
        steps: of the whole run.
        rate: learning rate of a step, as the network's configuration has it, and `peak_rate` its highest.
        workers: how many there will be, which says how many updates make a round.
        lease_s: how long a worker has for an update.

    Raises:
        InvalidInput: so many updates of this network cannot be judged together.
    """
    if isinstance(config, OuterConfig):
        leases = Leases(steps=steps, unit=config.local_steps, push=config.local_steps, lease_s=lease_s)
        return OuterRules(config, weights, buffers, leases, rate, workers=workers)
    factor = 1.0 if config.rate is None else config.rate / peak_rate
    leases = Leases(steps=steps, unit=config.n_fetch, push=config.n_push, lease_s=lease_s)
    return ServerRules(config, weights, buffers, leases, lambda step: factor * rate(step), workers=workers)
