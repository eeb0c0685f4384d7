"""Structural similarity that gradients pass through."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ssim"]

_SIZE, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03


def ssim(images: Tensor, others: Tensor) -> Tensor:
    """SSIM of each image pair, `[n]`: mean over colours and over the windows that lie within the image.

    Wang et al. 2004, https://doi.org/10.1109/TIP.2003.819861, equation 13, with the paper's Gaussian window (11x11,
    sigma 1.5), K1 = 0.01 and K2 = 0.03.

    Args:
        images: float `[n, 3, h, w]` in [0, 1].
        others: likewise.
    """
    images, others = images.float(), others.float()
    rows, columns = (_window(side).to(images.device) for side in images.shape[2:])

    def blur(values: Tensor) -> Tensor:
        return rows @ values @ columns.T

    mean, other_mean = blur(images), blur(others)
    variance, other_variance = blur(images * images) - mean**2, blur(others * others) - other_mean**2
    covariance = blur(images * others) - mean * other_mean
    above = (2 * mean * other_mean + _K1**2) * (2 * covariance + _K2**2)
    below = (mean**2 + other_mean**2 + _K1**2) * (variance + other_variance + _K2**2)
    return (above / below).mean(dim=(1, 2, 3))


def _window(side: int) -> Tensor:
    """`[side - 10, side]`: each row takes the weighted mean of eleven neighbours."""
    offsets = torch.arange(_SIZE) - (_SIZE - 1) / 2
    weights = torch.exp(-(offsets**2) / (2 * _SIGMA**2))
    weights /= weights.sum()
    window = torch.zeros(side - _SIZE + 1, side)
    for row in range(len(window)):
        window[row, row : row + _SIZE] = weights
    return window
