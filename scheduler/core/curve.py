"""The curve of a run, in a bounded number of points. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierkit.thinning import thinned

__all__ = ["MOST_POINTS", "Point", "extended"]

MOST_POINTS = 500


class Point(NamedTuple):
    """One moment of a run."""

    at: float
    """Seconds since 1970."""
    done: int
    """Steps."""
    loss: float | None
    accuracy: float | None
    updates: int | None = None
    """Total of all workers since the run began; None if it is not known, as in the next two."""
    bytes_moved: int | None = None
    """Bytes of updates and weights."""
    staleness: float | None = None
    """Mean over the updates."""


def extended(curve: Sequence[Point], point: Point) -> tuple[Point, ...]:
    """The curve with one more point; see `tierkit.thinning.thinned`. A measurement of a dropped point passes to the
    next point if that has none."""
    return thinned((*curve, point), MOST_POINTS, lambda each: each.at, _joined)


def _joined(before: Point, after: Point) -> Point:
    return after._replace(
        loss=before.loss if after.loss is None else after.loss,
        accuracy=before.accuracy if after.accuracy is None else after.accuracy,
    )
