"""What every training run does, whatever it trains: steps and epochs, averaged weights, held-out accuracy, checkpoints.

A run lives in a folder: `checkpoint.pt` (replaced atomically) and `log.txt` (one line per epoch). Started again on the
same folder it goes on from the last checkpoint and ends with the same weights as an unbroken run would have.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from models.data import ImageSet
from models.held_out import hold_out
from models.hierarchy import Hierarchy
from models.training.batches import BatchSource, Statistics
from models.training.checkpoint import Checkpoint, EpochRow, load_checkpoint, save_checkpoint
from models.training.config import TrainConfig
from models.training.loss import Labels
from models.training.schedule import learning_rate
from tierkit.errors import Conflict, DataError, WeightsError
from tierkit.inference.model import Array

__all__ = ["Driver", "Progress", "autocast", "check_hierarchy", "load_weights"]

Config = TypeVar("Config", bound=TrainConfig)
Row = TypeVar("Row", bound=EpochRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Generic[Row]):
    """What a display needs after each step."""

    step: int
    steps: int
    loss: float
    seconds_left: float
    row: Row | None
    """The finished epoch, after its last step."""


class Driver(ABC, Generic[Config, Row]):
    """A run on one data set. A subclass builds what it trains in its `__init__`: first its networks, then `_begin`, and
    `_restore` at the end.

    Args:
        config: the run.
        data: training images with labels; part of them is held out.
        hierarchy: class counts and superclasses of `data`.
        folder: the run folder.
        row: what an epoch is reported as.
        epochs: of the run.
        teacher: log-probabilities `[N, 2, F]` for each image and its mirror image, where `config` has a teacher.
        device: "cpu", "cuda", ...
        checkpoint_every_s: seconds between checkpoints within an epoch; each epoch ends with one.

    Raises:
        DataError: labels or a teacher's answers are missing, or labels disagree with the hierarchy.
    """

    def __init__(
        self,
        config: Config,
        data: ImageSet,
        hierarchy: Hierarchy,
        folder: Path,
        *,
        row: type[Row],
        epochs: int,
        teacher: Tensor | None,
        device: str,
        checkpoint_every_s: float,
    ) -> None:
        if data.fine is None or data.coarse is None:
            raise DataError("training needs labelled images")
        if int(data.fine.max()) >= len(hierarchy.fine):
            raise DataError(
                f"label {int(data.fine.max())} is outside hierarchy {hierarchy.name!r}, which has {len(hierarchy.fine)}"
            )
        if config.teacher is not None and teacher is None:
            raise DataError(f"configuration {config.name!r} has a teacher, but no probabilities of one were given")
        self.config = config
        self._row = row
        self._device = torch.device(device)
        self._folder = folder
        self._checkpoint_every_s = checkpoint_every_s
        split = hold_out(data.fine, config.held_out_per_class)
        self._held_out = data.take(split.held_out)
        self.train_images = len(split.train)
        # The share of early epochs, with small images, is one of all epochs.
        whole = config.model_copy(update={"epochs": epochs})
        self._source = BatchSource(data, split.train, whole, self._device)
        self._hierarchy = hierarchy
        self._data_sha256 = data.digest()
        membership = torch.zeros(len(hierarchy.fine), len(hierarchy.coarse))
        membership[torch.arange(len(hierarchy.fine)), torch.tensor(hierarchy.parent)] = 1
        self._labels = Labels(
            fine=torch.from_numpy(data.fine).to(self._device),
            coarse=torch.from_numpy(data.coarse).to(self._device),
            membership=membership.to(self._device),
            teacher=None if teacher is None else teacher.to(self._device),
        )
        self.epochs = epochs
        self.steps = epochs * self._source.steps_per_epoch
        self.rows: list[Row] = []
        self.seconds = 0.0
        self.step = 0
        self._loss_sum = self._epoch_seconds = 0.0
        torch.manual_seed(config.seed)

    def run(
        self,
        report: Callable[[Progress[Row]], None] = lambda _: None,
        *,
        last: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train on, to the end or until `stop()` holds after a step; True when the run is complete.

        Args:
            last: stop also after this many steps of the run, those of earlier calls included.

        Raises:
            SetupError: a checkpoint could not be written; the previous one is whole.
        """
        saved_at = begun = time.monotonic()
        first = self.step
        last = self.steps if last is None else min(last, self.steps)
        while self.step < last:
            started = time.monotonic()
            loss = self._advance()
            self._average()
            self._loss_sum += loss
            self.step += 1
            row = None
            spent = time.monotonic() - started
            self._epoch_seconds += spent
            self.seconds += spent
            if self.step % self._source.steps_per_epoch == 0:
                row = self._finish_epoch()
            if row is not None or time.monotonic() - saved_at > self._checkpoint_every_s:
                self._save()
                saved_at = time.monotonic()
            pace = (time.monotonic() - begun) / (self.step - first)
            left = pace * (self.steps - self.step)
            report(Progress(step=self.step, steps=self.steps, loss=loss, seconds_left=left, row=row))
            if stop() or self.step == last:
                if row is None:
                    self._save()
                break
        return self.step == self.steps

    def weights(self) -> dict[str, Tensor]:
        """The averaged weights, by `state_dict` name."""
        return self._averaged

    @property
    def steps_per_epoch(self) -> int:
        return self._source.steps_per_epoch

    @property
    def held_out_images(self) -> int:
        return len(self._held_out)

    @property
    def statistics(self) -> Statistics:
        """Channel statistics of the training images, as the network expects its input normalised."""
        return self._source.statistics

    # --- what is trained ------------------------------------------------------------------------------------------

    @abstractmethod
    def _advance(self) -> float:
        """Do step `self.step`; its loss."""

    @abstractmethod
    def _held_out_logits(self) -> Array | None:
        """Of the averaged weights for the held-out images, `[n, classes]`; None while they have no answers to give."""

    @abstractmethod
    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Weights and state of the optimisers, for a checkpoint."""

    @abstractmethod
    def _take_up(self, checkpoint: Checkpoint) -> None:
        """Undo `_state`. Raises WeightsError for weights that do not fit."""

    def _rate(self, step: int) -> float:
        return learning_rate(step, self.steps, self.config)

    def _more_of_epoch(self) -> dict[str, Any]:
        """What a row has beside the fields of `EpochRow`; for the epoch that has just ended."""
        return {}

    def _begin(self, network: nn.Module) -> None:
        """Take a network, with its first weights, to be trained by `_optimizer` and averaged."""
        self._network = network
        self._averaged = {name: value.clone() for name, value in network.state_dict().items()}
        self._optimizer = torch.optim.SGD(
            _parameter_groups(network, self.config.weight_decay),
            lr=self.config.peak_rate,
            momentum=self.config.momentum,
            nesterov=self.config.momentum > 0,
        )

    def _set_rate(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(self.step)

    def _average(self) -> None:
        # The decay grows with the step, so that the random first weights are forgotten early.
        decay = min(self.config.ema_decay, (1 + self.step) / (10 + self.step)) if self.config.ema_decay else 0.0
        present = self._network.state_dict()
        floats = [name for name, value in present.items() if value.is_floating_point()]
        torch._foreach_lerp_([self._averaged[name] for name in floats], [present[name] for name in floats], 1 - decay)
        for name in present.keys() - set(floats):
            self._averaged[name].copy_(present[name])

    # --- epochs and checkpoints -----------------------------------------------------------------------------------

    def _finish_epoch(self) -> Row:
        steps = self._source.steps_per_epoch
        coarse, fine = self._held_out_accuracy()
        row = self._row(
            epoch=self.step // steps,
            loss=self._loss_sum / steps,
            held_out_coarse=coarse,
            held_out_fine=fine,
            rate=self._rate(self.step - 1),
            seconds=self._epoch_seconds,
            **self._more_of_epoch(),
        )
        self.rows.append(row)
        self._loss_sum = self._epoch_seconds = 0.0
        return row

    def _held_out_accuracy(self) -> tuple[float | None, float | None]:
        logits = self._held_out_logits()
        if logits is None:
            return None, None
        assert self._held_out.fine is not None
        assert self._held_out.coarse is not None
        fine = None
        if self.config.target == "fine":
            fine = float(np.mean(logits.argmax(1) == self._held_out.fine))
            probabilities = np.exp(logits - logits.max(1, keepdims=True))
            logits = self._hierarchy.coarse_probabilities(probabilities / probabilities.sum(1, keepdims=True))
        return float(np.mean(logits.argmax(1) == self._held_out.coarse)), fine

    def _save(self) -> None:
        weights, optimizer = self._state()
        save_checkpoint(
            self._folder / "checkpoint.pt",
            Checkpoint(
                step=self.step,
                config=self.config.model_dump(mode="json"),
                hierarchy=self._hierarchy.content(),
                data_sha256=self._data_sha256,
                statistics=asdict(self.statistics),
                weights=weights,
                averaged=self._averaged,
                optimizer=optimizer,
                epochs=[asdict(row) for row in self.rows],
                loss_sum=self._loss_sum,
                epoch_seconds=self._epoch_seconds,
                seconds=self.seconds,
            ),
        )

    def _restore(self) -> None:
        """Go on from the folder's checkpoint, if there is one.

        Raises:
            Conflict: it belongs to a run with another configuration, on other images or for another hierarchy.
            WeightsError: it is damaged.
        """
        path = self._folder / "checkpoint.pt"
        checkpoint = load_checkpoint(path, str(self._device))
        if checkpoint is None:
            return
        if checkpoint.config != self.config.model_dump(mode="json"):
            other = "with another configuration"
        elif _hierarchy_of(checkpoint) != self._hierarchy:
            other = "for another hierarchy"
        elif checkpoint.data_sha256 != self._data_sha256:
            other = "on other training images"
        else:
            other = None
        if other is not None:
            raise Conflict(f"{path} belongs to a run {other}; use another folder of runs, or remove it")
        self._take_up(checkpoint)
        for name, value in checkpoint.averaged.items():
            self._averaged[name].copy_(value)
        self.step, self.seconds = checkpoint.step, checkpoint.seconds
        self._loss_sum, self._epoch_seconds = checkpoint.loss_sum, checkpoint.epoch_seconds
        self.rows = [self._row(**row) for row in checkpoint.epochs]


def load_weights(network: nn.Module, weights: dict[str, Tensor], what: str) -> None:
    """Fill a network. Raises WeightsError, with `what` in it, for weights that do not fit."""
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:  # its text lists every tensor
        raise WeightsError(
            f"{what} does not fit the network that its configuration describes; train it afresh"
        ) from error


def check_hierarchy(checkpoint: Checkpoint, hierarchy: Hierarchy) -> None:
    """Compare what a checkpoint was trained for with a data set's hierarchy: names, counts and order.

    Raises:
        WeightsError: they differ.
    """
    stored = _hierarchy_of(checkpoint)
    if stored != hierarchy:
        ours, theirs = (
            f"{each.name!r} ({len(each.fine)} classes in {len(each.coarse)} superclasses)"
            for each in (stored, hierarchy)
        )
        raise WeightsError(
            f"the run {checkpoint.config['name']!r} was trained for hierarchy {ours}, the data set has {theirs}; "
            "names and order of the classes must agree"
        )


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """In which forward passes are computed: bf16 where the configuration says so."""
    return torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16" else nullcontext()


def _hierarchy_of(checkpoint: Checkpoint) -> Hierarchy:
    return Hierarchy.parse(checkpoint.hierarchy, source="the checkpoint")


def _parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    # Decay on biases and normalisation only distorts scale (arXiv:1812.01187, section 3.1).
    matrices = [value for value in network.parameters() if value.ndim > 1]
    vectors = [value for value in network.parameters() if value.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
