"""Time series in ring buffers of fixed size, and percentiles of latencies from counts."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["Latencies", "RingBuffer"]

_LEAST_MS = 0.1
_RATIO = 1.05
_BUCKETS = 400
"""0.1 ms times 1.05 to the 400th power: over eight hours."""


class Latencies:
    """Latencies as counts in buckets, each 5 % wider than the one before."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)

    def add(self, ms: float, images: int) -> None:
        """Count a number of images with this latency."""
        place = math.ceil(math.log(max(ms, _LEAST_MS) / _LEAST_MS) / math.log(_RATIO))
        self._counts[min(place, _BUCKETS - 1)] += images

    def join(self, other: Latencies) -> None:
        """Add the counts of another one."""
        self._counts += other._counts

    def percentile(self, percent: float) -> float:
        """Milliseconds, at most 5 % too many; NaN where nothing was counted."""
        total = int(self._counts.sum())
        if not total:
            return math.nan
        place = int(np.searchsorted(np.cumsum(self._counts), total * percent / 100))
        return float(_LEAST_MS * _RATIO**place)


class RingBuffer:
    """Rows of figures, one for each step of time; the oldest make room.

    Args:
        columns: figures of a row.
        step_s: seconds of a row.
        length: rows that are kept.
    """

    def __init__(self, columns: int, step_s: int, length: int) -> None:
        self.step_s = step_s
        self._rows = np.full((length, columns), np.nan, np.float32)
        self._last: int | None = None
        """Number of the newest row: its time in steps since 1970."""
        self._first = 0
        """The same of the first one."""

    def put(self, at: float, row: list[float]) -> None:
        """Keep the row of the step that holds the time `at`, in seconds since 1970. Steps that were left out have NaN;
        a second row of a step takes the place of the first, and one of the past is left out."""
        number, length = int(at // self.step_s), len(self._rows)
        if self._last is None:
            self._first = self._last = number
        if number < self._last:
            return
        for missing in range(max(self._last + 1, number - length + 1), number):
            self._rows[missing % length] = np.nan
        self._rows[number % length] = row
        self._last = number

    def since(self, at: float) -> tuple[int, NDArray[np.float32]]:
        """The rows from a time on, in seconds since 1970.

        Returns:
            Start of the first row, in seconds since 1970, and the rows, oldest first.
        """
        length = len(self._rows)
        if self._last is None:
            return int(at), self._rows[:0]
        oldest = max(self._first, self._last - length + 1)
        first = min(max(math.floor(at / self.step_s), oldest), self._last + 1)
        order = [number % length for number in range(first, self._last + 1)]
        return first * self.step_s, self._rows[order]
