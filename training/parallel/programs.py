"""The program of a rank, by its strategy."""

from __future__ import annotations

from tierkit.errors import InvalidInput
from training.learner import FlatLearner
from training.parallel.allreduce import allreduce
from training.parallel.ensemble import ensemble
from training.parallel.exchange import Program, Seat
from training.parallel.factors import check_factors, factors
from training.parallel.gossip import gossip
from training.parallel.pairs import check_hybrid
from training.parallel.pipeline import check_pipeline
from training.parallel.tournament import tournament
from training.strategies.config import RanksConfig, TournamentConfig

__all__ = ["check_rule", "make_program"]


def check_rule(config: RanksConfig, learner: FlatLearner, ranks: int) -> None:
    """Check that a rule can do what the configuration asks, before anything starts.

    Raises:
        InvalidInput: it cannot, and why.
    """
    if config.rule == "pipeline":
        check_pipeline(config, learner, ranks)
    if config.rule == "factors":
        check_factors(learner, ranks)
    if config.rule == "hybrid":
        check_hybrid(learner, ranks)


def make_program(config: RanksConfig, learner: FlatLearner, seat: Seat) -> Program:
    """One rank's program.

    Args:
        learner: learner of this strategy, in its state at the first step.

    Raises:
        InvalidInput: the rule cannot be used with this number of ranks, or has no such program.
    """
    if config.rule in ("pipeline", "hybrid"):
        raise InvalidInput(
            f"{config.rule} computes through torch, and has no run on virtual time: use terrace train run"
        )
    if isinstance(config, TournamentConfig):
        return tournament(learner, config, seat)
    if config.rule == "ensemble":
        return ensemble(learner, config, seat)
    if config.rule == "factors":
        return factors(learner, config, seat)
    program = gossip if config.rule == "gossip" else allreduce
    return program(learner, config, rank=seat.rank, ranks=seat.ranks, start=seat.start)
