"""The training loop of a learned encoder; resumable after a kill at any time, as `models.training.loop` is.

Each step the adversary learns to reconstruct the images from what was sent, and head and tail learn to answer while
the reconstruction gets worse.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encryption.training.config import BottleneckConfig
from encryption.training.networks import Decoder, Head, Tail, front, transmit
from encryption.training.ssim import ssim
from models.data import ImageSet
from models.held_out import hold_out
from models.hierarchy import Hierarchy
from models.training.batches import Batch, BatchSource, Statistics, normalise
from models.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from models.training.gemm_conv import use_matrix_products
from models.training.loop import autocast, parameter_groups
from models.training.loss import Labels, training_loss
from models.training.schedule import learning_rate
from tierkit.errors import Conflict, DataError

__all__ = ["EncoderRow", "EncoderTrainer", "Progress", "answer", "build_parts"]

_EVALUATION_BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRow:
    """One line of the log."""

    epoch: int
    """Counted from 1; those of the hint come first."""
    loss: float
    """Mean of the labels' and the teacher's loss, or of the hint's; without the adversary's part."""
    adversary_ssim: float
    """Mean SSIM of the adversary's reconstructions during the epoch."""
    held_out_coarse: float | None
    held_out_fine: float | None
    """Accuracies of the averaged weights on the held-out training images; None after an epoch of the hint."""
    rate: float
    seconds: float
    """Wall time of the epoch's steps in this process; pauses of the process included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a display needs after each step."""

    step: int
    steps: int
    loss: float
    adversary_ssim: float
    seconds_left: float
    row: EncoderRow | None
    """The finished epoch, after its last step."""


def build_parts(config: BottleneckConfig, upper: nn.Module) -> nn.ModuleDict:
    """Head and tail, freshly initialised but for what they take from the upper network."""
    return nn.ModuleDict({"head": Head(upper, config.encoder), "tail": Tail(upper, config.encoder)})


class EncoderTrainer:
    """Trains head, tail and adversary on one data set.

    Args:
        config: the run.
        data: training images with labels; part of them is held out.
        hierarchy: class counts and superclasses of `data`.
        folder: the run folder.
        upper: the upper network with its first weights; its last blocks become the tail.
        initial: averaged weights of an earlier run's head and tail, in the place of fresh ones. Where the numbers of
            features differ, those that both have are taken over.
        teacher: log-probabilities `[N, 2, F]` for each image and its mirror image, where `config` has a teacher.
        device: "cpu", "cuda", ...
        checkpoint_every_s: seconds between checkpoints within an epoch; each epoch ends with one.

    Raises:
        DataError: labels are missing.
        Conflict: the folder holds a run with another configuration or on other images.
        WeightsError: the folder's checkpoint is damaged.
    """

    def __init__(
        self,
        config: BottleneckConfig,
        data: ImageSet,
        hierarchy: Hierarchy,
        folder: Path,
        *,
        upper: nn.Module,
        initial: dict[str, Tensor] | None = None,
        teacher: Tensor | None = None,
        device: str = "cpu",
        checkpoint_every_s: float = 300.0,
    ) -> None:
        if data.fine is None or data.coarse is None:
            raise DataError("training needs labelled images")
        self.config = config
        self._device = torch.device(device)
        self._folder = folder
        self._checkpoint_every_s = checkpoint_every_s
        split = hold_out(data.fine, config.held_out_per_class)
        self._held_out = data.take(split.held_out)
        self.train_images = len(split.train)
        # The share of early epochs, with small images, is one of all epochs.
        whole = config.model_copy(update={"epochs": config.hint_epochs + config.epochs})
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
        self._hint_steps = config.hint_epochs * self._source.steps_per_epoch
        self.steps = self._hint_steps + config.epochs * self._source.steps_per_epoch
        self.rows: list[EncoderRow] = []
        self.seconds = 0.0
        self.step = 0
        self._loss_sum = self._ssim_sum = self._epoch_seconds = 0.0
        torch.manual_seed(config.seed)
        place: dict[str, Any] = {"device": self._device, "memory_format": torch.channels_last}
        self._replaced = None
        if config.hint_epochs:
            # What the encoder takes the place of gives the hint.
            self._replaced = front(upper, range(config.encoder.cut)).eval().requires_grad_(False).to(**place)
        self._parts = build_parts(config, upper).to(**place)
        if initial is not None:
            _take_over(self._parts, initial)
        with torch.no_grad():
            side = data.images.shape[1]
            smaller = self._parts["head"].eval()(torch.zeros(1, 3, side, side, device=self._device)).shape[2]
        self._decoder = Decoder(config.encoder.channels, side // smaller, config.adversary.width).to(**place)
        self._averaged = {name: value.clone() for name, value in self._parts.state_dict().items()}
        self._optimizer = torch.optim.SGD(
            parameter_groups(self._parts, config.weight_decay),
            lr=config.peak_rate,
            momentum=config.momentum,
            nesterov=config.momentum > 0,
        )
        self._adversary = torch.optim.AdamW(self._decoder.parameters(), lr=config.adversary.rate)
        if self._device.type == "cpu" and config.precision == "bf16":
            use_matrix_products(self._parts)
            use_matrix_products(self._decoder)
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
        saved_at = begun = time.monotonic()
        first = self.step
        last = self.steps if last is None else min(last, self.steps)
        while self.step < last:
            started = time.monotonic()
            loss, seen = self._advance()
            self._loss_sum += loss
            self._ssim_sum += seen
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
                    adversary_ssim=seen,
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
        """The averaged weights of head and tail, by `state_dict` name."""
        return self._averaged

    @property
    def steps_per_epoch(self) -> int:
        return self._source.steps_per_epoch

    @property
    def statistics(self) -> Statistics:
        """Channel statistics of the training images, as the head expects its input normalised."""
        return self._source.statistics

    def _rate(self, step: int) -> float:
        if step < self._hint_steps:
            return learning_rate(step, self._hint_steps, self.config)
        return learning_rate(step - self._hint_steps, self.steps - self._hint_steps, self.config)

    def _advance(self) -> tuple[float, float]:
        """One step of adversary, head and tail: the loss without the adversary's part, and its SSIM."""
        batch = self._source.batch(self.step)
        # Noise too depends on nothing but seed and step: a resumed run is an unbroken one.
        torch.manual_seed(self.config.seed * 2_654_435_761 + self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(self.step)
        self._parts.train()
        with autocast(self.config, self._device):
            features = self._parts["head"](batch.images)
            sent = transmit(features, self.config.encoder)
            loss = self._hint_loss(batch, sent) if self.step < self._hint_steps else self._task_loss(batch, sent)
        pixels = self._pixels(batch.images)
        similarity = self._train_adversary(features.detach(), pixels)
        total = loss
        if weight := self._adversary_weight():
            self._decoder.requires_grad_(False)
            with autocast(self.config, self._device):
                shown = self._decoder(sent)
            # A decoder that is fooled into the opposite of the image would learn that at once: zero is the aim.
            total = loss + weight * ssim(shown, pixels).clamp_min(0.0).mean()
            self._decoder.requires_grad_(True)
        total.backward()
        nn.utils.clip_grad_norm_(self._parts.parameters(), self.config.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._average()
        return float(loss.detach()), similarity

    def _adversary_weight(self) -> float:
        """None during the hint, then rising: an encoder that hides before it has anything to say learns nothing."""
        rising = self.config.adversary.ramp_epochs * self._source.steps_per_epoch
        done = self.step - self._hint_steps
        return self.config.adversary.weight * min(1.0, max(0.0, done / rising if rising else float(done >= 0)))

    def _task_loss(self, batch: Batch, sent: Tensor) -> Tensor:
        return training_loss(self._parts["tail"](sent), None, batch, self._labels, self.config)

    def _hint_loss(self, batch: Batch, sent: Tensor) -> Tensor:
        assert self._replaced is not None
        with torch.no_grad():
            wanted = self._replaced(batch.images).float()
        return F.mse_loss(self._parts["tail"].restore(sent).float(), wanted) / wanted.var()

    def _pixels(self, images: Tensor) -> Tensor:
        known = self.statistics
        return (images * known.std + known.mean) / 255.0

    def _train_adversary(self, features: Tensor, pixels: Tensor) -> float:
        similarity = 0.0
        self._decoder.train()
        for _ in range(self.config.adversary.steps):
            with autocast(self.config, self._device):
                shown = self._decoder(transmit(features, self.config.encoder))
            alike = ssim(shown, pixels).mean()
            (1 - alike + F.mse_loss(shown, pixels)).backward()
            self._adversary.step()
            self._adversary.zero_grad()
            similarity = float(alike.detach())
        return similarity

    def _average(self) -> None:
        # The decay grows with the step, so that the first weights are forgotten early.
        decay = min(self.config.ema_decay, (1 + self.step) / (10 + self.step)) if self.config.ema_decay else 0.0
        present = self._parts.state_dict()
        floats = [name for name, value in present.items() if value.is_floating_point()]
        torch._foreach_lerp_([self._averaged[name] for name in floats], [present[name] for name in floats], 1 - decay)
        for name in present.keys() - set(floats):
            self._averaged[name].copy_(present[name])

    def _finish_epoch(self) -> EncoderRow:
        steps = self._source.steps_per_epoch
        coarse = fine = None
        if self.step > self._hint_steps:
            coarse, fine = self._held_out_accuracy()
        row = EncoderRow(
            epoch=self.step // steps,
            loss=self._loss_sum / steps,
            adversary_ssim=self._ssim_sum / steps,
            held_out_coarse=coarse,
            held_out_fine=fine,
            rate=self._rate(self.step - 1),
            seconds=self._epoch_seconds,
        )
        self.rows.append(row)
        self._loss_sum = self._ssim_sum = self._epoch_seconds = 0.0
        return row

    def _held_out_accuracy(self) -> tuple[float, float]:
        kept = {name: value.clone() for name, value in self._parts.state_dict().items()}
        self._parts.load_state_dict(self._averaged)
        logits = answer(self._parts, self._held_out.images, self.statistics, self.config, self._device)
        self._parts.load_state_dict(kept)
        probabilities = np.exp(logits - logits.max(1, keepdims=True))
        coarse = self._hierarchy.coarse_probabilities(probabilities / probabilities.sum(1, keepdims=True))
        assert self._held_out.fine is not None
        assert self._held_out.coarse is not None
        return (
            float(np.mean(coarse.argmax(1) == self._held_out.coarse)),
            float(np.mean(logits.argmax(1) == self._held_out.fine)),
        )

    def _save(self) -> None:
        save_checkpoint(
            self._folder / "checkpoint.pt",
            Checkpoint(
                step=self.step,
                config=self.config.model_dump(mode="json"),
                hierarchy=self._hierarchy.content(),
                data_sha256=self._data_sha256,
                statistics=asdict(self.statistics),
                weights={"parts": self._parts.state_dict(), "decoder": self._decoder.state_dict()},
                averaged=self._averaged,
                optimizer={"parts": self._optimizer.state_dict(), "decoder": self._adversary.state_dict()},
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
            raise Conflict(f"{path} belongs to a run with another configuration; use another folder, or remove it")
        if checkpoint.data_sha256 != self._data_sha256 or checkpoint.hierarchy != self._hierarchy.content():
            raise Conflict(f"{path} belongs to a run on other training images; use another folder, or remove it")
        self._parts.load_state_dict(checkpoint.weights["parts"])
        self._decoder.load_state_dict(checkpoint.weights["decoder"])
        for name, value in checkpoint.averaged.items():
            self._averaged[name].copy_(value)
        self._optimizer.load_state_dict(checkpoint.optimizer["parts"])
        self._adversary.load_state_dict(checkpoint.optimizer["decoder"])
        self.step, self.seconds = checkpoint.step, checkpoint.seconds
        self._loss_sum, self._epoch_seconds = checkpoint.loss_sum, checkpoint.epoch_seconds
        self.rows = [EncoderRow(**row) for row in checkpoint.epochs]


def answer(
    parts: nn.ModuleDict, images: np.ndarray, known: Statistics, config: BottleneckConfig, device: torch.device
) -> np.ndarray:
    """Logits, FP32 `[n, classes]`, of UINT8 images `[n, h, w, 3]` through head, noise, rounding and tail."""
    parts.eval()
    torch.manual_seed(config.seed)
    logits = []
    with torch.inference_mode(), autocast(config, device):
        for start in range(0, len(images), _EVALUATION_BATCH):
            chunk = torch.from_numpy(images[start : start + _EVALUATION_BATCH]).to(device)
            sent = transmit(parts["head"](normalise(chunk, known)), config.encoder)
            logits.append(parts["tail"](sent).float().cpu())
    return torch.cat(logits).numpy()


def _take_over(parts: nn.ModuleDict, weights: dict[str, Tensor]) -> None:
    """Copy an earlier run's weights; where the number of features differs, those of the features that both have."""
    with torch.no_grad():
        for name, value in parts.state_dict().items():
            given = weights[name]
            both = tuple(slice(0, min(pair)) for pair in zip(value.shape, given.shape, strict=True))
            value[both] = given[both]
