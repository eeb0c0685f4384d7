"""Rows of the table `volunteers`: figure 18 of the volunteers' platform of 2018, and what overlapping segments change.
Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.training.cases import LINK_BYTES_PER_S, LINK_DELAY_S, Case
from experiments.training.simulation import Machines, run_simulation
from models.data import ImageSet
from models.held_out import hold_out
from models.hierarchy import Hierarchy
from models.training.config import TrainConfig, find_config
from models.training.data import DataPart, TrainingData
from tierkit.tensors import Array
from training.learner import FlatLearner
from training.payloads import packed_bytes
from training.strategies.config import BatchConfig, ExchangeConfig, TournamentConfig
from training.virtual import Link

__all__ = ["segments_of", "volunteers"]

_NETWORK = "mnist-100-crowdsourced"
_HELD_OUT = 120
"""Reciprocal of the share of images that is held out."""
_STEP_S, _SERVE_S, _SPREAD = 0.001, 0.0008, 0.1
"""Seconds of a batch and of a request at the host, and the spread of steps. They set the order of the updates."""


def segments_of(labels: Array, *, machines: int, held: int, by_class: bool) -> list[Array]:
    """Indices of the images that each machine has: machine J has the segments J to J + held - 1 of all.

    Args:
        labels: int64 `[n]`, classes of the images.
        machines: number of machines. All segments together are `machines + held - 1`.
        held: number of neighbouring segments of a machine.
        by_class: sort the images by class first, so that each segment has few classes.
    """
    order = np.argsort(labels, kind="stable") if by_class else np.arange(len(labels))
    parts = np.array_split(order, machines + held - 1)
    return [np.concatenate(parts[first : first + held]) for first in range(machines)]


def volunteers(
    case: Case, images: tuple[ImageSet, ImageSet, Hierarchy], seed: int, watch: Callable[[], None]
) -> dict[str, Any]:
    """Run one line.

    Args:
        images: training images, test images, and their classes.
        watch: called now and then; what it raises ends the run.
    """
    assert not isinstance(case.strategy, BatchConfig | ExchangeConfig | TournamentConfig)
    train, test, hierarchy = images
    epochs = case.passes(case.epochs)
    held_out = max(1, len(train) // _HELD_OUT // len(hierarchy.fine))
    changes = {"epochs": epochs, "seed": seed, "held_out_per_class": held_out}
    config = find_config(_NETWORK, None).model_copy(update=changes)
    data = TrainingData(config, train, hierarchy)
    found = run_simulation(
        config,
        case.strategy,
        (data, test),
        Machines(
            workers=case.workers,
            step_s=_STEP_S,
            serve_s=_SERVE_S,
            spread=_SPREAD,
            link=Link(delay_s=LINK_DELAY_S, bytes_per_s=LINK_BYTES_PER_S),
            own=_own(case, config, data, (train, hierarchy)) if case.held else (),
        ),
        lambda done, steps, now: watch(),
    )
    return {
        **found,
        "epoch_seconds": found["virtual_seconds"] / case.epochs,
        "timed_epochs": case.epochs,
        "size_bytes": packed_bytes(*FlatLearner(config, data).lengths, "fp32"),
    }


def _own(case: Case, config: TrainConfig, data: TrainingData, images: tuple[ImageSet, Hierarchy]) -> list[TrainingData]:
    """The images of each machine."""
    train, hierarchy = images
    assert train.fine is not None
    kept = hold_out(train.fine, config.held_out_per_class).train
    found = []
    for chosen in segments_of(train.fine[kept], machines=case.workers, held=case.held, by_class=case.by_class):
        part = DataPart(
            train=np.ones(len(chosen), bool),
            statistics=data.batches.statistics,
            steps_per_epoch=data.batches.steps_per_epoch,
            sha256=data.sha256,
        )
        found.append(TrainingData(config, train.take(kept[chosen]), hierarchy, part=part))
    return found
