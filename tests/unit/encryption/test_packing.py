"""Features as UINT8: what is lost, what is refused."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from encryption.packing import Quantiser
from tierkit.errors import InvalidInput

FEATURES = arrays.arrays(np.float32, (2, 3, 4, 4), elements=st.floats(-8, 8, width=32))


@given(FEATURES, st.integers(1, 8))
def test_a_feature_within_the_range_comes_back_within_half_a_step(features: np.ndarray, bits: int):
    quantiser = Quantiser.for_range(-8.0, 8.0, levels=2**bits)
    back = quantiser.unpack(quantiser.pack(features))
    assert back.dtype == np.float32
    # The zero point is rounded, so that zero is a level: at the ends half a step more can be missing.
    assert np.abs(back - features).max() <= quantiser.scale * 1.001


@given(FEATURES)
def test_what_lies_outside_goes_to_the_nearest_level(features: np.ndarray):
    quantiser = Quantiser.for_range(0.0, 2.0)
    back = quantiser.unpack(quantiser.pack(features))
    np.testing.assert_allclose(back, np.clip(features, 0, 2), atol=quantiser.scale * 0.501)


@given(arrays.arrays(np.uint8, (2, 3, 4, 4)), st.integers(0, 255))
def test_each_level_comes_back_as_itself(packed: np.ndarray, zero_point: int):
    quantiser = Quantiser(scale=0.037, zero_point=zero_point)
    assert (quantiser.pack(quantiser.unpack(packed)) == packed).all()


@given(st.floats(-100, 0), st.floats(0.01, 100), st.integers(1, 8))
def test_zero_is_a_level_of_its_own(low: float, high: float, bits: int):
    quantiser = Quantiser.for_range(low, high, levels=2**bits)
    zero = np.zeros((1, 1, 1, 1), np.float32)
    assert quantiser.unpack(quantiser.pack(zero)) == zero


def test_the_formula_is_the_manifests():
    quantiser = Quantiser(scale=0.5, zero_point=3, levels=16)
    values = np.array([-9.0, -1.5, -0.2, 0.0, 0.3, 1.1, 99.0], np.float32).reshape(1, 1, 1, 7)
    assert quantiser.pack(values).ravel().tolist() == [0, 0, 3, 3, 4, 5, 15]
    assert quantiser.unpack(np.array([0, 3, 15], np.uint8)).tolist() == [-1.5, 0.0, 6.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_features_that_are_no_numbers_are_refused(bad: float):
    features = np.zeros((1, 2, 2, 2), np.float32)
    features[0, 1, 1, 0] = bad
    with pytest.raises(InvalidInput, match="NaN or infinity"):
        Quantiser.for_range(0, 1).pack(features)


def test_a_value_that_is_no_level_is_refused():
    with pytest.raises(InvalidInput, match="is 17; this encoder has 16 levels"):
        Quantiser(scale=1.0, zero_point=0, levels=16).unpack(np.array([3, 17], np.uint8))


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (1.0, -1.0), (0.0, float("nan")), (0.0, float("inf"))])
def test_a_range_without_extent_is_refused(low: float, high: float):
    with pytest.raises(ValueError, match="no range"):
        Quantiser.for_range(low, high)
