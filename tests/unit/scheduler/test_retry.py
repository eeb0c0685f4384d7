"""Budgets and thresholds of what is tried again."""

from __future__ import annotations

import pytest

from scheduler.dispatch.retry import DeathLog, RetryBudget, backoff_s, hedge_after_s, is_poison, is_suspect


def test_a_retry_budget_gives_its_burst_at_once_and_then_its_rate():
    budget = RetryBudget(per_s=10, burst=3)
    assert [budget.take(5.0) for _ in range(5)] == pytest.approx([0, 0, 0, 0.1, 0.2])
    assert not budget.has_token(5.2)
    assert budget.take(5.2) == pytest.approx(0.1)
    assert budget.has_token(5.5)
    assert [budget.take(99.0) for _ in range(4)] == pytest.approx([0, 0, 0, 0.1])


def test_in_any_time_no_more_retries_begin_than_the_burst_and_the_rate_allow():
    budget = RetryBudget(per_s=20, burst=5)
    begins = sorted(now + budget.take(now) for now in (0.001 * k for k in range(1000)))
    for first in range(0, 1000, 37):
        window = [begin for begin in begins if begins[first] <= begin <= begins[first] + 2.0]
        assert len(window) <= 5 + 20 * 2.0 + 1


@pytest.mark.parametrize(("failures", "expected"), [(1, 0.05), (2, 0.1), (3, 0.2), (5, 0.8), (20, 2.0)])
def test_each_failure_doubles_the_wait_up_to_a_bound(failures, expected):
    assert backoff_s(failures) == pytest.approx(expected)


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
