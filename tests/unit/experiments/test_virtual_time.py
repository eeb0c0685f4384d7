"""Real workers with a share of a core: how they are held to it, and how their runs are judged."""

from pathlib import Path
from typing import Any

import pytest

from experiments.training.cores import Hierarchy, hierarchies, limits
from experiments.training.virtual_time import VIRTUAL_TIME, drifted, judge, of_a_step, thinned
from tierkit.errors import SetupError

MOUNTS = """\
sysfs /sys sysfs rw,nosuid 0 0
cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,nsdelegate 0 0
"""

POINT: dict[str, Any] = {
    "strategy": "downpour",
    "workers": 4,
    "seed": 0,
    "epochs": 7,
    "seconds": 20.0,
    "virtual_seconds": 21.0,
    "updates": 3_850,
    "virtual_updates": 3_850,
    "step_s": 0.02,
    "serve_s": 0.001,
    "sync_s": 0.004,
    "cores": [0.25, 0.25, 0.24, 0.24],
    "seen": [[1.0, 100], [20.0, 3_850]],
    "around": [{"step_s": 0.02, "sync_s": 0.004, "seen": [[[1.0, 100], [8.0, 400]]], "cores": [0.25]}] * 2,
    "drift": 0.01,
    "passed_over": [],
}


def test_the_hierarchy_is_the_one_of_processor_time() -> None:
    assert hierarchies(MOUNTS) == [
        Hierarchy(Path("/sys/fs/cgroup/cpu,cpuacct"), 1),
        Hierarchy(Path("/sys/fs/cgroup/unified"), 2),
    ]
    assert hierarchies("proc /proc proc rw 0 0\n") == []


def test_a_share_is_a_quota_of_a_period_before_all_else() -> None:
    assert limits(2, 0.25) == {"cpu.weight": "10000", "cpu.max": "5000 20000"}
    quota = {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "5000"}
    assert limits(1, 0.25) == {"cpu.shares": "102400", **quota}
    assert limits(1, None) == {"cpu.shares": "102400"}


def test_a_step_is_what_an_update_takes_without_the_host() -> None:
    # 10 updates a second after a slow first one.
    seen = [(2.0, 1), (3.0, 11), (5.0, 31)]
    assert of_a_step(seen, steps=5, host_s=0.01) == pytest.approx((0.1 - 0.01) / 5)


@pytest.mark.parametrize("seen", [[], [(1.0, 5)], [(1.0, 5), (2.0, 6)]])
def test_a_run_that_is_too_short_tells_nothing(seen: list[tuple[float, int]]) -> None:
    with pytest.raises(SetupError, match="too few updates"):
        of_a_step(seen, steps=1, host_s=0.0)


def test_drift_is_a_share_of_the_mean_whichever_came_first() -> None:
    assert drifted(0.9, 1.1) == drifted(1.1, 0.9) == pytest.approx(0.2)
    assert drifted(0.02, 0.02) == 0.0


def test_a_record_keeps_a_look_a_second_and_the_last() -> None:
    seen = [(tenth / 10, tenth) for tenth in range(1, 26)]
    assert thinned(seen) == [(0.1, 1), (1.1, 11), (2.1, 21), (2.5, 25)]
    assert thinned([]) == []


@pytest.mark.parametrize(
    ("ratios", "reached"),
    [([1.0, 1.099, 0.901], True), ([1.0, 1.101], False), ([0.899, 1.0], False), ([1.0] * 4, True)],
)
def test_each_run_is_within_a_tenth(ratios: list[float], reached: bool) -> None:
    line = [{**POINT, "seconds": 1.0, "virtual_seconds": ratio} for ratio in ratios]
    assert judge(line).reached is reached


def test_a_row_tells_what_was_missed_but_for_quick_runs() -> None:
    far = {**POINT, "strategy": "fedavg", "virtual_seconds": 30.0}
    record = {"config": {"quick": False}, "points": [POINT, {**POINT, "seed": 1, "virtual_seconds": 19.0}, far]}
    rows = VIRTUAL_TIME.rows(record)
    assert [len(row["missed"]) for row in rows] == [0, 0, 1]
    assert [row["runs"] for row in rows] == [2, 2, 1]
    assert [row["ratio"] for row in rows] == pytest.approx([1.05, 0.95, 1.5])
    assert not any(row["missed"] for row in VIRTUAL_TIME.rows({**record, "config": {"quick": True}}))
    table = VIRTUAL_TIME.table(record)
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [each["virtual / real"] for each in cells] == ["1.000 ± 0.071", "1.500"]
    assert cells[1]["target"].startswith("missed: farthest from 1: 1.500")
