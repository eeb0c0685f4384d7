"""The part of a learner that a strategy reads, without a network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__all__ = ["constant"]


def constant(rate: float, *, steps: int, momentum: float = 0.0, epochs: int = 1) -> Any:
    """A run in which all steps have the same learning rate."""
    config = SimpleNamespace(peak_rate=rate, momentum=momentum, seed=0, all_epochs=epochs)
    return SimpleNamespace(config=config, steps=steps, rate=lambda step: rate)
