"""A small world: handwritten digits, a network that takes seconds to train, and a camera that moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments.improve.world import AnsweredPictures, LearningWorld
from models.data import ImageSet
from models.dataset import Dataset
from models.escalation import margin
from models.evaluate import logits_of
from models.export.pipeline import quantize_run
from models.manifest import ModelEntry
from models.session import load_model, softmax
from models.training.config import find_config
from models.training.run import RunOptions, train_run
from tierkit.tensors import Array

__all__ = ["digits_judge", "digits_world"]

_NETWORK, _JUDGE, _EPOCHS = "mnist-100", "mnist-64-64", 3
_MOVED = 2
"""Pixels by which the camera has moved, down and to the right."""
_WRONG_ABOVE = 0.03
"""Share of the answers from above that are wrong."""
_SHARE_UP = 0.35
_OF_TEST = 6_000
"""Test images in the stream; the others are new pictures."""


def digits_world(data: Path | None, folder: Path, seed: int = 0) -> LearningWorld:
    """Train and quantise the network in a folder, if it is not there, and let the devices see test images.

    Raises:
        DataError: MNIST is missing.
    """
    dataset = Dataset.open("mnist", data)
    entry = _trained(_NETWORK, dataset, folder)
    test = dataset.read("test")
    draw = np.random.default_rng(seed)
    images, labels = _in_colour(test), test.fine
    assert labels is not None
    moved = np.roll(images, (_MOVED, _MOVED), axis=(1, 2))
    before = _OF_TEST * 3 // 10

    def answered(pictures: Array, truth: Array) -> AnsweredPictures:
        said = np.where(draw.random(len(truth)) < _WRONG_ABOVE, draw.integers(0, 10, len(truth)), truth)
        above = np.full((len(truth), 10), 0.03 / 9, np.float32)
        above[np.arange(len(truth)), said] = 0.97
        return AnsweredPictures(pictures, truth, above)

    stream = answered(np.concatenate([images[:before], moved[before:_OF_TEST]]), labels[:_OF_TEST])
    end = load_model(entry, folder / "set", labels=dataset.hierarchy.labels(entry.target))
    local = softmax(logits_of(end, stream.images)[0] / entry.temperature)
    return LearningWorld(
        entry=entry,
        content=(folder / "set" / entry.file).read_bytes(),
        hierarchy=dataset.hierarchy,
        stream=stream,
        own=answered(moved[_OF_TEST:], labels[_OF_TEST:]),
        clean=answered(images[_OF_TEST:], labels[_OF_TEST:]),
        local=local,
        below=float(np.quantile(margin(local), _SHARE_UP)),
    )


def digits_judge(data: Path | None, folder: Path) -> Callable[[Array], Array]:
    """Train another network in a folder, if it is not there; return a function that classifies UINT8 images.

    Raises:
        DataError: MNIST is missing.
    """
    dataset = Dataset.open("mnist", data)
    entry = _trained(_JUDGE, dataset, folder)
    network = load_model(entry, folder / "set", labels=dataset.hierarchy.labels(entry.target))
    return lambda images: np.asarray(logits_of(network, images)[0].argmax(axis=1))


def _trained(network: str, dataset: Dataset, folder: Path) -> ModelEntry:
    config = find_config(network, None).model_copy(update={"epochs": _EPOCHS})
    train_run(config, dataset, folder, RunOptions(threads=1))
    return quantize_run(folder / network, dataset, folder / "set", records=folder / "records")


def _in_colour(images: ImageSet) -> Array:
    return np.repeat(images.images, 3 if images.images.shape[3] == 1 else 1, axis=3)
