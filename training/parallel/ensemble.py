"""Ensemble in two stages (Ding et al. 2017): each rank trains its own network on its own part of the images, and their
answers are combined. Then the networks are optimised together, by the loss of the combined answer.

Answers are combined as the mean of logits. It is linear, so the gradient of each network is an equal share of the joint
one, and ranks exchange only logits: `batch size x classes` numbers a step, however large the networks are.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from tierkit.errors import InvalidInput
from training.learner import FlatLearner
from training.parallel.exchange import Done, Gather, Mean, Program, Request, Seat
from training.strategies.config import ExchangeConfig
from training.units import Flat

__all__ = ["ensemble"]

_SEEDS = 1_000_003
"""Distance between the seeds of two networks' first weights."""


def ensemble(learner: FlatLearner, config: ExchangeConfig, seat: Seat) -> Program:
    """One rank's program. At the end each rank holds its own network, a member of the ensemble.

    Returns:
        `best_local` and `combined`: accuracy on the test images after the first stage, of the best network and of the
        combined answer; `accuracy`: of the combined answer at the end.

    Raises:
        InvalidInput: there is only one rank, or a stage has no steps.
        DataError: there are fewer training images than ranks.
    """
    rank, ranks, whole, steps = seat.rank, seat.ranks, learner.data, learner.steps // seat.ranks
    apart = round(config.apart * steps)
    if ranks < 2 or not 0 < apart < steps:
        raise InvalidInput(
            f"an ensemble of {ranks} ranks has {steps:,} steps each: it needs 2 ranks and a step of each stage"
        )
    kept = dict(seat.kept)
    if not seat.start:
        own = learner.config.model_copy(update={"seed": (learner.config.seed + _SEEDS * rank) % 2**31})
        first = FlatLearner(own, whole)
        learner.load(first.weights(), first.buffers())
    if seat.start < apart:
        learner.draw_from(whole.part(rank, ranks))
        for step in range(seat.start, apart):
            loss = learner.walk(step, learner.rate(step * learner.steps // apart))
            if step + 1 == apart:
                kept["best_local"], kept["combined"] = yield from _measured(learner, seat)
                learner.moments = None
            yield Done(step, loss, kept)
    learner.draw_from(whole)
    for step in range(max(seat.start, apart), steps):
        mean = yield Mean(learner.answers(step))
        rate = learner.rate((step - apart) * learner.steps // (steps - apart))
        yield Done(step, learner.walk_together(mean, ranks, rate), kept)
    _, accuracy = yield from _measured(learner, seat)
    return {**kept, "accuracy": accuracy}


def _measured(learner: FlatLearner, seat: Seat) -> Generator[Request, Flat, tuple[float, float]]:
    """Measure the accuracy of the best network and of the combined answer on the test images."""
    logits, labels = learner.logits(seat.test), learner.labels(seat.test)
    right = yield Gather(np.array([np.mean(logits.argmax(1) == labels)], np.float32))
    mean = yield Mean(logits.reshape(-1))
    return float(right.max()), float(np.mean(mean.reshape(logits.shape).argmax(1) == labels))
