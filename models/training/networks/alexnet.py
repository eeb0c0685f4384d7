"""AlexNet in one column (Krizhevsky 2014, arXiv:1404.5997) for small images: convolutions with most of the computation,
then dense layers with most of the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.training.networks.mlp import Dropout

__all__ = ["AlexNet"]

_KERNELS = (5, 5, 3, 3, 3)  # the source's first is 11 with stride 4, for images of 224 pixels
_POOLED = (0, 1, 4)
"""Convolutions before a pooling that halves height and width."""


class AlexNet(nn.Module):
    """Float images `[n, c, h, w]` of one size to logits `[n, classes]`.

    Args:
        classes: number of outputs.
        image: `c`, `h` and `w`.
        widths: channels of the five convolutions. By default they are narrower than in the source, so that the dense
            layers hold 95 % of the parameters here as well.
        hidden: units of the two dense layers before the classifier.
        dropout: share of their units that a training step leaves out.
    """

    def __init__(
        self,
        classes: int,
        *,
        image: Sequence[int] = (3, 32, 32),
        widths: Sequence[int] = (64, 128, 256, 256, 256),
        hidden: Sequence[int] = (4096, 4096),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if (len(image), len(widths), len(hidden)) != (3, len(_KERNELS), 2):
            raise ValueError(f"image has 3 numbers, widths {len(_KERNELS)}, hidden 2; got {image}, {widths}, {hidden}")
        if not all(type(each) is int and each >= 1 for each in (*image, *widths, *hidden)):
            raise ValueError(
                f"image, widths and hidden are whole numbers of 1 or more, got {image}, {widths}, {hidden}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        colours, height, width = image
        blocks: list[nn.Module] = []
        for number, (before, after, kernel) in enumerate(zip((colours, *widths), widths, _KERNELS, strict=False)):
            layers = [nn.Conv2d(before, after, kernel, padding=kernel // 2), nn.ReLU(inplace=True)]
            if number in _POOLED:
                layers.append(nn.MaxPool2d(3, 2, padding=1))
                height, width = -(-height // 2), -(-width // 2)
            blocks.append(nn.Sequential(*layers))
        self.blocks = nn.Sequential(*blocks)
        first, second = hidden
        self.dense = nn.Sequential(
            nn.Linear(widths[-1] * height * width, first),
            nn.ReLU(),
            Dropout(dropout),
            nn.Linear(first, second),
            nn.ReLU(),
            Dropout(dropout),
        )
        self.classifier = nn.Linear(second, classes)
        self.feature_width = second
        for module in (*self.blocks.modules(), *self.dense):
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def embed(self, images: Tensor) -> Tensor:
        """Output of the last hidden layer `[n, feature_width]`, the input of the classifier."""
        features: Tensor = self.dense(torch.flatten(self.blocks(images), 1))
        return features

    def chain(self) -> list[nn.Module]:
        """Blocks whose composition is `forward`. The network can be cut between any two of them."""
        return [*self.blocks, nn.Sequential(nn.Flatten(), *self.dense[:3]), self.dense[3:], self.classifier]

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(images))
        return logits
