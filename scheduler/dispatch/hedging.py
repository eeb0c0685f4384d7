"""Hedged requests: when a straggler gets a second attempt on another device. Pure; durations are passed in.

An attempt is a straggler once it has been on its device for longer than 95 % of the job's tasks there took
(Dean, Barroso: The tail at scale, CACM 2013).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["hedge_after_s"]

_HEDGE_QUANTILE = 0.95
_HEDGE_SAMPLES = 10
"""With fewer answers of a device its 95th percentile is unknown."""


def hedge_after_s(durations_s: Sequence[float]) -> float | None:
    """Seconds after which an attempt is a straggler, from the durations of others on the same device; None if too few
    are known."""
    if len(durations_s) < _HEDGE_SAMPLES:
        return None
    ranked = sorted(durations_s)
    return ranked[math.ceil(_HEDGE_QUANTILE * len(ranked)) - 1]
