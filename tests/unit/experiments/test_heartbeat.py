"""The arithmetic of the heartbeat experiment."""

from __future__ import annotations

import pytest

from experiments.heartbeat import HEARTBEAT, times_for
from scheduler.settings import SchedulerSettings


@pytest.mark.parametrize("heartbeat_s", [0.05, 0.1, 0.25, 0.5, 1.0, 2.0])
def test_every_interval_gives_settings_that_the_scheduler_takes(heartbeat_s):
    times = SchedulerSettings.model_validate(times_for(heartbeat_s))
    assert times.suspect_s >= SchedulerSettings().suspect_s
    assert times.suspect_s >= 2.5 * heartbeat_s


def test_the_default_interval_is_measured_with_the_defaults():
    assert times_for(0.2) == {"heartbeat_s": 0.2, "suspect_s": 0.5, "lease_s": 3.0}


def test_rows_and_deaths_that_nobody_caused():
    stop = {"mode": "stop", "heartbeat_s": 0.2}
    cost = {"scheduler_cpu_percent": 1.7, "node_cpu_percent": 1.1, "node_bytes_per_s": 2185.4}
    record = {
        "config": {"nodes": 2},
        "points": [
            {"kind": "cost", **stop, **cost},
            *({"kind": "detection", **stop, "node": "end-1", "seconds": seconds} for seconds in (0.7, 0.9, 0.8)),
            *({"kind": "death", **stop, "node": "end-1", "reason": "", "caused": caused} for caused in (True, False)),
            {"kind": "cost", "mode": "kill", "heartbeat_s": 0.05, **cost},
        ],
    }
    kill, silent = HEARTBEAT.rows(record)
    assert (silent["n"], silent["p50_s"], silent["p99_s"], silent["false_deaths"]) == (3, 0.8, 0.9, 1)
    assert (kill["mode"], kill["n"], kill["p50_s"]) == ("kill", 0, None)
    assert HEARTBEAT.table(record).rows[1] == [
        *("0.2", "silent", "3", "0.80", "0.90", "0.90", "1", "1.7", "1.1", "2,185")
    ]
