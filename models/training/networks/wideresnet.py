"""Wide residual network WRN-depth-width (Zagoruyko & Komodakis 2016, arXiv:1605.07146, table 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.training.networks.pooling import MeanPool

__all__ = ["Block", "WideResNet"]


class Block(nn.Module):
    """Pre-activation block: BN-ReLU-conv3x3 twice, plus the shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.shortcut = (
            nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            if stride != 1 or channels_in != channels_out
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x), inplace=True)
        out: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active)), inplace=True))
        # Where the shape changes, the shortcut starts from the activation (as in the authors' code).
        return out + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """Float images `[n, 3, h, w]` to logits `[n, classes]`.

    Args:
        classes: number of outputs.
        depth: 6 k + 4 convolutional layers, at most 1,000.
        width: multiplier of the channels 16, 32, 64.
    """

    def __init__(self, classes: int, *, depth: int = 28, width: int = 10) -> None:
        super().__init__()
        if not 10 <= depth <= 1_000 or (depth - 4) % 6:
            raise ValueError(f"the depth of a wide residual network is 6 k + 4 from 10 to 1,000, got {depth}")
        blocks_per_stage = (depth - 4) // 6
        self.encoder = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        channels = 16
        blocks: list[nn.Module] = []
        for stage, base in enumerate((16, 32, 64)):
            for index in range(blocks_per_stage):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Block(channels, base * width, stride))
                channels = base * width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)
        self.feature_width = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def embed(self, images: Tensor) -> Tensor:
        """Pooled features `[n, feature_width]`, the input of the classifier."""
        return torch.mean(F.relu(self.norm(self.blocks(self.encoder(images)))), dim=(2, 3))

    def chain(self) -> list[nn.Module]:
        """Blocks whose composition is `forward`. The network can be cut between any two of them."""
        tail = nn.Sequential(self.norm, nn.ReLU(), MeanPool(), self.classifier)
        return [self.encoder, *self.blocks, tail]

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(images))
        return logits
