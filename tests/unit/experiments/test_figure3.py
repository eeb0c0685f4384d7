"""Formulas, windows and bounds of figure 3 on the paper's figures, computed by hand."""

from typing import Any

import pytest

from experiments.figure3 import FIGURE3, SERIES, Series, bound_s, busy_window, formula_s, times_of
from experiments.profile import read_profile
from scheduler.placement.bound import NodeCounts
from tierkit.types import Scheme

PAPER = read_profile("paper")
TIMES = times_of(PAPER)
END, END_CLOUD, END_EDGE, MAPPING, BY_FORMULA, ADAPTIVE = SERIES


def fleet(ends: int) -> NodeCounts:
    return NodeCounts(end=ends, edge=4, cloud=1)


def test_a_task_costs_what_the_profile_says() -> None:
    assert TIMES.edge is not None
    assert TIMES.cloud is not None
    assert TIMES.end.total_s == pytest.approx(0.3705)
    assert (TIMES.edge.communication_s, TIMES.edge.processing_s) == pytest.approx((0.5, 0.2995))
    assert (TIMES.cloud.communication_s, TIMES.cloud.processing_s) == pytest.approx((1.0, 0.368))


def test_the_window_that_keeps_an_end_device_busy() -> None:
    # 1.7385 s to the last answer from the cloud are 4.7 tasks of 0.3705 s.
    assert busy_window(TIMES) == 6


@pytest.mark.parametrize(
    ("series", "ends", "expected"),
    [
        (END, 8, 200 / 8 * 0.3705),
        (END_EDGE, 8, 200 / 8 * 0.3705 + 200 / 4 * 0.7995),
        (END_CLOUD, 8, 200 / 8 * 0.3705 + 200 * 1.368),
        (MAPPING, 8, 200 / 8 * 0.3705 + 0.5 * 200 / 4 * 0.7995 + 0.5 * 200 * 1.368),
        (MAPPING, 4, 200 / 4 * 0.3705 + 200 / 4 * 0.7995),
        (BY_FORMULA, 8, 200 / 8 * 0.3705 + 200 / 4 * 0.7995),
    ],
)
def test_the_papers_formulas(series: Series, ends: int, expected: float) -> None:
    assert formula_s(series, 200, fleet(ends), TIMES) == pytest.approx(expected)


def test_the_paper_has_no_formula_for_adaptive() -> None:
    assert formula_s(ADAPTIVE, 200, fleet(8), TIMES) is None


@pytest.mark.parametrize(
    ("series", "ends", "expected"),
    [
        (END, 1, 200 * 0.3705),
        (END_CLOUD, 8, 0.3705 + 1.0 + 200 * 0.368),
        (END_EDGE, 1, 200 * 0.3705 + 0.5 + 0.2995),
        (END_EDGE, 8, 0.3705 + 0.5 + 50 * 0.2995),
        # 41 tasks to each of four edge nodes with an end device of its own, 36 to the cloud, which is done first.
        (MAPPING, 8, 41 * 0.3705 + 0.5 + 0.2995),
        # Four end devices, each with an edge node of its own.
        (MAPPING, 4, 50 * 0.3705 + 0.5 + 0.2995),
    ],
)
def test_the_pipelined_bound(series: Series, ends: int, expected: float) -> None:
    assert bound_s(series, 200, fleet(ends), TIMES) == pytest.approx(expected)


def test_a_window_of_one_waits_for_each_answer() -> None:
    assert bound_s(END, 200, fleet(1), TIMES, window=1) == pytest.approx(200 * 0.3705)
    assert bound_s(END_EDGE, 200, fleet(4), TIMES, window=1) == pytest.approx(50 * 1.17)
    # At eight end devices the cloud is the narrower place again.
    assert bound_s(END_CLOUD, 200, fleet(8), TIMES, window=1) == pytest.approx(0.3705 + 1.0 + 200 * 0.368)
    assert bound_s(END_CLOUD, 200, fleet(1), TIMES, window=6) == pytest.approx(bound_s(END_CLOUD, 200, fleet(1), TIMES))


def test_adaptive_has_the_least_bound_of_all_that_give_fine_answers() -> None:
    for ends in range(1, 9):
        best = min(bound_s(series, 200, fleet(ends), TIMES) for series in (END_CLOUD, END_EDGE, MAPPING, BY_FORMULA))
        assert bound_s(ADAPTIVE, 200, fleet(ends), TIMES) <= best + 1e-9


def point(scheme: Scheme, seconds: float, *, cloud: int = 0, fallback: int = 0, fine: float | None = 0.6) -> Any:
    by_tier = {"end": 10000, "edge": 10000 - cloud * 50, "cloud": cloud * 50}
    facts = {"scheme": scheme, "by_formula": False, "window": 6, "ends": 8, "state": "completed", "images": 10000}
    return {**facts, "seconds": seconds, "images_by_tier": by_tier, "fallback": fallback, "fine_accuracy": fine}


def record(*points: Any) -> Any:
    return {"config": {"profile": {"name": "paper", **PAPER.model_dump(mode="json")}, "tasks": 200}, "points": points}


def test_rows_have_formula_bound_and_measurement_side_by_side() -> None:
    (row,) = FIGURE3.rows(record(point(Scheme.END_EDGE, 16.0), point(Scheme.END_EDGE, 17.0)))
    assert (row["seconds"], row["min_seconds"], row["max_seconds"], row["runs"]) == (16.5, 16.0, 17.0, 2)
    assert (row["formula_seconds"], row["bound_seconds"]) == (49.237, 15.845)
    assert row["ratio"] == pytest.approx(16.5 / 15.8455, abs=1e-3)
    assert (row["fine_accuracy"], row["cloud_share"]) == (0.6, 0.0)


def test_a_job_with_coarse_answers_where_fine_ones_were_wanted_has_no_time() -> None:
    (row,) = FIGURE3.rows(record(point(Scheme.END_CLOUD, 70.0, cloud=199, fallback=50)))
    assert (row["seconds"], row["ratio"], row["fallback"]) == (None, None, 50)
    assert "not whole" in FIGURE3.table(record(point(Scheme.END_CLOUD, 70.0, cloud=199, fallback=50))).rows[0]


def test_rows_stand_in_the_order_of_the_figure() -> None:
    rows = FIGURE3.rows(record(point(Scheme.ADAPTIVE, 14.0, cloud=30), point(Scheme.END, 10.0, fine=None)))
    assert [row["scheme"] for row in rows] == ["end", "adaptive"]
    assert rows[1]["formula_seconds"] is None
