"""The networks that Terrace trains, by the `kind` that a training configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from torch import Tensor, nn

from models.training.networks.early_exit import EarlyExit
from models.training.networks.mlp import leaves_out, reseed
from tierkit.errors import InvalidInput
from tierkit.extensions import load

__all__ = [
    "EarlyExit",
    "Network",
    "NetworkKind",
    "build_network",
    "count_parameters",
    "leaves_out",
    "reseed",
    "running_statistics",
]

_MOST_REASON = 300
"""Characters of what is wrong: it may repeat the options."""


class Network(Protocol):
    """Parts of a network that a second classifier reads (`auxiliary` of the training configuration)."""

    feature_width: int
    classifier: nn.Linear

    def embed(self, images: Tensor) -> Tensor: ...


class NetworkKind(Protocol):
    """An entry point of `terrace.networks`: a module class, or a function that makes a module."""

    def __call__(self, classes: int, /, *args: Any, **options: Any) -> nn.Module:
        """A freshly initialised network that maps float images `[n, c, h, w]` to logits `[n, classes]`.

        Args:
            args: none are given.
            options: the table `[network.options]` of the training configuration.

        Raises:
            TypeError, ValueError: it does not take these options.
        """
        ...


def build_network(kind: str, classes: int, options: Mapping[str, Any]) -> nn.Module:
    """A network of this kind; see `NetworkKind`.

    Raises:
        InvalidInput: there is no such kind, or it does not take these options.
        BrokenExtension: the package of the kind cannot be used.
    """
    make = cast(NetworkKind, load("terrace.networks", kind))
    try:
        return make(classes, **options)
    except (TypeError, ValueError, RuntimeError) as error:  # the last is torch's, for shapes that there cannot be
        raise InvalidInput(f"network {kind!r}: {str(error)[:_MOST_REASON]}") from error


def count_parameters(network: nn.Module) -> int:
    """Number of trained values; running statistics do not count."""
    return sum(parameter.numel() for parameter in network.parameters())


def running_statistics(network: nn.Module) -> list[Tensor]:
    """Buffers with decimals that belong to the state of a network, without those that follow from its plan."""
    state = network.state_dict().keys()
    return [each for name, each in network.named_buffers() if name in state and each.is_floating_point()]
