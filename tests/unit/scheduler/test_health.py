"""The failure detector's verdicts."""

from __future__ import annotations

import pytest

from scheduler.health import LeaseTimes, judge
from tierkit.types import Health

TIMES = LeaseTimes(heartbeat_s=0.5, suspect_s=1.5, lease_s=3.0)


@pytest.mark.parametrize(
    ("silent_s", "accusation", "draining", "health", "reason"),
    [
        (0.0, None, False, Health.ALIVE, "on time"),
        (1.5, None, False, Health.ALIVE, "on time"),
        (1.51, None, False, Health.SUSPECT, "silent for 1.5 s"),
        (3.0, None, False, Health.SUSPECT, "lease of 3.0 s"),
        (3.01, None, False, Health.DEAD, "run out"),
        (0.1, "connection refused", False, Health.SUSPECT, "connection refused"),
        (3.01, "connection refused", False, Health.DEAD, "run out"),
        (0.1, None, True, Health.DRAINING, "nothing new"),
        (2.0, "slow", True, Health.DRAINING, "nothing new"),
        (4.0, None, True, Health.DEAD, "run out"),
    ],
)
def test_judge(silent_s, accusation, draining, health, reason):
    found, why = judge(silent_s, TIMES, accusation=accusation, draining=draining)
    assert found is health
    assert reason in why
