"""Multilayer perceptron: fully connected layers. It suits small images such as MNIST's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from models.training.networks.predicted import PredictedLinear

__all__ = ["Dropout", "Mlp", "leaves_out", "reseed"]

_MOST_LAYERS = 1_000
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def reseed(network: nn.Module, seed: int) -> None:
    """Have a network leave out the same units as after any other call with this seed, on each kind of device."""
    layers = (layer for layer in network.modules() if isinstance(layer, Dropout))
    for place, layer in enumerate(layers):
        layer.chance.manual_seed(seed + (place << 48))


def leaves_out(network: nn.Module) -> bool:
    """True if a network has dropout."""
    return any(isinstance(layer, Dropout) and layer.share > 0 for layer in network.modules())


class Dropout(nn.Module):
    """Leaves out a share of its inputs in training. The choice depends only on `reseed`. torch's own layer draws from
    the generator of the whole process, which other threads use as well.

    Args:
        share: at least 0 and below 1.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.chance = torch.Generator()

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or not self.share:
            return values
        kept = torch.rand(values.shape, generator=self.chance) >= self.share
        return values * (kept / (1 - self.share)).to(values.device, values.dtype)


class Mlp(nn.Module):
    """Float images `[n, c, h, w]` of one size to logits `[n, classes]`.

    Args:
        classes: number of outputs.
        inputs: `c h w`, values of an image: 784 for MNIST.
        hidden: units of each hidden layer, first to last; at most 1,000 layers.
        activation: "tanh" or "relu", after each hidden layer.
        dropout: share of the hidden units that a training step leaves out.
        predicted: share of the first layer's weights that is learned, while the others are predicted; see
            `PredictedLinear`. None: all are learned.
    """

    def __init__(
        self,
        classes: int,
        *,
        inputs: int = 784,
        hidden: Sequence[int] = (100,),
        activation: str = "tanh",
        dropout: float = 0.0,
        predicted: float | None = None,
    ) -> None:
        super().__init__()
        if len(hidden) > _MOST_LAYERS:
            raise ValueError(f"hidden has {len(hidden):,} layers, at most {_MOST_LAYERS:,} are possible")
        widths = [inputs, *hidden]
        if not all(type(width) is int and width >= 1 for width in widths):
            raise ValueError(f"inputs and hidden must be whole numbers of at least 1, got {inputs} and {hidden}")
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation is one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        if predicted is not None and not hidden:
            raise ValueError("predicted needs a hidden layer: the last layer learns all its weights")
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            # Only the layer that stays is built: a worker counts all values as they are made.
            dense: nn.Module = (
                nn.Linear(before, after) if predicted is None or layers else PredictedLinear(before, after, predicted)
            )
            layers += [dense, _ACTIVATIONS[activation](), Dropout(dropout)]
        self.layers = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(widths[-1], classes)
        self.feature_width = widths[-1]

    def embed(self, images: Tensor) -> Tensor:
        """Output of the last hidden layer `[n, feature_width]`, the input of the classifier."""
        features: Tensor = self.layers(images)
        return features

    def chain(self) -> list[nn.Module]:
        """Blocks whose composition is `forward`. The network can be cut between any two of them."""
        flatten, *layers = self.layers
        blocks = [*(layers[first : first + 3] for first in range(0, len(layers), 3)), [self.classifier]]
        blocks[0].insert(0, flatten)
        return [nn.Sequential(*block) for block in blocks]

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(images))
        return logits
