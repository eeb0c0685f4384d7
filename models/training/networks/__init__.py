"""The networks that Terrace trains, by the `kind` that a training configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from models.training.networks.alexnet import AlexNet
from models.training.networks.early_exit import EarlyExit
from models.training.networks.mlp import Mlp, leaves_out, reseed
from models.training.networks.mobilenet import MobileNetV1
from models.training.networks.resnet import ResNet34
from models.training.networks.wideresnet import WideResNet
from tierkit.errors import InvalidInput

__all__ = ["EarlyExit", "Network", "build_network", "count_parameters", "leaves_out", "reseed", "running_statistics"]

_MOST_REASON = 300
"""Characters of what is wrong: it may repeat the options."""

_KINDS: dict[str, type[nn.Module]] = {
    "alexnet": AlexNet,
    "early-exit": EarlyExit,
    "mlp": Mlp,
    "mobilenet-v1": MobileNetV1,
    "resnet-34": ResNet34,
    "wide-resnet": WideResNet,
}


class Network(Protocol):
    """What the training loop needs of a network beside being a module."""

    feature_width: int
    classifier: nn.Linear

    def embed(self, images: Tensor) -> Tensor: ...


def build_network(kind: str, classes: int, options: Mapping[str, Any]) -> nn.Module:
    """A freshly initialised network that maps float images `[n, c, h, w]` to logits `[n, classes]`.

    Raises:
        InvalidInput: there is no such kind, or it does not take these options.
    """
    if kind not in _KINDS:
        raise InvalidInput(f"no network of kind {kind!r}; there is: {', '.join(sorted(_KINDS))}")
    try:
        return _KINDS[kind](classes, **options)
    except (TypeError, ValueError, RuntimeError) as error:  # the last is torch's, for shapes that there cannot be
        raise InvalidInput(f"network {kind!r}: {str(error)[:_MOST_REASON]}") from error


def count_parameters(network: nn.Module) -> int:
    """Number of trained values; running statistics do not count."""
    return sum(parameter.numel() for parameter in network.parameters())


def running_statistics(network: nn.Module) -> list[Tensor]:
    """Buffers with decimals that belong to the state of a network, without those that follow from its plan."""
    state = network.state_dict().keys()
    return [each for name, each in network.named_buffers() if name in state and each.is_floating_point()]
