"""Networks between the present one and the trained one: how far the step goes is chosen on pictures, not in training.

A network that was tuned to new pictures forgets some of what it knew. The mean of both networks' weights keeps most of
either (Wortsman et al. 2022, arXiv:2109.01903).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

__all__ = ["SHARES", "Candidate", "best"]

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of the way from the present weights to the trained ones."""


class Candidate(Protocol):
    """A network that may become a release."""

    @property
    def passes(self) -> bool:
        """True if the gate lets it through."""

    @property
    def gain(self) -> float:
        """Accuracy that it gains on the newest pictures."""


C = TypeVar("C", bound=Candidate)


def best(candidates: Iterable[C]) -> C:
    """The candidate that gains most of those that pass, and of all if none passes. The first one wins a tie."""
    return max(candidates, key=lambda each: (each.passes, each.gain))
