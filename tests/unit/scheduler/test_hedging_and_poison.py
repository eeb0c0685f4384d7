"""Budgets and thresholds of what is tried again."""

from __future__ import annotations

import pytest

from scheduler.core.hedging import hedge_after_s
from scheduler.core.poison import DeathLog, is_poison
from scheduler.core.work import is_suspect


def test_a_straggler_is_beyond_the_95th_percentile_of_its_own_device():
    assert hedge_after_s([1.0] * 9) is None
    assert hedge_after_s([1.0] * 9 + [7.0]) == 7.0
    assert hedge_after_s([float(k) for k in range(100, 0, -1)]) == 95.0


@pytest.mark.parametrize(
    ("deaths", "suspect", "poison"),
    [(set(), False, False), ({"a"}, False, False), ({"a", "b"}, True, False), ({"a", "b", "c"}, True, True)],
)
def test_two_dead_nodes_make_a_suspect_and_three_a_poison(deaths, suspect, poison):
    assert (is_suspect(deaths), is_poison(deaths, 0)) == (suspect, poison)


@pytest.mark.parametrize(
    ("deaths", "unexplained", "poison"), [(3, 0, True), (3, 2, True), (3, 3, False), (4, 3, True), (2, 0, False)]
)
def test_where_nodes_die_anyway_a_task_needs_more_deaths_than_happen_without_it(deaths, unexplained, poison):
    assert is_poison({f"end-{number}" for number in range(deaths)}, unexplained) is poison


def test_a_death_is_explained_by_a_suspect_on_the_node():
    log = DeathLog()
    killer, other = set[str](), set[str]()
    log.add(0.0, [killer, other])
    killer.add("end-1")
    log.add(1.0, [killer])
    assert log.unexplained(1.0) == 2
    killer.add("end-2")  # a suspect from now on: it was on both nodes
    assert log.unexplained(1.0) == 0
    log.add(2.0, [other])
    log.add(3.0, [])
    assert log.unexplained(3.0) == 2
    killer.clear()  # answered: innocent
    assert log.unexplained(3.0) == 4
    assert log.unexplained(61.5) == 2  # only the last minute counts
