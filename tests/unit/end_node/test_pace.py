"""Pace of batches without a budget: rare answers go at once, a steady stream goes every two seconds."""

import pytest

from end_node.settings import UplinkSettings
from end_node.uplink.pace import Pace
from tierkit.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pace(clock: FakeClock) -> Pace:
    return Pace(UplinkSettings(), tls=False, clock=clock)


def sent_within(pace: Pace, clock: FakeClock, seconds: float, *, waiting: int) -> int:
    """Batches of a device with so many waiting answers at any time."""
    until, sent = clock() + seconds, 0
    while clock() < until:
        if (wait_s := pace.answers_in_s(waiting)) > 0:
            clock.advance(wait_s)
        else:
            pace.answers_sent()
            sent += 1
    return sent


def test_rare_answers_go_at_once(pace: Pace, clock: FakeClock) -> None:
    for _ in range(20):
        clock.advance(10.0)
        assert pace.answers_in_s(1) == 0
        pace.answers_sent()


def test_a_steady_stream_goes_every_two_seconds(pace: Pace, clock: FakeClock) -> None:
    clock.advance(60.0)
    assert sent_within(pace, clock, 100.0, waiting=1) == pytest.approx(55, abs=1)


def test_full_batches_go_as_fast_as_they_can(pace: Pace, clock: FakeClock) -> None:
    assert sent_within(pace, clock, 10.0, waiting=500) >= 49
