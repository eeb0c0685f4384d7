"""What table 2 says of its points, made up by hand."""

from typing import Any

import pytest

from experiments.table2 import TABLE2


def point(tier: str, link_s: float = 0.0, **other: Any) -> dict[str, Any]:
    inference_ms = {"end": 7.41, "edge": 5.99, "cloud": 7.36}[tier]
    stage_ms = [inference_ms * 50 + link_s * 1000 + over for over in (1.0, 2.0, 6.0)]
    return {
        "tier": tier,
        "latency": link_s > 0,
        "link_s": link_s,
        "inference_ms_per_image": inference_ms,
        "emulated_ms_per_image": inference_ms,
        "stage_ms": stage_ms,
        "images": 150,
        "between_ms": 2.5,
        **other,
    }


def rows(*points: dict[str, Any]) -> list[dict[str, Any]]:
    return TABLE2.rows({"points": points})


def test_the_overhead_is_what_is_above_inference_and_link() -> None:
    (row,) = rows(point("cloud", 1.0))
    assert (row["overhead_ms_per_task"], row["median_overhead_ms_per_task"]) == (3.0, 2.0)
    assert row["processing_ms_per_image"] == pytest.approx((7.36 * 50 + 1000 + 3.0) / 50, abs=1e-4)


def test_the_papers_figures_stand_beside_its_own_times_alone() -> None:
    other, real = point("end", emulated_ms_per_image=4.0), point("end", emulated_ms_per_image=None)
    found = rows(point("end"), point("edge"), point("edge", 0.5), point("edge", 0.06), point("cloud", 1.0), other, real)
    assert [row["paper_processing_ms_per_image"] for row in found] == [10.4, 8.4, 18.3, None, 31.0, None, None]


def test_a_row_over_a_link_without_delay_is_told_from_one_without_a_link() -> None:
    table = TABLE2.table({"points": [point("edge"), point("edge", latency=True), point("edge", 0.5)]})
    assert [row[1] for row in table.rows] == ["0", "0, but a link", "0.5"]


def test_where_tasks_overlapped_there_is_no_time_between_them() -> None:
    record = {"points": [point("edge", 0.5, between_ms=None)]}
    assert TABLE2.rows(record)[0]["between_ms"] is None
    assert "-" in TABLE2.table(record).rows[0]
