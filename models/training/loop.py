"""The training loop: one for every network, resumable after a kill at any time.

A run lives in a folder: `checkpoint.pt` (replaced atomically) and `log.txt` (one line per epoch). Started again on the
same folder it goes on from the last checkpoint and ends with the same weights as an unbroken run would have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.data import ImageSet
from models.held_out import hold_out
from models.hierarchy import Hierarchy
from models.training.batches import BatchSource, Statistics, normalise
from models.training.checkpoint import Checkpoint, EpochRow, load_checkpoint, save_checkpoint
from models.training.config import TrainConfig
from models.training.gemm_conv import use_matrix_products
from models.training.loss import Labels, training_loss
from models.training.networks import build_network
from models.training.schedule import learning_rate
from tierkit.errors import Conflict, DataError, WeightsError

__all__ = [
    "Progress",
    "Trainer",
    "autocast",
    "averaged_network",
    "check_hierarchy",
    "parameter_groups",
    "predict",
    "served_weights",
]

_EVALUATION_BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a display needs after each step."""

    step: int
    steps: int
    loss: float
    seconds_left: float
    row: EpochRow | None
    """The finished epoch, after its last step."""


class Trainer:
    """Trains one network on one data set.

    Args:
        config: the run.
        data: training images with labels; part of them is held out.
        hierarchy: class counts and superclasses of `data`.
        folder: the run folder.
        initial: weights of the served network to start from, as `weights()` gives them; random ones unless given.
        teacher: log-probabilities `[N, 2, F]` for each image and its mirror image, from `models.training.teacher`.
        device: "cpu", "cuda", ...
        checkpoint_every_s: seconds between checkpoints within an epoch; each epoch ends with one.

    Raises:
        DataError: labels are missing or disagree with the hierarchy.
        Conflict: the folder holds a run with another configuration, on other images or for another hierarchy.
        WeightsError: the folder's checkpoint is damaged.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: ImageSet,
        hierarchy: Hierarchy,
        folder: Path,
        *,
        initial: dict[str, Tensor] | None = None,
        teacher: Tensor | None = None,
        device: str = "cpu",
        checkpoint_every_s: float = 300.0,
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
        self._device = torch.device(device)
        self._folder = folder
        self._checkpoint_every_s = checkpoint_every_s
        split = hold_out(data.fine, config.held_out_per_class)
        self._held_out = data.take(split.held_out)
        self.train_images = len(split.train)
        self._source = BatchSource(data, split.train, config, self._device)
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
        self.steps = config.epochs * self._source.steps_per_epoch
        self.rows: list[EpochRow] = []
        self.seconds = 0.0
        self.step = 0
        self._loss_sum = 0.0
        self._epoch_seconds = 0.0
        torch.manual_seed(config.seed)
        self._student = _Student(config, hierarchy).to(self._device, memory_format=torch.channels_last)
        if initial is not None:
            _fill(self._student.network, initial, f"the weights that {config.name!r} is to start from")
        self._averaged = {name: value.clone() for name, value in self._student.state_dict().items()}
        self._optimizer = torch.optim.SGD(
            parameter_groups(self._student, config.weight_decay),
            lr=config.peak_rate,
            momentum=config.momentum,
            nesterov=config.momentum > 0,
        )
        if self._device.type == "cpu" and config.precision == "bf16":
            use_matrix_products(self._student)
        self._restore()

    def run(
        self,
        report: Callable[[Progress], None] = lambda _: None,
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
        saved_at = time.monotonic()
        first, begun = self.step, time.monotonic()
        last = self.steps if last is None else min(last, self.steps)
        while self.step < last:
            started = time.monotonic()
            loss = self._advance()
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
            report(
                Progress(
                    step=self.step,
                    steps=self.steps,
                    loss=loss,
                    seconds_left=pace * (self.steps - self.step),
                    row=row,
                )
            )
            if stop() or self.step == last:
                if row is None:
                    self._save()
                break
        return self.step == self.steps

    def weights(self) -> dict[str, Tensor]:
        """The averaged weights of the served network, by `state_dict` name."""
        return _served(self._averaged)

    @property
    def statistics(self) -> Statistics:
        """Channel statistics of the training images, as the network expects its input normalised."""
        return self._source.statistics

    def _advance(self) -> float:
        batch = self._source.batch(self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, self.config)
        self._student.train()
        with autocast(self.config, self._device):
            output, auxiliary = self._student(batch.images)
        loss = training_loss(output, auxiliary, batch, self._labels, self.config)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._average()
        return float(loss.detach())

    def _average(self) -> None:
        # The decay grows with the step, so that the random first weights are forgotten early.
        decay = min(self.config.ema_decay, (1 + self.step) / (10 + self.step)) if self.config.ema_decay else 0.0
        present = self._student.state_dict()
        floats = [name for name, value in present.items() if value.is_floating_point()]
        torch._foreach_lerp_([self._averaged[name] for name in floats], [present[name] for name in floats], 1 - decay)
        for name in present.keys() - set(floats):
            self._averaged[name].copy_(present[name])

    def _finish_epoch(self) -> EpochRow:
        network = _load(self.config, self._hierarchy, self.weights()).to(
            self._device, memory_format=torch.channels_last
        )
        logits = predict(network, self._held_out.images, self.statistics, self.config, self._device)
        assert self._held_out.fine is not None
        assert self._held_out.coarse is not None
        fine_accuracy = None
        if self.config.target == "fine":
            fine_accuracy = float(np.mean(logits.argmax(1) == self._held_out.fine))
            probabilities = np.exp(logits - logits.max(1, keepdims=True))
            logits = self._hierarchy.coarse_probabilities(probabilities / probabilities.sum(1, keepdims=True))
        row = EpochRow(
            epoch=self.step // self._source.steps_per_epoch,
            loss=self._loss_sum / self._source.steps_per_epoch,
            held_out_coarse=float(np.mean(logits.argmax(1) == self._held_out.coarse)),
            held_out_fine=fine_accuracy,
            rate=learning_rate(self.step - 1, self.steps, self.config),
            seconds=self._epoch_seconds,
        )
        self.rows.append(row)
        self._loss_sum, self._epoch_seconds = 0.0, 0.0
        return row

    def _save(self) -> None:
        save_checkpoint(
            self._folder / "checkpoint.pt",
            Checkpoint(
                step=self.step,
                config=self.config.model_dump(mode="json"),
                hierarchy=self._hierarchy.content(),
                data_sha256=self._data_sha256,
                statistics=asdict(self.statistics),
                weights=self._student.state_dict(),
                averaged=self._averaged,
                optimizer=self._optimizer.state_dict(),
                epochs=[asdict(row) for row in self.rows],
                loss_sum=self._loss_sum,
                epoch_seconds=self._epoch_seconds,
                seconds=self.seconds,
            ),
        )

    def _restore(self) -> None:
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
        _fill(self._student, checkpoint.weights, str(path))
        for name, value in checkpoint.averaged.items():
            self._averaged[name].copy_(value)
        self._optimizer.load_state_dict(checkpoint.optimizer)
        self.step, self.seconds = checkpoint.step, checkpoint.seconds
        self._loss_sum, self._epoch_seconds = checkpoint.loss_sum, checkpoint.epoch_seconds
        self.rows = [EpochRow(**row) for row in checkpoint.epochs]


class _Student(nn.Module):
    """The served network, with the second classifier that a coarse one has during training."""

    def __init__(self, config: TrainConfig, hierarchy: Hierarchy) -> None:
        super().__init__()
        classes = len(hierarchy.fine if config.target == "fine" else hierarchy.coarse)
        self.network: Any = build_network(config.network.kind, classes, config.network.options)
        self.auxiliary = (
            nn.Linear(self.network.feature_width, len(hierarchy.fine))
            if config.target == "coarse" and config.auxiliary
            else None
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        features = self.network.embed(images)
        return self.network.classifier(features), None if self.auxiliary is None else self.auxiliary(features)


def averaged_network(checkpoint: Checkpoint, hierarchy: Hierarchy) -> tuple[nn.Module, TrainConfig, Statistics]:
    """The network with a checkpoint's averaged weights in evaluation mode, its configuration and input statistics.

    Raises:
        WeightsError: it was trained for another hierarchy.
    """
    check_hierarchy(checkpoint, hierarchy)
    config = TrainConfig.model_validate(checkpoint.config)
    return _load(config, hierarchy, served_weights(checkpoint)), config, Statistics(**checkpoint.statistics)


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


def _hierarchy_of(checkpoint: Checkpoint) -> Hierarchy:
    return Hierarchy.parse(checkpoint.hierarchy, source="the checkpoint")


def _fill(network: nn.Module, weights: dict[str, Tensor], what: str) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:  # its text lists every tensor
        raise WeightsError(
            f"{what} does not fit the network that its configuration describes; train it afresh"
        ) from error


def served_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The averaged weights of the served network, without the classifier that it has during training only."""
    return _served(checkpoint.averaged)


def predict(
    network: nn.Module, images: np.ndarray, known: Statistics, config: TrainConfig, device: torch.device
) -> np.ndarray:
    """Logits, FP32 `[n, classes]`, of UINT8 images `[n, h, w, 3]`, in the precision of `config`.

    On a CPU in bf16 the convolutions of `network` change their form (`use_matrix_products`).
    """
    network.eval()
    if device.type == "cpu" and config.precision == "bf16":
        use_matrix_products(network)
    with torch.inference_mode(), autocast(config, device):
        parts = [
            network(normalise(torch.from_numpy(chunk).to(device), known)).float().cpu() for chunk in _chunks(images)
        ]
    return torch.cat(parts).numpy()


def _chunks(images: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(images), _EVALUATION_BATCH):
        yield images[start : start + _EVALUATION_BATCH]


def _served(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "network."
    return {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}


def _load(config: TrainConfig, hierarchy: Hierarchy, weights: dict[str, Tensor]) -> nn.Module:
    classes = len(hierarchy.fine if config.target == "fine" else hierarchy.coarse)
    network = build_network(config.network.kind, classes, config.network.options)
    _fill(network, weights, f"the checkpoint of {config.name!r}")
    return network.eval()


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16" else nullcontext()


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    # Decay on biases and normalisation only distorts scale (arXiv:1812.01187, section 3.1).
    matrices = [value for value in network.parameters() if value.ndim > 1]
    vectors = [value for value in network.parameters() if value.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
