"""Time per image of a loaded network, by batch size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from models.data import read_sample
from tierkit.inference.model import Model
from tierkit.tensors import Array

__all__ = ["least_ms_per_image", "measure_ms_per_image", "probe_images"]

_REPEATS = 9
_LEAST_S = 0.05


def measure_ms_per_image(model: Model, images: Array, batch_sizes: Sequence[int]) -> dict[int, float]:
    """Milliseconds per image of a network by batch size; see `least_ms_per_image`.

    Args:
        images: UINT8 `[n, h, w, 3]`; repeated where a batch needs more.
    """
    return {
        size: least_ms_per_image(lambda batch: model.run({"images": batch}, ["logits"]), images, size)
        for size in batch_sizes
    }


def least_ms_per_image(work: Callable[[Array], object], images: Array, batch_size: int) -> float:
    """Milliseconds per image that `work` takes for a batch: the smallest of nine means, each over at least 0.05 s.

    The smallest mean is what the work needs; larger ones have other programs' time in them.

    Args:
        images: UINT8 `[n, h, w, 3]`; repeated where a batch needs more.
    """
    batch = np.resize(images, (batch_size, *images.shape[1:]))
    work(batch)
    means: list[float] = []
    for _ in range(_REPEATS):
        runs, begun = 0, time.perf_counter()
        while (spent := time.perf_counter() - begun) < _LEAST_S:
            work(batch)
            runs += 1
        means.append(spent * 1e3 / (runs * batch_size))
    return min(means)


def probe_images(shape: tuple[int, int, int]) -> Array:
    """Images of a shape to measure with: the bundled sample if it fits, else fixed noise."""
    sample = read_sample().images
    if sample.shape[1:] == shape:
        return sample
    return np.random.default_rng(0).integers(0, 256, (256, *shape), dtype=np.uint8)
