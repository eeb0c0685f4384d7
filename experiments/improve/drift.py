"""A camera that changes: pictures lose sharpness and contrast. And the cloud's first step, which restores contrast."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageFilter

from tierkit.tensors import Array

__all__ = ["BLUR", "CONTRAST", "drifted", "standardised"]

BLUR, CONTRAST = 0.4, 0.55
"""Radius of the blur in pixels, and factor of the contrast. Chosen before anything was learned: the end network loses
about 15 points, the cloud at most 5."""
_SPREAD = 50.0
"""Standard deviation of the pixels of a picture below which the cloud raises its contrast."""
_MOST = 4.0


def drifted(images: Array, blur: float = BLUR, contrast: float = CONTRAST) -> Array:
    """UINT8 `[n, h, w, 3]`, blurred, and with less contrast around the mean of each picture."""
    if blur:
        filtered = [np.asarray(Image.fromarray(each).filter(ImageFilter.GaussianBlur(blur))) for each in images]
        images = np.stack(filtered)
    return _scaled(images, np.float32(contrast))


def standardised(images: Array) -> Array:
    """UINT8 `[n, h, w, 3]`: pictures of low contrast get more of it, at most four times as much. Others stay."""
    spread = images.astype(np.float32).std(axis=(1, 2, 3), keepdims=True)
    return _scaled(images, np.clip(_SPREAD / np.maximum(spread, 1e-6), 1.0, _MOST))


def _scaled(images: Array, factor: Array | np.float32) -> Array:
    values = images.astype(np.float32)
    middle = values.mean(axis=(1, 2, 3), keepdims=True)
    scaled: Array = np.clip(middle + (values - middle) * factor, 0, 255).round().astype(np.uint8)
    return scaled
