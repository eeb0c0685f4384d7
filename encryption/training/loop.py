"""The training loop of a learned encoder.

Each step the adversary learns to reconstruct the images from what was sent, and head and tail learn to answer while
the reconstruction gets worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encryption.training.config import BottleneckConfig
from encryption.training.networks import Decoder, Head, Tail, front, transmit
from encryption.training.similarity import ssim
from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.training.batches import Batch, Statistics, normalise
from models.training.checkpoint import Checkpoint, EpochRow
from models.training.driver import Driver, autocast, load_weights
from models.training.gemm_conv import use_matrix_products
from models.training.loss import training_loss
from models.training.schedule import learning_rate
from tierkit.inference.model import Array

__all__ = ["EncoderRow", "EncoderTrainer", "answer", "build_parts"]

_EVALUATION_BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRow(EpochRow):
    """One line of the log. Epochs of the hint come first, and have no accuracies; their loss is the hint's, without
    the adversary's part as in all others."""

    adversary_ssim: float
    """Mean SSIM of the adversary's reconstructions during the epoch."""


def build_parts(config: BottleneckConfig, upper: nn.Module) -> nn.ModuleDict:
    """Head and tail, freshly initialised but for what they take from the upper network."""
    return nn.ModuleDict({"head": Head(upper, config.encoder), "tail": Tail(upper, config.encoder)})


class EncoderTrainer(Driver[BottleneckConfig, EncoderRow]):
    """Trains head, tail and adversary on one data set.

    Args:
        config, data, hierarchy, folder, teacher, device, checkpoint_every_s: as for `Driver`.
        upper: the upper network with its first weights; its last blocks become the tail.
        initial: averaged weights of an earlier run's head and tail, in the place of fresh ones. Where the numbers of
            features differ, those that both have are taken over.

    Raises:
        DataError: labels are missing or disagree with the hierarchy.
        Conflict: the folder holds a run with another configuration, on other images or for another hierarchy.
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
        super().__init__(
            config,
            data,
            hierarchy,
            folder,
            row=EncoderRow,
            epochs=config.hint_epochs + config.epochs,
            teacher=teacher,
            device=device,
            checkpoint_every_s=checkpoint_every_s,
        )
        self._hint_steps = config.hint_epochs * self._source.steps_per_epoch
        self._ssim_sum = 0.0
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
        self._begin(self._parts)
        self._adversary = torch.optim.AdamW(self._decoder.parameters(), lr=config.adversary.rate)
        if self._device.type == "cpu" and config.precision == "bf16":
            use_matrix_products(self._parts)
            use_matrix_products(self._decoder)
        self._restore()

    def _rate(self, step: int) -> float:
        if step < self._hint_steps:
            return learning_rate(step, self._hint_steps, self.config)
        return learning_rate(step - self._hint_steps, self.steps - self._hint_steps, self.config)

    def _advance(self) -> float:
        """One step of adversary, head and tail; the loss without the adversary's part."""
        batch = self._source.batch(self.step)
        # Noise too depends on nothing but seed and step: a resumed run is an unbroken one.
        torch.manual_seed(self.config.seed * 2_654_435_761 + self.step)
        self._set_rate()
        self._parts.train()
        with autocast(self.config, self._device):
            features = self._parts["head"](batch.images)
            sent = transmit(features, self.config.encoder)
            loss = self._hint_loss(batch, sent) if self.step < self._hint_steps else self._task_loss(batch, sent)
        pixels = self._pixels(batch.images)
        self._ssim_sum += self._train_adversary(features.detach(), pixels)
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
        return float(loss.detach())

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

    def _more_of_epoch(self) -> dict[str, float]:
        mean, self._ssim_sum = self._ssim_sum / self._source.steps_per_epoch, 0.0
        return {"adversary_ssim": mean}

    def _held_out_logits(self) -> Array | None:
        if self.step <= self._hint_steps:
            return None
        kept = {name: value.clone() for name, value in self._parts.state_dict().items()}
        self._parts.load_state_dict(self._averaged)
        logits = answer(self._parts, self._held_out.images, self.statistics, self.config, self._device)
        self._parts.load_state_dict(kept)
        return logits

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {"parts": self._parts.state_dict(), "decoder": self._decoder.state_dict()},
            {"parts": self._optimizer.state_dict(), "decoder": self._adversary.state_dict()},
        )

    def _take_up(self, checkpoint: Checkpoint) -> None:
        for name, network in (("parts", self._parts), ("decoder", self._decoder)):
            load_weights(network, checkpoint.weights[name], str(self._folder / "checkpoint.pt"))
        self._optimizer.load_state_dict(checkpoint.optimizer["parts"])
        self._adversary.load_state_dict(checkpoint.optimizer["decoder"])


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
