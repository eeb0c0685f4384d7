"""The images of a training run: batches of those that are trained on, their labels, and those held out."""

from __future__ import annotations

import torch
from torch import Tensor

from models.data import ImageSet
from models.held_out import hold_out
from models.hierarchy import Hierarchy
from models.training.batches import BatchSource
from models.training.config import TrainConfig
from models.training.loss import Labels
from tierkit.errors import DataError

__all__ = ["TrainingData"]


class TrainingData:
    """Everything that a run reads, on its device.

    Args:
        data: training images with labels; part of them is held out.
        hierarchy: class counts and superclasses of `data`.
        teacher: log-probabilities `[N, 2, F]` for each image and its mirror image, where `config` has a teacher.
        device: "cpu", "cuda", ...

    Raises:
        DataError: labels or a teacher's answers are missing, or labels disagree with the hierarchy.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: ImageSet,
        hierarchy: Hierarchy,
        *,
        teacher: Tensor | None = None,
        device: str = "cpu",
    ) -> None:
        if data.fine is None or data.coarse is None:
            raise DataError("training needs labelled images")
        if int(data.fine.max()) >= len(hierarchy.fine):
            raise DataError(
                f"label {int(data.fine.max())} is outside hierarchy {hierarchy.name!r}, which has {len(hierarchy.fine)}"
            )
        if config.teacher is not None and teacher is None:
            raise DataError(f"configuration {config.name!r} has a teacher, but no probabilities of one were given")
        split = hold_out(data.fine, config.held_out_per_class)
        membership = torch.zeros(len(hierarchy.fine), len(hierarchy.coarse))
        membership[torch.arange(len(hierarchy.fine)), torch.tensor(hierarchy.parent)] = 1
        self.hierarchy = hierarchy
        self.device = torch.device(device)
        self.train_images = len(split.train)
        self.held_out = data.take(split.held_out)
        self.sha256 = data.digest()
        self.side = data.images.shape[1]
        self.batches = BatchSource(data, split.train, config, self.device)
        self.labels = Labels(
            fine=torch.from_numpy(data.fine).to(self.device),
            coarse=torch.from_numpy(data.coarse).to(self.device),
            membership=membership.to(self.device),
            teacher=None if teacher is None else teacher.to(self.device),
        )
