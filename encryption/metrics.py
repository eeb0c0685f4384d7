"""How alike two pictures are: SSIM and PSNR, on numpy arrays."""

from __future__ import annotations

import numpy as np

from tierkit.errors import InvalidInput
from tierkit.inference.model import Array

__all__ = ["WINDOW", "gaussian_window", "psnr_db", "ssim"]

WINDOW, _SIGMA = 11, 1.5
_RANGE = 255.0
_C1, _C2 = (0.01 * _RANGE) ** 2, (0.03 * _RANGE) ** 2


def ssim(originals: Array, reconstructions: Array) -> Array:
    """Structural similarity of each pair of images, 1 for the same picture.

    Wang et al., Image quality assessment: from error visibility to structural similarity, 2004, equation 13, with its
    constants: a Gaussian window of 11x11 pixels with a deviation of 1.5, the population's moments, values of 0 to 255.
    It is taken where the window fits into the picture and averaged over positions and colours.

    Args:
        originals, reconstructions: UINT8 `[n, h, w, colours]`, of at least 11x11 pixels.

    Returns:
        FP64 `[n]`.

    Raises:
        InvalidInput: the two are no images of the same shape, or too small.
    """
    _check(originals, reconstructions)
    if min(originals.shape[1:3]) < WINDOW:
        raise InvalidInput(f"SSIM needs images of at least {WINDOW}x{WINDOW} pixels, these are {originals.shape[1:3]}")
    x, y = originals.astype(np.float64), reconstructions.astype(np.float64)
    mean_x, mean_y = _blur(x), _blur(y)
    variance_x = _blur(x * x) - mean_x**2
    variance_y = _blur(y * y) - mean_y**2
    covariance = _blur(x * y) - mean_x * mean_y
    alike = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    spread = (mean_x**2 + mean_y**2 + _C1) * (variance_x + variance_y + _C2)
    return np.asarray((alike / spread).mean(axis=(1, 2, 3)))


def psnr_db(originals: Array, reconstructions: Array) -> float:
    """Peak signal-to-noise ratio in dB of all images together: `10 log10(255^2 / mean squared error)`.

    Args:
        originals, reconstructions: UINT8 `[n, h, w, colours]`.

    Returns:
        Infinity where they are the same.

    Raises:
        InvalidInput: the two are no images of the same shape.
    """
    _check(originals, reconstructions)
    error = float(np.mean((originals.astype(np.float64) - reconstructions.astype(np.float64)) ** 2))
    return float(10 * np.log10(_RANGE**2 / error)) if error else float("inf")


def gaussian_window() -> Array:
    """The window of `ssim` along one axis, FP64 `[11]` with sum 1."""
    offsets = np.arange(WINDOW) - WINDOW // 2
    weights = np.exp(-(offsets**2) / (2 * _SIGMA**2))
    return np.asarray(weights / weights.sum())


def _blur(values: Array) -> Array:
    """Weighted means FP64 `[n, h - 10, w - 10, colours]` under the window at each position where it fits."""
    weights = gaussian_window()
    for axis in (1, 2):
        values = np.lib.stride_tricks.sliding_window_view(values, WINDOW, axis=axis) @ weights
    return values


def _check(originals: Array, reconstructions: Array) -> None:
    for images in (originals, reconstructions):
        if images.ndim != 4 or images.dtype != np.uint8 or not images.size:
            raise InvalidInput(f"images are UINT8 [n, h, w, colours], got {images.dtype} {list(images.shape)}")
    if originals.shape != reconstructions.shape:
        raise InvalidInput(f"{list(originals.shape)} originals for {list(reconstructions.shape)} reconstructions")
