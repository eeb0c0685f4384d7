"""Whether an improved network may become a release."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from training.improve.gate import FEW, FEWEST, Comparison, compared, contradiction, judge, wilson_low


def comparison(pictures: int, gained: int, lost: int, *, finite: bool = True) -> Comparison:
    right = (pictures - gained) // 2 + lost
    return Comparison(
        pictures=pictures, old_right=right, new_right=right + gained - lost, gained=gained, lost=lost, finite=finite
    )


@pytest.mark.parametrize(
    ("validation", "above", "passes"),
    [
        # (pictures, gained, lost) of each
        ((1000, 0, 0), None, True),
        ((1000, 20, 30), None, True),  # 1 point less
        ((1000, 20, 31), None, False),
        ((100, 1, 2), None, True),
        ((100, 1, 3), None, False),
        ((FEWEST - 1, 9, 0), None, False),  # too few to say anything
        (None, None, False),
        (None, (500, 60, 20), True),
        (None, (500, 20, 60), False),
        (None, (500, 12, 11), False),  # chance
        (None, (500, 0, 0), False),
        (None, (FEWEST, 12, 1), True),
        (None, (FEWEST - 1, 12, 1), False),
        ((1000, 20, 30), (500, 60, 20), True),
        ((1000, 20, 31), (500, 60, 20), False),
        ((1000, 30, 20), (500, 20, 21), False),
        ((1000, 0, 0), (FEWEST - 1, 0, 9), True),  # as if there were no answers from above
    ],
)
def test_a_network_that_loses_becomes_no_release(validation, above, passes: bool):
    given = [None if each is None else comparison(*each) for each in (validation, above)]
    verdict = judge(*given)
    assert verdict.passes is passes
    assert verdict.reason


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("pictures", [10, 1000])
def test_numbers_that_are_not_finite_never_pass(where: int, pictures: int):
    both = [comparison(1000, 300, 0), comparison(1000, 300, 0)]
    both[where] = comparison(pictures, pictures // 2, 0, finite=False)
    assert not judge(*both).passes


def test_the_comparison_counts_pictures_that_change_sides():
    old = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    new = np.array([[1, 0], [0, 1], [1, 0], [np.nan, 1]], np.float32)
    found = compared(old, new, np.array([0, 1, 1, 1]))
    assert (found.pictures, found.old_right, found.gained, found.lost, found.finite) == (4, 3, 1, 2, False)
    assert found.change == pytest.approx(-0.25)
    assert compared(old, old, np.array([0, 1, 1, 1])).change == 0


@given(st.integers(0, 300), st.integers(0, 300))
def test_a_network_that_wins_by_chance_alone_rarely_passes(gained: int, lost: int):
    above = comparison(1000, gained, lost)
    if judge(None, above).passes:
        assert gained - lost > 1.5 * (gained + lost) ** 0.5
    assert 0 <= wilson_low(gained, gained + lost) <= 1


def answers(*rows: tuple[int, float, int, bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities of three classes, labels, and who said them, of (class, confidence, label, by a person)."""
    probabilities = np.full((len(rows), 3), 0.0)
    for row, (said, confidence, _, _) in enumerate(rows):
        probabilities[row] = (1 - confidence) / 2
        probabilities[row, said] = confidence
    return probabilities, np.array([row[2] for row in rows]), np.array([row[3] for row in rows])


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([(0, 0.9, 1, False)] * 9, (0, 1, 9, 9)),
        ([(0, 0.9, 1, False)] * 9 + [(0, 0.9, 0, False)], (0, 1, 10, 9)),
        ([(0, 0.6, 1, False)] * 90, None),  # the network is unsure
        ([(0, 0.9, 1, False)] * 9 + [(0, 0.9, 0, False)] * 9, None),
        ([(0, 0.9, 1, False)] * 9 + [(0, 0.9, 2, False)] * 9, None),  # errors that spread
        ([(0, 0.9, 1, False)] * 2, None),  # too few
        ([(0, 0.9, 1, False)] * 9 + [(0, 0.9, 1, True)] * FEW, None),  # people agree with the tier above
        ([(0, 0.9, 1, False)] * 9 + [(0, 0.9, 1, True)] * (FEW - 1), (0, 1, 9, 9)),
        ([(0, 0.9, 1, False)] * 9 + [(0, 0.9, 0, True)] * FEW, (0, 1, 9, 9)),  # people agree with the network
        ([(0, 0.9, 1, True)] * 9, None),  # people say so themselves
        ([(0, 0.9, 1, False)] * 9 + [(2, 0.9, 0, False)] * 20, (2, 0, 20, 20)),
        ([], None),
    ],
)
def test_a_class_that_two_tiers_see_differently_is_found(rows, found: tuple[int, int, int, int] | None):
    worst = contradiction(*answers(*rows))
    assert (None if worst is None else (worst.said, worst.above, worst.pictures, worst.contradicted)) == found
