"""Elapsed time in the database of the scheduler, across restarts."""

from __future__ import annotations

import asyncio
import time

import pytest
from sqlalchemy import select, text

from scheduler.store import elapsed as module
from scheduler.store.elapsed import kept_elapsed, note_elapsed
from scheduler.store.tables import properties
from tests.unit.scheduler.test_store import opened
from tierkit.elapsed import since_boot
from tierkit.testing import wait_for


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
        noting = asyncio.create_task(note_elapsed(elapsed, store.commit))

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
