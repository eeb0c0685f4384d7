"""Head, tail and adversary of a learned encoder, as they are trained.

Each step the adversary learns to reconstruct the images from what was sent, and head and tail learn to answer while
the reconstruction gets worse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encryption.audit.similarity import ssim
from encryption.training.config import BottleneckConfig
from encryption.training.networks import Decoder, Head, Tail, first_layers, transmit
from models.training.batches import Batch, Statistics, normalise
from models.training.data import TrainingData
from models.training.gemm_conv import use_matrix_products
from models.training.learner import EVALUATION_BATCH, autocast, load_weights, make_optimizer, set_rate
from models.training.loss import training_loss
from models.training.networks import build_network
from models.training.schedule import learning_rate
from tierkit.tensors import Array

__all__ = ["EncoderLearner", "answer", "build_parts"]


def build_parts(config: BottleneckConfig, upper: nn.Module, body: nn.Module | None = None) -> nn.ModuleDict:
    """Head and tail, freshly initialised but for what they take from the upper network and from the body.

    Args:
        body: the network of `encoder.body` with its weights; without it, a new one.
    """
    if (named := config.encoder.body) is None:
        source = upper
    else:
        source = build_network(named.network.kind, 1, named.network.options) if body is None else body
    return nn.ModuleDict({"head": Head(source, config.encoder), "tail": Tail(upper, config.encoder)})


class EncoderLearner:
    """Head and tail against an adversary; see `models.training.trainer.Learner`. `network` is head and tail.

    Epochs of the hint come first, and have no accuracies. The loss of an epoch is without the adversary's part.

    Args:
        upper: the upper network with its first weights; its last blocks become the tail.
        body: see `build_parts`.
    """

    def __init__(
        self, config: BottleneckConfig, data: TrainingData, upper: nn.Module, body: nn.Module | None = None
    ) -> None:
        self.config = config
        self.data = data
        self._hint_steps = config.hint_epochs * data.batches.steps_per_epoch
        self._ssim_sum = 0.0
        torch.manual_seed(config.seed)
        place: dict[str, Any] = {"device": data.device, "memory_format": torch.channels_last}
        self._replaced = None
        if config.hint_epochs:
            # What the encoder takes the place of gives the hint.
            self._replaced = first_layers(upper, range(config.encoder.cut)).eval().requires_grad_(False).to(**place)
        self._parts = self.network = build_parts(config, upper, body).to(**place)
        with torch.no_grad():
            smaller = self._parts["head"].eval()(torch.zeros(1, 3, data.side, data.side, device=data.device)).shape[2]
        self._decoder = Decoder(config.encoder.channels, data.side // smaller, config.adversary.width).to(**place)
        self._optimizer = make_optimizer(self._parts, config)
        self._adversary = torch.optim.AdamW(self._decoder.parameters(), lr=config.adversary.rate)
        if data.device.type == "cpu" and config.precision == "bf16":
            use_matrix_products(self._parts)
            use_matrix_products(self._decoder)

    def rate(self, step: int) -> float:
        if step < self._hint_steps:
            return learning_rate(step, self._hint_steps, self.config)
        steps = self.config.epochs * self.data.batches.steps_per_epoch
        return learning_rate(step - self._hint_steps, steps, self.config)

    def learn(self, step: int) -> float:
        batch = self.data.batches.batch(step)
        # Noise too depends on nothing but seed and step: a resumed run is an unbroken one.
        torch.manual_seed(self.config.seed * 2_654_435_761 + step)
        set_rate(self._optimizer, self.rate(step))
        self._parts.train()
        with autocast(self.config, self.data.device):
            features = self._parts["head"](batch.images)
            sent = transmit(features, self.config.encoder)
            loss = self._hint_loss(batch, sent) if step < self._hint_steps else self._task_loss(batch, sent)
        known = self.data.batches.statistics
        pixels = (batch.images * known.std + known.mean) / 255.0
        self._ssim_sum += self._train_adversary(features.detach(), pixels)
        total = loss
        if weight := self._adversary_weight(step):
            self._decoder.requires_grad_(False)
            with autocast(self.config, self.data.device):
                shown = self._decoder(sent)
            # A decoder that is fooled into the opposite of the image would learn that at once: zero is the aim.
            total = loss + weight * ssim(shown, pixels).clamp_min(0.0).mean()
            self._decoder.requires_grad_(True)
        total.backward()
        nn.utils.clip_grad_norm_(self._parts.parameters(), self.config.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def _adversary_weight(self, step: int) -> float:
        """None during the hint, then rising: an encoder that hides before it has anything to say learns nothing."""
        rising = self.config.adversary.ramp_epochs * self.data.batches.steps_per_epoch
        done = step - self._hint_steps
        return self.config.adversary.weight * min(1.0, max(0.0, done / rising if rising else float(done >= 0)))

    def _task_loss(self, batch: Batch, sent: Tensor) -> Tensor:
        return training_loss(self._parts["tail"](sent), None, batch, self.data.labels, self.config)

    def _hint_loss(self, batch: Batch, sent: Tensor) -> Tensor:
        assert self._replaced is not None
        with torch.no_grad():
            wanted = self._replaced(batch.images).float()
        return F.mse_loss(self._parts["tail"].restore(sent).float(), wanted) / wanted.var()

    def _train_adversary(self, features: Tensor, pixels: Tensor) -> float:
        similarity = 0.0
        self._decoder.train()
        for _ in range(self.config.adversary.steps):
            with autocast(self.config, self.data.device):
                shown = self._decoder(transmit(features, self.config.encoder))
            alike = ssim(shown, pixels).mean()
            (1 - alike + F.mse_loss(shown, pixels)).backward()
            self._adversary.step()
            self._adversary.zero_grad()
            similarity = float(alike.detach())
        return similarity

    def held_out_logits(self, averaged: dict[str, Tensor], step: int) -> Array | None:
        if step < self._hint_steps:
            return None
        kept = {name: value.clone() for name, value in self._parts.state_dict().items()}
        self._parts.load_state_dict(averaged)
        logits = answer(
            self._parts, self.data.held_out.images, self.data.batches.statistics, self.config, self.data.device
        )
        self._parts.load_state_dict(kept)
        return logits

    def finish_epoch(self, steps: int) -> dict[str, float]:
        mean, self._ssim_sum = self._ssim_sum / steps, 0.0
        return {"adversary_ssim": mean}

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {"parts": self._parts.state_dict(), "decoder": self._decoder.state_dict()},
            {
                "parts": self._optimizer.state_dict(),
                "decoder": self._adversary.state_dict(),
                "ssim_sum": self._ssim_sum,
            },
        )

    def restore(self, weights: dict[str, Any], optimizer: dict[str, Any]) -> None:
        for name, network in (("parts", self._parts), ("decoder", self._decoder)):
            load_weights(network, weights[name], f"the checkpoint of {self.config.name!r}")
        self._optimizer.load_state_dict(optimizer["parts"])
        self._adversary.load_state_dict(optimizer["decoder"])
        self._ssim_sum = optimizer.get("ssim_sum", 0.0)  # checkpoints of earlier versions lack it


def answer(
    parts: nn.ModuleDict, images: np.ndarray, known: Statistics, config: BottleneckConfig, device: torch.device
) -> np.ndarray:
    """Logits, FP32 `[n, classes]`, of UINT8 images `[n, h, w, 3]` through head, noise, rounding and tail."""
    parts.eval()
    torch.manual_seed(config.seed)
    logits = []
    with torch.inference_mode(), autocast(config, device):
        for start in range(0, len(images), EVALUATION_BATCH):
            chunk = torch.from_numpy(images[start : start + EVALUATION_BATCH]).to(device)
            sent = transmit(parts["head"](normalise(chunk, known)), config.encoder)
            logits.append(parts["tail"](sent).float().cpu())
    return torch.cat(logits).numpy()
