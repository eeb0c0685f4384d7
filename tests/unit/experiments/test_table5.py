"""The arithmetic of table 5, on points made up by hand."""

from typing import Any

import pytest

from experiments.table5 import TABLE5, ideal_s

CONFIG = {"tasks": 200, "devices": 8, "given": 12, "task_s": 0.3705, "communication_s": 0.5, "runs": 2}


@pytest.mark.parametrize(("failures", "expected"), [(0, 9.2625), (1, 188 / 7 * 0.3705), (6, 23.712)])
def test_the_ideal_time_is_that_of_the_machines_that_were_alive(failures: int, expected: float) -> None:
    assert ideal_s(200, 8, failures, 12, 0.3705) == pytest.approx(expected)


def point(method: str, failures: int, seconds: float, state: str = "completed", **attempts: int) -> dict[str, Any]:
    reason = "" if state == "completed" else "task 96 failed on end-1 (recovery=none): silent"
    facts = {"method": method, "failures": failures, "seconds": seconds, "state": state, "reason": reason}
    return {**facts, "attempts": {"ok": 200, **attempts}, "valid": True}


RECORD = {
    "config": CONFIG,
    "points": [
        point("monitor", 6, 24.0, lost=18),
        point("monitor", 6, 25.0, lost=18),
        point("none", 1, 5.5, "failed", lost=1),
        point("none", 1, 5.7, "failed", lost=1),
        point("reassign", 6, 180.0, unreachable=300, lost=18),
        point("reassign", 6, 182.0, unreachable=310),
    ],
}


def test_rows_are_means_in_the_order_of_the_paper() -> None:
    none, reassign, monitor = TABLE5.rows(RECORD)
    assert [row["method"] for row in (none, reassign, monitor)] == ["none", "reassign", "monitor"]
    assert (monitor["seconds"], monitor["runs"], monitor["ideal_seconds"]) == (24.5, 2, 23.712)
    assert (monitor["min_seconds"], monitor["max_seconds"]) == (24.0, 25.0)
    assert monitor["ratio"] == pytest.approx(24.5 / 23.712, abs=1e-3)
    assert (reassign["unacknowledged_sends"], reassign["eq9_seconds"], reassign["paper_seconds"]) == (
        305.0,
        152.5,
        226.0,
    )


def test_a_job_that_failed_has_no_time_but_a_reason() -> None:
    none = TABLE5.rows(RECORD)[0]
    assert none["seconds"] is None
    assert none["failed_after_seconds"] == pytest.approx(5.6)
    assert "recovery=none" in none["reason"]


def test_one_failed_run_of_several_is_not_averaged_away() -> None:
    points = [point("monitor", 2, 12.0), point("monitor", 2, 900.0, "failed")]
    assert TABLE5.rows({"config": CONFIG, "points": points})[0]["seconds"] is None


def test_a_run_whose_devices_fell_silent_too_late_is_left_out() -> None:
    late = {**point("monitor", 6, 17.8), "valid": False}
    rows = TABLE5.rows({**RECORD, "points": [*RECORD["points"], late]})
    assert rows == TABLE5.rows(RECORD)


def test_the_table_has_the_papers_figures_beside_ours() -> None:
    one, six = TABLE5.table(RECORD).rows
    assert one == ["1", "failed after 5.6 (Inf)", "-", "-", "-", "10.0", "-"]
    assert six == ["6", "-", "181.0 [180.0, 182.0] (226.0)", "176.2", "24.5 [24.0, 25.0] (38.3)", "23.7", "1.03"]


def test_another_job_than_the_papers_stands_alone() -> None:
    table = TABLE5.table({**RECORD, "config": {**CONFIG, "tasks": 40, "given": 2}})
    assert "(paper)" not in table.columns[1]
    assert "(" not in table.rows[1][2]


def test_the_papers_seconds_stand_beside_the_papers_job_alone() -> None:
    quick = TABLE5.rows({**RECORD, "config": {**CONFIG, "tasks": 40, "given": 2}})
    assert {row["paper_seconds"] for row in quick} == {None}
