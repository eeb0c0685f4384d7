"""All-reduce: the mean of the ranks' gradients at each step, so that N batches make one step."""

from __future__ import annotations

from training.learner import FlatLearner
from training.parallel.exchange import Done, Mean, Program
from training.strategies.config import ExchangeConfig

__all__ = ["allreduce", "scaled_rate"]


def scaled_rate(config: ExchangeConfig, rate: float, *, ranks: int, step: int, steps: int) -> float:
    """Learning rate of a step of all ranks together (Goyal et al. 2017, arXiv:1706.02677): in the first steps it rises
    from the network's own, later it is that times the number of ranks.

    Args:
        rate: the network's, at this step of its schedule.
        step: of all ranks, counted from 0; `steps`, how many there are.
    """
    if config.scaling == "none":
        return rate
    rising = config.warmup * steps
    share = 1.0 if step >= rising else (step + 1) / (rising + 1)
    return rate * (1 + (ranks - 1) * share)


def allreduce(learner: FlatLearner, config: ExchangeConfig, *, rank: int, ranks: int, start: int = 0) -> Program:
    """One rank's program, with plain vectors. Real processes leave the mean to torch's `DistributedDataParallel`, which
    overlaps it with the backward pass.

    Args:
        start: step to go on with.
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
