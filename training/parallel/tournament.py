"""Tournament among ranks: each trains its own lineage, and pairs of them meet; see `training.strategies.tournament`."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from tierkit.errors import InvalidInput
from training.learner import FlatLearner
from training.parallel.exchange import Broadcast, Done, Gather, Program, Request, Seat, Swap
from training.strategies.config import TournamentConfig
from training.strategies.tournament import Score, opponents, rate_after, rates_of, wins
from training.units import Flat

__all__ = ["tournament"]


def tournament(learner: FlatLearner, config: TournamentConfig, seat: Seat) -> Program:
    """One rank's program. At the end all hold the best lineage on the held-out images.

    Returns:
        `rate`: the best lineage's at its highest; `mean`: accuracy on the test images, over all lineages.

    Raises:
        InvalidInput: there is only one rank.
    """
    rank, ranks, peak = seat.rank, seat.ranks, learner.config.peak_rate
    if ranks < 2:
        raise InvalidInput("a tournament needs at least 2 ranks: give more, or another strategy")
    rate = seat.kept.get("rate", rates_of(config, peak, ranks)[rank])
    for step in range(seat.start, learner.steps // ranks):
        number = step * ranks + rank
        loss = learner.walk(number, rate / peak * learner.rate(number))
        if (step + 1) % config.period == 0:
            rate = yield from _meeting(learner, config, seat, (step + 1) // config.period - 1, rate)
        yield Done(step, loss, {"rate": rate})
    right, _ = learner.evaluated(learner.weights(), learner.buffers(), seat.test)
    everything = (yield Gather(_vector(right, *_score(learner), rate))).reshape(ranks, -1)
    best = 0
    for other in range(1, ranks):
        if wins(_score_in(everything[other, 1:]), _score_in(everything[best, 1:]), first=False):
            best = other
    learner.load_joined((yield Broadcast(learner.joined(), best)))
    return {"rate": float(everything[best, 3]), "mean": float(everything[:, 0].mean())}


def _meeting(
    learner: FlatLearner, config: TournamentConfig, seat: Seat, meeting: int, rate: float
) -> Generator[Request, Flat, float]:
    """Meet the opponent; the rate to continue with."""
    seed, rank = learner.config.seed, seat.rank
    opponent = opponents(seat.ranks, meeting, seed)[rank]
    sent = np.concatenate((learner.joined(), _vector(*_score(learner), rate)))
    came = yield Swap(sent, opponent, opponent)
    if opponent == rank or wins(_score_in(sent[-3:]), _score_in(came[-3:]), first=rank < opponent):
        return rate
    learner.load_joined(came[:-3])
    return rate_after(config, float(came[-1]), lineage=rank, meeting=meeting, seed=seed)


def _score(learner: FlatLearner) -> Score:
    return learner.measured(learner.weights(), learner.buffers())


def _score_in(values: Flat) -> Score:
    return float(values[0]), float(values[1])


def _vector(*figures: float) -> Flat:
    return np.array(figures, np.float32)
