"""MobileNet v1 (Howard et al. 2017, arXiv:1704.04861, table 1) for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.training.networks.pooling import MeanPool

__all__ = ["MobileNetV1"]

# (output channels at alpha = 1, stride) of the thirteen depthwise-separable blocks, table 1 of the paper.
_BLOCKS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *(((512, 1),) * 5),
    (1024, 2),
    (1024, 1),
)


def _conv_bn_relu(channels_in: int, channels_out: int, *, kernel: int, stride: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class MobileNetV1(nn.Module):
    """Float images `[n, 3, h, w]` to logits `[n, classes]`.

    Args:
        classes: number of outputs.
        alpha: width multiplier; every channel count is `int(alpha * table value)`.
        stem_stride: stride of the first convolution; 2 as in the paper, 1 keeps more detail of small images at four
            times the cost.
        block_strides: strides of the thirteen blocks, in order; the paper's by default.
    """

    def __init__(
        self,
        classes: int,
        *,
        alpha: float = 0.5,
        stem_stride: int = 1,
        block_strides: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        strides = block_strides or tuple(stride for _, stride in _BLOCKS)
        if len(strides) != len(_BLOCKS):
            raise ValueError(f"MobileNet v1 has {len(_BLOCKS)} blocks, got {len(strides)} strides")
        channels = int(32 * alpha)
        self.widths = [int(width * alpha) for width, _ in _BLOCKS]
        """Channels that each block gives."""
        self.stem = _conv_bn_relu(3, channels, kernel=3, stride=stem_stride, groups=1)
        blocks: list[nn.Module] = []
        for out, stride in zip(self.widths, strides, strict=True):
            blocks.append(
                nn.Sequential(
                    _conv_bn_relu(channels, channels, kernel=3, stride=stride, groups=channels),
                    _conv_bn_relu(channels, out, kernel=1, stride=1, groups=1),
                )
            )
            channels = out
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, classes)
        self.feature_width = channels

    def embed(self, images: Tensor) -> Tensor:
        """Pooled features `[n, feature_width]`, the input of the classifier."""
        return torch.mean(self.blocks(self.stem(images)), dim=(2, 3))

    def chain(self) -> list[nn.Module]:
        """Blocks whose composition is `forward`. The network can be cut between any two of them."""
        return [self.stem, *self.blocks, nn.Sequential(MeanPool(), self.classifier)]

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(images))
        return logits
