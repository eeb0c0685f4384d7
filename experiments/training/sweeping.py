"""One run of `terrace experiment training-sweeps`. Needs torch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from experiments.training.sweeps import SERVE_S, SPREAD, STEP_S, Trained
from models.data import ImageSet
from models.dataset import Dataset
from models.training.config import TrainConfig, find_config
from models.training.data import TrainingData
from tierkit.errors import DataError
from training.learner import FlatLearner
from training.strategies.build import build_strategy
from training.strategies.config import STRATEGIES
from training.virtual import SimulatedWorker, simulate

__all__ = ["NETWORK", "STRATEGY", "train"]

NETWORK, STRATEGY = "mnist-100-crowdsourced", "crowdsourced"

_HELD_OUT = 120
"""One of so many images is held out: 500 of each class of all 60,000."""
_LEASE_S = 1e9


def train(line: Trained, seed: int, images: int, data: Path | None) -> dict[str, dict[str, float]]:
    """Accuracies on the test images by the number of epochs: `own`, when each machine has gone through the images so
    often; `equal`, when all together have.

    Raises:
        DataError: MNIST is missing, or has fewer images.
    """
    torch.set_num_threads(1)
    machines = 1 + line.workers
    _, test = _read(images, data)
    prepared = _prepared(seed, line.batch, images, data)
    changes = {"peak_rate": line.rate, "epochs": machines * max(line.epochs)}
    config = _config(seed, line.batch, images).model_copy(update=changes)
    learner = FlatLearner(config, prepared)
    choice = STRATEGIES[STRATEGY]
    strategy = build_strategy(
        choice,
        learner.weights(),
        learner.buffers(),
        steps=learner.steps,
        rate=learner.rate,
        peak_rate=config.peak_rate,
        workers=machines,
        lease_s=_LEASE_S,
    )
    per_pass = prepared.batches.steps_per_epoch
    due = {count * per_pass * share for count in line.epochs for share in (1, machines)}
    reached: dict[int, float] = {}

    def watch(done: int, now: float) -> None:
        if done in due:
            reached[done] = learner.accuracy(strategy.weights, strategy.buffers, test)

    crew = [SimulatedWorker(name=f"w{number}", step_s=STEP_S) for number in range(machines)]
    simulate(strategy, learner, choice.sends, crew, serve_s=SERVE_S, spread=SPREAD, seed=seed, watch=watch)
    return {
        str(count): {"own": reached[machines * count * per_pass], "equal": reached[count * per_pass]}
        for count in line.epochs
    }


@lru_cache(maxsize=1)
def _read(images: int, data: Path | None) -> tuple[ImageSet, ImageSet]:
    dataset = Dataset.open("mnist", data)
    whole = dataset.read("train")
    if len(whole) < images:
        raise DataError(f"MNIST has {len(whole):,} training images here, fewer than {images:,}")
    return whole.take(np.arange(images)), dataset.read("test")


@lru_cache(maxsize=2)
def _prepared(seed: int, batch: int, images: int, data: Path | None) -> TrainingData:
    # Batches depend on nothing else of a configuration.
    whole, _ = _read(images, data)
    return TrainingData(_config(seed, batch, images), whole, Dataset.open("mnist", data).hierarchy)


def _config(seed: int, batch: int, images: int) -> TrainConfig:
    changes = {"seed": seed, "batch_size": batch, "held_out_per_class": images // _HELD_OUT}
    return find_config(NETWORK, None).model_copy(update=changes)
