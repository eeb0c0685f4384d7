"""How long a node that answers wrongly is given nothing."""

from __future__ import annotations

import pytest

from scheduler.core.breaker import LONGEST_S, WrongAnswers, rest_s


@pytest.mark.parametrize(
    ("count", "base_s", "expected_s"),
    [(1, 1.0, 1.0), (2, 1.0, 2.0), (5, 1.0, 16.0), (6, 1.0, 30.0), (10**9, 1.0, 30.0), (3, 0.1, 0.4), (1, 60.0, 30.0)],
)
def test_the_rest_doubles_up_to_its_bound(count, base_s, expected_s):
    assert rest_s(count, base_s) == pytest.approx(expected_s)
    assert rest_s(count, base_s) <= LONGEST_S


def test_one_that_has_answered_nothing_wrong_is_trusted():
    fresh = WrongAnswers()
    assert not fresh.sets_aside(0.0, 1.0)
    assert not fresh.may_be_asked(100.0, 1.0)
    assert fresh.why == ""
    assert fresh.again(5.0) == fresh.one_less() == fresh


def test_a_trial_after_each_rest_and_a_longer_rest_after_each_wrong_one():
    once = WrongAnswers().one_more("no JSON", 10.0)
    assert once.sets_aside(10.9, 1.0)
    assert not once.sets_aside(11.0, 1.0)
    # While its trial is out it gets nothing else; should nothing come of that, there is another one.
    trial = once.again(11.0)
    assert trial.sets_aside(11.9, 1.0)
    assert not trial.sets_aside(12.0, 1.0)
    twice = trial.one_more("500", 11.2)
    assert twice.sets_aside(13.1, 1.0)
    assert not twice.sets_aside(13.2, 1.0)
    assert (once.why, twice.why) == ("its last answer was wrong: no JSON", "its last 2 answers were wrong: 500")
    assert twice.one_less().count == 1
    assert not once.one_less().sets_aside(10.0, 1.0)


def test_where_there_is_nothing_else_it_is_asked_after_the_shortest_rest():
    often = WrongAnswers(count=9, at=10.0, reason="500")
    assert not often.may_be_asked(10.9, 1.0)
    assert often.may_be_asked(11.0, 1.0)
    assert often.sets_aside(39.9, 1.0)
