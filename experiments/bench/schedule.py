"""Arrival times of requests, and the levels of load of a command line. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierkit.errors import InvalidInput

__all__ = ["arrivals", "parse_range"]

_MAX_LEVELS = 1000
_CHUNK = 1024


def arrivals(rate_per_s: float, *, seed: int = 0) -> Iterator[float]:
    """Seconds from the start at which requests are due, ascending, without end.

    The gaps are drawn from an exponential distribution, as independent clients arrive. The same seed gives the same
    times.
    """
    random = np.random.default_rng(seed)
    now = 0.0
    while True:
        # The clock starts at an arbitrary moment, so the first gap is drawn as well.
        for gap in random.exponential(1.0 / rate_per_s, _CHUNK).tolist():
            now += gap
            yield now


def parse_range(text: str, *, whole: bool, most: float) -> list[float]:
    """Levels of "start[:end[:step]]", end included, with a default step of 1, as in perf_analyzer.

    Args:
        whole: Accept whole numbers only.
        most: Highest level that can be measured.

    Raises:
        InvalidInput: The text is not such a range, or the range is too long.
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
    if not start <= end <= most:
        raise InvalidInput(f"{text!r} must ascend, to at most {most:,.0f}")
    count = int((end - start) / step + 1e-9) + 1
    if count > _MAX_LEVELS:
        raise InvalidInput(f"{text!r} has {count} levels; at most {_MAX_LEVELS} are measured")
    return [start + number * step for number in range(count)]
