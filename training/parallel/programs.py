"""The program of a rank, by its strategy."""

from __future__ import annotations

from tierkit.errors import InvalidInput
from training.learner import FlatLearner
from training.parallel.allreduce import allreduce
from training.parallel.exchange import Program, Seat
from training.parallel.gossip import gossip
from training.strategies.config import RanksConfig, TournamentConfig

__all__ = ["make_program"]


def make_program(config: RanksConfig, learner: FlatLearner, seat: Seat) -> Program:
    """One rank's program.

    Args:
        learner: of this strategy; with what it had at the step to start with.

    Raises:
        InvalidInput: the rule cannot be used with this number of ranks.
    """
    if isinstance(config, TournamentConfig) or config.rule == "ensemble":
        raise InvalidInput(f"{config.rule} is not there yet")
    program = gossip if config.rule == "gossip" else allreduce
    return program(learner, config, rank=seat.rank, ranks=seat.ranks, start=seat.start)
