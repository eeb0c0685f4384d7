"""GossipGraD: each rank trains, and averages its weights with one other at a time (Daily et al. 2018,
arXiv:1803.05880). What a rank sends does not grow with the number of ranks.
"""

from __future__ import annotations

import random

import numpy as np

from training.learner import FlatLearner
from training.parallel.exchange import Done, Gather, Mean, Program, Swap
from training.strategies.config import ExchangeConfig

__all__ = ["gossip", "partners"]


def partners(rank: int, ranks: int, turn: int, seed: int) -> tuple[int, int]:
    """The rank to send to, and the one to get from, in an exchange.

    Dissemination: with each exchange the distance doubles, so what one rank knows reaches all N in log2 N of them. Then
    the ranks are put in another order, drawn from the seed, so that other pairs meet.

    Args:
        turn: number of the exchange, counted from 0.
    """
    distances = max(1, (ranks - 1).bit_length())
    order = list(range(ranks))
    random.Random(f"{seed} {turn // distances}").shuffle(order)
    place, distance = order.index(rank), 1 << turn % distances
    return order[(place + distance) % ranks], order[(place - distance) % ranks]


def gossip(learner: FlatLearner, config: ExchangeConfig, *, rank: int, ranks: int, start: int = 0) -> Program:
    """One rank's program. At the end all hold the mean.

    Returns:
        `spread`: the largest distance of a rank's weights to their mean before that, as a share of the mean's length.
    """
    for step in range(start, learner.steps // ranks):
        number = step * ranks + rank
        loss = learner.walk(number, learner.rate(number))
        if (step + 1) % config.period == 0:
            to, source = partners(rank, ranks, step // config.period, learner.config.seed)
            own = learner.joined()
            learner.load_joined((own + (yield Swap(own, to, source))) / np.float32(2))
        yield Done(step, loss)
    own = learner.joined()
    mean = yield Mean(own)
    values, _ = learner.lengths
    distance = np.linalg.norm(own[:values] - mean[:values]) / max(1e-12, float(np.linalg.norm(mean[:values])))
    distances = yield Gather(np.array([distance], np.float32))
    learner.load_joined(mean)
    return {"spread": float(distances.max())}
