"""The arithmetic of the detection measurement."""

from __future__ import annotations

import pytest

from experiments.detection import percentile, times_for
from scheduler.settings import SchedulerSettings


@pytest.mark.parametrize(
    ("samples", "share", "expected"),
    [
        ([1.0], 0.99, 1.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([float(n) for n in range(1, 101)], 0.5, 50.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_percentile(samples, share, expected):
    assert percentile(samples, share) == expected


def test_without_an_interval_the_defaults_are_measured():
    assert times_for(None) == {}


@pytest.mark.parametrize("heartbeat_s", [0.05, 0.1, 0.25, 0.5, 1.0, 2.0])
def test_every_interval_gives_settings_that_the_scheduler_takes(heartbeat_s):
    times = SchedulerSettings.model_validate(times_for(heartbeat_s))
    assert times.suspect_s >= SchedulerSettings().suspect_s
    assert times.suspect_s >= 2.5 * heartbeat_s
