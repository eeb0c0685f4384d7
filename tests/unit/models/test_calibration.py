"""Temperature scaling and the calibration error, against values known in advance."""

import numpy as np
import pytest

from models.calibration import expected_calibration_error, fit_temperature, negative_log_likelihood
from models.session import softmax


def drawn(temperature: float, n: int = 20_000):
    """Logits, and labels drawn from their softmax at `temperature`: that is the temperature that fits."""
    random = np.random.default_rng(3)
    logits = random.normal(0, 3, (n, 5)).astype(np.float32)
    chances = softmax(logits.astype(np.float64), temperature)
    labels = (chances.cumsum(axis=1) < random.random((n, 1))).sum(axis=1)
    return logits, labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_that_made_the_labels_is_found(temperature: float):
    assert fit_temperature(*drawn(temperature)) == pytest.approx(temperature, rel=0.04)


def test_the_fitted_temperature_has_the_least_likelihood_loss():
    logits, labels = drawn(1.7, 2000)
    best = fit_temperature(logits, labels)
    loss = negative_log_likelihood(logits, labels, best)
    assert loss <= negative_log_likelihood(logits, labels, best * 1.02)
    assert loss <= negative_log_likelihood(logits, labels, best / 1.02)


def test_a_fitted_network_is_calibrated():
    logits, labels = drawn(2.5)
    before = expected_calibration_error(softmax(logits), labels)
    after = expected_calibration_error(softmax(logits, fit_temperature(logits, labels)), labels)
    assert after < 0.02 < before


def test_the_calibration_error_of_a_case_done_by_hand():
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    labels = np.array([0, 1, 1, 1])
    # Two images at 0.9, one right: |0.5 - 0.9|. Two at 0.6, both right: |1 - 0.6|. Halves of the whole.
    assert expected_calibration_error(probabilities, labels) == pytest.approx(0.5 * 0.4 + 0.5 * 0.4)


def test_large_logits_do_not_overflow():
    logits = np.array([[1e4, 0.0], [-1e4, 0.0]], dtype=np.float32)
    assert softmax(logits).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert np.isfinite(negative_log_likelihood(logits, np.array([0, 1]), 1.0))
