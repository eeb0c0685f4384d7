"""Estimates of the speed of nodes and the delay of links, from durations of attempts. Pure functions.

An estimate is an exponentially weighted moving average (Roberts, Control Chart Tests Based on Geometric Moving
Averages, 1959; TCP's round-trip time, RFC 6298, is the same with other weights):

    value' = (1 - w) value + w observation

It starts from a prior: a node's own measurement at its start, or the link times of the settings. After each
`HALF_LIFE_S` without an observation, the earlier observations count half as much. A node that was slow for a while gets
no tasks, so only time can show that it is fast again.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

__all__ = ["HALF_LIFE_S", "WEIGHT", "Estimate"]

WEIGHT = 0.3
"""Weight of one observation: 90 % of a lasting change are known after seven."""

CHANGE, CHANGE_WEIGHT = 1.5, 0.7
"""An observation that is this many times more or less than expected counts for a change, not for noise, and gets this
weight. A node that has become four times slower would otherwise get too many tasks for most of a short job. If the
observation was an accident, the next one corrects the estimate as quickly."""

HALF_LIFE_S = 30.0


class Estimate(Struct, frozen=True, kw_only=True):
    """A moving average, in the unit of its observations."""

    prior: float
    """Known beforehand."""
    learned: float = 0.0
    """Sum of what the observations add to the prior."""
    samples: int = 0
    at: float = 0.0
    """Time of the last observation."""

    def value(self, now: float) -> float:
        """The estimate at `now`."""
        idle_s = max(0.0, now - self.at)
        return self.prior + self.learned * math.pow(0.5, idle_s / HALF_LIFE_S)

    def at_least(self, bound: float, now: float) -> Estimate:
        """The estimate after it has shown that the truth is `bound` or more, though not how much."""
        return self if bound <= self.value(now) else replace(self, learned=bound - self.prior, at=now)

    def observe(
        self, observation: float, now: float, *, trust_first: bool = False, may_change: bool = False
    ) -> Estimate:
        """The estimate after one more observation.

        Args:
            trust_first: the first observation replaces the prior, which is a mere guess.
            may_change: one that is far off is a change.
        """
        if trust_first and self.samples == 0:
            return Estimate(prior=observation, samples=1, at=now)
        before = self.value(now)
        changed = may_change and not before / CHANGE <= observation <= before * CHANGE
        weight = CHANGE_WEIGHT if changed else WEIGHT
        after = (1 - weight) * before + weight * observation
        return Estimate(prior=self.prior, learned=after - self.prior, samples=self.samples + 1, at=now)
