"""When requests are due, and which levels of load are asked for. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import numpy as np

from tierkit.errors import InvalidInput

__all__ = ["Distribution", "arrivals", "parse_range"]

Distribution = Literal["poisson", "constant"]

_MAX_LEVELS = 1000
_CHUNK = 1024


def arrivals(rate_per_s: float, distribution: Distribution, *, seed: int = 0) -> Iterator[float]:
    """Seconds from the start at which requests are due, ascending, without end.

    `poisson` draws the gaps from an exponential distribution, as independent clients would arrive; `constant` has
    them all equal. The same seed gives the same times.
    """
    if distribution == "constant":
        yield from (number / rate_per_s for number in itertools.count())
    random = np.random.default_rng(seed)
    now = 0.0
    while True:
        # The clock starts at an arbitrary moment, so the first gap is drawn as well.
        for gap in random.exponential(1.0 / rate_per_s, _CHUNK).tolist():
            now += gap
            yield now


def parse_range(text: str, *, whole: bool, most: float) -> list[float]:
    """Read "start[:end[:step]]", end included, step 1 unless given, as perf_analyzer does.

    Args:
        whole: whether only whole numbers make sense.
        most: highest level that can be measured.

    Raises:
        InvalidInput: no range of this form, or one without end.
    """
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or not all(0 < number < float("inf") for number in numbers):
        raise InvalidInput(f"{text!r} is not a range: write start:end:step, all above 0, or one number")
    start, end, step = [*numbers, *(numbers[0], 1.0)[len(numbers) - 1 :]]
    if whole and any(number != int(number) for number in (start, end, step)):
        raise InvalidInput(f"{text!r} must be of whole numbers")
    if end > most:
        raise InvalidInput(f"{text!r} goes beyond {most:,.0f}, the most that is measured")
    if end < start:
        raise InvalidInput(f"{text!r} ends before it starts")
    count = int((end - start) / step + 1e-9) + 1
    if count > _MAX_LEVELS:
        raise InvalidInput(f"{text!r} has {count} levels; at most {_MAX_LEVELS} are measured")
    return [start + number * step for number in range(count)]
