"""ResNet-34 (He et al. 2015, arXiv:1512.03385, table 1) with a choice of stem for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.training.networks.pooling import MeanPool
from tierkit.errors import MissingExtra

__all__ = ["ResNet34"]

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # channels, blocks, stride of the first block


class ResNet34(nn.Module):
    """Float images `[n, 3, h, w]` to logits `[n, classes]`.

    The first convolution carries a bias: it is the encoder that can run on another machine (9,472 parameters with the
    7x7 kernel), where no batch normalisation follows it.

    Raises:
        MissingExtra: torchvision is not installed; the other networks need none.

    Args:
        classes: number of outputs.
        stem_kernel: 7 (stride 2, as in the paper) or 3 (stride 1, usual for 32x32 images).
        stem_pool: True if the paper's 3x3/2 max-pooling follows the first convolution. Without it every later layer
            sees four times as many positions.
    """

    def __init__(self, classes: int, *, stem_kernel: int = 7, stem_pool: bool = False) -> None:
        super().__init__()
        if stem_kernel not in (3, 7):
            raise ValueError(f"stem_kernel is 3 or 7, got {stem_kernel}")
        try:
            from torchvision.models.resnet import BasicBlock
        except ImportError as error:
            raise MissingExtra("train", "the network resnet-34") from error
        self.encoder = nn.Conv2d(
            3, 64, stem_kernel, stride=2 if stem_kernel == 7 else 1, padding=stem_kernel // 2, bias=True
        )
        self.norm = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, padding=1) if stem_pool else nn.Identity()
        channels = 64
        blocks: list[nn.Module] = []
        for width, depth, stride in _STAGES:
            for index in range(depth):
                step = stride if index == 0 else 1
                shortcut = (
                    nn.Sequential(nn.Conv2d(channels, width, 1, step, bias=False), nn.BatchNorm2d(width))
                    if step != 1 or channels != width
                    else None
                )
                blocks.append(BasicBlock(channels, width, step, shortcut))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, classes)
        self.feature_width = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock):
                # Each residual branch starts at zero (arXiv:1706.02677, section 5.1): the early epochs learn faster.
                nn.init.zeros_(module.bn2.weight)

    def embed(self, images: Tensor) -> Tensor:
        """Pooled features `[n, feature_width]`, the input of the classifier."""
        stem = self.pool(self.relu(self.norm(self.encoder(images))))
        return torch.mean(self.blocks(stem), dim=(2, 3))

    def chain(self) -> list[nn.Module]:
        """Blocks whose composition is `forward`. The network can be cut between any two of them."""
        stem = nn.Sequential(self.encoder, self.norm, self.relu, self.pool)
        return [stem, *self.blocks, nn.Sequential(MeanPool(), self.classifier)]

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(images))
        return logits
