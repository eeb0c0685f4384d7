"""The outbox in the database: events go with what they are about, in order, and what is dropped is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import event, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from scheduler.core.job import ImageFacts, JobRow
from scheduler.core.outbox import NO_FILTER, DeadLetter, EventFilter, Sink, SinkEvent
from scheduler.core.policy import JobPolicy
from scheduler.sinks.protocol import SinkContext
from scheduler.sinks.service import SinkLimits, Sinks
from scheduler.store import sinks as module
from scheduler.store.commit import GroupCommit
from scheduler.store.database import last_seq, open_database
from scheduler.store.jobs import JobStore, new_job_id
from scheduler.store.lease import Lease
from scheduler.store.outbox import Outbox
from scheduler.store.reading import Reader
from scheduler.store.sinks import SinkStore
from scheduler.store.tables import outbox, properties
from tierkit.errors import Conflict, InvalidInput
from tierkit.types import JobState, Scheme


class Store:
    """A database with its writer running, and a sink that wants all."""

    def __init__(self, engine: AsyncEngine, commit: GroupCommit) -> None:
        self.engine = engine
        self.commit = commit
        self.now = 1000.0
        commit.outbox = Outbox(wall=lambda: 1_700_000_000.0, elapsed=lambda: self.now)
        commit.outbox.use([NO_FILTER])
        self.jobs = JobStore(Reader(engine), commit)
        self.sinks = SinkStore(Reader(engine), commit)

    async def write(self, *keys: str) -> None:
        """Store an event for each key."""
        rows = self.commit.outbox.rows([happened(key) for key in keys])
        self.commit.put(tuple(rows))
        await self.commit.flush()

    async def numbers(self) -> list[int]:
        return [each.number for each in await self.sinks.page(0, 10_000)]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    engine = await open_database(url)
    lease = Lease(engine, url="http://a", lease_s=60.0, alone=True)
    await lease.acquire()
    commit = GroupCommit(engine, lease, next_seq=await last_seq(engine) + 1)
    writer = asyncio.create_task(commit.run())
    try:
        yield Store(engine, commit)
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        await engine.dispose()


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    async with opened(database_url) as store:
        yield store


def happened(key: str, **data: Any) -> SinkEvent:
    return SinkEvent(type="job.failed", key=key, data=data)


def a_job(**changes: Any) -> JobRow:
    now = time.time()
    fields = {
        "id": new_job_id(now),
        "policy": JobPolicy(scheme=Scheme.END, deadline_s=10, task_deadline_s=5, name="a job"),
        "images": 3,
        "input_sha256": "0" * 64,
        "resized_images": 0,
        "fingerprint": "f",
        "created_at": now,
        "deadline_elapsed": now + 10,
    }
    return JobRow(**{**fields, **changes})


def a_sink(name: str = "hook", **changes: Any) -> Sink:
    return Sink(name=name, kind="webhook", created_at=1.5, options={"url": "http://a/"}, **changes)


async def test_an_event_is_stored_with_what_it_is_about_or_not_at_all(store: Store) -> None:
    job = await store.jobs.add(a_job(), ImageFacts(), "key")
    again = await store.jobs.add(a_job(), ImageFacts(), "key")
    assert again.id == job.id
    store.jobs.started(job, 5.0, 25.0)
    store.jobs.finished(job, state=JobState.FAILED, reason="why", at=9.0, elapsed=29.0, summary={"fallback": 1})
    await store.commit.flush()
    events = await store.sinks.page(0, 10)
    assert [each.type for each in events] == ["job.submitted", "job.started", "job.failed"]
    assert {each.key for each in events} == {f"job/{job.id}"}
    assert (events[2].data["reason"], events[2].data["fallback"], events[2].at) == ("why", 1, 1_700_000_000.0)


async def test_a_job_that_goes_on_after_a_restart_has_started_before(store: Store) -> None:
    job = await store.jobs.add(a_job(), ImageFacts())
    store.jobs.started(job, 5.0, 25.0)
    await store.commit.flush()
    store.jobs.started(await store.jobs.get(job.id), 9.0, 29.0)
    await store.commit.flush()
    assert [each.type for each in await store.sinks.page(0, 10)] == ["job.submitted", "job.started"]


async def test_a_transaction_that_fails_stores_no_event(store: Store) -> None:
    async def fail(connection: AsyncConnection) -> None:
        await store.commit.outbox.write(connection, [happened("a")])
        raise RuntimeError("the change cannot be made")

    with pytest.raises(RuntimeError):
        await store.commit.execute(fail)
    await store.write("b")
    assert [each.key for each in await store.sinks.page(0, 10)] == ["b"]


async def test_without_a_sink_nothing_is_written(store: Store) -> None:
    store.commit.outbox.use([])
    statements: list[str] = []
    event.listen(store.engine.sync_engine, "before_cursor_execute", lambda *given: statements.append(given[2].lower()))
    job = await store.jobs.add(a_job(), ImageFacts())
    store.jobs.started(job, 5.0, 25.0)
    await store.write("a")
    assert statements
    assert not [each for each in statements if "terrace_outbox" in each]


async def test_only_what_a_sink_wants_is_written(store: Store) -> None:
    store.commit.outbox.use([EventFilter(labels=("cat",)), EventFilter(events=("node.*",))])
    rows = store.commit.outbox.rows([happened("a"), happened("b", label="cat"), happened("c", label="dog")])
    assert len(rows) == 1


async def test_numbers_rise_in_the_order_of_transactions_and_are_never_used_again(store: Store) -> None:
    await asyncio.gather(*(store.write(f"key-{each}") for each in range(20)))
    first = await store.numbers()
    assert first == sorted(set(first))
    await store.sinks.delete_upto(first[-1])
    assert await store.numbers() == []
    await store.write("later")
    assert (await store.numbers())[0] > first[-1]


async def test_statements_of_one_change_are_in_one_transaction(store: Store) -> None:
    """However many others are queued."""
    sizes: list[int] = []
    begun = 0

    def count(*given: Any) -> None:
        nonlocal begun
        begun += "terrace_properties" in given[2] or "terrace_outbox" in given[2]

    def end(*_: Any) -> None:
        nonlocal begun
        sizes.append(begun)
        begun = 0

    event.listen(store.engine.sync_engine, "before_cursor_execute", count)
    event.listen(store.engine.sync_engine, "commit", end)
    for each in range(700):
        change = insert(properties).values(name=f"n{each}", value="")
        store.commit.put((change, *store.commit.outbox.rows([happened(f"key-{each}")])))
    await store.commit.flush()
    assert sum(sizes) == 1400
    assert all(size % 2 == 0 for size in sizes), sizes
    assert len([size for size in sizes if size]) > 1


async def test_words_that_no_database_holds_do_not_stop_an_event(store: Store) -> None:
    rows = store.commit.outbox.rows([happened("a", name="half \ud83d and \0")])
    store.commit.put(tuple(rows))
    await store.commit.flush()
    (found,) = await store.sinks.page(0, 10)
    assert found.data == {"name": "half ? and \0"}


async def test_a_damaged_row_is_an_event_without_data(store: Store) -> None:
    await store.write("a", "b")
    async with store.engine.begin() as connection:
        await connection.execute(text("UPDATE terrace_outbox SET content = '{' WHERE key = 'a'"))
    assert [(each.key, each.data) for each in await store.sinks.page(0, 10)] == [("a", {}), ("b", {})]


async def test_a_sink_comes_back_as_it_was_stored(store: Store) -> None:
    await store.write("a", "b")
    sink = a_sink(filter=EventFilter(labels=("cat",), confidence=0.5), created_by="alice")
    stored = await store.sinks.add(sink)
    assert stored.position == (await store.numbers())[-1]
    assert await store.sinks.sinks() == [stored]
    await store.sinks.save_positions({"hook": 17, "gone": 3})
    await store.sinks.pause("hook", True, "by bob")
    (found,) = await store.sinks.sinks()
    assert (found.position, found.paused, found.reason) == (17, True, "by bob")
    await store.sinks.remove("hook")
    assert await store.sinks.sinks() == []


def letter(number: int, reason: str = "no") -> DeadLetter:
    event = SinkEvent(number=number, type="job.failed", key="a", at=2.0, data={"id": "1"})
    return DeadLetter(sink="hook", event=event, reason=reason, attempts=3, at=9.0)


async def test_the_oldest_dead_letters_go_and_are_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LETTERS", 3)
    await store.sinks.add(a_sink())
    assert [await store.sinks.bury(letter(number)) for number in (1, 2, 3, 2, 4, 5)] == [0, 0, 0, 0, 1, 1]
    assert [each.event.number for each in await store.sinks.letters("hook", most=10)] == [3, 4, 5]
    assert (await store.sinks.sinks())[0].lost_letters == 2
    assert await store.sinks.letter_counts() == {"hook": 3}
    assert await store.sinks.letters("hook", after=4, most=10) == [letter(5)]


async def test_dead_letters_are_marked_and_unmarked(store: Store) -> None:
    await store.sinks.add(a_sink())
    for number in (1, 2, 3):
        await store.sinks.bury(letter(number))
    assert await store.sinks.want("hook", [2, 7]) == 1
    assert [each.event.number for each in await store.sinks.letters("hook", most=10, wanted=True)] == [2]
    await store.sinks.bury(letter(2, "again"))
    assert await store.sinks.letters("hook", most=10, wanted=True) == []
    assert await store.sinks.want("hook", None) == 3
    await store.sinks.unbury("hook", 2)
    assert [each.event.number for each in await store.sinks.letters("hook", most=10)] == [1, 3]


async def of(store: Store, **limits: float) -> Sinks:
    """The sinks of a database, with nothing under way."""
    given = SinkLimits(**{"retry_s": 1e9, "keep_s": 1e9, **limits})
    sinks = Sinks(store.sinks, SinkContext(name=""), given, lambda: store.now)
    await sinks.load()
    return sinks


async def test_what_all_sinks_have_had_is_deleted(store: Store) -> None:
    await store.sinks.add(a_sink("fast"))
    await store.sinks.add(a_sink("slow", paused=True))
    await store.write(*"abcdef")
    numbers = await store.numbers()
    await store.sinks.save_positions({"fast": numbers[4], "slow": numbers[1]})
    await (await of(store)).purge()
    assert await store.numbers() == numbers[2:]
    await store.sinks.remove("slow")
    await (await of(store)).purge()
    assert await store.numbers() == numbers[5:]
    await store.sinks.remove("fast")
    await (await of(store)).purge()
    assert await store.numbers() == []


@pytest.mark.parametrize("why", ["too old", "too many"])
async def test_what_is_deleted_before_a_sink_has_had_it_is_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(module, "_PART", 3)
    await store.sinks.add(a_sink("fast"))
    await store.sinks.add(a_sink("slow", paused=True))
    await store.sinks.add(a_sink("choosy", paused=True, filter=EventFilter(events=("node.*",))))
    await store.write(*(f"key-{each}" for each in range(10)))
    store.now += 100.0
    await store.write("young")
    numbers = await store.numbers()
    await store.sinks.save_positions({"fast": numbers[-1], "slow": numbers[1]})
    if why == "too many":
        monkeypatch.setattr("scheduler.sinks.service.MOST_EVENTS", 1)
    sinks = await of(store, **({"keep_s": 50.0} if why == "too old" else {}))
    await sinks.purge()
    assert await store.numbers() == numbers[-1:]
    assert {each.name: each.dropped for each in await store.sinks.sinks()} == {"choosy": 0, "fast": 0, "slow": 8}
    assert sinks.courier("slow").dropped == 8
    await sinks.purge()
    assert sinks.courier("slow").dropped == 8


class _Rows:
    """The part of a store that adds need, in memory."""

    async def page(self, after: int, most: int) -> Sequence[SinkEvent]:
        return ()

    async def last(self) -> int:
        return 0

    async def add(self, sink: Sink) -> Sink:
        return sink


async def test_ten_thousand_sinks_are_too_many() -> None:
    rows: Any = _Rows()
    sinks = Sinks(rows, SinkContext(name=""), SinkLimits(retry_s=1.0, keep_s=1.0), time.monotonic)
    refused: set[str] = set()
    for number in range(10_000):
        try:
            await sinks.add(a_sink(f"hook-{number}"))
        except Conflict as exc:
            refused.add(str(exc))
    assert len(sinks.couriers()) == 1000
    assert refused == {"there are 1,000 sinks, and no more fit: remove one first"}


async def test_the_kinds_of_sinks_are_named_if_one_is_unknown() -> None:
    rows: Any = _Rows()
    sinks = Sinks(rows, SinkContext(name=""), SinkLimits(retry_s=1.0, keep_s=1.0), time.monotonic)
    with pytest.raises(InvalidInput, match="known: mqtt, webhook"):
        await sinks.add(Sink(name="hook", kind="smoke", created_at=0.0))


async def test_a_kind_whose_extra_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = _Rows()
    sinks = Sinks(rows, SinkContext(name=""), SinkLimits(retry_s=1.0, keep_s=1.0), time.monotonic)
    monkeypatch.setattr("scheduler.sinks.mqtt_options.find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match="needs the extra 'mqtt'"):
        await sinks.add(Sink(name="hook", kind="mqtt", options={"host": "broker.example"}, created_at=0.0))


async def test_events_of_a_job_that_is_taken_back_go_too(store: Store) -> None:
    """Its transaction counts as doubtful when the caller is cancelled at its end."""
    job = a_job()
    adding = asyncio.create_task(store.jobs.add(job, ImageFacts()))

    def cancel(*given: Any) -> None:
        if "terrace_outbox" in given[2].lower():
            adding.cancel()

    event.listen(store.engine.sync_engine, "before_cursor_execute", cancel)
    with pytest.raises(asyncio.CancelledError):
        await adding
    event.remove(store.engine.sync_engine, "before_cursor_execute", cancel)
    await store.write("next")
    async with store.engine.connect() as connection:
        keys = (await connection.execute(select(outbox.c.key).order_by(outbox.c.number))).scalars().all()
    assert list(keys) == ["next"]
