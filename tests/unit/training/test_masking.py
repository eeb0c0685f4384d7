"""Clipping and noise on updates."""

import numpy as np
import pytest
from pydantic import ValidationError

from training.masking import Masking, masked
from training.strategies.config import OuterConfig, ServerConfig
from training.trust.config import TrustConfig
from training.units import Computed, Flat

VALUES = np.array([3.0, 0.0, -4.0], np.float32)


def update(values: Flat) -> Computed:
    return Computed(values=values, buffers=np.ones(2, np.float32), loss=0.5)


def drawn(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_without_masking_an_update_is_sent_as_it_is() -> None:
    computed = update(VALUES)
    assert masked(computed, None, drawn()) is computed


@pytest.mark.parametrize(("clip", "expected"), [(2.5, [1.5, 0.0, -2.0]), (5.0, [3.0, 0.0, -4.0]), (9.0, [3.0, 0, -4])])
def test_a_longer_update_is_shortened_and_a_shorter_one_stays(clip: float, expected: list[float]) -> None:
    found = masked(update(VALUES), Masking(clip=clip), drawn())
    assert found.values.tolist() == expected
    assert found.values.dtype == np.float32
    assert found.buffers.tolist() == [1.0, 1.0]


def test_an_update_of_nothing_and_one_of_large_values_are_no_trouble() -> None:
    assert masked(update(np.zeros(3, np.float32)), Masking(clip=1), drawn()).values.tolist() == [0, 0, 0]
    huge = np.full(4, 1e30, np.float32)
    assert np.linalg.norm(masked(update(huge), Masking(clip=1), drawn()).values) == pytest.approx(1.0)


def test_the_noise_has_the_deviation_that_was_asked_for_and_is_another_each_time() -> None:
    nothing, draw = update(np.zeros(100_000, np.float32)), drawn()
    masking = Masking(clip=2.0, noise=0.25)
    first, second = masked(nothing, masking, draw).values, masked(nothing, masking, draw).values
    assert first.std() == pytest.approx(0.5, rel=0.02)
    assert abs(first.mean()) < 0.01
    assert first.dtype == np.float32
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("strategy", [ServerConfig(rule="sgd"), OuterConfig()], ids=["server", "outer"])
def test_noise_and_rechecks_contradict_each_other(strategy: ServerConfig | OuterConfig) -> None:
    kind, given = type(strategy), strategy.model_dump(exclude={"masking", "trust"})
    noisy, clipped = Masking(clip=1, noise=0.1), Masking(clip=1)
    with pytest.raises(ValidationError, match=r"masking\.noise"):
        kind(**given, masking=noisy, trust=TrustConfig(recheck=0.1))
    assert kind(**given, masking=clipped, trust=TrustConfig(recheck=0.1)).masking == clipped
    assert kind(**given, masking=noisy, trust=TrustConfig()).masking == noisy
