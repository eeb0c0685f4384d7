"""Hedged requests: when a straggler gets a second attempt on another device. Pure.

An attempt is a straggler once it has been on its device for longer than 95 % of the job's tasks there took
(Dean, Barroso: The tail at scale, CACM 2013).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.core.work import Attempt, Phase
from tierkit.types import Recovery

__all__ = ["hedge_after_s", "hedge_at"]

_HEDGE_QUANTILE = 0.95
_HEDGE_SAMPLES = 10
"""Least answers of a device: with fewer, its 95th percentile is unknown."""


def hedge_after_s(durations_s: Sequence[float]) -> float | None:
    """Seconds after which an attempt is a straggler, from the durations of others on the same device; None if too few
    are known."""
    if len(durations_s) < _HEDGE_SAMPLES:
        return None
    ranked = sorted(durations_s)
    return ranked[math.ceil(_HEDGE_QUANTILE * len(ranked)) - 1]


def hedge_at(attempt: Attempt) -> float | None:
    """Return the time at which an attempt becomes a straggler; None if it may not be hedged."""
    job, facts = attempt.job, attempt.facts
    alone = len(attempt.task.running) == 1 and attempt.phase is not Phase.ANSWERED
    if not alone or job.ending or job.facts.policy.recovery is not Recovery.MONITOR:
        return None
    after_s = hedge_after_s(job.durations.get(facts.node_id, ()))
    return None if after_s is None else facts.started + after_s
