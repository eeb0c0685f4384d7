"""When the edge node becomes slower, and what the time is held against."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.emulation.compute import SLOWER
from experiments.figure3 import times_of
from experiments.harness import Request, Run, execute
from experiments.plots import Figures
from experiments.profile import read_profile
from experiments.slow_edge import SLOW_EDGE, Chosen, images_until
from scheduler.placement.bound import NodeCounts, bound_with_slow_edge, least_bound

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


def test_a_run_in_which_nothing_became_slower_is_in_no_average() -> None:
    (alone,) = SLOW_EDGE.rows(record(point(15.0)))
    mixed = record(point(15.0), point(11.0, None), point(90.0, None, fallback=50))
    (row,) = SLOW_EDGE.rows(mixed)
    assert row == {**alone, "never_slower": 2}
    assert SLOW_EDGE.table(mixed).rows[0][:3] == ["8", "0.5", "7.0 (1 of 3 runs)"]


def test_a_point_at_which_nothing_became_slower_has_no_time() -> None:
    (row,) = SLOW_EDGE.rows(record(point(15.0, None)))
    assert (row["runs"], row["never_slower"], row["bound_seconds"], row["seconds"]) == (0, 1, None, None)
    assert SLOW_EDGE.table(record(point(15.0, None))).rows == [["8", "0.5", "never", "13.4", "-", "-", "-"]]


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Fleets that were started, none of them real; the edge node becomes slower in the first one alone."""

    began = datetime.now(UTC)

    class Client:
        async def submit(self, images: Any, **options: Any) -> None: ...

        async def wait(self, job: None, *, budget_s: float) -> Any:
            facts = {"state": "completed", "reason": "", "elapsed_s": 15.0, "fallback": 0, "fine_accuracy": 1.0}
            return SimpleNamespace(started_at=began, by_node={}, **facts)

    started: list[Run] = []

    @asynccontextmanager
    async def fleet(run: Run, *arguments: Any, watch: Callable[[str, str], None], **options: Any) -> AsyncIterator[Any]:
        started.append(run)
        if len(started) == 1:
            watch("edge-1", f"now {SLOWER}")
        yield None, Client()

    monkeypatch.setattr(Run, "fleet", fleet)
    monkeypatch.setattr("experiments.harness.measure_networks", lambda *arguments: [])
    return started


async def test_the_record_names_the_runs_in_which_nothing_became_slower(tmp_path: Path, fleets: list[Run]) -> None:
    request = Request(profile_name="paper", profile=PAPER, quick=True)
    outcome = await execute(SLOW_EDGE, request, tmp_path / "run", lambda *words: None, Chosen(runs=2))
    assert [point["slower_after_s"] is None for point in outcome.record["points"]] == [False, True]
    assert outcome.record["notes"][-1] == (
        "left out: 8 end devices, part 0.5, run 2: the edge node got too little to do and never became slower"
    )


@pytest.mark.parametrize(
    ("quick", "most", "ends"), [(False, 8, [4, 6, 8]), (True, 8, [8]), (False, 3, [2, 3]), (False, 1, [1])]
)
async def test_without_a_choice_there_are_no_more_end_devices_than_the_profile_has(
    tmp_path: Path, fleets: list[Run], quick: bool, most: int, ends: list[int]
) -> None:
    request = Request(profile_name="paper", profile=PAPER.with_nodes(end=most), quick=quick)
    outcome = await execute(SLOW_EDGE, request, tmp_path / "run", lambda *words: None, Chosen(after=[0.5]))
    assert [point["ends"] for point in outcome.record["points"]] == ends


def test_the_plot_shows_no_run_in_which_nothing_became_slower() -> None:
    pytest.importorskip("matplotlib")
    figures = Figures()
    SLOW_EDGE.draw(record(point(15.0, None)), figures)
    assert figures.shown() == {}
    SLOW_EDGE.draw(record(point(15.0, None), {**point(16.0), "part": 0.75}), figures)
    (axes,) = figures.by_name["slow-edge"].axes
    drawn = {x for line in axes.get_lines() for x in line.get_xdata()}
    assert drawn == {0.75}


def test_a_job_with_coarse_answers_where_fine_ones_were_wanted_has_no_time() -> None:
    (row,) = SLOW_EDGE.rows(record(point(15.0, fallback=50)))
    assert (row["seconds"], row["ratio"]) == (None, None)
