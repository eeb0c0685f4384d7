"""What is told of an improvement whose command ends before it is done."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace import improving
from terrace.cli import run as terrace
from terrace.improve_progress import ProgressLines, progress_line
from terrace.improve_state import ImproveState, ImproveWish
from terrace.improving import STATE, Goal, Improving
from tests.own_networks import run_on_kept_pictures
from tests.release_stub import a_release, stubbed
from tierkit.client import Client, Run, RunWorker
from tierkit.errors import Conflict, DataError, InvalidInput, NotFound, ServiceFailed, Unavailable
from tierkit.wire.releases import ReleaseNow, ReleaseState
from training.messages import SPEC

pytestmark = pytest.mark.train

WISH = ImproveWish(release="flowers@7")


class Failing:
    """A client whose scheduler answers with an error."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def release(self, ref: str) -> None:
        raise self._error

    def run(self, id: str) -> None:
        raise NotFound(id)


def telling(told: list[tuple[str, str]]) -> Goal:
    return Goal(told=lambda now: told.append((now.state, now.reason)), within_s=60.0)


def improvement(folder: Path, client: object, goal: Goal, **facts: Any) -> Improving:
    """An improvement whose model set is made."""
    state = ImproveState(id="a" * 32, wish=WISH, created_at=datetime.now(UTC), **facts)
    (folder / "set").mkdir(parents=True)
    (folder / "set" / ".made").touch()
    (folder / STATE).write_text(state.model_dump_json())
    return Improving(cast(Client, client), folder, WISH, goal)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Conflict("another release rolls out"), "paused"),
        (Unavailable("the scheduler is away"), "paused"),
        (NotFound("no such release"), "paused"),
        (KeyboardInterrupt(), "paused"),
        (InvalidInput("it cannot be"), "failed"),
        (DataError("the pictures are damaged"), "failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_error_that_ends_the_command_is_told(tmp_path: Path, error: BaseException, state: str) -> None:
    told: list[tuple[str, str]] = []
    facts = {"state": "evaluating", "passes": True, "verdict": "better", "reason": "better"}
    with pytest.raises(type(error)):
        improvement(tmp_path / "improved", Failing(error), telling(told), **facts).run()
    assert [now for now, _ in told] == [state]
    assert str(error) in told[0][1]
    kept = ImproveState.model_validate_json((tmp_path / "improved" / STATE).read_bytes())
    assert (kept.state, kept.verdict) == (state, "better")


def test_an_improvement_that_was_paused_is_under_way_while_its_command_runs(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    facts = {"state": "paused", "passes": True, "verdict": "better", "reason": "another release rolls out"}
    with pytest.raises(Conflict):
        improvement(tmp_path, Failing(Conflict("again")), telling(told), **facts).run()
    assert [now for now, _ in told] == ["evaluating", "paused"]
    assert told[0][1] == "better"


def test_a_command_that_is_terminated_pauses_the_improvement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM); signal.pause()"
    monkeypatch.setattr(improving, "_HOST", (sys.executable, "-c", waiting))
    told: list[tuple[str, str]] = []
    before = signal.getsignal(signal.SIGTERM)  # of the process of the tests, where other tests may have left one
    with pytest.raises(KeyboardInterrupt):
        improvement(tmp_path, Failing(Conflict("")), telling(told)).run()
    assert [now for now, _ in told] == ["training", "paused"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_host_that_is_killed_pauses_the_improvement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suicide = "import os, signal; print('all is well', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(improving, "_HOST", (sys.executable, "-c", suicide))
    told: list[tuple[str, str]] = []
    with pytest.raises(ServiceFailed, match="SIGKILL") as caught:
        improvement(tmp_path, Failing(Conflict("")), telling(told)).run()
    assert caught.value.code == -9
    assert "all is well" not in str(caught.value)
    assert [now for now, _ in told] == ["training", "paused"]


class Enough(BaseException):
    """In place of a signal."""


def test_a_training_under_way_is_told_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Knowing:
        def run(self, id: str) -> Run:
            return run_of(done=3, steps=12)

    monkeypatch.setattr(improving, "_HOST", (sys.executable, "-c", "import signal; signal.pause()"))
    monkeypatch.setattr(improving, "_LOOK_S", 0.01)
    write_spec(tmp_path / "run")
    told: list[tuple[str, int]] = []
    said: list[str] = []

    def tell(now: ImproveState) -> None:
        told.append((now.state, now.devices))
        if len(told) > 3:
            raise Enough

    with pytest.raises(Enough):
        improvement(tmp_path, Knowing(), Goal(told=tell, say=said.append, within_s=60.0)).run()
    assert told == [("training", 0), *[("training", 1)] * 3]
    assert sum("round 5 of 20" in line for line in said) == 1, "what has not changed is said once"


def run_of(done: int, steps: int, workers: int = 2) -> Run:
    """A run of which one device has brought an update, and one has left."""
    at = datetime.now(UTC)
    counts: dict[str, Any] = {"staleness": 0.0, "bytes_sent": 0, "bytes_received": 0, "idle_s": 0.0}
    each = (RunWorker(name="a", updates=3, **counts), RunWorker(name="b", updates=0, left=True, **counts))
    times = {"created_at": at, "heard_at": at}
    names = {"id": "a" * 32, "network": "flowers", "strategy": "improve", "state": "running", "url": "http://h:1"}
    return Run.model_validate(
        {**names, **times, "steps": steps, "done": done, "loss": 0.51234, "workers": each[:workers]}
    )


def write_spec(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / SPEC).write_text(run_on_kept_pictures().model_dump_json())


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (ReleaseState.CANARY, "flowers@8 is tried now: better"),
        (ReleaseState.ROLLED_BACK, "flowers@8 is rolled back now: better"),
        (None, "flowers@8 was made, and has been removed: better"),
    ],
)
async def test_a_command_that_finds_its_work_done_says_what_the_release_is_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: ReleaseState | None, says: str
) -> None:
    facts = {"state": "released", "passes": True, "reason": "better", "new_release": "flowers@8", "started": True}
    improvement(tmp_path, Failing(NotFound("")), Goal(), **facts)
    async with stubbed() as stub:
        if state is not None:
            stub.add(a_release("flowers", 8, state))
        words = ["--scheduler", stub.url, "--release", "flowers@7", "--folder", str(tmp_path)]
        assert await asyncio.to_thread(terrace, ["train", "improve", *words]) == 0
    assert capsys.readouterr().out.strip() == says


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (ReleaseState.ROLLED_BACK, "refused"),
        (ReleaseState.STOPPED, "refused"),
        (ReleaseState.CANARY, "released"),
        (ReleaseState.IN_FORCE, "released"),
    ],
)
def test_a_release_that_was_taken_back_is_not_called_released(tmp_path: Path, found: ReleaseState, state: str) -> None:
    class Having:
        def release(self, ref: str) -> ReleaseNow:
            return a_release("flowers", 8, found)

    facts = {"state": "evaluating", "passes": True, "verdict": "better", "new_release": "flowers@8"}
    outcome = improvement(tmp_path, Having(), Goal(), **facts).run()
    assert outcome.state == state
    assert ("flowers@8 has the same networks" in outcome.reason) is (state == "refused")


def test_a_line_says_how_far_the_training_is() -> None:
    assert progress_line(run_of(done=3, steps=12), 20) == "round 5 of 20 done, 1 device, loss 0.512"
    assert "waiting" in progress_line(run_of(done=0, steps=12, workers=0), 20)


def test_lines_come_one_in_ten_seconds_at_most_and_only_if_they_changed() -> None:
    said: list[str] = []
    now = 0.0
    lines = ProgressLines(said.append, clock=lambda: now)
    for at, line in ((0.0, "a"), (1.0, "b"), (11.0, "a"), (12.0, "c"), (13.0, "c"), (30.0, "d")):
        now = at
        lines.news(line)
    assert said == ["a", "c", "d"]
