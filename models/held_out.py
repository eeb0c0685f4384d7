"""Images that training left out. Only the answers to these show how a network does on images that it has not seen.

The module needs no torch, because serving's thresholds are chosen on these images (`models.tuning`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.data import ImageSet, Split as Part
from models.dataset import Dataset
from models.folders import FolderImages
from models.manifest import ModelEntry
from tierkit.errors import DataError, WeightsError

__all__ = ["Split", "Unseen", "held_out_per_class", "hold_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Indices of the images that are trained on, and of those held out."""

    train: np.ndarray
    held_out: np.ndarray


def hold_out(fine: np.ndarray, per_class: int) -> Split:
    """Hold out the last `per_class` images of each class, in data set order.

    Raises:
        DataError: a class has no image left to train on.
    """
    held: list[np.ndarray] = []
    for label in np.unique(fine):
        members = np.flatnonzero(fine == label)
        if len(members) <= per_class:
            raise DataError(f"class {int(label)} has {len(members)} training images; {per_class} are to be held out")
        held.append(members[-per_class:])
    held_out = np.sort(np.concatenate(held))
    return Split(train=np.setdiff1d(np.arange(len(fine)), held_out), held_out=held_out)


def held_out_per_class(entries: Iterable[ModelEntry], records: Path) -> int:
    """Return the number of images of each class that none of these networks was trained on, by their training records.

    The runs that a network started from and its teachers count as well: what a teacher has seen, its student knows.

    Args:
        records: folder of the training records.

    Raises:
        WeightsError: a record is missing or damaged, or a run held nothing out.
    """
    seen: dict[str, int] = {}
    waiting = [Path(entry.trained.record).stem for entry in entries]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        config = _config(records / f"{name}.json")
        seen[name] = config["held_out_per_class"]
        if seen[name] < 1:
            raise WeightsError(f"{name!r} was trained on all images (held_out_per_class is 0): none is left to tune on")
        teacher = config.get("teacher") or {}
        waiting += [run for run in (config.get("initial"), *teacher.get("runs", ())) if run is not None]
    # The last images of each class are held out, so the smallest number is in all of them.
    return min(seen.values())


class Unseen:
    """Labelled images that some networks were not trained on: one part to choose by, another to judge the choice by.

    If all networks were trained here, these are the images that training held out, and the test images. Only the user
    of an imported network knows its training images, and names pictures that it has not seen: the test images. Every
    other one of each class is to choose by.

    Args:
        records: folder of the training records.

    Raises:
        WeightsError: a training record is missing or damaged, or a run held nothing out.
    """

    def __init__(self, dataset: Dataset, entries: Collection[ModelEntry], records: Path) -> None:
        self._dataset = dataset
        self._per_class: int | None = None
        if all(entry.training is not None for entry in entries):
            self._per_class = held_out_per_class(entries, records)
        self._read: dict[Any, ImageSet | FolderImages] = {}

    def said(self, images: int) -> str:
        """Describe the images to choose by in words.

        Args:
            images: how many there are.
        """
        if self._per_class is None:
            return f"{self._dataset.name}: {images} labelled images, every other one of each class"
        return f"{self._dataset.name}: {images} images held out of training, the last {self._per_class} of each class"

    def to_choose(self, entry: ModelEntry) -> ImageSet | FolderImages:
        """Return the images to choose by, in the form that a network takes.

        Raises:
            DataError: they are missing, or have no labels.
        """
        images = self._images(entry, "test" if self._per_class is None else "train")
        labels = _labels(images)
        if self._per_class is None:
            return images.take(np.flatnonzero(_every_other(labels)))
        return images.take(hold_out(labels, self._per_class).held_out)

    def to_judge(self, entry: ModelEntry) -> ImageSet | FolderImages:
        """Return the images to judge the choice by, in the form that a network takes.

        Raises:
            DataError: they are missing, have no labels, or are all used to choose by.
        """
        images = self._images(entry, "test")
        if self._per_class is not None:
            return images
        others = np.flatnonzero(~_every_other(_labels(images)))
        if not len(others):
            raise DataError(
                f"{self._dataset.name} has one image of each class: at least two of some are needed, to choose by one "
                "and to judge by the other"
            )
        return images.take(others)

    def _images(self, entry: ModelEntry, part: Part) -> ImageSet | FolderImages:
        key = part, entry.fit
        if key not in self._read:
            self._read[key] = self._dataset.read_for(entry, part)
        return self._read[key]


def _labels(images: ImageSet | FolderImages) -> np.ndarray:
    if images.fine is None:
        raise DataError("images without labels cannot be held out")
    return images.fine


def _every_other(labels: np.ndarray) -> np.ndarray:
    """bool `[n]`: the first, third, ... image of each class."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[::2]] = True
    return chosen


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())["config"]
        int(config["held_out_per_class"])
    except OSError as error:
        raise WeightsError(
            f"cannot read the training record {path} ({error.strerror}); without it, the images that the network "
            "has not seen are unknown. Name the folder of the records with --records"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"the training record {path} is damaged: {error!r}") from error
    return dict(config)
