"""Construction of a strategy from its configuration."""

from __future__ import annotations

from training.strategies.config import BatchConfig, HostedConfig, OuterConfig, TournamentConfig
from training.strategies.lbfgs import BatchRules
from training.strategies.leases import Leases
from training.strategies.outer_rules import OuterRules
from training.strategies.protocol import Schedule, Strategy
from training.strategies.server_rules import ServerRules
from training.strategies.tournament import Tournament
from training.units import Flat, WorkUnit

__all__ = ["build_strategy"]


def build_strategy(
    config: HostedConfig,
    start: tuple[Flat, Flat],
    learner: Schedule,
    *,
    workers: int,
    lease_s: float,
    unit: WorkUnit | None = None,
) -> Strategy:
    """The strategy of a run at its first step.

    Args:
        workers: how many are expected, which is how many updates make a round.
        lease_s: seconds that a worker has for an update.
        unit: steps to hand out, and the rate of the workers' steps, for part of a run. Default: the whole run.

    Raises:
        InvalidInput: so many updates of this network cannot be judged together, or its vectors do not fit in memory.
    """
    rate = config.local_rate if config.local_rate is not None or unit is None else unit.rate
    leases = Leases(steps=(unit or learner).steps, period=config.period, lease_s=lease_s, rate=rate)
    if isinstance(config, OuterConfig):
        return OuterRules(config, start, leases, workers)
    if isinstance(config, TournamentConfig):
        return Tournament(config, start, leases, learner, workers)
    if isinstance(config, BatchConfig):
        return BatchRules(config, start, leases, learner)
    return ServerRules(config, start, leases, learner, workers)
