"""Delivery of events to one receiver: in order for each key, at least once, and without holding up others."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import BaseModel

from scheduler.core.outbox import DeadLetter, Sink, SinkEvent, after_failure, lane_of, matches
from scheduler.metrics import SINK_DELIVERED, SINK_FAILED
from scheduler.sinks.feed import Feed
from scheduler.sinks.protocol import Delivery, SinkContext, SinkKind
from scheduler.sinks.slots import SinkPlaces, Slots
from tierkit.errors import ConnectionEnded, ReceiverGone, Rejected, Standby, TerraceError, Unavailable
from tierkit.pacing import backoff_s
from tierkit.plaintext import one_line

__all__ = ["MOST_PENDING", "Courier", "Letters", "Office", "ends_task", "reason_of"]

_log = logging.getLogger(__name__)

MOST_PENDING = 256
"""Events of a sink in memory."""
_BUDGET_S = 30.0
"""Seconds for one try. Each kind of sink has a shorter budget."""
_OPEN_S = 30.0
_FIRST_S, _LONGEST_S = 1.0, 60.0
"""Seconds between two connections, at first and at most; a receiver cannot ask for a longer wait."""
_DATABASE_AGAIN_S = 1.0
_LETTERS_AT_ONCE = 100
_MOST_SAID = 500

T = TypeVar("T")

FAILURES = (TerraceError, OSError, TimeoutError)


def ends_task(error: BaseException) -> bool:
    """True if the scheduler ends the present task; False if code of a sink has raised the error by itself."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


def reason_of(error: BaseException) -> str:
    """The reason of a failure for people. An error that Terrace does not know has its class in it."""
    if isinstance(error, FAILURES):
        said = "no answer in time" if isinstance(error, TimeoutError) and not str(error) else str(error)
    else:
        said = f"{type(error).__name__}: {error}"
    return one_line(said or type(error).__name__)[:_MOST_SAID]


class Letters(Protocol):
    """Keeps dead letters. Each method raises Unavailable."""

    async def bury(self, letter: DeadLetter) -> int: ...

    async def letters(self, sink: str, *, after: int = 0, most: int, wanted: bool = False) -> Sequence[DeadLetter]: ...

    async def unbury(self, sink: str, number: int) -> None: ...


@dataclass(slots=True)
class _Pending:
    """An event that is on its way, or waits for that."""

    event: SinkEvent
    is_letter: bool = False
    """It was a dead letter, and is tried again."""
    attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Office:
    """State that the couriers of all sinks share."""

    feed: Feed
    letters: Letters
    """Keeps dead letters."""
    retry_s: float
    """Age at which an event is given up that a receiver does not take."""
    elapsed: Callable[[], float]
    """Returns seconds of elapsed time."""
    slots: Slots
    """Bounds the deliveries of all sinks together."""


class Courier:
    """Carries the events of one sink.

    Args:
        sink: as it is stored.
        load: returns its kind and options, without blocking; raises TerraceError or ImportError.
    """

    def __init__(
        self,
        sink: Sink,
        load: Callable[[], Awaitable[tuple[SinkKind, BaseModel]]],
        context: SinkContext,
        office: Office,
    ) -> None:
        self.sink = sink
        self.trouble = ""
        """Reason why the last try failed; "" after one that did not."""
        self.delivered = 0
        self.failed = 0
        """Tries that failed."""
        self.dropped = 0
        """Events that were deleted before the receiver had them, since the scheduler started; so is `lost_letters`."""
        self.lost_letters = 0
        self.letters_changed = True
        """True if dead letters have come or gone since this was set to False."""
        self.read_upto = sink.position
        """Events up to this number are delivered, in memory, or not wanted."""
        self._load = load
        self._feed = office.feed
        self._letters = office.letters
        self._context = context
        self._retry_s = office.retry_s
        self._elapsed = office.elapsed
        self._places = SinkPlaces(office.slots)
        self._pending: dict[int, _Pending] = {}
        """Pending events by number, rising, without dead letters."""
        self._lanes: dict[int, deque[_Pending]] = {}
        self._again: set[int] = set()
        """Numbers of the dead letters that are on their way again."""
        self._look_at_letters = True
        self._full = False
        """True while as many events are in memory as may be; no more are read then."""
        self._wake = asyncio.Event()

    @property
    def position(self) -> int:
        """All events up to this number are dealt with."""
        return next(iter(self._pending)) - 1 if self._pending else self.read_upto

    @property
    def behind(self) -> int:
        """The most events that the receiver may lack: those on their way, and all that were not looked at."""
        return len(self._pending) + max(0, self._feed.last - self.read_upto)

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest event was stored that is on its way; 0 without one."""
        if not self._pending:
            return 0.0
        return max(0.0, self._elapsed() - next(iter(self._pending.values())).event.elapsed)

    def replay(self) -> None:
        """Dead letters were marked for another delivery."""
        self._look_at_letters = True
        self._wake.set()

    def drop(self, events: Sequence[SinkEvent]) -> int:
        """Pass over events that are deleted and were not read; returns the number of wanted ones."""
        read, self.read_upto = self.read_upto, max(self.read_upto, events[-1].number)
        count = sum(each.number > read and matches(self.sink.filter, each) for each in events)
        self.dropped += count
        return count

    async def run(self) -> str:
        """Deliver events until the receiver wants no more; returns what it said."""
        self._feed.waiting.add(self._wake)
        failures = 0
        try:
            while True:
                before = self.delivered
                try:
                    await self._connect()
                except ReceiverGone as exc:
                    return self._note(exc)
                except BaseException as exc:
                    if ends_task(exc):
                        raise
                    if not isinstance(exc, (*FAILURES, ImportError)):
                        _log.error("the sink %s has failed", self.sink.name, exc_info=exc)
                    self._note(exc)
                failures = 1 if self.delivered > before else failures + 1
                pause_s = backoff_s(failures, first_s=_FIRST_S, cap_s=_LONGEST_S, chance=random.random())
                await self._rest(pause_s, failures)
        finally:
            self._feed.waiting.discard(self._wake)

    async def _connect(self) -> None:
        """Deliver over one connection until it ends."""
        kind, options = await self._load()
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(_OPEN_S):
                delivery = await stack.enter_async_context(kind.open(options, self._context))
            try:
                async with asyncio.TaskGroup() as tasks:
                    await self._read(tasks, delivery)
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None

    async def _rest(self, pause_s: float, failures: int) -> None:
        """Wait before the next connection. Events that come meanwhile wait in memory, and old ones are given up.

        Args:
            failures: connections that failed, one after the other.
        """
        try:
            await self._take_in()
            while await self._give_up_old(failures):
                await self._take_in()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    while True:
                        self._wake.clear()
                        await self._take_in()
                        await self._wake.wait()
        except Unavailable as exc:
            _log.warning("the sink %s cannot read its events now: %s", self.sink.name, exc)
            await asyncio.sleep(pause_s)

    async def _give_up_old(self, failures: int) -> bool:
        """Make dead letters of the events in memory that are too old; returns True if there were some."""
        given_up = False
        for lane, waiting in list(self._lanes.items()):
            while waiting:
                pending, age_s = waiting[0], self._elapsed() - waiting[0].event.elapsed
                attempts = max(failures, pending.attempts)
                if after_failure(attempts, age_s=age_s, retry_s=self._retry_s, chance=0.0) is not None:
                    break
                pending.attempts = attempts
                await self._bury(pending, self.trouble)
                self._settled(waiting.popleft())
                given_up = True
            if not waiting:
                del self._lanes[lane]
        return given_up

    async def _take_in(self) -> Sequence[int]:
        """Put events that are wanted into lanes, as many as may be in memory; returns the lanes that are new."""
        self._full = len(self._pending) >= MOST_PENDING
        if self._full:
            return ()
        page, self.read_upto = await self._feed.after(self.read_upto, MOST_PENDING - len(self._pending))
        new: list[int] = []
        for event in page:
            if matches(self.sink.filter, event):
                self._pending[event.number] = pending = _Pending(event)
                new += self._queue(pending)
        return new

    def _queue(self, pending: _Pending) -> Sequence[int]:
        """Put an event into its lane; returns the lane if it is new."""
        lane = lane_of(pending.event.key)
        if (waiting := self._lanes.get(lane)) is not None:
            waiting.append(pending)
            return ()
        self._lanes[lane] = deque([pending])
        return (lane,)

    async def _read(self, tasks: asyncio.TaskGroup, delivery: Delivery) -> None:
        """Put what is wanted into lanes, and deliver it, until cancelled."""

        def start(lanes: Iterable[int]) -> None:
            for lane in lanes:
                tasks.create_task(self._carry(lane, delivery))

        start(self._lanes)  # what an earlier connection has left
        while True:
            self._wake.clear()
            before = self.read_upto
            try:
                for letter in await self._wanted_letters():
                    self._again.add(letter.event.number)
                    start(self._queue(_Pending(letter.event, is_letter=True)))
                start(await self._take_in())
            except Unavailable as exc:
                _log.warning("the sink %s cannot read its events now: %s", self.sink.name, exc)
                await asyncio.sleep(_DATABASE_AGAIN_S)
                continue
            if self.read_upto > before:
                await asyncio.sleep(0)
            else:
                await self._wake.wait()

    async def _wanted_letters(self) -> Sequence[DeadLetter]:
        """Dead letters to deliver again, once those before them are done."""
        if not self._look_at_letters or self._again:
            return ()
        found = await self._letters.letters(self.sink.name, most=_LETTERS_AT_ONCE, wanted=True)
        self._look_at_letters = len(found) == _LETTERS_AT_ONCE
        return found

    async def _carry(self, lane: int, delivery: Delivery) -> None:
        """Deliver what is in a lane, one after the other."""
        waiting = self._lanes[lane]
        while waiting:
            await self._settle(waiting[0], delivery)
            self._settled(waiting.popleft())
        del self._lanes[lane]

    def _settled(self, pending: _Pending) -> None:
        """The receiver has an event, or it is a dead letter."""
        if pending.is_letter:
            self._again.discard(pending.event.number)
            if not self._again:
                self._wake.set()
            return
        del self._pending[pending.event.number]
        if self._full and len(self._pending) <= MOST_PENDING // 2:
            self._wake.set()

    async def _settle(self, pending: _Pending, delivery: Delivery) -> None:
        """Return when the receiver has an event, or it is a dead letter."""
        event = pending.event
        while True:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # the code of the sink has swallowed it
            pending.attempts += 1
            try:
                async with self._places.place(), asyncio.timeout(_BUDGET_S):
                    await delivery.deliver(event)
            except (ConnectionEnded, ReceiverGone):
                self._count_failure()
                raise
            except Rejected as exc:
                await self._bury(pending, self._failed(exc))
                return
            except BaseException as exc:  # code of others may raise anything
                if ends_task(exc):
                    raise
                if not isinstance(exc, FAILURES):
                    _log.error("the sink %s has failed on %s", self.sink.name, event.id, exc_info=exc)
                reason, age_s = self._failed(exc), self._elapsed() - event.elapsed
                wait_s = after_failure(pending.attempts, age_s=age_s, retry_s=self._retry_s, chance=random.random())
                if wait_s is None:
                    await self._bury(pending, reason)
                    return
                asked_s = exc.retry_after_s if isinstance(exc, Unavailable) else 0.0
                await asyncio.sleep(max(wait_s, min(asked_s, _LONGEST_S)))
            else:
                self.trouble = ""
                self.delivered += 1
                SINK_DELIVERED.labels(sink=self.sink.name).inc()
                if pending.is_letter:
                    await self._until_stored(lambda: self._letters.unbury(self.sink.name, event.number))
                    self.letters_changed = True
                return

    async def _bury(self, pending: _Pending, reason: str) -> None:
        letter = DeadLetter(
            sink=self.sink.name, event=pending.event, reason=reason, attempts=pending.attempts, at=time.time()
        )
        self.lost_letters += await self._until_stored(lambda: self._letters.bury(letter))
        self.letters_changed = True
        _log.warning("the sink %s gives up %s: %s", self.sink.name, pending.event.id, reason)

    async def _until_stored(self, write: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await write()
            except Standby:
                raise
            except Unavailable:
                await asyncio.sleep(_DATABASE_AGAIN_S)

    def _failed(self, error: BaseException) -> str:
        self._count_failure()
        return self._note(error)

    def _count_failure(self) -> None:
        self.failed += 1
        SINK_FAILED.labels(sink=self.sink.name).inc()

    def _note(self, error: BaseException) -> str:
        """Remember what went wrong."""
        self.trouble = reason_of(error)
        return self.trouble
