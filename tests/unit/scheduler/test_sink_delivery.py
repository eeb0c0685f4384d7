"""Delivery: order within a key, retries, dead letters, connections that end, and bounds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from pydantic import BaseModel

from scheduler.core.outbox import DeadLetter, EventFilter, Sink, SinkEvent
from scheduler.sinks import delivery as module
from scheduler.sinks.delivery import MOST_PENDING, Courier, Office
from scheduler.sinks.feed import Feed
from scheduler.sinks.protocol import SinkContext
from scheduler.sinks.slots import Slots
from tierkit.errors import ConnectionEnded, ReceiverGone, Rejected, Unavailable
from tierkit.testing import wait_for


class Log:
    """An outbox in memory, with dead letters."""

    def __init__(self) -> None:
        self.events: list[SinkEvent] = []
        self.dead: dict[int, DeadLetter] = {}
        self.reads = 0
        self.refused_reads = 0
        """The next so many reads of events are refused."""
        self.refusals = 0
        """The next so many writes of dead letters are refused."""

    def add(self, key: str, **data: Any) -> None:
        self.events.append(SinkEvent(number=len(self.events) + 1, type="job.failed", key=key, data=data))

    async def page(self, after: int, most: int) -> list[SinkEvent]:
        self.reads += 1
        if self.refused_reads:
            self.refused_reads -= 1
            raise Unavailable("the database does not answer now")
        return self.events[after : after + most]

    async def bury(self, letter: DeadLetter) -> int:
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("the disk is full")
        self.dead[letter.event.number] = letter
        return 0

    async def letters(self, sink: str, *, after: int = 0, most: int, wanted: bool = False) -> Sequence[DeadLetter]:
        return [letter for letter in self.dead.values() if letter.wanted or not wanted][:most]

    async def unbury(self, sink: str, number: int) -> None:
        del self.dead[number]


class Options(BaseModel):
    """None."""


class Kind:
    """A kind of sink whose receiver does as a test says."""

    Options = Options

    def __init__(self, deliver: Callable[[SinkEvent], Any]) -> None:
        self._deliver = deliver
        self.opened = 0

    @asynccontextmanager
    async def open(self, options: Any, context: SinkContext) -> AsyncIterator[Kind]:
        self.opened += 1
        yield self

    async def deliver(self, event: SinkEvent) -> None:
        await self._deliver(event)


def loaded(kind: Any) -> Callable[[], Awaitable[Any]]:
    """Returns a kind and its options as the scheduler loads them."""

    async def load() -> Any:
        return kind, kind.Options()

    return load


@asynccontextmanager
async def carrying(
    log: Log,
    deliver: Callable[[SinkEvent], Any],
    *,
    retry_s: float = 1e9,
    slots: Slots | None = None,
    kind: Any = None,
    **sink: Any,
) -> AsyncIterator[tuple[Courier, Feed, Kind]]:
    feed, kind = Feed(log.page, 0), kind or Kind(deliver)
    courier = Courier(
        Sink(name="hook", kind="test", created_at=0.0, **sink),
        loaded(kind),
        SinkContext(name="hook"),
        Office(feed=feed, letters=log, retry_s=retry_s, elapsed=lambda: 100.0, slots=slots or Slots()),
    )
    tasks = [asyncio.create_task(courier.run()), asyncio.create_task(feed.run())]
    await asyncio.sleep(0)
    feed.tell()
    try:
        yield courier, feed, kind
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(attempts: int, *, age_s: float, retry_s: float, chance: float) -> float | None:
        return None if age_s >= retry_s and attempts >= 5 else 0.0

    monkeypatch.setattr(module, "after_failure", at_once)
    monkeypatch.setattr(module, "_FIRST_S", 0.0)
    monkeypatch.setattr(module, "_DATABASE_AGAIN_S", 0.0)
    monkeypatch.setattr("scheduler.sinks.feed._AGAIN_S", 0.0)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_fails_each_event_arrives_in_the_order_of_its_key(no_waits: None, seed: int) -> None:
    chance, log, taken = random.Random(seed), Log(), list[SinkEvent]()
    for _ in range(400):
        log.add(f"key-{chance.randrange(40)}")
    under_way: Counter[str] = Counter()

    async def deliver(event: SinkEvent) -> None:
        under_way[event.key] += 1
        assert under_way[event.key] == 1
        try:
            await asyncio.sleep(0)
            match chance.randrange(12):
                case 0:
                    raise OSError("reset")
                case 1:
                    taken.append(event)  # the receiver has it, but the answer is lost
                    raise TimeoutError
                case 2:
                    raise ConnectionEnded("closed", retry_after_s=0.0)
                case 3:
                    raise ValueError("a bug")
            taken.append(event)
        finally:
            under_way[event.key] -= 1

    async with carrying(log, deliver) as (courier, _, _):
        await wait_for(lambda: courier.position == 400, what="all events")
        assert (courier.behind, log.dead) == (0, {})
    for key in {event.key for event in log.events}:
        got = list(dict.fromkeys(event.number for event in taken if event.key == key))
        assert got == [event.number for event in log.events if event.key == key]


async def test_the_position_stays_before_the_oldest_event_that_is_not_delivered() -> None:
    log, hold = Log(), asyncio.Event()
    for number in range(10):
        log.add(f"key-{number}")

    async def deliver(event: SinkEvent) -> None:
        if event.number == 4:
            await hold.wait()

    async with carrying(log, deliver) as (courier, _, _):
        await wait_for(lambda: courier.delivered == 9, what="the others")
        assert (courier.position, courier.behind) == (3, 1)
        assert courier.lag_s == 100.0
        hold.set()
        await wait_for(lambda: courier.position == 10, what="the last one")
        assert courier.lag_s == 0.0


async def test_a_slow_receiver_is_read_for_no_faster_than_it_takes() -> None:
    log, hold = Log(), asyncio.Event()
    for number in range(5 * MOST_PENDING):
        log.add(f"key-{number % 3}")

    async def deliver(event: SinkEvent) -> None:
        await hold.wait()

    async with carrying(log, deliver) as (courier, feed, _):
        await wait_for(lambda: courier.read_upto >= MOST_PENDING and feed.last == len(log.events), what="a full page")
        assert courier.read_upto == MOST_PENDING
        assert courier.behind == len(log.events)
        hold.set()
        await wait_for(lambda: courier.position == len(log.events), what="all events")


async def test_a_refused_event_is_a_dead_letter_and_its_lane_goes_on(no_waits: None) -> None:
    log, taken = Log(), list[int]()
    log.refusals = 2
    for _ in range(3):
        log.add("key")

    async def deliver(event: SinkEvent) -> None:
        if event.number == 2 and not log.dead:
            raise Rejected("no such thing")
        taken.append(event.number)

    async with carrying(log, deliver) as (courier, _, _):
        await wait_for(lambda: courier.position == 3, what="all events")
        assert taken == [1, 3]
        assert (log.dead[2].reason, log.dead[2].attempts) == ("no such thing", 1)
        log.dead[2] = DeadLetter(sink="hook", event=log.events[1], reason="", attempts=1, at=0.0, wanted=True)
        courier.replay()
        await wait_for(lambda: not log.dead, what="the dead letter to go")
        assert taken == [1, 3, 2]


async def test_an_event_that_is_too_old_is_given_up_after_some_tries(no_waits: None) -> None:
    log, tries = Log(), Counter[int]()
    log.add("key")
    log.add("key")

    async def deliver(event: SinkEvent) -> None:
        tries[event.number] += 1
        if event.number == 1:
            raise OSError("connection refused")

    async with carrying(log, deliver, retry_s=50.0) as (courier, _, _):
        await wait_for(lambda: courier.position == 2, what="both")
        assert (tries[1], tries[2], log.dead[1].reason) == (5, 1, "connection refused")
        assert (courier.failed, courier.delivered) == (5, 1)


async def test_a_receiver_that_is_gone_ends_the_deliveries() -> None:
    log = Log()
    log.add("key")

    async def deliver(event: SinkEvent) -> None:
        raise ReceiverGone("no more")

    async with carrying(log, deliver) as (courier, _, _):
        await wait_for(lambda: courier.trouble != "", what="the end")
        assert await courier.run() == "no more"
        assert (courier.position, log.dead) == (0, {})


async def test_a_kind_that_cannot_be_used_says_so(no_waits: None) -> None:
    log = Log()

    async def load() -> Any:
        raise ImportError("No module named 'aiomqtt'")

    feed = Feed(log.page, 0)
    courier = Courier(
        Sink(name="hook", kind="mqtt", created_at=0.0),
        load,
        SinkContext(name="hook"),
        Office(feed=feed, letters=log, retry_s=1.0, elapsed=lambda: 0.0, slots=Slots()),
    )
    task = asyncio.create_task(courier.run())
    await wait_for(lambda: courier.trouble != "", what="the trouble")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert "aiomqtt" in courier.trouble


async def test_a_database_that_does_not_answer_is_asked_again(no_waits: None) -> None:
    log, taken = Log(), list[int]()
    for _ in range(4500):
        log.add("key")

    async def deliver(event: SinkEvent) -> None:
        if event.number in (1, 100):
            log.refused_reads = 3
        taken.append(event.number)

    log.refused_reads = 3
    async with carrying(log, deliver) as (courier, _, kind):
        await wait_for(lambda: courier.position == 4500, what="all events")
        assert (taken, kind.opened) == (list(range(1, 4501)), 1)


async def test_what_is_not_wanted_is_passed_over() -> None:
    log, taken = Log(), list[int]()
    for number in range(600):
        log.add("key", label="cat" if number % 100 == 7 else "dog")

    async def deliver(event: SinkEvent) -> None:
        taken.append(event.number)

    async with carrying(log, deliver, filter=EventFilter(labels=("cat",))) as (courier, _, _):
        await wait_for(lambda: courier.position == 600, what="all events")
    assert taken == [8, 108, 208, 308, 408, 508]


async def test_the_feed_reads_once_for_all_and_keeps_a_bounded_part() -> None:
    log = Log()
    feed = Feed(log.page, 0)
    feed.waiting.add(asyncio.Event())
    task = asyncio.create_task(feed.run())
    for _ in range(5000):
        log.add("key")
    feed.tell()
    await wait_for(lambda: feed.last == 5000, what="all events")
    reads = log.reads
    page, upto = await feed.after(4990, 100)
    assert ([event.number for event in page], upto, log.reads) == (list(range(4991, 5001)), 5000, reads)
    page, upto = await feed.after(10, 5)
    assert ([event.number for event in page], upto, log.reads) == (list(range(11, 16)), 15, reads + 1)
    assert await feed.after(5000, 5) == ([], 5000)
    assert len(feed._events) <= 4000
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Rogue(BaseException):
    """An error that is not an Exception."""


ODD = [asyncio.CancelledError("mine"), SystemExit(3), Rogue("mine"), RuntimeError("mine")]


@pytest.mark.parametrize("error", ODD, ids=repr)
async def test_whatever_a_kind_raises_is_a_failure_of_the_try(no_waits: None, error: BaseException) -> None:
    log, taken = Log(), list[int]()
    for number in range(3):
        log.add(f"key-{number % 2}")

    async def deliver(event: SinkEvent) -> None:
        taken.append(event.number)
        if taken.count(event.number) == 1:
            raise error

    async with carrying(log, deliver) as (courier, _, kind):
        await wait_for(lambda: courier.position == 3, what="all events")
        assert (courier.failed, courier.delivered, kind.opened) == (3, 3, 1)


@pytest.mark.parametrize("error", ODD, ids=repr)
async def test_whatever_a_kind_raises_when_it_connects_is_named(no_waits: None, error: BaseException) -> None:
    log = Log()
    log.add("key")

    class Odd(Kind):
        @asynccontextmanager
        async def open(self, options: Any, context: SinkContext) -> AsyncIterator[Kind]:
            self.opened += 1
            if self.opened == 1:
                raise error
            yield self

    said = list[str]()

    async def deliver(event: SinkEvent) -> None:
        said.append(courier.trouble)

    async with carrying(log, deliver, kind=Odd(deliver)) as (courier, _, _):
        await wait_for(lambda: courier.position == 1, what="the event")
    assert said[0].startswith(f"{type(error).__name__}: ")


async def test_a_kind_that_swallows_the_end_of_its_sink_delivers_nothing_more() -> None:
    log, begun, tries = Log(), asyncio.Event(), list[int]()
    log.add("key")
    log.add("key")

    async def deliver(event: SinkEvent) -> None:
        tries.append(event.number)
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async with carrying(log, deliver):
        await begun.wait()
    assert tries == [1]


async def test_events_of_a_receiver_that_is_away_are_given_up_with_the_reason(no_waits: None) -> None:
    """It cannot be connected to, so none of its events is ever tried."""
    log = Log()
    for number in range(2 * MOST_PENDING + 10):
        log.add(f"key-{number}")

    class Away(Kind):
        @asynccontextmanager
        async def open(self, options: Any, context: SinkContext) -> AsyncIterator[Kind]:
            self.opened += 1
            raise OSError("no such machine")
            yield self

    async def deliver(event: SinkEvent) -> None:
        raise AssertionError

    async with carrying(log, deliver, retry_s=50.0, kind=Away(deliver)) as (courier, _, _):
        await wait_for(lambda: len(log.dead) == len(log.events), what="dead letters")
        assert {letter.reason for letter in log.dead.values()} == {"no such machine"}
        assert all(letter.attempts >= 5 for letter in log.dead.values())
        await wait_for(lambda: courier.behind == 0, what="an empty queue")
        assert (courier.delivered, courier.lag_s, courier.position) == (0, 0.0, len(log.events))


async def test_the_oldest_event_of_a_receiver_that_is_away_has_an_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_S", 3600.0)
    monkeypatch.setattr(module, "_LONGEST_S", 3600.0)
    log = Log()
    log.add("key")

    async def load() -> Any:
        raise OSError("no such machine")

    feed = Feed(log.page, 0)
    courier = Courier(
        Sink(name="hook", kind="test", created_at=0.0),
        load,
        SinkContext(name="hook"),
        Office(feed=feed, letters=log, retry_s=1e9, elapsed=lambda: 100.0, slots=Slots()),
    )
    tasks = [asyncio.create_task(courier.run()), asyncio.create_task(feed.run())]
    try:
        await wait_for(lambda: courier.trouble != "", what="the trouble")
        feed.tell()  # while the sink waits for its next try
        await wait_for(lambda: courier.lag_s == 100.0, what="the age of the event")
        assert (courier.behind, log.dead) == (1, {})
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_receivers_that_never_answer_leave_places_to_a_good_one() -> None:
    log, slots, under_way, most = Log(), Slots(shared=4), 0, 0
    for number in range(100):
        log.add(f"key-{number}")

    async def never(event: SinkEvent) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await asyncio.Event().wait()
        finally:
            under_way -= 1

    async def good(event: SinkEvent) -> None:
        await asyncio.sleep(0)

    async with AsyncExitStack() as stack:
        for _ in range(5):
            await stack.enter_async_context(carrying(log, never, slots=slots))
        await wait_for(lambda: under_way == 5, what="a try at each of them")
        courier, _, _ = await stack.enter_async_context(carrying(log, good, slots=slots))
        await wait_for(lambda: courier.position == 100, what="the events at the good receiver")
        assert (most, slots.free) == (5, 4)
