"""Tournament of lineages: pairs, winners and rates, and the lineages that a host keeps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.schedules import constant
from tierkit.errors import InvalidInput, SetupError
from training.strategies.build import build_strategy
from training.strategies.config import ExchangeConfig, TournamentConfig
from training.strategies.finding import find_hosted, find_strategy
from training.strategies.tournament import Score, Tournament, opponents, rate_after, rates_of, wins
from training.units import Computed, Flat, UnitLease, Update

RATE, PERIOD = 0.1, 5
NONE = np.zeros(0, np.float32)


def start(lineages: int = 4, *, steps: int = 100, lease_s: float = 10.0) -> Tournament:
    config = TournamentConfig(period=PERIOD)
    learner = constant(RATE, steps=steps)
    found = build_strategy(config, (np.zeros(3, np.float32), NONE), learner, workers=lineages, lease_s=lease_s)
    assert isinstance(found, Tournament)
    return found


def granted(strategy: Tournament, worker: str, now: float = 0.0) -> UnitLease:
    lease = strategy.grant(worker, now)
    assert lease is not None
    return lease


def bring(strategy: Tournament, lease: UnitLease, values: Flat, now: float = 0.0) -> str:
    computed = Computed(values=values, buffers=NONE, loss=0.0)
    update = Update(lease=lease.number, worker=lease.worker, steps=lease.unit.span, computed=computed)
    return strategy.take(update, now)


def change(value: float) -> Flat:
    return np.full(3, -value, np.float32)


def measure(strategy: Tournament) -> list[tuple[int, ...]]:
    """Let all lineages meet that are to meet. The one with the larger weights is the better one."""
    met = []
    while lineages := strategy.to_measure():
        met.append(lineages)
        strategy.met(lineages, [(float(strategy.lineage(each)[0][0]), 0.0) for each in lineages])
    return met


def test_the_grid_of_rates() -> None:
    assert rates_of(TournamentConfig(), 0.1, 3) == pytest.approx([0.01, 0.1, 1.0])
    assert rates_of(TournamentConfig(), 0.1, 4) == pytest.approx([0.01, 0.0316, 0.1, 0.316], rel=0.01)
    assert 0.1 in rates_of(TournamentConfig(), 0.1, 2)
    assert rates_of(TournamentConfig(rates=[0.5, 0.2]), 0.1, 5) == [0.5, 0.2, 0.5, 0.2, 0.5]


@pytest.mark.parametrize("lineages", range(1, 10))
def test_all_have_an_opponent_but_one_of_an_odd_number(lineages: int) -> None:
    seen = set()
    for meeting in range(40):
        found = opponents(lineages, meeting, seed=7)
        assert found == opponents(lineages, meeting, seed=7)
        assert all(found[opponent] == number for number, opponent in enumerate(found))
        assert sum(number == opponent for number, opponent in enumerate(found)) == lineages % 2
        seen |= set(enumerate(found))
    everyone = range(lineages)
    assert seen >= {(one, other) for one in everyone for other in everyone if one != other}


@pytest.mark.parametrize(
    ("own", "other", "first", "won"),
    [
        ((0.9, 1.0), (0.8, 0.1), False, True),
        ((0.9, 1.0), (0.9, 0.1), True, False),
        ((0.9, 0.1), (0.9, math.nan), False, True),
        ((0.9, math.nan), (0.9, 0.1), True, False),
        ((0.9, 0.5), (0.9, 0.5), True, True),
        ((0.1, math.nan), (0.1, math.nan), False, False),
    ],
)
def test_who_wins(own: Score, other: Score, first: bool, won: bool) -> None:
    assert wins(own, other, first=first) is won
    assert wins(other, own, first=not first) is not won


def test_the_losers_rate_is_near_the_winners() -> None:
    config = TournamentConfig(variation=0.2)
    found = [rate_after(config, 1.0, lineage=lineage, meeting=3, seed=1) for lineage in range(20)]
    assert set(found) == {0.8, 1.2}
    assert found == [rate_after(config, 1.0, lineage=lineage, meeting=3, seed=1) for lineage in range(20)]


def test_the_winner_continues_on_both_sides() -> None:
    strategy = start(2)
    rates = list(strategy.rates)
    leases = [granted(strategy, name) for name in "ab"]
    assert [lease.unit.rate for lease in leases] == rates == pytest.approx([0.01, 0.1])
    assert [lease.unit.first for lease in leases] == [0, PERIOD]
    bring(strategy, leases[0], change(1.0))
    assert not strategy.to_measure()
    assert strategy.grant("a", 0.0) is None  # its lineage waits for the other one
    bring(strategy, leases[1], change(3.0))
    assert measure(strategy) == [(0, 1)]
    for number in range(2):
        assert strategy.lineage(number)[0].tolist() == [3.0] * 3
    assert strategy.rates[1] == rates[1]
    assert strategy.rates[0] in (pytest.approx(0.08), pytest.approx(0.12))
    assert strategy.weights.tolist() == [3.0] * 3
    again = granted(strategy, "a")
    assert again.unit.first == 2 * PERIOD
    assert strategy.start_of(again)[0].tolist() == [3.0] * 3


def test_a_run_ends_when_all_lineages_have_been_ranked() -> None:
    strategy = start(3, steps=43)
    strengths, done, turn = {"a": 1.0, "b": 2.0, "c": 4.0}, 0, 0
    while not strategy.finished:
        name = "abc"[turn % 3]
        turn += 1
        lease = strategy.grant(name, 0.0)
        if lease is not None:
            assert bring(strategy, lease, change(strengths[name])) == "taken"
            done += lease.unit.steps
        measure(strategy)
        assert turn < 100
    assert done == 43
    best = max(float(strategy.lineage(number)[0][0]) for number in range(3))
    assert strategy.weights.tolist() == [best] * 3
    assert strategy.results()["rate"] in strategy.rates


def test_a_lineage_whose_worker_dies_continues_with_another_worker() -> None:
    strategy = start(2, lease_s=10.0)
    dead, living = granted(strategy, "dead"), granted(strategy, "living")
    lineage = strategy.rates.index(dead.unit.rate or 0.0)
    bring(strategy, living, change(1.0))
    assert strategy.grant("living", 0.5) is None
    taken_over = granted(strategy, "living", now=10.0)
    assert (taken_over.unit.rate, taken_over.unit.span) == (strategy.rates[lineage], dead.unit.span)
    assert bring(strategy, dead, change(9.0), now=10.0) == "late"
    bring(strategy, taken_over, change(2.0), now=11.0)
    assert measure(strategy) == [(0, 1)]
    assert strategy.weights.tolist() == [2.0] * 3


def test_a_lineage_that_diverges_stays_behind_and_loses() -> None:
    strategy = start(2)
    leases = [granted(strategy, name) for name in "ab"]
    assert bring(strategy, leases[0], np.full(3, np.nan, np.float32)) == "taken"
    assert bring(strategy, leases[1], change(1.0)) == "taken"
    measure(strategy)
    assert strategy.lineage(0)[0].tolist() == [1.0] * 3
    assert bring(strategy, granted(strategy, "a"), np.zeros(4, np.float32)) == "refused"


def test_a_tournament_continues_from_its_state() -> None:
    strategy = start(4)
    for name, value in zip("abcd", (1.0, 2.0, 3.0, 4.0), strict=True):
        bring(strategy, granted(strategy, name), change(value))
    measure(strategy)
    granted(strategy, "a")
    again = start(4)
    again.restore(*strategy.state())
    for each in (strategy, again):
        for name in "bcd":
            bring(each, granted(each, name), change(10.0))
        measure(each)
    assert [again.lineage(number)[0].tolist() for number in range(4)] == [
        strategy.lineage(number)[0].tolist() for number in range(4)
    ]
    assert again.state()[1] == strategy.state()[1]


def test_one_cheat_costs_no_more_than_its_own_lineage() -> None:
    strategy = start(4, steps=40 * PERIOD)
    turn = 0
    while not strategy.finished:
        name = "abcd"[turn % 4]
        turn += 1
        lease = strategy.grant(name, 0.0)
        if lease is not None:
            bring(strategy, lease, change(-100.0 if name == "d" else 1.0))
        measure(strategy)
    assert strategy.weights[0] >= 8.0


@pytest.mark.parametrize(("workers", "said"), [(1, "at least 2"), (200_000_000, "GiB")])
def test_too_few_or_too_many_lineages(workers: int, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        start(workers)


def test_a_file_of_the_family_exchange_may_be_a_tournament(tmp_path: Path) -> None:
    file = tmp_path / "meet.toml"
    file.write_text('family = "exchange"\nrule = "tournament"\nrates = [0.1, 0.5]\n')
    assert find_hosted(str(file)) == TournamentConfig(rates=[0.1, 0.5])
    file.write_text('family = "exchange"\nrule = "tournament"\nscaling = "none"\n')
    with pytest.raises(SetupError, match="scaling"):
        find_strategy(str(file))
    file.write_text('family = "exchange"\nrule = "gossip"\nperiod = 2\n')
    assert find_strategy(str(file)) == ExchangeConfig(rule="gossip", period=2)


def test_strategies_of_ranks_are_not_for_hosts() -> None:
    assert find_strategy("gossip") == ExchangeConfig(rule="gossip")
    assert find_hosted("tournament") == TournamentConfig()
    with pytest.raises(InvalidInput, match="terrace train run"):
        find_hosted("gossip")
