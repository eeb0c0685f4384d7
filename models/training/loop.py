"""The training of a network that is served: one loop for every one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.training.batches import Statistics, normalise
from models.training.checkpoint import Checkpoint, EpochRow
from models.training.config import TrainConfig
from models.training.driver import Driver, autocast, check_hierarchy, load_weights
from models.training.gemm_conv import use_matrix_products
from models.training.loss import training_loss
from models.training.networks import build_network
from tierkit.inference.model import Array

__all__ = ["Trainer", "averaged_network", "predict", "served_weights"]

_EVALUATION_BATCH = 500


class Trainer(Driver[TrainConfig, EpochRow]):
    """Trains one network on one data set.

    Args:
        config, data, hierarchy, folder, teacher, device, checkpoint_every_s: as for `Driver`.
        initial: weights of the served network to start from, as `weights()` gives them; random ones unless given.

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
        super().__init__(
            config,
            data,
            hierarchy,
            folder,
            row=EpochRow,
            epochs=config.epochs,
            teacher=teacher,
            device=device,
            checkpoint_every_s=checkpoint_every_s,
        )
        student = _Student(config, hierarchy).to(self._device, memory_format=torch.channels_last)
        if initial is not None:
            load_weights(student.network, initial, f"the weights that {config.name!r} is to start from")
        self._begin(student)
        if self._device.type == "cpu" and config.precision == "bf16":
            use_matrix_products(student)
        self._restore()

    def weights(self) -> dict[str, Tensor]:
        """The averaged weights of the served network, by `state_dict` name."""
        return _served(self._averaged)

    def _advance(self) -> float:
        batch = self._source.batch(self.step)
        self._set_rate()
        self._network.train()
        with autocast(self.config, self._device):
            output, auxiliary = self._network(batch.images)
        loss = training_loss(output, auxiliary, batch, self._labels, self.config)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def _held_out_logits(self) -> Array:
        network = _load(self.config, self._hierarchy, self.weights()).to(
            self._device, memory_format=torch.channels_last
        )
        return predict(network, self._held_out.images, self.statistics, self.config, self._device)

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._network.state_dict(), self._optimizer.state_dict()

    def _take_up(self, checkpoint: Checkpoint) -> None:
        load_weights(self._network, checkpoint.weights, str(self._folder / "checkpoint.pt"))
        self._optimizer.load_state_dict(checkpoint.optimizer)


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
    load_weights(network, weights, f"the checkpoint of {config.name!r}")
    return network.eval()
