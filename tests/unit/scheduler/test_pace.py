"""Power budgets."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from scheduler.core.fleet import Ledger
from tests.unit.scheduler.test_devices import TIMES, registration


def listed(rate: int | None) -> Ledger:
    devices = Ledger(TIMES)
    devices.register(registration(images_per_minute=rate), 0.0)
    return devices


@pytest.mark.parametrize(
    ("rate", "sent", "rests_until"),
    [
        (None, [(0.0, 5000)], 0.0),
        (600, [], 0.0),
        (600, [(0.0, 50)], 5.0),
        (600, [(0.0, 50), (0.0, 50)], 10.0),  # an interactive request beside a task
        (600, [(0.0, 50), (100.0, 50)], 105.0),  # rest is not saved up
    ],
)
def test_rest(rate, sent, rests_until):
    devices = listed(rate)
    for at, images in sent:
        devices.charge("end-0", images, at)
    assert devices.get("end-0").not_before == pytest.approx(rests_until)


@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 100)), min_size=1, max_size=30))
def test_in_any_time_go_at_most_the_budget_and_one_task(rate, tasks):
    devices, now, sent = listed(rate), 0.0, []
    for pause_s, images in tasks:
        now = max(now + pause_s, devices.get("end-0").not_before)
        devices.charge("end-0", images, now)
        sent.append((now, images))
    for first, (begin, _) in enumerate(sent):
        for last in range(first, len(sent)):
            total = sum(images for _, images in sent[first : last + 1])
            assert total - sent[last][1] <= rate * (sent[last][0] - begin) / 60 + 1e-6
