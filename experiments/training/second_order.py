"""Rows of the table `second-order`: L-BFGS on the fleet against the best gradient descent in one process. Needs torch.

All times are virtual and come from constants, so the rows are the same on each machine, but for its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.training.cases import DESCENT, LINK_BYTES_PER_S, LINK_DELAY_S, NESTEROV, Case
from experiments.training.simulation import Machines, run_simulation
from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.training.config import find_config
from models.training.data import TrainingData
from tierkit.errors import InvalidInput
from training.learner import FlatLearner
from training.payloads import packed_bytes
from training.strategies.config import BatchConfig
from training.virtual import Link

__all__ = ["second_order"]

_NETWORK = "mnist-100"
_HELD_OUT = 10
"""Images of each class."""
_IMAGES = 10_000 + 10 * _HELD_OUT
_BATCH = 250
_STEP_S, _SERVE_S, _SPREAD = 0.0025, 0.0008, 0.1
"""Seconds of a batch and of a request at the host, rounded from what the other tables measure; and the spread of
steps."""
_RATES = {DESCENT: (0.4, 0.6, 0.8, 1.0, 1.2), NESTEROV: (0.2, 0.3, 0.4, 0.5, 0.6)}
_MOMENTA = {DESCENT: (0.0,), NESTEROV: (0.8, 0.9, 0.95)}
_DIVERGED = 10.0
"""A run ends early when its loss is this many times the loss at the start."""


def second_order(
    case: Case, images: tuple[ImageSet, ImageSet, Hierarchy], seed: int, watch: Callable[[], None]
) -> dict[str, Any]:
    """Run one line.

    Args:
        images: the first 10,100 of the first set are trained on; the second is the test set; then their classes.
        watch: called now and then; what it raises ends the run.
    """
    train, test, hierarchy = images
    changes = {"epochs": case.epochs, "batch_size": _BATCH, "held_out_per_class": _HELD_OUT, "seed": seed}
    config = find_config(_NETWORK, None).model_copy(update=changes)
    data = TrainingData(config, train.take(np.arange(min(len(train), _IMAGES))), hierarchy)
    learner = FlatLearner(config, data)
    size_bytes = packed_bytes(*learner.lengths, "fp32")
    if case.name in _RATES:
        found = _best(case.name, learner, test, watch)
    else:
        assert isinstance(case.strategy, BatchConfig)
        found = run_simulation(
            config,
            case.strategy,
            (data, test),
            Machines(
                workers=case.workers,
                slow=case.slow,
                step_s=_STEP_S,
                serve_s=_SERVE_S,
                spread=_SPREAD,
                link=Link(delay_s=LINK_DELAY_S, bytes_per_s=LINK_BYTES_PER_S),
            ),
            lambda done, steps, now: watch(),
        )
    return {
        **found,
        "epoch_seconds": found["virtual_seconds"] / case.epochs,
        "timed_epochs": case.epochs,
        "size_bytes": size_bytes,
    }


def _best(name: str, learner: FlatLearner, test: ImageSet, watch: Callable[[], None]) -> dict[str, Any]:
    """The run with the lowest loss in the grid of rates and momenta."""
    start, config = (learner.weights(), learner.buffers()), learner.config
    runs = []
    for momentum in _MOMENTA[name]:
        for rate in _RATES[name]:
            objective, weights = _descend(learner, start[0], rate, momentum, watch)
            runs.append((objective, rate, momentum, weights))
    objective, rate, momentum, weights = min(runs, key=lambda run: run[0])
    if not math.isfinite(objective):
        raise InvalidInput(f"no rate of {name} gives a finite loss: train on other images")
    accuracy, _ = learner.evaluated(weights, start[1], test)
    return {
        "network": config.name,
        "workers": 1,
        "seed": config.seed,
        "wire": "fp32",
        "accuracy": accuracy,
        "epochs": config.all_epochs,
        "virtual_seconds": learner.steps * _STEP_S,
        "updates": config.all_epochs,
        "bytes_sent": 0,
        "bytes_received": 0,
        "step_bytes": 0,
        "faults": 0,
        "loss": objective,
        "step_s": _STEP_S,
        "serve_s": 0.0,
        "cheat": None,
        "cheaters": 0,
        "twice": 0,
        "missing": 0,
        "objective": objective,
        "rate": rate,
        "momentum": momentum,
        "runs_of_grid": len(runs),
    }


def _descend(
    learner: FlatLearner, weights: np.ndarray, rate: float, momentum: float, watch: Callable[[], None]
) -> tuple[float, np.ndarray]:
    """The lowest loss of all points of a run of gradient descent with Nesterov momentum, and the weights there. A pass
    evaluates a point, as a pass of L-BFGS does."""
    batches, buffers = learner.data.batches.steps_per_epoch, learner.buffers()
    velocity, first = np.zeros_like(weights), math.inf
    best = math.inf, weights
    for _ in range(learner.config.all_epochs):
        watch()
        learner.load(weights, buffers)
        found = learner.compute(range(batches), "portion")
        first = found.loss if first == math.inf else first
        if not found.loss <= _DIVERGED * first:
            break
        best = min(best, (found.loss, weights), key=lambda point: point[0])
        gradient = found.values / np.float32(batches)
        velocity = np.float32(momentum) * velocity + gradient
        weights = weights - np.float32(rate) * (gradient + np.float32(momentum) * velocity)
    return best
