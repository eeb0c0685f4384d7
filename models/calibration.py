"""Temperature scaling and expected calibration error (Guo et al. 2017, arXiv:1706.04599)."""

from __future__ import annotations

import numpy as np

from tierkit.tensors import Array

__all__ = ["expected_calibration_error", "fit_temperature", "negative_log_likelihood"]

_GOLDEN = (5**0.5 - 1) / 2
_LOWEST, _HIGHEST = 0.05, 20.0
_STEPS = 60  # narrows the interval by 0.618 ** 60, below the resolution of a float


def negative_log_likelihood(logits: Array, labels: Array, temperature: float) -> float:
    """Mean of `-log softmax(logits / temperature)[label]`; `logits` `[n, classes]`, `labels` int64 `[n]`."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=1, keepdims=True)
    picked = scaled[np.arange(len(labels)), labels]
    return float(np.mean(np.log(np.exp(scaled).sum(axis=1)) - picked))


def fit_temperature(logits: Array, labels: Array) -> float:
    """The temperature in [0.05, 20] with the smallest negative log-likelihood.

    The likelihood has one extremum in the temperature (section 4.2), so a golden-section search on its logarithm
    finds it. A network that makes no error at all has no finite optimum; it gets the lowest temperature.
    """
    low, high = np.log(_LOWEST), np.log(_HIGHEST)
    for _ in range(_STEPS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if negative_log_likelihood(logits, labels, np.exp(left)) < negative_log_likelihood(
            logits, labels, np.exp(right)
        ):
            high = right
        else:
            low = left
    return float(np.exp((low + high) / 2))


def expected_calibration_error(probabilities: Array, labels: Array, bins: int = 15) -> float:
    """Mean over images of |accuracy - confidence| of their bin of confidence, bins of equal width (section 2, eq. 3).

    Args:
        probabilities: `[n, classes]`.
        labels: int64 `[n]`.
    """
    confidence = probabilities.max(axis=1)
    correct = probabilities.argmax(axis=1) == labels
    # Bins are (0, 1/15], (1/15, 2/15], ...: the right edge belongs to the bin.
    bin_of = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gap = np.bincount(bin_of, weights=correct - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(labels))
