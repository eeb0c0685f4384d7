"""Pairs of dense layers that `hybrid` splits over the ranks."""

from __future__ import annotations

from torch import nn

from models.training.networks.mlp import Dropout
from tierkit.errors import InvalidInput
from training.learner import FlatLearner

__all__ = ["check_hybrid", "dense_layer", "dense_pairs"]

_ELEMENTWISE = (nn.ReLU, nn.Tanh, Dropout)


def dense_pairs(network: nn.Module) -> list[tuple[str, str]]:
    """Names of dense layers that follow each other, two by two, with only elementwise functions between them."""
    found = []
    for name, module in network.named_modules():
        if not isinstance(module, nn.Sequential):
            continue
        first: str | None = None
        for place, child in module.named_children():
            if isinstance(child, nn.Linear):
                here = f"{name}.{place}"
                if first is not None:
                    found.append((first, here))
                first = here if first is None else None
            elif not isinstance(child, _ELEMENTWISE):
                first = None
    return found


def check_hybrid(learner: FlatLearner, ranks: int) -> None:
    """Raises InvalidInput if the network has no dense layers that this number of ranks can split."""
    if ranks < 2:
        raise InvalidInput("hybrid splits dense layers over the ranks: it needs at least 2 of them")
    pairs = dense_pairs(learner.trained_network)
    if not pairs:
        raise InvalidInput(
            f"{learner.config.name!r} has no two dense layers in a row for hybrid to split; use allreduce, or another "
            "network, such as alexnet"
        )
    for first, _ in pairs:
        units = dense_layer(learner.trained_network, first).out_features
        if units % ranks:
            raise InvalidInput(
                f"a dense layer of {learner.config.name!r} has {units} units, which cannot be divided among {ranks} "
                "ranks: use a number of ranks that divides it"
            )


def dense_layer(network: nn.Module, name: str) -> nn.Linear:
    """The dense layer of this name."""
    found = network.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found
