"""When the edge node becomes slower, and what the time is held against."""

from typing import Any

import pytest

from experiments.figure3 import times_of
from experiments.plots import Figures
from experiments.profile import read_profile
from experiments.slow_edge import SLOW_EDGE, images_until
from scheduler.bound import NodeCounts, bound_with_slow_edge, least_bound

PAPER = read_profile("paper")
EIGHT = NodeCounts(end=8, edge=4, cloud=1)


def point(seconds: float, slower_after_s: float | None = 7.0, *, fallback: int = 0) -> Any:
    facts = {"ends": 8, "part": 0.5, "state": "completed", "fallback": fallback}
    return {**facts, "seconds": seconds, "slower_after_s": slower_after_s}


def record(*points: Any) -> Any:
    profile = {"name": "paper", **PAPER.model_dump(mode="json")}
    return {"config": {"profile": profile, "tasks": 200, "factor": 4.0, "runs": len(points)}, "points": points}


def test_the_edge_node_has_its_share_by_then() -> None:
    share = least_bound(200, EIGHT, times_of(PAPER)).edge_tasks / 4
    assert images_until(0.5, 200, EIGHT, PAPER) == 102 + 50 * round(share / 2)
    assert images_until(0.0, 200, EIGHT, PAPER) == 102


def test_each_run_is_held_against_the_bound_for_its_own_moment() -> None:
    (row,) = SLOW_EDGE.rows(record(point(15.0, 6.0), point(15.5, 8.0)))
    bounds = [bound_with_slow_edge(200, EIGHT, times_of(PAPER), factor=4.0, after_s=at) for at in (6.0, 8.0)]
    assert bounds[0] > bounds[1] > row["unchanged_bound_seconds"]
    assert row["bound_seconds"] == pytest.approx(sum(bounds) / 2, abs=1e-3)
    assert row["ratio"] == pytest.approx((15.0 / bounds[0] + 15.5 / bounds[1]) / 2, abs=1e-3)
    assert row["max_ratio"] == pytest.approx(15.5 / bounds[1], abs=1e-3)


def test_a_node_that_had_too_little_to_do_never_became_slower() -> None:
    (row,) = SLOW_EDGE.rows(record(point(15.0, None)))
    assert row["bound_seconds"] == row["unchanged_bound_seconds"]
    assert SLOW_EDGE.table(record(point(15.0, None))).rows[0][1] == "never"


def test_the_plot_shows_no_run_in_which_nothing_became_slower() -> None:
    pytest.importorskip("matplotlib")
    figures = Figures()
    SLOW_EDGE.draw(record(point(15.0, None)), figures)
    assert figures.shown() == {}
    SLOW_EDGE.draw(record(point(15.0, None), {**point(16.0), "part": 0.75}), figures)
    (axes,) = figures._figures["slow-edge"].axes
    drawn = {x for line in axes.get_lines() for x in line.get_xdata()}
    assert drawn == {0.75}


def test_a_job_with_coarse_answers_where_fine_ones_were_wanted_has_no_time() -> None:
    (row,) = SLOW_EDGE.rows(record(point(15.0, fallback=50)))
    assert (row["seconds"], row["ratio"]) == (None, None)
