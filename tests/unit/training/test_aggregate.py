"""Robust centres against their definitions, and against what some of the updates can do to them."""

from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from training.trust.aggregate import centre_of
from training.trust.config import Centre
from training.units import Flat

CENTRES: tuple[Centre, ...] = ("median", "trimmed-mean")
NONE = np.zeros(0, np.float32)


def centre(
    values: list[Flat], *, rule: Centre, cheaters: float = 0.3, weights: list[float] | None = None
) -> list[float]:
    found, _ = centre_of(
        [(each, NONE) for each in values], weights or [1.0] * len(values), centre=rule, cheaters=cheaters
    )
    assert found.dtype == np.float32
    return [float(each) for each in found]


def flat(*values: float) -> Flat:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("rule", "cheaters", "numbers", "expected"),
    [
        ("median", 0.3, [5, 1, 9], 5),
        ("median", 0.3, [5, 1, 9, 6], 5.5),
        ("median", 0.3, [7], 7),
        ("trimmed-mean", 0.0, [1, 2, 9], 4),
        ("trimmed-mean", 0.25, [-100, 1, 2, 900], 1.5),
        # A tenth of three updates is no whole one: part of the outer ones is left out.
        ("trimmed-mean", 0.1, [0, 3, 9], (0.7 * 0 + 3 + 0.7 * 9) / 2.4),
    ],
)
def test_what_the_rules_say_of_a_few_numbers(
    rule: Centre, cheaters: float, numbers: list[float], expected: float
) -> None:
    assert centre([flat(each) for each in numbers], rule=rule, cheaters=cheaters) == pytest.approx([expected])


@pytest.mark.parametrize("rule", CENTRES)
def test_a_weight_counts_as_much_as_that_many_updates(rule: Centre) -> None:
    numbers = [flat(each) for each in (1, 2, 4)]
    often = [numbers[0]] * 3 + [numbers[1]] * 2 + [numbers[2]] * 2
    assert centre(numbers, rule=rule, weights=[3, 2, 2]) == pytest.approx(centre(often, rule=rule), rel=1e-6)


@pytest.mark.parametrize("rule", CENTRES)
def test_a_long_vector_is_the_same_in_pieces(rule: Centre) -> None:
    values = list(np.random.default_rng(0).standard_normal((5, 40_000)).astype(np.float32))
    whole = centre(values, rule=rule)
    if rule == "median":
        assert whole == [float(each) for each in np.median(values, axis=0)]
    if rule == "trimmed-mean":
        ordered = np.sort(np.array(values, np.float64), axis=0)
        # 1.5 of 5 at each end.
        expected = (0.5 * ordered[1] + ordered[2] + 0.5 * ordered[3]) / 2
        np.testing.assert_allclose(whole, expected, atol=1e-6)


NUMBERS = st.floats(-100, 100, width=32)
HUGE = st.floats(-(2.0**127), 2.0**127, width=32)


@settings(max_examples=60)
@given(
    honest=st.lists(NUMBERS, min_size=7, max_size=7),
    wrong=st.lists(HUGE, min_size=3, max_size=3),
    order=st.permutations(range(10)),
)
def test_three_of_ten_move_median_and_trimmed_mean_no_further_than_the_honest_reach(
    honest: list[float], wrong: list[float], order: list[int]
) -> None:
    numbers = [*honest, *wrong]
    values = [flat(numbers[each]) for each in order]
    for rule in ("median", "trimmed-mean"):
        (found,) = centre(values, rule=rule)
        assert min(honest) <= found <= max(honest)


@settings(max_examples=60)
@given(values=st.lists(NUMBERS, min_size=1, max_size=64), order=st.randoms())
def test_a_centre_does_not_depend_on_the_order_and_is_the_plain_rule(values: list[float], order: object) -> None:
    shuffled = list(values)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    for rule in ("median", "trimmed-mean"):
        (one,), (other,) = (centre([flat(n) for n in each], rule=rule) for each in (values, shuffled))
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)
    assert centre([flat(n) for n in values], rule="median") == pytest.approx([median(values)], rel=1e-6, abs=1e-6)


def test_buffers_have_a_centre_too() -> None:
    updates = [(flat(n), flat(10 * n, n)) for n in (1, 2, 900)]
    assert centre_of(updates, [1, 1, 1], centre="median", cheaters=0.3)[1].tolist() == [20, 2]
