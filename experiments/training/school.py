"""The runs of the table of a teacher. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from encryption.training.upper import answers_of_networks
from experiments.training.cases import LINK_BYTES_PER_S, LINK_DELAY_S
from experiments.training.ranks import RankMachines, simulate_ranks
from experiments.training.simulation import Machines, run_simulation
from experiments.training.teaching import OF_IMAGES, STUDENT, TEACHER, Lesson
from models.data import ImageSet
from models.dataset import CIFAR100, Dataset
from models.hierarchy import Hierarchy
from models.training.answers import ask
from models.training.config import TrainConfig, find_config
from models.training.data import TrainingData
from tierkit.errors import DataError
from training.strategies.config import ExchangeConfig
from training.strategies.finding import HOSTED
from training.virtual import Link

__all__ = ["Classroom", "School", "read_classroom"]

_EPOCHS, _HELD_OUT = 6, 600
"""Passes of a run. Each class has one held-out image for every 600 images, 10 of 6,000."""
_FEW: dict[str, Any] = {"batch_size": 64, "peak_rate": 0.1}
"""Many steps in few passes, at a rate for these batches."""
_ROUND = HOSTED["fedavg"].model_copy(update={"period": 10})
"""A run has few steps, so rounds are short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classroom:
    """Images to learn from, and test images for the end."""

    training: ImageSet
    test: ImageSet
    hierarchy: Hierarchy


def read_classroom(data: Path | None, images: int) -> Classroom:
    """The first training images of CIFAR-100, and its test images.

    Raises:
        DataError: CIFAR-100 is missing.
    """
    dataset = Dataset.open(CIFAR100, data)
    training = dataset.read("train")
    chosen = training.take(np.arange(min(images // OF_IMAGES, len(training))))
    return Classroom(training=chosen, test=dataset.read("test"), hierarchy=dataset.hierarchy)


class School:
    """The end tier's network, and the answers of the edge tier's to its training images.

    Args:
        changes: more changes of the network's configuration.

    Raises:
        DataError: there are too few images.
    """

    def __init__(self, room: Classroom, changes: dict[str, Any] | None = None) -> None:
        torch.set_num_threads(1)  # of a machine with one core
        held_out = max(1, len(room.training) // _HELD_OUT)
        # A step on smaller images takes less, and virtual time has one number for all steps.
        plain = {"epochs": _EPOCHS, "held_out_per_class": held_out, "early_side": None, **_FEW}
        self._config = find_config(STUDENT, None).model_copy(update={**plain, **(changes or {})})
        if len(room.training) < 2 * held_out * len(room.hierarchy.fine):
            raise DataError(f"{len(room.training):,} images are too few for a lesson: give more --images")
        self._room = room
        _, teachers = answers_of_networks((TEACHER,), room.training, None)
        self._answers = torch.from_numpy(ask(teachers, room.training, room.hierarchy))
        self._step_s: float | None = None
        """A step of a machine. The first lesson measures it; the others take as long."""

    def give(self, lesson: Lesson, seed: int, watch: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Run a line and return the results."""
        taught = {} if lesson.taught else {"teacher": None}
        config = self._config.model_copy(update={"seed": seed, **taught})
        answers = self._answers if lesson.taught else None
        data = TrainingData(config, self._room.training, self._room.hierarchy, teacher=answers)
        found = self._simulated(config, lesson.workers, data, watch)
        self._step_s = self._step_s or found["step_s"]
        return {
            **found,
            "lesson": lesson.name,
            "taught": lesson.taught,
            "teacher": TEACHER,
            "steps": config.epochs * data.batches.steps_per_epoch,
            "train_images": data.train_images,
            "answers_bytes": 0 if answers is None else answers.numel() * answers.element_size(),
        }

    def _simulated(
        self, config: TrainConfig, workers: int, data: TrainingData, watch: Callable[[], None]
    ) -> dict[str, Any]:
        link = Link(delay_s=LINK_DELAY_S, bytes_per_s=LINK_BYTES_PER_S)

        def watched(done: int, steps: int, now: float) -> None:
            watch()

        images = data, self._room.test
        if workers == 1:
            alone = RankMachines(ranks=1, step_s=self._step_s, link=link)
            return simulate_ranks(config, ExchangeConfig(rule="allreduce"), images, alone, watched)
        several = Machines(workers=workers, step_s=self._step_s, link=link)
        return run_simulation(config, _ROUND, images, several, watched)
