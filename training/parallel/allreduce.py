"""All-reduce: the mean of the ranks' gradients at each step, so that N batches make one step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch.nn.parallel import DistributedDataParallel

from training.learner import FlatLearner
from training.parallel.exchange import Done, Mean, Program
from training.parallel.group import Group
from training.strategies.config import ExchangeConfig

__all__ = ["allreduce", "allreduce_by_torch", "computed_by_torch", "scaled_rate"]


def scaled_rate(config: ExchangeConfig, rate: float, *, ranks: int, step: int, steps: int) -> float:
    """Learning rate of a step of all ranks together (Goyal et al. 2017, arXiv:1706.02677): in the first steps it rises
    from the network's own, later it is that times the number of ranks.

    Args:
        rate: the network's rate at this step of its schedule.
        step: step of all ranks, counted from 0; `steps` is their number.
    """
    if config.scaling == "none":
        return rate
    rising = config.warmup * steps
    share = 1.0 if step >= rising else (step + 1) / (rising + 1)
    return rate * (1 + (ranks - 1) * share)


def allreduce(learner: FlatLearner, config: ExchangeConfig, *, rank: int, ranks: int, start: int = 0) -> Program:
    """One rank's program, with plain vectors.

    Args:
        start: step to continue with.
    """
    steps = learner.steps // ranks
    for step in range(start, steps):
        number = step * ranks + rank
        gradient, loss = learner.gradient(number)
        mean = yield Mean(gradient)
        learner.apply(mean, scaled_rate(config, learner.rate(step * ranks), ranks=ranks, step=step, steps=steps))
        yield Done(step, loss)
    if learner.lengths[1]:
        learner.load(learner.weights(), (yield Mean(learner.buffers())))
    return {}


@contextmanager
def computed_by_torch(learner: FlatLearner, *, start: int) -> Iterator[None]:
    """Meanwhile, torch's `DistributedDataParallel` takes the mean of gradients, overlapped with the backward pass."""
    # Each rank has running statistics of its own batches; their mean is taken at the end.
    wrap = partial(DistributedDataParallel, broadcast_buffers=False, init_sync=start == 0)
    with ExitStack() as stack:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # newer torch has another name for it
            stack.enter_context(learner.spread(wrap))
        yield


def allreduce_by_torch(learner: FlatLearner, config: ExchangeConfig, group: Group, *, start: int = 0) -> Program:
    """Return the same program for a learner that is `computed_by_torch`."""
    ranks, steps = group.ranks, learner.steps // group.ranks
    share = 2 * (ranks - 1) * 4 * learner.lengths[0] // ranks
    for step in range(start, steps):
        rate = scaled_rate(config, learner.rate(step * ranks), ranks=ranks, step=step, steps=steps)
        with group.with_others():
            loss = learner.walk(step * ranks + group.rank, rate)
        group.count(share, share)
        yield Done(step, loss)
    if learner.lengths[1]:
        learner.load(learner.weights(), (yield Mean(learner.buffers())))
    return {}
