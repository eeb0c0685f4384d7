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
    """Build the strategy of a run at its first step.

    Args:
        workers: number of expected workers, which is the number of updates in a round.
        lease_s: seconds that a worker has for an update.
        unit: part of a run to hand out: its steps and the learning rate of the workers. Default: the whole run.

    Raises:
        InvalidInput: this many updates of the network cannot be judged together, or its vectors do not fit in memory.
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
