"""The files that tell other programs what to train. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from models.dataset import Dataset
from models.held_out import hold_out
from models.training.batches import statistics as pixel_statistics
from models.training.config import find_config
from models.training.data import TrainingData
from training.learner import FlatLearner

__all__ = ["write_task"]


def write_task(data: Path | None, network: Path, seeds: Iterable[int], folder: Path) -> None:
    """Write the images and first weights of a training task, in the form that `contenders/common.py` reads.

    Args:
        network: its configuration.

    Raises:
        DataError: CIFAR-100 is missing.
    """
    config = find_config(network.stem, network)
    dataset = Dataset.open(config.dataset, data)
    images = dataset.read("train")
    assert images.fine is not None  # CIFAR-100 has labels
    assert images.coarse is not None
    split = hold_out(images.fine, config.held_out_per_class)
    known = pixel_statistics(images.images[split.train])
    labels = images.coarse if config.target == "coarse" else images.fine
    parts = {
        f"{name}_{what}": values[chosen]
        for name, chosen in (("train", split.train), ("held_out", split.held_out))
        for what, values in (("images", images.images), ("labels", labels))
    }
    np.savez(folder / "images.npz", mean=known.mean, std=known.std, **parts)
    training = TrainingData(config, images, dataset.hierarchy)
    for seed in seeds:
        learner = FlatLearner(config.model_copy(update={"seed": seed}), training)
        np.save(folder / f"{seed}.npy", learner.weights())
