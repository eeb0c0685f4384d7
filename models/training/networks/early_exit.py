"""A network in two parts, with an early exit on the device (DDNN: Teerapittayanon et al. 2017, arXiv:1709.01921).

The device's part is the whole MobileNet v1. Its first blocks feed both its own classifier, which is the early exit, and
the cloud's part, which continues with the last stages of a wide residual network. Both exits are trained together, on
the sum of their losses (section 3.2 of the source).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.training.networks.mobilenet import MobileNetV1
from models.training.networks.wideresnet import Block

__all__ = ["EarlyExit"]


class EarlyExit(nn.Module):
    """Float images `[n, 3, h, w]` to the upper exit's logits `[n, classes]`.

    Args:
        classes: number of outputs of each exit.
        shared: blocks of the device's network before the cloud's part begins.
        width: multiplier of the channels 32 and 64 of the cloud's two stages; the second halves height and width.
        blocks: residual blocks in each of them.
        alpha, stem_stride, block_strides: options of the device's network, see `MobileNetV1`.
    """

    def __init__(
        self,
        classes: int,
        *,
        shared: int = 3,
        width: int = 4,
        blocks: int = 2,
        alpha: float = 0.5,
        stem_stride: int = 1,
        block_strides: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        if blocks > 100:
            raise ValueError(f"blocks may be at most 100, got {blocks}")
        self.device = MobileNetV1(classes, alpha=alpha, stem_stride=stem_stride, block_strides=block_strides)
        if not 1 <= shared <= len(self.device.blocks):
            raise ValueError(f"the device has {len(self.device.blocks)} blocks to share, got {shared}")
        self.shared = shared
        channels = self.device.widths[shared - 1]
        upper: list[nn.Module] = []
        for stage, base in enumerate((32, 64)):
            for index in range(blocks):
                upper.append(Block(channels, base * width, 2 if stage > 0 and index == 0 else 1))
                channels = base * width
        self.upper = nn.Sequential(*upper)
        self.norm = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)
        self.feature_width = channels
        for module in self.upper.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def exits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the upper exit and of the device's, each `[n, classes]`."""
        sent = self.sent(images)
        local = torch.mean(self.device.blocks[self.shared :](sent), dim=(2, 3))
        return self.classifier(self._pooled(sent)), self.device.classifier(local)

    def sent(self, images: Tensor) -> Tensor:
        """Features that the device sends up, `[n, c, h', w']`, at least 0."""
        features: Tensor = self.device.blocks[: self.shared](self.device.stem(images))
        return features

    def embed(self, images: Tensor) -> Tensor:
        """Pooled features `[n, feature_width]`, the input of the upper classifier."""
        return self._pooled(self.sent(images))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(images))
        return logits

    def _pooled(self, sent: Tensor) -> Tensor:
        return torch.mean(F.relu(self.norm(self.upper(sent))), dim=(2, 3))
