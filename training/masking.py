"""Clipping and noise that a worker applies to an update before sending it, so that less can be read from it. Pure
except for the noise.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from tierkit.documents import Strict
from training.units import Computed

__all__ = ["Masking", "masked"]


class Masking(Strict):
    """The table `[masking]` of a strategy."""

    clip: PositiveFloat
    """Longest update, by its Euclidean norm; a longer one is shortened."""
    noise: NonNegativeFloat = 0.0
    """Standard deviation of the Gaussian noise on each value, as a share of `clip`."""


def masked(computed: Computed, masking: Masking | None, draw: np.random.Generator) -> Computed:
    """Return the update as it is sent; unchanged without masking.

    Clipping and noise follow Abadi et al. 2016 (arXiv:1607.00133, algorithm 1), but apply to a whole update instead of
    each picture's gradient. So no bound of differential privacy follows.

    Args:
        draw: generator of the noise; the host must not be able to predict it.
    """
    if masking is None:
        return computed
    length = float(np.linalg.norm(computed.values.astype(np.float64)))
    values = computed.values * np.float32(min(1.0, masking.clip / length) if length else 1.0)
    if masking.noise:
        deviation = np.float32(masking.clip * masking.noise)
        values = values + deviation * draw.standard_normal(len(values), dtype=np.float32)
    return dataclasses.replace(computed, values=values)
