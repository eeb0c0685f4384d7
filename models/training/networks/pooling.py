"""The mean of a feature map, as a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["MeanPool"]


class MeanPool(nn.Module):
    """Features `[n, c, h, w]` to their means `[n, c]`. It has no parameters."""

    def forward(self, features: Tensor) -> Tensor:
        return torch.mean(features, dim=(2, 3))
