"""Networks between the present one and the trained one: how far the step goes is chosen on pictures, not in training.

A network that was tuned to new pictures forgets some of what it knew. The mean of both networks' weights keeps most of
either (Wortsman et al. 2022, arXiv:2109.01903).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import torch

from models.training.onnx_network import OnnxNetwork, rewritten

__all__ = ["SHARES", "Candidate", "best", "blended"]

SHARES = (1.0, 0.8, 0.6, 0.4)
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


def blended(content: bytes, trained: bytes, share: float) -> bytes:
    """The file of the network that lies at a share of the way between two files of the same network.

    Args:
        content: file of the present network.
        trained: file with the same layers and other weights.

    Raises:
        WeightsError: they are different networks, or a weight is stored in a form that cannot be written.
    """
    old, new = OnnxNetwork(content), OnnxNetwork(trained)
    with torch.no_grad():
        for before, after in zip(old.layers(), new.layers(), strict=True):
            for one, other in zip(before.parameters, after.parameters, strict=True):
                other.lerp_(one, 1 - share)
    return rewritten(trained, new)


def best(candidates: Iterable[C]) -> C:
    """The candidate that gains most of those that pass, and of all if none passes. The first one wins a tie."""
    return max(candidates, key=lambda each: (each.passes, each.gain))
