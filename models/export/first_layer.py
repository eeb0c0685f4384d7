"""The first layer of a trained network as a convolution over three colours. Networks are exported in this form."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from models.training.networks.mlp import Mlp
from models.training.networks.predicted import PredictedLinear
from tierkit.errors import WeightsError

__all__ = ["of_three_colours"]

_COLOURS = 3


def of_three_colours(network: nn.Module, image_shape: tuple[int, int]) -> nn.Module:
    """Return a copy of a network that takes float images `[n, 3, h, w]` and begins with a convolution.

    A network of grey images sees the mean of the three colours, so a grey picture gets the same answer. The first layer
    of an MLP becomes a convolution whose kernel covers the whole image.

    Args:
        image_shape: height and width.

    Raises:
        WeightsError: the network has neither a convolution nor, as an MLP, a hidden layer.
    """
    network = deepcopy(network)
    if isinstance(network, Mlp):
        _, *layers = network.layers
        if not layers:
            raise WeightsError("an MLP without a hidden layer cannot be exported: give it one to serve it")
        linear = layers[0].as_linear() if isinstance(layers[0], PredictedLinear) else layers[0]
        height, width = image_shape
        kernel = linear.weight.detach().view(linear.out_features, -1, height, width)
        network.layers = nn.Sequential(_convolution(kernel, linear.bias), nn.Flatten(), *layers[1:])
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Conv2d)]
    if not names:
        raise WeightsError("a network without convolutions cannot be exported: to serve one, train another kind")
    first = network.get_submodule(names[0])
    assert isinstance(first, nn.Conv2d)
    if first.in_channels == 1:
        wider = _convolution(
            first.weight.detach().repeat(1, _COLOURS, 1, 1) / _COLOURS,
            first.bias,
            stride=first.stride,
            padding=first.padding,
            dilation=first.dilation,
        )
        parent, _, own = names[0].rpartition(".")
        setattr(network.get_submodule(parent), own, wider)
    return network


def _convolution(kernel: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> nn.Conv2d:
    """A convolution with this kernel `[out, in, h, w]`."""
    channels, taken, height, width = kernel.shape
    layer = nn.Conv2d(taken, channels, (height, width), bias=bias is not None, **options)
    layer.weight.data.copy_(kernel)
    if bias is not None and layer.bias is not None:
        layer.bias.data.copy_(bias.detach())
    return layer
