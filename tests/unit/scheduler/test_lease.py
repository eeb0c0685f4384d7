"""The lease: one leads, its transactions alone count, and each of them counts once."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from scheduler.store.commit import GroupCommit
from scheduler.store.copies import FileCopies
from scheduler.store.database import open_database, transact
from scheduler.store.lease import Lease
from scheduler.store.tables import VERSION_TABLE, inputs, lease as table
from tests.unit.scheduler.test_store import Store, add, answer
from tierkit.errors import SetupError, Standby, Unavailable
from tierkit.testing import FakeClock, wait_for

FIRST, SECOND = "http://first", "http://second"


@pytest.fixture
async def engines(database_url: str) -> AsyncIterator[tuple[AsyncEngine, AsyncEngine]]:
    """Of two schedulers with one database."""
    first, second = await open_database(database_url), await open_database(database_url)
    yield first, second
    await first.dispose()
    await second.dispose()


@asynccontextmanager
async def writing(engine: AsyncEngine, lease: Lease) -> AsyncIterator[Store]:
    commit = GroupCommit(engine, lease, next_seq=1)
    writer = asyncio.create_task(commit.run())
    try:
        yield Store(engine, commit)
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)


async def expire(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(update(table).values(expires_at=0.0))


async def row(engine: AsyncEngine) -> Any:
    async with engine.connect() as connection:
        return (await connection.execute(table.select())).one()


@contextmanager
def unreachable(engine: AsyncEngine) -> Iterator[None]:
    def refuse(*given: Any) -> None:
        raise ConnectionResetError("the connection broke")

    event.listen(engine.sync_engine, "begin", refuse)
    try:
        yield
    finally:
        event.remove(engine.sync_engine, "begin", refuse)


@contextmanager
def unheard(engine: AsyncEngine, times: int = 1) -> Iterator[None]:
    """The database commits, and its word is lost."""
    dialect = engine.sync_engine.dialect
    commit = dialect.do_commit

    def commit_and_break(connection: Any) -> None:
        nonlocal times
        commit(connection)
        if times:
            times -= 1
            raise ConnectionResetError("the connection broke")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialect, "do_commit", commit_and_break)
        yield


async def test_one_leads_and_the_other_one_when_that_has_given_the_lease_back(engines: Any) -> None:
    first, second = Lease(engines[0], url=FIRST, lease_s=60.0), Lease(engines[1], url=SECOND, lease_s=0.3)
    await first.acquire()
    assert first.held
    waits = asyncio.Event()
    standby = asyncio.create_task(second.acquire(waits.set))
    await waits.wait()
    assert (second.leader, standby.done()) == (FIRST, False)
    await first.release()
    async with asyncio.timeout(10):
        await standby
    assert second.epoch > first.epoch
    keeping = asyncio.create_task(second.keep())
    with pytest.raises(Standby):
        async with engines[0].begin() as connection:
            await first.fence(connection)
    assert (first.held, second.held) == (False, True)
    keeping.cancel()


async def test_a_lease_that_is_not_renewed_runs_out(engines: Any) -> None:
    first, second = Lease(engines[0], url=FIRST, lease_s=0.2), Lease(engines[1], url=SECOND, lease_s=60.0)
    await first.acquire()
    async with asyncio.timeout(10):
        await second.acquire()
        await first.keep()  # ends when it is lost
    assert (first.held, second.held) == (False, True)


async def test_a_renewed_lease_does_not_run_out(engines: Any) -> None:
    first, second = (Lease(engine, url=FIRST, lease_s=2.0) for engine in engines)
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3.0):
            await second.acquire()
    assert first.held
    keeping.cancel()


async def test_who_cannot_renew_leads_on_only_where_nobody_waits(engines: Any) -> None:
    clock = FakeClock()
    first = Lease(engines[0], url=FIRST, lease_s=1.0, clock=clock)
    await first.acquire()
    keeping = asyncio.create_task(first.keep())

    async def renewed() -> bool:
        return bool((await row(engines[0])).expires_at < 9e12)

    async def renew() -> None:
        async with engines[0].begin() as connection:
            await connection.execute(update(table).values(expires_at=9e12))
        await wait_for(renewed, what="a renewal")

    await renew()
    with unreachable(engines[0]):
        clock.advance(5.0)
        await wait_for(lambda: first.held, what="it to lead on")
    waiting = asyncio.create_task(Lease(engines[1], url=SECOND, lease_s=1000.0).acquire())

    async def awaited() -> bool:
        return bool((await row(engines[0])).awaited_until > 0.0)

    await wait_for(awaited, what="the other one to wait")
    await renew()
    with unreachable(engines[0]):
        clock.advance(0.9)
        await wait_for(lambda: first.held, what="it to lead on")
        clock.advance(0.2)
        await wait_for(lambda: not first.held, what="it to lead no longer")
        await asyncio.wait_for(keeping, 10)  # it is given up
        assert first.lost.is_set()
    for task in (keeping, waiting):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_who_has_the_database_alone_need_not_wait(engines: Any) -> None:
    await Lease(engines[0], url=FIRST, lease_s=60.0).acquire()
    second = Lease(engines[1], url=FIRST, lease_s=60.0, alone=True)
    await second.acquire()
    assert second.epoch > 1


async def test_a_newer_schema_is_not_led(engines: Any) -> None:
    async with engines[0].begin() as connection:
        await connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    lease = Lease(engines[0], url=FIRST, lease_s=60.0)
    with pytest.raises(SetupError, match="update this one"):
        await lease.acquire()
    async with engines[0].connect() as connection:
        assert await connection.scalar(table.select().with_only_columns(table.c.expires_at)) == 0.0


async def test_what_an_earlier_leader_still_writes_is_refused(engines: Any) -> None:
    first, second = (Lease(engine, url=FIRST, lease_s=60.0) for engine in engines)
    await first.acquire()
    async with writing(engines[0], first) as old:
        job = await add(old.jobs)
        await expire(engines[0])
        await second.acquire()
        old.commit.put(answer(job, 0))
        flushing = asyncio.create_task(old.commit.flush())
        async with asyncio.timeout(10):
            await first.lost.wait()
        with pytest.raises(Standby):
            await add(old.jobs)
        assert (old.announced, flushing.done()) == ([], False)
        async with writing(engines[1], second) as new:
            assert await new.jobs.results_after(job, 0, limit=5) == []
            new.commit.put(answer(job, 0))
            await new.commit.flush()
            assert new.announced == [[1]]
        flushing.cancel()


async def test_a_commit_whose_answer_is_lost_is_not_made_twice(engines: Any) -> None:
    lease = Lease(engines[0], url=FIRST, lease_s=60.0)
    await lease.acquire()
    async with writing(engines[0], lease) as store:
        job = await add(store.jobs)
        with unheard(engines[0]):
            store.commit.put(answer(job, 0))
            await store.commit.flush()
        store.commit.put(answer(job, 1))
        await store.commit.flush()
        assert store.announced == [[1], [2]]
        assert [seq for seq, _ in await store.jobs.results_after(job, 0, limit=5)] == [1, 2]


async def test_a_submission_whose_answer_is_lost_is_taken_back(engines: Any) -> None:
    lease = Lease(engines[0], url=FIRST, lease_s=60.0)
    await lease.acquire()
    async with writing(engines[0], lease) as store:
        with unheard(engines[0]), pytest.raises(Unavailable):
            await add(store.jobs, key="k")
        again = await add(store.jobs, key="k")
        assert [job.id for job in await store.jobs.unfinished()] == [again.id]


async def test_copies_of_inputs(engines: Any, tmp_path: Any) -> None:
    lease = Lease(engines[0], url=FIRST, lease_s=60.0)
    await lease.acquire()
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 40_000)  # three parts
    async with writing(engines[0], lease) as store:
        copies = FileCopies(engines[0], store.commit, inputs)
        await asyncio.gather(*(copies.save("a" * 64, source) for _ in range(3)))
        await copies.save("b" * 64, source)
        copies.remove("b" * 64)
        await copies.save("b" * 64, source)
        for name in "ab":
            await FileCopies(engines[1], store.commit, inputs).fetch(name * 64, target)
            assert target.read_bytes() == source.read_bytes()
        await copies.keep_only({"b" * 64})
        await copies.fetch("a" * 64, target)
        assert target.read_bytes() == b""
        copies.remove("b" * 64)
        await store.commit.flush()
        await copies.fetch("b" * 64, target)
        assert target.read_bytes() == b""


async def test_a_transaction_that_is_cancelled_leaves_no_lock(tmp_path: Path) -> None:
    file = tmp_path / "terrace.db"
    engine = await open_database(f"sqlite+aiosqlite:///{file}")
    begun, ended = threading.Event(), threading.Event()

    def slow() -> float:
        begun.set()
        ended.wait(10.0)
        return 1.0

    async def renew(connection: AsyncConnection) -> None:
        driver = (await connection.get_raw_connection()).driver_connection
        assert driver is not None
        await driver.create_function("slow", 0, slow)
        await connection.execute(update(table).values(expires_at=func.slow()).returning(table.c.epoch))

    gc.disable()
    try:
        renewal = asyncio.create_task(transact(engine, renew))
        assert await asyncio.to_thread(begun.wait, 10.0)
        renewal.cancel()
        ended.set()
        with pytest.raises(asyncio.CancelledError):
            await renewal
        with closing(sqlite3.connect(file, isolation_level=None, timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")
    finally:
        gc.enable()
        await engine.dispose()
