"""News of sources: changes of state are reported soon, and a camera that fails all the time costs little."""

import pytest

from end_node.uplink.news import SourceNews
from tierkit.wire.observations import ReportedSource


def states(state: str, reason: str = "") -> tuple[ReportedSource, ...]:
    return (ReportedSource(name="gate", state=state, reason=reason),)


@pytest.fixture
def news() -> SourceNews:
    """The scheduler has been sent that the source runs."""
    news = SourceNews()
    news.sending(states("running"))
    news.sent(0.0, alone=False)
    return news


def test_the_first_states_are_due_after_a_moment():
    assert SourceNews().due_in_s(states("running"), 5.0) == 1.0


def test_a_change_is_due_within_two_seconds(news):
    assert news.due_in_s(states("paused"), 10.0) == 1.0
    assert news.due_in_s(states("paused"), 11.0) == 0.0


def test_another_reason_is_a_change(news):
    news.sending(states("waiting", "it cannot be read"))
    news.sent(1.0, alone=False)
    assert news.due_in_s(states("waiting", "it sends nothing"), 10.0) == 1.0


def test_a_change_that_comes_and_goes_costs_nothing(news):
    assert news.due_in_s(states("waiting"), 10.0) == 1.0
    assert news.due_in_s(states("running"), 10.5) is None
    assert news.due_in_s(states("waiting"), 10.9) == 1.0


def test_what_went_with_observations_is_not_sent_again(news):
    news.due_in_s(states("paused"), 10.0)
    news.sending(states("paused"))
    news.sent(10.2, alone=False)
    assert news.due_in_s(states("paused"), 20.0) is None


def test_a_scheduler_that_has_forgotten_is_told_again(news):
    news.forget()
    assert news.due_in_s(states("running"), 10.0) == 1.0


def test_a_scheduler_that_forgets_while_a_batch_is_on_its_way_is_told_again(news):
    news.sending(states("paused"))
    news.forget()
    news.sent(10.0, alone=False)
    assert news.due_in_s(states("paused"), 20.0) == 1.0


def test_a_source_that_fails_and_recovers_every_second_sends_a_batch_each_ten_seconds(news):
    sent = 0
    for tenth in range(6000):
        now = 100 + tenth / 10
        current = states("waiting" if int(now) % 2 else "running")
        # The change lasts for just as long as it must.
        if news.due_in_s(current, now) == 0.0 or news.due_in_s(current, now + 0.95) == 0.0:
            news.sending(current)
            news.sent(now, alone=True)
            sent += 1
    assert 3 <= sent <= 3 + 60
