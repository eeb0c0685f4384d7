"""Arrival times and ranges of load."""

import itertools

import numpy as np
import pytest

from experiments.bench.schedule import arrivals, parse_range
from tierkit.errors import InvalidInput


def test_poisson_gaps_are_exponential_with_the_rate_asked_for() -> None:
    gaps = np.diff(list(itertools.islice(arrivals(200.0, seed=1), 20_000)))
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 200, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 200, rel=0.05)
    # Memoryless: the share of gaps beyond the mean is 1/e.
    assert np.mean(gaps > 1 / 200) == pytest.approx(np.exp(-1), abs=0.02)


def test_the_same_seed_gives_the_same_times() -> None:
    def first(seed: int) -> list[float]:
        return list(itertools.islice(arrivals(10.0, seed=seed), 2000))

    assert first(3) == first(3)
    assert first(3) != first(4)


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("4", [4]),
        ("1:4", [1, 2, 3, 4]),
        ("1:8:3", [1, 4, 7]),
        ("2:2", [2]),
        ("100:200:50", [100, 150, 200]),
    ],
)
def test_ranges_include_their_end(text: str, levels: list[float]) -> None:
    assert parse_range(text, whole=True, most=200) == levels


def test_rates_may_be_fractions() -> None:
    assert parse_range("0.5:1.1:0.2", whole=False, most=10) == pytest.approx([0.5, 0.7, 0.9, 1.1])


@pytest.mark.parametrize(
    "text", ["", "a", "1:2:3:4", "0", "-1:3", "1:8:0", "nan", "1:inf", "5:1", "1:100000:1", "1000001", "1e308"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_range(text, whole=False, most=1e6)


def test_clients_are_counted_in_whole_numbers() -> None:
    with pytest.raises(InvalidInput, match="whole"):
        parse_range("1:2:0.5", whole=True, most=10)
