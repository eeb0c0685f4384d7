"""Power budgets."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from scheduler.devices.pace import Pace


@pytest.mark.parametrize(
    ("rate", "sent", "now", "wait_s"),
    [
        (None, [(0.0, 5000)], 0.0, 0.0),
        (600, [], 0.0, 0.0),
        (600, [(0.0, 50)], 0.0, 5.0),
        (600, [(0.0, 50)], 4.0, 1.0),
        (600, [(0.0, 50)], 7.0, 0.0),
        (600, [(0.0, 50), (0.0, 50)], 0.0, 10.0),  # an interactive request beside a task
        (600, [(0.0, 50), (100.0, 50)], 100.0, 5.0),  # rest is not saved up
    ],
)
def test_wait(rate, sent, now, wait_s):
    pace = Pace(rate)
    for at, images in sent:
        pace.charge(images, at)
    assert pace.wait_s(now) == pytest.approx(wait_s)


@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 100)), min_size=1, max_size=30))
def test_in_any_time_go_at_most_the_budget_and_one_task(rate, tasks):
    pace, now, sent = Pace(rate), 0.0, []
    for pause_s, images in tasks:
        now += pause_s + pace.wait_s(now + pause_s)
        pace.charge(images, now)
        sent.append((now, images))
    for first, (begin, _) in enumerate(sent):
        for last in range(first, len(sent)):
            total = sum(images for _, images in sent[first : last + 1])
            assert total - sent[last][1] <= rate * (sent[last][0] - begin) / 60 + 1e-6
