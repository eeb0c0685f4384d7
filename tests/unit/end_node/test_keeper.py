"""Supervision of a source: states, restarts, pauses, and what is logged."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from end_node.settings import SourceSettings
from end_node.sources import keeper as keepers
from end_node.sources.choosing import Opened
from end_node.sources.keeper import SourceKeeper
from end_node.sources.picture import Intake, TakenPicture
from tierkit.errors import SourceUnavailable, TerraceError
from tierkit.testing import FakeClock, wait_for


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_BACKOFF_S", "_LONGEST_BACKOFF_S", "_LONGEST_POLITE_S"):
        monkeypatch.setattr(keepers, name, 0.001)


class NoIntake:
    async def take(self, picture: TakenPicture) -> None:
        pass

    async def known(self, marks: Collection[str]) -> Collection[str]:
        return set()


class ScriptedSource:
    """Takes a picture, then does what the next step says: an error is raised, None is the end."""

    def __init__(self, *steps: Exception | asyncio.Event | None) -> None:
        self.steps = list(steps)
        self.kinds: list[str | None] = []

    async def run(self, intake: Intake, alive: Callable[[int], None]) -> None:
        step = self.steps.pop(0)
        alive(2)
        await intake.take(TakenPicture(content=b""))
        if isinstance(step, Exception):
            raise step
        if step is not None:
            await step.wait()

    async def open(self, settings: SourceSettings, tls_ca: Path | None) -> Opened:
        self.kinds.append(settings.kind)
        return Opened("stream", self)


@asynccontextmanager
async def running(source: ScriptedSource, clock: FakeClock | None = None) -> AsyncIterator[SourceKeeper]:
    settings = SourceSettings(name="gate", url="rtsp://camera/")
    keeper = SourceKeeper(settings, NoIntake(), opened=source.open, clock=clock or FakeClock())
    task = asyncio.create_task(keeper.run())
    yield keeper
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_source_that_breaks_starts_again_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source = ScriptedSource(SourceUnavailable("cut"), SourceUnavailable("cut"), ZeroDivisionError("a defect"), None)
    clock = FakeClock()
    async with running(source, clock) as keeper:
        await wait_for(lambda: keeper.status.state == "finished", what="the end")
        clock.advance(7.0)
        status = keeper.status
    assert (status.taken, status.skipped, status.restarts, status.last_picture_s) == (4, 8, 3, 7.0)
    assert "a defect" in caplog.text
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "source 'gate': waiting, cut",
        "source 'gate': waiting, cut",
        "source 'gate': waiting, a defect",
    ]
    # The kind is asked for once.
    assert source.kinds == [None, "stream", "stream", "stream"]


async def test_a_fault_that_stays_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class AwaySource(ScriptedSource):
        async def run(self, intake: Intake, alive: Callable[[int], None]) -> None:
            self.kinds.append("tried")
            raise SourceUnavailable("away")

    source = AwaySource()
    async with running(source) as keeper:
        await wait_for(lambda: keeper.status.restarts >= 5, what="some tries")
        assert (keeper.status.state, keeper.status.reason) == ("waiting", "away")
    assert caplog.text.count("away") == 1


async def test_pause_and_resume() -> None:
    never = asyncio.Event()
    source = ScriptedSource(never, never)
    async with running(source) as keeper:
        await wait_for(lambda: keeper.status.taken == 1, what="the picture")
        keeper.pause()
        assert keeper.status.state == "paused"
        assert len(source.steps) == 1
        keeper.resume()
        await wait_for(lambda: keeper.status.taken == 2, what="the next picture")
        assert keeper.status.restarts == 0


async def test_a_picture_that_is_not_taken_is_a_fault_with_a_reason() -> None:
    class FullIntake(NoIntake):
        async def take(self, picture: TakenPicture) -> None:
            raise TerraceError("the disk is full")

    settings = SourceSettings(name="gate", url="rtsp://camera/")
    source = ScriptedSource(*[None] * 1000)
    keeper = SourceKeeper(settings, FullIntake(), opened=source.open)
    task = asyncio.create_task(keeper.run())
    await wait_for(lambda: keeper.status.reason == "the disk is full", what="the reason")
    assert keeper.status.taken == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
