"""Multilayer perceptron: fully connected layers, for small images such as MNIST's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

__all__ = ["Mlp"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class Mlp(nn.Module):
    """Float images `[n, c, h, w]` of one size to logits `[n, classes]`.

    Args:
        classes: number of outputs.
        inputs: `c h w`, values of an image: 784 for MNIST.
        hidden: units of each hidden layer, first to last.
        activation: "tanh" or "relu", after each hidden layer.
        dropout: share of the hidden units that a training step leaves out.
    """

    def __init__(
        self,
        classes: int,
        *,
        inputs: int = 784,
        hidden: Sequence[int] = (100,),
        activation: str = "tanh",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        if not all(type(width) is int and width >= 1 for width in widths):
            raise ValueError(f"inputs and hidden must be whole numbers of at least 1, got {inputs} and {hidden}")
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation is one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), _ACTIVATIONS[activation](), nn.Dropout(dropout)]
        self.layers = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(widths[-1], classes)
        self.feature_width = widths[-1]

    def embed(self, images: Tensor) -> Tensor:
        """Output of the last hidden layer `[n, feature_width]`, the input of the classifier."""
        features: Tensor = self.layers(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(images))
        return logits
