"""Networks between the present one and the trained one. The length of the step is chosen on pictures, not in training.

A network that was tuned to new pictures forgets some of what it knew. The mean of both networks' weights keeps most of
either (Wortsman et al. 2022, arXiv:2109.01903).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from training.improve.gate import Comparison

__all__ = ["SHARES", "Candidate", "best", "worth"]

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of the way from the present weights to the trained ones."""


class Candidate(Protocol):
    """A network that may become a release."""

    @property
    def passes(self) -> bool:
        """True if the gate lets it through."""

    @property
    def gain(self) -> float:
        """Its worth; see `worth`."""


_FORGETTING = 2.0
"""Weight of accuracy lost on labelled pictures. Small steps forget little and gain most, and the estimates of both have
errors."""


def worth(newest: Comparison | None, labelled: Comparison | None) -> float:
    """The worth of a network among others: what it gains on the newest pictures, less what it forgets on labelled ones.

    Args:
        newest, labelled: comparisons with the present network; None without such pictures.
    """
    if newest is None or not newest.pictures:
        return 0.0 if labelled is None else labelled.change
    return newest.change + _FORGETTING * min(0.0, 0.0 if labelled is None else labelled.change)


C = TypeVar("C", bound=Candidate)


def best(candidates: Iterable[C]) -> C:
    """The candidate that gains most of those that pass, and of all if none passes. The first one wins a tie."""
    return max(candidates, key=lambda each: (each.passes, each.gain))
