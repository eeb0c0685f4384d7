"""The scheduler's own code on virtual time, with simulated machines."""

from typing import Any

import pytest

from experiments.profile import read_profile
from experiments.scale.experiment import Size, case_of, simulated_point
from experiments.scale.world import Case, simulate
from scheduler.dispatch.loop import Dispatcher
from tierkit.errors import InvalidInput
from tierkit.types import Scheme

PAPER = read_profile("paper")


def figures(case: Case) -> dict[str, Any]:
    found = simulate(case)
    return {name: value for name, value in found.items() if name not in ("cpu_s", "wall_s", "memory_bytes")}


@pytest.mark.parametrize("scheme", [Scheme.END, Scheme.END_EDGE, Scheme.END_CLOUD, Scheme.MAPPING])
def test_the_papers_machines_reach_the_pipelined_bound(scheme: Scheme) -> None:
    found = simulate(simulated_point((scheme, False, 6, 8), 80, PAPER))
    assert 0.9999 * found["bound_seconds"] <= found["seconds"] <= 1.05 * found["bound_seconds"]
    assert found["answers"] == {"coarse" if scheme is Scheme.END else "fine": 80}


def test_adaptive_is_close_to_the_bound() -> None:
    found = simulate(simulated_point((Scheme.ADAPTIVE, False, 6, 8), 100, PAPER))
    assert found["seconds"] <= 1.07 * found["bound_seconds"]


def test_a_window_of_one_is_what_it_costs() -> None:
    found = simulate(simulated_point((Scheme.END_EDGE, False, 1, 1), 20, PAPER))
    one_task_s = 0.004 + 0.3705 + 0.5 + 0.2995
    assert found["seconds"] == pytest.approx(20 * one_task_s, rel=0.01)


def test_every_heartbeat_is_sent_and_nobody_is_given_up_for_no_reason() -> None:
    case = case_of(Size(60, 3, 1, 300), Scheme.MAPPING, PAPER, seed=1)
    found = figures(Case(**{**_fields(case), "churn_per_minute": 0.0}))
    assert found["heartbeats"] == pytest.approx(64 * found["seconds"] / 0.2, rel=0.05)
    assert found["outcomes"] == {"ok": 300}
    assert found == figures(Case(**{**_fields(case), "churn_per_minute": 0.0})), "not the same twice"


@pytest.mark.parametrize("scheme", [Scheme.MAPPING, Scheme.ADAPTIVE])
def test_no_task_is_lost_when_nodes_fail_all_the_time(scheme: Scheme) -> None:
    case = case_of(Size(40, 4, 1, 300), scheme, PAPER, seed=3)
    found = figures(Case(**{**_fields(case), "churn_per_minute": 3.0}))
    assert found["deaths"] > 5
    assert sum(found["answers"].values()) == 300
    assert set(found["answers"]) <= {"fine", "fallback"}
    assert found["answers"].get("fallback", 0) < 10
    assert sum(found["outcomes"].values()) > 300, "no attempt was lost"


def test_an_answer_costs_no_look_at_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    look_ahead = Dispatcher._look_ahead

    def count(self: Dispatcher, now: float) -> None:
        nonlocal looks
        looks += 1
        look_ahead(self, now)

    monkeypatch.setattr(Dispatcher, "_look_ahead", count)
    found = simulate(Case(**{**_fields(case_of(Size(40, 4, 1, 600), Scheme.MAPPING, PAPER, seed=3)), "job_tasks": 200}))
    assert sum(found["answers"].values()) == 600
    assert looks < 100, "but for what frees a place there is little news"


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__slots__}


def test_a_large_fleet_keeps_the_proportions_of_the_profile() -> None:
    case = case_of(Size(1000, 50, 2, 1), Scheme.MAPPING, PAPER, seed=0)
    small = simulated_point((Scheme.MAPPING, False, 6, 8), 1, PAPER)
    for tier in ("edge", "cloud"):
        large_rate = getattr(case, f"{tier}s") / getattr(case, f"{tier}_s") / case.ends
        small_rate = getattr(small, f"{tier}s") / getattr(small, f"{tier}_s") / small.ends
        assert large_rate == pytest.approx(small_rate)
    assert case.beats_at_once == 1
    assert case_of(Size(100_000, 2000, 50, 1), Scheme.MAPPING, PAPER, seed=0).beats_at_once == 100


@pytest.mark.parametrize("text", ["1000", "10/2", "10/0/1", "a/b/c", "-1/2/3"])
def test_a_size_that_is_none_is_told_what_one_looks_like(text: str) -> None:
    with pytest.raises(InvalidInput, match="1000/50/2"):
        Size.read(text, None)


def test_a_fleet_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(InvalidInput, match="more than 200,000 nodes"):
        Size.read("999999999999999999999/1/1", None)
