"""Robust centres of several updates, which change little even if some updates are extreme. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from training.trust.config import Centre
from training.units import Flat

__all__ = ["centre_of", "pieces"]

_PIECE = 1 << 14
"""Values of each update that are processed together. With 64 updates, the intermediate values take about 30 MB."""
_HALF = 0.5
_DUST = 1e-9
"""A share of the weight that is only a rounding error, and would let a value of 1e38 in."""

Weights = Sequence[float]


def centre_of(
    updates: Sequence[tuple[Flat, Flat]], weights: Weights, *, centre: Centre, cheaters: float
) -> tuple[Flat, Flat]:
    """The centre of updates that each have values and buffers.

    `median` and `trimmed-mean` are taken coordinate by coordinate (Yin et al. 2018, arXiv:1803.01498, definitions 1 and
    2).

    Args:
        updates: at least one; finite.
        weights: weight of each update, above 0. With equal weights these are the rules of the sources.
        cheaters: share of the updates that may be wrong.
    """
    cut = _HALF if centre == "median" else cheaters
    share = np.asarray(weights, np.float64) / np.sum(weights)
    return tuple(_trimmed(each, share, cut) for each in zip(*updates, strict=True))  # type: ignore[return-value]


def _trimmed(vectors: Sequence[Flat], share: NDArray[np.float64], cut: float) -> Flat:
    """The mean of what is left in each coordinate when `cut` of the weight is taken from both of its ends. A cut of a
    half leaves the value in the middle, or the mean of the two there."""
    found, start = np.empty_like(vectors[0]), 0
    low = min(cut, _HALF - 2 * _DUST)
    for piece in pieces(vectors):
        order = np.argsort(piece, axis=0, kind="stable")
        ends = np.cumsum(share[order], axis=0)
        kept = np.minimum(ends, 1 - low) - np.maximum(ends - share[order], low)
        kept[kept < _DUST] = 0.0
        mean = (np.take_along_axis(piece, order, axis=0) * kept).sum(axis=0) / kept.sum(axis=0)
        found[start : start + piece.shape[1]] = mean
        start += piece.shape[1]
    return found


def pieces(vectors: Sequence[Flat]) -> Iterator[NDArray[np.float64]]:
    """Yield all vectors, some values of each at a time: `[vectors, values]`, in 64 bits, which the square of 1e30
    needs.
    """
    for start in range(0, len(vectors[0]), _PIECE):
        yield np.stack([each[start : start + _PIECE] for each in vectors]).astype(np.float64)
