"""How fast a loaded network runs, by batch size."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from models.data import read_sample
from tierkit.model import Array, Model

__all__ = ["measure_ms_per_image", "probe_images"]

_REPEATS = 9
_LEAST_S = 0.2


def measure_ms_per_image(model: Model, images: Array, batch_sizes: Sequence[int]) -> dict[int, float]:
    """Milliseconds per image by batch size: the smallest of nine means, each over at least 0.2 s of runs.

    The smallest mean is what the network needs; larger ones have other programs' time in them.

    Args:
        images: UINT8 `[n, h, w, 3]`; repeated where a batch needs more.
    """
    answer: dict[int, float] = {}
    for size in batch_sizes:
        batch = np.resize(images, (size, *images.shape[1:]))
        model.run({"images": batch}, ["logits"])
        means: list[float] = []
        for _ in range(_REPEATS):
            runs, begun = 0, time.perf_counter()
            while (spent := time.perf_counter() - begun) < _LEAST_S:
                model.run({"images": batch}, ["logits"])
                runs += 1
            means.append(spent * 1e3 / (runs * size))
        answer[size] = min(means)
    return answer


def probe_images(shape: tuple[int, int, int]) -> Array:
    """Images of a shape to measure with: the bundled sample where it fits, else a fixed noise."""
    sample = read_sample().images
    if sample.shape[1:] == shape:
        return sample
    return np.random.default_rng(0).integers(0, 256, (256, *shape), dtype=np.uint8)
