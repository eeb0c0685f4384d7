"""The curve of a run's loss and accuracy, in a bounded number of points. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["MOST_POINTS", "Point", "extended"]

MOST_POINTS = 500

_LEAST_S = 1e-3
"""The whole time of a curve, should all of its points be of one moment."""


class Point(NamedTuple):
    """One moment of a run."""

    at: float
    """Seconds since 1970."""
    done: int
    """Steps."""
    loss: float | None
    accuracy: float | None


def extended(curve: Sequence[Point], point: Point) -> tuple[Point, ...]:
    """The curve with one more point. Once it has too many, time is cut into at most 250 equal spans, and the last point
    of each span stays. A measurement of a dropped point passes to the next point if that has
    none."""
    longer = (*curve, point)
    if len(longer) <= MOST_POINTS:
        return longer
    begun = longer[0].at
    # Powers of two: the spans of a later cut are made of whole spans of this one, so gaps do not add up.
    span_s = 2.0 ** math.ceil(math.log2(max(_LEAST_S, point.at - begun) / (MOST_POINTS // 2)))
    kept = [longer[0]]
    loss = accuracy = None
    for each, following in pairwise((*longer[1:], None)):
        assert each is not None
        loss = loss if each.loss is None else each.loss
        accuracy = accuracy if each.accuracy is None else each.accuracy
        if following is None or (following.at - begun) // span_s > (each.at - begun) // span_s:
            kept.append(each._replace(loss=loss, accuracy=accuracy))
            loss = accuracy = None
    return tuple(kept)
