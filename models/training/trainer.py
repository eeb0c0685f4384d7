"""The one training loop: steps and epochs, averaged weights, held-out accuracy, checkpoints.

A run lives in a folder. A run that is started again on the same folder continues from the last checkpoint and ends with
the same weights as an unbroken run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from models.session import softmax
from models.training.checkpoint import CHECKPOINT, Checkpoint, EpochRow, read_checkpoint, save_checkpoint
from models.training.config import TrainConfig
from models.training.data import TrainingData
from tierkit.errors import InvalidInput, WeightsError
from tierkit.tensors import Array

__all__ = ["Learner", "Trainer", "TrainerProgress", "resume"]


class Learner(Protocol):
    """Interface of the training loop to a learner: a served network, or an encoder with the network behind it."""

    data: TrainingData
    network: nn.Module
    """Network whose weights are averaged."""

    @property
    def config(self) -> TrainConfig: ...

    def rate(self, step: int) -> float:
        """Learning rate of a step."""

    def learn(self, step: int) -> float:
        """Do a step and return its loss."""

    def held_out_logits(self, averaged: dict[str, Tensor], step: int) -> Array | None:
        """Logits of averaged weights for the held-out images, `[n, classes]`; None if there are none after this
        step.
        """

    def finish_epoch(self, steps: int) -> dict[str, float]:
        """Values that this learner adds to the row of an epoch of `steps` steps."""

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Weights and optimiser state to store in a checkpoint."""

    def restore(self, weights: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Undo `state`. Raises WeightsError for weights that do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgress:
    """Values that a display needs after each step."""

    step: int
    steps: int
    seconds_left: float
    row: EpochRow | None
    """The finished epoch, after its last step."""
    saved: bool
    """True if a checkpoint was written after this step."""


class Trainer:
    """A run from its first step; see `resume`.

    Args:
        checkpoint_every_s: seconds between checkpoints; each call of `run` ends with one.
    """

    def __init__(self, learner: Learner, folder: Path, *, checkpoint_every_s: float = 120.0) -> None:
        self.learner = learner
        self.averaged = {name: value.clone() for name, value in learner.network.state_dict().items()}
        self.steps_per_epoch = learner.data.batches.steps_per_epoch
        self.steps = learner.config.all_epochs * self.steps_per_epoch
        self.step = 0
        self.rows: list[EpochRow] = []
        self.seconds = 0.0
        self._loss_sum = self._epoch_seconds = 0.0
        self.folder = folder
        self._checkpoint_every_s = checkpoint_every_s

    def run(
        self,
        report: Callable[[TrainerProgress], None] = lambda _: None,
        *,
        last: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Continue training to the end or until `stop()` is true after a step. Return True if the run is complete.

        Args:
            last: number of steps of the run, including earlier calls, after which to stop.

        Raises:
            SetupError: a checkpoint could not be written; the previous one is whole.
            InvalidInput: the loss is not a finite number any more.
        """
        saved_at = begun = time.monotonic()
        first = self.step
        last = self.steps if last is None else min(last, self.steps)
        while self.step < last:
            started = time.monotonic()
            loss = self.learner.learn(self.step)
            if not math.isfinite(loss):
                raise InvalidInput(
                    f"{self.learner.config.name} diverges, the loss of step {self.step + 1:,} is {loss}: remove "
                    f"{self.folder}, and train afresh with a lower peak_rate"
                )
            self._loss_sum += loss
            self._average()
            self.step += 1
            spent = time.monotonic() - started
            self._epoch_seconds += spent
            self.seconds += spent
            row = self._finish_epoch() if self.step % self.steps_per_epoch == 0 else None
            done = self.step == last or stop()
            saved = done or time.monotonic() - saved_at > self._checkpoint_every_s
            if saved:
                self._save()
                saved_at = time.monotonic()
            left = (time.monotonic() - begun) / (self.step - first) * (self.steps - self.step)
            report(TrainerProgress(step=self.step, steps=self.steps, seconds_left=left, row=row, saved=saved))
            if done:
                break
        return self.step == self.steps

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of this run. Raises WeightsError for weights or a state that do not fit."""
        where = self.folder / CHECKPOINT
        if not 0 <= checkpoint.step <= self.steps:
            raise WeightsError(f"{where} is damaged: it says {checkpoint.step:,} of {self.steps:,} steps; remove it")
        try:
            self.learner.restore(checkpoint.weights, checkpoint.optimizer)
        except (KeyError, ValueError) as error:
            raise WeightsError(
                f"{where} has no state to continue from: it is from a run on many machines, or damaged; name another "
                "folder of runs"
            ) from error
        for name, value in checkpoint.averaged.items():
            self.averaged[name].copy_(value)
        self.step, self.seconds, self.rows = checkpoint.step, checkpoint.seconds, list(checkpoint.epochs)
        self._loss_sum, self._epoch_seconds = checkpoint.loss_sum, checkpoint.epoch_seconds

    def _average(self) -> None:
        # The decay grows with the step, so that the random first weights are forgotten early.
        most = self.learner.config.ema_decay
        decay = min(most, (1 + self.step) / (10 + self.step)) if most else 0.0
        present = self.learner.network.state_dict()
        floats = [name for name, value in present.items() if value.is_floating_point()]
        torch._foreach_lerp_([self.averaged[name] for name in floats], [present[name] for name in floats], 1 - decay)
        for name in present.keys() - set(floats):
            self.averaged[name].copy_(present[name])

    def _finish_epoch(self) -> EpochRow:
        coarse, fine = self._held_out_accuracy()
        row = EpochRow(
            epoch=self.step // self.steps_per_epoch,
            loss=self._loss_sum / self.steps_per_epoch,
            held_out_coarse=coarse,
            held_out_fine=fine,
            rate=self.learner.rate(self.step - 1),
            seconds=self._epoch_seconds,
            **self.learner.finish_epoch(self.steps_per_epoch),  # type: ignore[typeddict-item]
        )
        self.rows.append(row)
        self._loss_sum = self._epoch_seconds = 0.0
        return row

    def _held_out_accuracy(self) -> tuple[float | None, float | None]:
        logits = self.learner.held_out_logits(self.averaged, self.step - 1)
        if logits is None:
            return None, None
        held_out, fine = self.learner.data.held_out, None
        if self.learner.config.target == "fine":
            fine = float(np.mean(logits.argmax(1) == held_out.fine))
            logits = self.learner.data.hierarchy.coarse_probabilities(softmax(logits))
        return float(np.mean(logits.argmax(1) == held_out.coarse)), fine

    def _save(self) -> None:
        data = self.learner.data
        weights, optimizer = self.learner.state()
        save_checkpoint(
            self.folder,
            Checkpoint(
                step=self.step,
                config=self.learner.config.model_dump(mode="json"),
                hierarchy=data.hierarchy.content(),
                data_sha256=data.sha256,
                statistics=asdict(data.batches.statistics),
                weights=weights,
                averaged=self.averaged,
                optimizer=optimizer,
                epochs=self.rows,
                loss_sum=self._loss_sum,
                epoch_seconds=self._epoch_seconds,
                seconds=self.seconds,
            ),
        )


def resume(learner: Learner, folder: Path, *, checkpoint_every_s: float = 120.0) -> Trainer:
    """The run of a folder, from its last checkpoint, or from its first step where there is none.

    Raises:
        WeightsError: the folder holds a run with another configuration, on other images or for another hierarchy; or
            its checkpoint is damaged.
    """
    trainer = Trainer(learner, folder, checkpoint_every_s=checkpoint_every_s)
    checkpoint = read_checkpoint(folder, str(learner.data.device))
    if checkpoint is None:
        return trainer
    changed = _changed(checkpoint.config, learner.config)
    for same, other in (
        (not changed, f"with another configuration (other: {', '.join(changed)})"),
        (checkpoint.trained_for == learner.data.hierarchy, "for another hierarchy"),
        (checkpoint.data_sha256 == learner.data.sha256, "on other training images"),
    ):
        if not same:
            raise WeightsError(
                f"{folder / CHECKPOINT} belongs to a run {other}; use another folder of runs, or remove it"
            )
    trainer.restore(checkpoint)
    return trainer


def _changed(stored: dict[str, Any], config: TrainConfig) -> list[str]:
    """The fields of a configuration whose values differ from the stored ones."""
    try:
        # Fields that came after the run was begun have their defaults.
        before = type(config).model_validate(stored)
    except ValidationError as error:
        return sorted({str(each["loc"][0]) for each in error.errors()})
    return [name for name in type(config).model_fields if getattr(before, name) != getattr(config, name)]
