"""The training of a network that is served, and its answers after that."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.hierarchy import Hierarchy
from models.training.batches import Batch, Statistics, normalise
from models.training.checkpoint import Checkpoint
from models.training.config import TrainConfig
from models.training.data import TrainingData
from models.training.gemm_conv import use_matrix_products
from models.training.loss import training_loss
from models.training.networks import EarlyExit, build_network, reseed
from models.training.schedule import learning_rate
from tierkit.errors import DataError, InvalidInput, WeightsError
from tierkit.tensors import Array

__all__ = [
    "EVALUATION_BATCH",
    "NetworkLearner",
    "autocast",
    "averaged_network",
    "check_images",
    "groups_of",
    "load_weights",
    "make_optimizer",
    "predict",
    "served_weights",
    "set_rate",
]

EVALUATION_BATCH = 500
_EVALUATION_PIXELS = EVALUATION_BATCH * 64 * 64


@dataclass(frozen=True, slots=True)
class BatchAnswers:
    """A batch, and the network's answers to it."""

    batch: Batch
    output: Tensor
    """Logits `[n, classes]`."""
    auxiliary: Tensor | None
    """Logits of its second classifier."""


class NetworkLearner:
    """A network of one data set; see `models.training.trainer.Learner`.

    Args:
        initial: weights of the served network to start from (`served_weights`); random weights by default.
        network: replaces the network of the configuration. It takes normalised images `[n, c, h, w]` and answers with
            logits.

    Raises:
        WeightsError: `initial` does not fit.
        DataError: the images do not fit.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        initial: dict[str, Tensor] | None = None,
        network: nn.Module | None = None,
    ) -> None:
        self.config = config
        self.data = data
        torch.manual_seed(config.seed)
        student = _Student(config, data.hierarchy) if network is None else _Given(network)
        self.network: nn.Module = student.to(data.device, memory_format=torch.channels_last)
        if initial is not None:
            load_weights(self.network.network, initial, f"the weights that {config.name!r} is to start from")
        check_images(self.network, data.held_out.images.shape[1:], config)
        self.times: dict[str, float] = {}
        """Seconds that `backward` has spent on the batch (load), forward and backward. What a GPU computes counts where
        it is waited for."""
        if data.device.type == "cpu" and config.precision == "bf16":
            use_matrix_products(self.network)

    @cached_property
    def _optimizer(self) -> torch.optim.SGD:
        # Made when it is needed: torch imports much for its first one, and a worker of a fleet needs none.
        return make_optimizer(self.network, self.config)

    def rate(self, step: int) -> float:
        return learning_rate(step, self.config.epochs * self.data.batches.steps_per_epoch, self.config)

    def learn(self, step: int) -> float:
        set_rate(self._optimizer, self.rate(step))
        loss = self.backward(step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def backward(self, step: int) -> float:
        """Add the gradients of a step to the gradients of the network's parameters, and return its loss."""
        return self.backward_from(self.forward(step))

    def forward(self, step: int) -> BatchAnswers:
        """The answers to a step's batch."""
        began = time.perf_counter()
        batch = self.data.batches.batch(step)
        loaded = time.perf_counter()
        if not self.network.training:
            self.network.train()
        # Dropout too depends on nothing but seed and step: a resumed run is an unbroken one.
        reseed(self.network, self.config.seed * 2_654_435_761 + step)
        with autocast(self.config, self.data.device):
            output, auxiliary = self.network(batch.images)
        self._spend("load", loaded - began)
        self._spend("forward", time.perf_counter() - loaded)
        return BatchAnswers(batch, output, auxiliary)

    def backward_from(self, answered: BatchAnswers) -> float:
        """Add the gradients of these answers to the parameters' own; return their loss."""
        began = time.perf_counter()
        loss = training_loss(answered.output, answered.auxiliary, answered.batch, self.data.labels, self.config)
        computed = time.perf_counter()
        loss.backward()
        value = float(loss.detach())  # waits for a GPU
        self._spend("forward", computed - began)
        self._spend("backward", time.perf_counter() - computed)
        return value

    def _spend(self, name: str, seconds: float) -> None:
        self.times[name] = self.times.get(name, 0.0) + seconds

    def observe(self, step: int) -> None:
        """Let the running statistics see a step's batch."""
        self.network.train()
        with torch.no_grad(), autocast(self.config, self.data.device):
            self.network(self.data.batches.batch(step).images)

    def held_out_logits(self, averaged: dict[str, Tensor], step: int) -> Array:
        data = self.data
        network = _load(self.config, data.hierarchy, _served(averaged))
        network.to(data.device, memory_format=torch.channels_last)
        return predict(network, data.held_out.images, data.batches.statistics, self.config, data.device)

    def finish_epoch(self, steps: int) -> dict[str, float]:
        return {}

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.network.state_dict(), self._optimizer.state_dict()

    def restore(self, weights: dict[str, Any], optimizer: dict[str, Any]) -> None:
        load_weights(self.network, weights, f"the checkpoint of {self.config.name!r}")
        self._optimizer.load_state_dict(optimizer)


class _Student(nn.Module):
    """The served network, with its second classifier: a coarse one has it during training, one of two parts always."""

    def __init__(self, config: TrainConfig, hierarchy: Hierarchy) -> None:
        super().__init__()
        self.network: Any = _build(config, hierarchy)
        if config.target == "coarse" and config.auxiliary and not hasattr(self.network, "embed"):
            kind = config.network.kind
            raise InvalidInput(f"network {kind!r} has no embed, which a second classifier reads: set auxiliary to 0")
        self.auxiliary = (
            nn.Linear(self.network.feature_width, len(hierarchy.fine))
            if config.target == "coarse" and config.auxiliary
            else None
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.network, EarlyExit):
            both: tuple[Tensor, Tensor] = self.network.exits(images)
            return both
        if self.auxiliary is None:
            return self.network(images), None
        features = self.network.embed(images)
        return self.network.classifier(features), self.auxiliary(features)


class _Given(nn.Module):
    """A network from elsewhere, which has no second classifier."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, None]:
        return self.network(images), None


def averaged_network(checkpoint: Checkpoint) -> tuple[nn.Module, TrainConfig, Statistics]:
    """The network with a checkpoint's averaged weights in evaluation mode, its configuration and input statistics.

    Raises:
        WeightsError: the configuration is not one of this version, or the weights do not fit it.
    """
    config = checkpoint.configured(TrainConfig)
    network = _load(config, checkpoint.trained_for, served_weights(checkpoint))
    return network, config, Statistics(**checkpoint.statistics)


def served_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The averaged weights of the served network, without the classifier that it has during training only."""
    return _served(checkpoint.averaged)


def predict(
    network: nn.Module, images: np.ndarray, known: Statistics, config: TrainConfig, device: torch.device
) -> np.ndarray:
    """Logits, FP32 `[n, classes]`, of UINT8 images `[n, h, w, c]`, in the precision of `config`.

    On a CPU in bf16 the convolutions of `network` change their form (`use_matrix_products`).
    """
    network.eval()
    if device.type == "cpu" and config.precision == "bf16":
        use_matrix_products(network)
    height, width = images.shape[1:3]
    size = max(1, min(EVALUATION_BATCH, _EVALUATION_PIXELS // (height * width)))
    with torch.inference_mode(), autocast(config, device):
        parts = [
            network(normalise(torch.from_numpy(images[start : start + size]).to(device), known))
            for start in range(0, len(images), size)
        ]
    return torch.cat(parts).float().cpu().numpy()


def check_images(network: nn.Module, shape: tuple[int, ...], config: TrainConfig) -> None:
    """Raise DataError unless the network takes images of this height, width and number of colours, and as small as they
    are in the early epochs. It is left in evaluation mode."""
    height, width, colours = shape
    sizes = [(height, width), *([] if config.early_side is None else [(config.early_side, config.early_side)])]
    for size in sizes:
        image = torch.zeros(1, colours, *size, device=next(network.parameters()).device)
        try:
            with torch.inference_mode():
                network.eval()(image)
        except RuntimeError as error:
            raise DataError(
                f"the network of {config.name!r} takes no images of {size[0]} x {size[1]} pixels with {colours} "
                f"{'colour' if colours == 1 else 'colours'}: name another data set with --dataset, or change the "
                "configuration"
            ) from error


def make_optimizer(network: nn.Module, config: TrainConfig) -> torch.optim.SGD:
    """SGD as the configuration says."""
    return torch.optim.SGD(
        groups_of(network, config),
        lr=config.peak_rate,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
    )


def groups_of(network: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """The parameters for an optimiser, each group with its weight decay."""
    # Decay on biases and normalisation only distorts scale (arXiv:1812.01187, section 3.1).
    matrices = [value for value in network.parameters() if value.ndim > 1]
    vectors = [value for value in network.parameters() if value.ndim <= 1]
    return [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def load_weights(network: nn.Module, weights: dict[str, Tensor], what: str) -> None:
    """Load weights into a network. Raises WeightsError, whose message contains `what`, if they do not fit."""
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:  # its text lists every tensor
        raise WeightsError(
            f"{what} does not fit the network that its configuration describes; train it afresh"
        ) from error


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Context for forward passes, which uses bf16 if the configuration asks for it."""
    return torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16" else nullcontext()


def _served(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "network."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _build(config: TrainConfig, hierarchy: Hierarchy) -> nn.Module:
    return build_network(config.network.kind, len(hierarchy.labels(config.target)), config.network.options)


def _load(config: TrainConfig, hierarchy: Hierarchy, weights: dict[str, Tensor]) -> nn.Module:
    network = _build(config, hierarchy)
    load_weights(network, weights, f"the checkpoint of {config.name!r}")
    return network.eval()
