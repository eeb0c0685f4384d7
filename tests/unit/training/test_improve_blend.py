"""The choice among networks that lie on the way to the trained one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from training.improve.blend import best, worth
from training.improve.gate import Comparison


def comparison(gained: int, lost: int, pictures: int = 100) -> Comparison:
    return Comparison(pictures=pictures, old_right=50, new_right=50 + gained - lost, gained=gained, lost=lost)


@pytest.mark.parametrize(
    ("newest", "labelled", "expected"),
    [
        (comparison(10, 2), None, 0.08),
        (comparison(10, 2), comparison(5, 1), 0.08),  # what it gains there is no reason to go further
        (comparison(10, 2), comparison(1, 2), 0.06),
        (None, comparison(1, 2), -0.01),
        (comparison(0, 0, pictures=0), comparison(3, 1), 0.02),
        (None, None, 0.0),
    ],
)
def test_forgetting_counts_twice(newest: Comparison | None, labelled: Comparison | None, expected: float) -> None:
    assert worth(newest, labelled) == pytest.approx(expected)


@dataclass(frozen=True)
class Tried:
    passes: bool
    gain: float


def test_the_best_of_those_that_pass_is_chosen() -> None:
    assert best([Tried(False, 0.9), Tried(True, 0.1), Tried(True, 0.2), Tried(True, 0.2)]) == Tried(True, 0.2)
    assert best([Tried(False, 0.1), Tried(False, 0.3)]) == Tried(False, 0.3)
