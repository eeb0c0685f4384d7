"""When a worker stands back for a node that serves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tierkit.errors import SetupError
from training.worker.idle import CpuShare, NodeWatch, Quiet, stand_back


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        # Process, its processor time, and when.
        ([(7, None, 100.0)], [True]),
        ([(7, 5.0, 100.0), (7, 5.0, 100.9), (7, 5.0, 101.1)], [False, False, True]),
        ([(7, 5.0, 100.0), (7, 5.0, 102.0), (7, 5.02, 102.1), (7, 5.02, 103.0), (7, 5.02, 103.2)], [0, 1, 0, 0, 1]),
        # What it does besides is no service.
        ([(7, 5.0, 100.0), (7, 5.0, 102.0), (7, 5.01, 102.2), (7, 5.02, 102.4)], [0, 1, 1, 1]),
        # A node that is started again computes at first, and one that has ended serves nobody.
        ([(7, 5.0, 100.0), (7, 5.0, 102.0), (8, 0.1, 102.1), (8, 0.1, 103.2)], [0, 1, 0, 1]),
        ([(7, 5.0, 100.0), (7, 5.0, 102.0), (0, None, 102.1)], [0, 1, 1]),
    ],
)
def test_a_worker_works_while_the_node_is_quiet(
    looks: list[tuple[int, float | None, float]], expected: list[bool]
) -> None:
    quiet = Quiet()
    assert [quiet.judge(*look) for look in looks] == [bool(each) for each in expected]


def test_a_node_is_found_by_its_ready_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100, 200, 2))
    monkeypatch.setattr("training.worker.idle.time.monotonic", lambda: float(next(clock)))
    proc, ready = tmp_path / "proc", tmp_path / "ready"
    with pytest.raises(SetupError, match="Linux"):
        NodeWatch(ready, proc)
    for name in ("self", "42"):
        (proc / name).mkdir(parents=True)

    def used(ticks: int) -> None:
        (proc / "42" / "stat").write_text(f"42 (a (b) c) S {' '.join(['0'] * 10)} {ticks} 0 0 0")

    (proc / "self" / "stat").touch()
    watch = NodeWatch(ready, proc)
    assert watch.may_work()  # there is no node
    ready.write_text(json.dumps({"pid": 42}))
    used(0)
    assert [watch.may_work(), watch.may_work()] == [False, True]
    used(os.sysconf("SC_CLK_TCK"))  # a second of the last two
    assert [watch.may_work(), watch.may_work()] == [False, True]
    ready.write_text("{")
    assert watch.may_work()


def test_a_share_of_a_core_is_kept_and_idle_time_is_not_saved_up() -> None:
    used, now = 0.0, 100.0
    share = CpuShare(0.1, used_s=lambda: used, clock=lambda: now)
    worked = 0
    for _ in range(10_000):  # for 1,000 seconds, in steps that would take half of the core
        now += 0.1
        if share.may_work():
            worked += 1
            used += 0.05
    assert 0.09 <= worked * 0.05 / 1000 <= 0.11
    now += 3600.0
    assert share.may_work()
    used += 2.5  # more than it may be ahead
    assert not share.may_work()
    now += 10.0
    assert share.may_work()


def test_a_thread_stands_back_until_there_may_be_work(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("training.worker.idle.time.sleep", waited.append)
    answers = iter([False, False, True])
    stand_back(lambda: next(answers))
    assert len(waited) == 2
