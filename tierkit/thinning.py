"""A growing curve in a bounded number of points. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

__all__ = ["thinned"]

P = TypeVar("P")

_LEAST = 1e-3
"""The whole length of a curve, should all of its points be at one place."""


def thinned(points: Sequence[P], most: int, place: Callable[[P], float], join: Callable[[P, P], P]) -> tuple[P, ...]:
    """The points of a curve, at most about `most`. Once there are more, the curve is cut into at most `most / 2` equal
    spans, and the last point of each span stays, with the first point of all.

    Args:
        most: number of points that are left as they are.
        place: of a point; rises from point to point.
        join: gives the second of two points, with what only the first one has.
    """
    if len(points) <= most:
        return tuple(points)
    begun = place(points[0])
    # Powers of two: the spans of a later cut are made of whole spans of this one, so gaps do not add up.
    span = 2.0 ** math.ceil(math.log2(max(_LEAST, place(points[-1]) - begun) / (most // 2)))
    kept = [points[0]]
    dropped: P | None = None
    for each, following in pairwise((*points[1:], None)):
        assert each is not None
        here = each if dropped is None else join(dropped, each)
        if following is None or (place(following) - begun) // span > (place(each) - begun) // span:
            kept.append(here)
            dropped = None
        else:
            dropped = here
    return tuple(kept)
