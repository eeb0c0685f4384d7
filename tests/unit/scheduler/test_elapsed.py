"""Elapsed time: what a wrong clock, a restart of the scheduler and one of the machine make of it."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from hypothesis import given, strategies as st
from sqlalchemy import select, text

from scheduler.store import elapsed as module
from scheduler.store.elapsed import Elapsed, Kept, boot_id, continued, kept_elapsed, since_boot
from scheduler.store.tables import properties
from tests.unit.scheduler.test_store import opened
from tierkit.testing import wait_for

KEPT = Kept(elapsed=5000.0, boot="first", since_boot=100.0)


@pytest.mark.parametrize(
    ("kept", "boot", "since_boot", "wall", "goes_on_at"),
    [
        (None, "first", 100.0, 1.7e9, 1.7e9),
        (KEPT, "first", 100.0, 1.7e9, 5000.0),
        (KEPT, "first", 160.0, 1.7e9, 5060.0),  # the scheduler was away for a minute
        (KEPT, "first", 160.0, 0.0, 5060.0),  # whatever the clock says
        (KEPT, "first", 90.0, 1.7e9, 5000.0),  # cannot be
        (KEPT, "second", 10.0, 1.7e9, 5000.0),  # the machine has started again: nobody knows how long that took
        (KEPT, "", 160.0, 1.7e9, 5000.0),
        (Kept(elapsed=5000.0, boot="", since_boot=100.0), "", 160.0, 1.7e9, 5000.0),
    ],
)
def test_where_elapsed_time_goes_on(kept, boot, since_boot, wall, goes_on_at):
    assert continued(kept, boot=boot, since_boot=since_boot, wall=wall) == goes_on_at


def by_name(kept: Kept) -> dict[str, object]:
    return {"elapsed": kept.elapsed, "boot": kept.boot, "since_boot": kept.since_boot}


class Machine:
    """A machine with a clock that anybody may set, and one that counts since its start."""

    def __init__(self) -> None:
        self.wall, self.since_boot, self.boot = 1_700_000_000.0, 0.0, 0
        self.kept: Kept | None = None
        self.start()

    def start(self) -> None:
        """The scheduler begins."""
        at = continued(self.kept, boot=str(self.boot), since_boot=self.since_boot, wall=self.wall)
        self.elapsed = Elapsed(at, boot=str(self.boot), clock=lambda: self.since_boot)
        self.note()

    def note(self) -> None:
        self.kept = Kept(**json.loads(json.dumps(by_name(self.elapsed.kept()))))

    def let_pass(self, seconds: float) -> None:
        self.wall += seconds
        self.since_boot += seconds


STEPS = st.one_of(
    st.tuples(st.just("pass"), st.floats(0, 1e6)),
    st.tuples(st.just("set"), st.floats(-2e9, 2e9)),
    st.tuples(st.just("restart"), st.floats(0, 1e6)),
    st.tuples(st.just("reboot"), st.floats(0, 1e6)),
    st.tuples(st.just("note"), st.just(0.0)),
)


@given(st.lists(STEPS, max_size=30))
def test_elapsed_time_is_the_time_that_passed_while_the_machine_ran(steps):
    """Setting the clock changes nothing, and it never goes back; only a restart of the machine may hide time."""
    machine = Machine()
    began, passed, sure = machine.elapsed.now(), 0.0, 0.0
    for what, seconds in steps:
        before = machine.elapsed.now()
        match what:
            case "pass":
                machine.let_pass(seconds)
                passed += seconds
            case "set":
                machine.wall += seconds
            case "restart":
                machine.let_pass(seconds)
                passed += seconds
                machine.start()
            case "note":
                machine.note()
                sure = passed
            case "reboot":
                machine.boot += 1
                machine.since_boot = 0.0
                machine.wall += seconds
                assert machine.kept is not None
                passed = machine.kept.elapsed - began  # what was noted last
                machine.start()
                before = machine.elapsed.now()
        now = machine.elapsed.now()
        assert now >= before - 1e-6  # sums of floats near 1.7e9 are rounded
        assert now - began == pytest.approx(passed, abs=1e-3 + 1e-9 * passed)
        assert now - began >= sure - 1e-3 - 1e-9 * sure or what == "reboot"


async def test_it_goes_on_after_a_restart_of_the_scheduler(database_url, monkeypatch):
    async with opened(database_url) as store:
        first = await kept_elapsed(store.engine, store.commit)
        assert first.now() == pytest.approx(time.time(), abs=60)
    wall, at = time.time(), since_boot()
    monkeypatch.setattr(time, "time", lambda: wall + 21 * 86400)
    monkeypatch.setattr(module, "since_boot", lambda: at + 30.0)
    async with opened(database_url) as store:
        second = await kept_elapsed(store.engine, store.commit)
        assert second.now() == pytest.approx(first.now(), abs=60)
    monkeypatch.setattr(module, "boot_id", lambda: "another start")
    async with opened(database_url) as store:
        assert (await kept_elapsed(store.engine, store.commit)).now() == pytest.approx(second.now(), abs=60)


async def test_it_is_noted_again_and_again(database_url, monkeypatch):
    monkeypatch.setattr(module, "_KEEP_S", 0.0)
    async with opened(database_url) as store:
        elapsed = await kept_elapsed(store.engine, store.commit)
        noting = asyncio.create_task(elapsed.run(store.commit))

        async def noted() -> str:
            async with store.engine.connect() as connection:
                query = select(properties.c.value).where(properties.c.name == "elapsed")
                return str(await connection.scalar(query))

        first = await noted()

        async def noted_again() -> bool:
            return await noted() != first

        await wait_for(noted_again, what="another note")
        noting.cancel()
        await asyncio.gather(noting, return_exceptions=True)


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"elapsed": "x", "boot": "b", "since_boot": 1}', "null"])
async def test_a_damaged_note_does_not_stop_the_start(database_url, damage):
    async with opened(database_url) as store:
        await kept_elapsed(store.engine, store.commit)
        async with store.engine.begin() as connection:
            statement = text("UPDATE terrace_properties SET value = :value WHERE name = 'elapsed'")
            await connection.execute(statement, {"value": damage})
        assert (await kept_elapsed(store.engine, store.commit)).now() == pytest.approx(time.time(), abs=60)


def test_this_machine_has_a_clock_that_nobody_sets():
    assert boot_id() == boot_id()
    assert since_boot() <= since_boot()
