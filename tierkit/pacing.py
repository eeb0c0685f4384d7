"""Exponential backoff, and a token bucket for rate limits. Pure: time and chance are passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["TokenBucket", "backoff_s"]

_MOST_DOUBLINGS = 30


def backoff_s(failures: int, *, first_s: float, cap_s: float, chance: float = 1.0) -> float:
    """Seconds to wait after this number of failures in a row (at least 1): `first_s`, doubled each time up to `cap_s`.

    Args:
        chance: 0 to 1, decides the upper half, so that those who failed together do not come back together.
    """
    full_s = min(cap_s, first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))
    return full_s * (0.5 + 0.5 * chance)


@dataclass(slots=True)
class TokenBucket:
    """Holds at most `burst` tokens, with which it starts, and gains `per_s` of them a second. Tokens may be taken that
    are not there yet; then it takes longer until there are some."""

    per_s: float
    burst: float
    level: float = math.inf
    """Tokens at the time `at`; below 0 if more have been taken than were there."""
    at: float = 0.0

    def wait_s(self, now: float, tokens: float = 1.0) -> float:
        """Seconds until it holds this number of tokens; 0 if it does. Changes nothing."""
        return max(0.0, (tokens - self._level_at(now)) / self.per_s)

    def take(self, now: float, tokens: float = 1.0) -> float:
        """Take tokens; returns the seconds until they would have been there."""
        self.level, self.at = self._level_at(now) - tokens, now
        return max(0.0, -self.level / self.per_s)

    def _level_at(self, now: float) -> float:
        return min(self.burst, self.level + (now - self.at) * self.per_s)
