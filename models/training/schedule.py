"""Learning rate of a step."""

from __future__ import annotations

import math

from models.training.config import TrainConfig

__all__ = ["learning_rate"]


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Rate of step `step` of `steps`.

    Linear warm-up over the share `config.warmup`, then down to zero: along a line (`one-cycle`, arXiv:1708.07120) or
    half a cosine (`cosine`, arXiv:1608.03983). Or the same for all steps (`constant`).
    """
    if config.schedule == "constant":
        return config.peak_rate
    rising = max(1, round(config.warmup * steps))
    if step < rising:
        return config.peak_rate * (step + 1) / rising
    progress = (step - rising) / max(1, steps - rising)
    if config.schedule == "cosine":
        return config.peak_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return config.peak_rate * (1 - progress)
