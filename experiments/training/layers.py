"""Shares of convolutions and dense layers in the computation and the parameters of networks. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.dataset import Dataset
from models.training.config import find_config
from models.training.networks import build_network, count_parameters

__all__ = ["shares"]

_COLOURS = {"mnist": 1}
"""Number of channels of the data sets that are not in colour."""


def shares(name: str) -> dict[str, Any]:
    """Multiply-adds of a forward pass of one image, and parameters, by kind of layer.

    Args:
        name: of a bundled configuration.

    Returns:
        `convolution_macs`, `dense_macs`, `convolution_parameters` and `dense_parameters`; normalisation counts to the
        convolutions, and its computation is left out.
    """
    config = find_config(name, None)
    dataset = Dataset.open(config.dataset, None)
    macs = {nn.Conv2d: 0, nn.Linear: 0}

    def count(layer: nn.Module, _given: object, answer: Tensor) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        # A convolution uses each weight at each position.
        macs[type(layer)] += weight.numel() * answer[0, 0].numel()

    with torch.device("meta"):
        network = build_network(
            config.network.kind, len(dataset.hierarchy.labels(config.target)), config.network.options
        )
        layers = [each for each in network.modules() if isinstance(each, nn.Conv2d | nn.Linear)]
        for each in layers:
            each.register_forward_hook(count)
        network.eval()(torch.empty(1, _COLOURS.get(config.dataset, 3), *dataset.size))
    dense = sum(count_parameters(each) for each in layers if isinstance(each, nn.Linear))
    return {
        "network": name,
        "convolution_macs": macs[nn.Conv2d],
        "dense_macs": macs[nn.Linear],
        "convolution_parameters": count_parameters(network) - dense,
        "dense_parameters": dense,
    }
