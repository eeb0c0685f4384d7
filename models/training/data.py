"""The images of a training run: batches of those that are trained on, their labels, and those held out."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.data import ImageSet
from models.held_out import Split, hold_out
from models.hierarchy import Hierarchy
from models.training.batches import BatchSource, Statistics, generator
from models.training.config import TrainConfig
from models.training.loss import Labels
from tierkit.errors import DataError

__all__ = ["DataPart", "TrainingData"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPart:
    """Facts about a whole data set of which only some images are here."""

    train: np.ndarray
    """bool `[n]`: True for the images that are trained on. The others are held out, and not used."""
    statistics: Statistics
    """Statistics of all training images of the data set."""
    steps_per_epoch: int
    """Steps per epoch of the run."""
    sha256: str
    """SHA-256 of the data set."""


class TrainingData:
    """Everything that a run reads, on its device.

    Args:
        data: training images with labels; part of them is held out, and a share of the others gets wrong labels if
            `config` says so.
        hierarchy: class counts and superclasses of `data`.
        teacher: log-probabilities `[N, 2, F]` for each image and its mirror image, if `config` has a teacher.
        device: "cpu", "cuda", ...
        part: facts about the whole data set, if `data` is only a part of it.

    Raises:
        DataError: labels or a teacher's answers are missing, labels disagree with the hierarchy, or there are too few
            images (see `BatchSource`).
    """

    def __init__(
        self,
        config: TrainConfig,
        data: ImageSet,
        hierarchy: Hierarchy,
        *,
        teacher: Tensor | None = None,
        device: str = "cpu",
        part: DataPart | None = None,
    ) -> None:
        if data.fine is None or data.coarse is None:
            raise DataError("training needs labelled images")
        if int(data.fine.max()) >= len(hierarchy.fine):
            raise DataError(
                f"label {int(data.fine.max())} is outside hierarchy {hierarchy.name!r}, which has {len(hierarchy.fine)}"
            )
        if config.teacher is not None and teacher is None:
            raise DataError(f"configuration {config.name!r} has a teacher, but no probabilities of one were given")
        if part is None:
            split = hold_out(data.fine, config.held_out_per_class)
        else:
            split = Split(train=np.flatnonzero(part.train), held_out=np.zeros(0, np.int64))
            if not len(split.train):
                raise DataError("none of the images here is to be trained on")
        membership = torch.zeros(len(hierarchy.fine), len(hierarchy.coarse))
        membership[torch.arange(len(hierarchy.fine)), torch.tensor(hierarchy.parent)] = 1
        self.hierarchy = hierarchy
        self.device = torch.device(device)
        self.train_images = len(split.train)
        self.held_out = data.take(split.held_out)
        self.sha256 = data.digest() if part is None else part.sha256
        self.side = data.images.shape[1]
        self.batches = BatchSource(data, split.train, config, self.device)
        if part is not None:
            self.batches.statistics, self.batches.steps_per_epoch = part.statistics, part.steps_per_epoch
        fine, coarse = data.fine, data.coarse
        if config.label_noise:
            fine = _with_noise(fine, split.train, len(hierarchy.fine), config)
            changed = fine != data.fine
            coarse = np.where(changed, np.array(hierarchy.parent)[fine], coarse)
        self.labels = Labels(
            fine=torch.from_numpy(fine).to(self.device),
            coarse=torch.from_numpy(coarse).to(self.device),
            membership=membership.to(self.device),
            teacher=None if teacher is None else teacher.to(self.device),
        )

    def part(self, number: int, parts: int) -> TrainingData:
        """Return the data with only every `parts`-th training image, from `number` on.

        Raises:
            DataError: there are fewer images than parts.
        """
        found = copy(self)
        found.batches = self.batches.part(number, parts)
        found.train_images = len(range(number, self.train_images, parts))
        return found


def _with_noise(fine: np.ndarray, train: np.ndarray, classes: int, config: TrainConfig) -> np.ndarray:
    """A copy of labels in which a share of those at `train` is another class, every other one as likely.

    Raises:
        DataError: there is no other class.
    """
    if classes < 2:
        raise DataError("label_noise needs at least two classes")
    draw = generator(config.seed, -1)
    chosen = train[torch.randperm(len(train), generator=draw)[: round(config.label_noise * len(train))].numpy()]
    shift = torch.randint(1, classes, (len(chosen),), generator=draw).numpy()
    noisy = fine.copy()
    noisy[chosen] = (fine[chosen] + shift) % classes
    return noisy
