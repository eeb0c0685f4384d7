"""Members of an all-reduce that come and go, by torchft."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
pytest.importorskip("torchft", reason="needs the extra 'elastic' (torchft)")

from tests.integration.training.test_ranks import changed, network, options, vectors
from tests.rank_processes import RankProcess, place_of, start_rank
from tierkit.copies.files import sha256_of
from tierkit.errors import SetupError, UpstreamUnavailable
from training.parallel.elastic import LIGHTHOUSE_VARIABLE, lighthouse
from training.parallel.rank import RankOptions
from training.parallel.starting import LocalRanks, run_ranks_here

pytestmark = [pytest.mark.train, pytest.mark.timeout(120)]

__all__ = ["network", "options"]  # the fixtures

RANKS = 3
Start = Callable[..., RankProcess]


@pytest.fixture
def start(options: RankOptions) -> Iterator[Start]:
    """Starts a member of a run."""
    started: list[RankProcess] = []
    with lighthouse() as url:

        def member(rank: int, **changes: object) -> RankProcess:
            own = changed(options, strategy="elastic", **changes)
            started.append(start_rank(own, place_of(rank, RANKS, 1) | {LIGHTHOUSE_VARIABLE: url}))
            return started[-1]

        yield member
        for each in started:
            each.kill()


def digest(folder: Path, rank: int, step: int) -> str:
    return sha256_of(vectors(folder, rank, step)["joined"].tobytes())


def test_a_member_is_killed_and_comes_back_and_no_step_is_lost(start: Start, tmp_path: Path) -> None:
    given = {"folder": tmp_path, "epochs": 225, "patience_s": 20.0}  # far longer than a process takes to start
    members = [start(rank, **given) for rank in range(RANKS)]
    while not members[2].progress or members[2].progress[-1][1] < 60:
        assert members[2].next() is not None
    killed_at = time.monotonic()
    members[2].kill()
    back = start(2, **given)
    results = [each.ended() for each in (*members[:2], back)]
    assert isinstance(results[0], dict), results

    seen = members[0].progress
    steps = [step for _, step, _ in seen]
    assert steps == sorted(set(steps))
    assert {*steps, *(step for _, step, _ in members[1].progress)} == {*range(1, 601)}
    found = [digest(tmp_path, rank, 600) for rank in range(RANKS)]
    assert found[1:] == found[:1] * 2
    longest_s = max(after - before for (before, _, _), (after, _, _) in itertools.pairwise(seen))
    back_at, first, ranks = back.progress[0]
    assert longest_s < 5  # on a machine that does much else; see the benchmark below
    assert back_at - killed_at < 10
    assert (first > 60, ranks) == (True, RANKS)


def test_a_member_with_old_weights_gets_those_of_the_others(start: Start, tmp_path: Path) -> None:
    """Its folder has a checkpoint of an earlier step."""
    folders = [tmp_path / str(rank) for rank in range(RANKS)]
    members = [start(rank, folder=folder, epochs=225) for rank, folder in enumerate(folders)]
    while not members[1].progress or members[1].progress[-1][1] < 50:
        assert members[1].next() is not None
    members[1].kill()
    old = max(int(path.stem.rpartition("-")[2]) for path in folders[1].glob("rank-1-*"))
    back = start(1, folder=folders[1], epochs=225)
    results = [each.ended() for each in (members[0], back, members[2])]
    assert isinstance(results[0], dict), results
    assert back.progress[0][1] > old + 1
    found = [digest(folder, rank, 600) for rank, folder in enumerate(folders)]
    assert found[1:] == found[:1] * 2


def test_a_run_that_continues_ends_with_the_same_weights_everywhere(start: Start, tmp_path: Path) -> None:
    given = {"folder": tmp_path, "epochs": 6}
    for each in [start(rank, **given) for rank in range(RANKS)]:
        each.ended()
    for path in tmp_path.glob("rank-*-16.safetensors"):
        path.unlink()
    again = [start(rank, **given) for rank in range(2)]
    late = start(2, **given)
    results = [each.ended() for each in (*again, late)]
    assert isinstance(results[0], dict), results
    found = [digest(tmp_path, rank, 16) for rank in range(RANKS)]
    assert found[1:] == found[:1] * 2


def test_members_that_are_too_few_begin_after_the_budget(start: Start) -> None:
    members = [start(rank, epochs=1, patience_s=1.0) for rank in range(2)]
    assert isinstance(members[0].ended(), dict)
    assert {ranks for _, _, ranks in members[0].progress} == {2}


def test_without_a_lighthouse_it_is_told(options: RankOptions) -> None:
    own = changed(options, strategy="elastic", patience_s=1.0)
    error = start_rank(own, place_of(0, RANKS, 1)).ended()
    assert isinstance(error, SetupError)
    assert "torchft_lighthouse" in str(error)
    error = start_rank(own, place_of(0, RANKS, 1) | {LIGHTHOUSE_VARIABLE: "http://127.0.0.1:9"}).ended()
    assert isinstance(error, UpstreamUnavailable)


@pytest.mark.benchmark
def test_what_a_killed_member_costs(tmp_path: Path) -> None:
    """On demand: `pytest -m benchmark tests/integration/training/test_elastic.py`, with MNIST below TERRACE_DATA. The
    process is started again, and imports torch first."""
    pids: dict[str, int] = {}
    times: list[tuple[float, int]] = []
    killed_at = 0.0

    def watch(now: Mapping[str, Any]) -> None:
        nonlocal killed_at
        times.append((time.monotonic(), now["ranks"]))
        if not killed_at and now["step"] > 60:
            killed_at = time.monotonic()
            os.kill(pids["rank-2"], signal.SIGKILL)

    settings = {"strategy": "elastic", "epochs": 12, "threads": 1, "folder": tmp_path}
    plan = LocalRanks(network="mnist-64-64", settings=settings, ranks=RANKS, on_start=pids.__setitem__)
    result = asyncio.run(run_ranks_here(plan, watch))
    away_at = next(at for at, ranks in times if at > killed_at and ranks < RANKS)
    back_s = next(at for at, ranks in times if at > away_at and ranks == RANKS) - killed_at
    sys.stdout.write(f"longest step {result['longest_step_s']:.2f} s, back after {back_s:.1f} s\n")
    assert result["longest_step_s"] <= 1
    assert back_s <= 10
    last = max(int(path.stem.rpartition("-")[2]) for path in tmp_path.glob("rank-0-*"))
    found = [vectors(tmp_path, rank, last)["joined"].tobytes() for rank in range(RANKS)]
    assert found[1:] == found[:1] * 2
