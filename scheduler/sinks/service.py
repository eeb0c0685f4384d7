"""The sinks of a scheduler: what admins do with them, and the deliveries behind them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from msgspec.structs import replace
from pydantic import BaseModel

from scheduler.core.outbox import EVENT_TYPES, DeadLetter, EventFilter, Sink, SinkEvent, unknown_types
from scheduler.metrics import forget_sink, show_sink
from scheduler.sinks.delivery import Courier, Letters, Office, ends_task, reason_of
from scheduler.sinks.feed import Feed
from scheduler.sinks.protocol import SinkContext, SinkKind, options_of, stored_options
from scheduler.sinks.slots import Slots
from scheduler.sinks.threads import Threads
from tierkit.errors import (
    BrokenExtension,
    Conflict,
    InvalidInput,
    MissingExtra,
    NotFound,
    Standby,
    TerraceError,
    Unavailable,
    UpstreamError,
)
from tierkit.extensions import load

__all__ = ["GROUP", "MOST_SINKS", "SinkLimits", "Sinks"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

GROUP = "terrace.sinks"
MOST_SINKS = 1000
MOST_EVENTS = 1_000_000
"""Events that wait for sinks; the oldest are deleted first."""
_SAVE_S = 1.0
_PURGE_S = 30.0
_STOP_S = 5.0
_TEST_S = 20.0
_THREAD_S = 20.0
_CHECK = "the check of the options"
_MOST_PATTERNS = 100
_MOST_PATTERN = 200


class _Store(Letters, Protocol):
    async def sinks(self) -> list[Sink]: ...

    async def add(self, sink: Sink) -> Sink: ...

    async def remove(self, name: str) -> None: ...

    async def pause(self, name: str, paused: bool, reason: str) -> None: ...

    async def save_positions(self, positions: Mapping[str, int]) -> None: ...

    async def last(self) -> int: ...

    async def page(self, after: int, most: int) -> list[SinkEvent]: ...

    async def end_of(self, before: float, most: int) -> int: ...

    async def delete_upto(self, number: int) -> None: ...

    async def delete_needed(self, upto: int, dropped: Callable[[Sequence[SinkEvent]], Mapping[str, int]]) -> None: ...

    async def letter_counts(self) -> dict[str, int]: ...

    async def want(self, sink: str, numbers: Collection[int] | None) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkLimits:
    """Ages of events, in seconds."""

    retry_s: float
    """An event that a receiver does not take is given up then."""
    keep_s: float
    """An event is deleted then, even if a sink has not had it."""


class Sinks:
    """All sinks. `load` reads them, and `run` must be running for anything to be delivered.

    Args:
        store: where sinks and events are kept.
        context: what each sink is given, whose name is filled in.
        elapsed: returns seconds of elapsed time.
        load_kind: returns a kind of sink by name; raises TerraceError or ImportError. It runs in a thread.
    """

    def __init__(
        self,
        store: _Store,
        context: SinkContext,
        limits: SinkLimits,
        elapsed: Callable[[], float],
        load_kind: Callable[[str], SinkKind] = lambda name: cast(SinkKind, load(GROUP, name)),
    ) -> None:
        self.use: Callable[[list[EventFilter]], None] = lambda _: None
        """Called with the filters of all sinks when they have changed."""
        self._store = store
        self._threads = Threads()
        self._slots = Slots()
        self._context = dataclasses.replace(context, resolve=self._threads.resolve)
        self._limits = limits
        self._elapsed = elapsed
        self._load_kind = load_kind
        self._couriers: dict[str, Courier] = {}
        """All sinks by name, paused ones included."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Deliveries under way, by name."""
        self._dead: dict[str, int] = {}
        self._saved: dict[str, int] = {}
        self._turn = asyncio.Lock()
        self._running = False
        self._pausing: set[asyncio.Task[None]] = set()
        """Sinks whose receivers want no more events."""
        self._feed = Feed(store.page, 0)

    def tell(self) -> None:
        """Something may have been stored in the outbox."""
        if self._couriers:
            self._feed.tell()

    async def load(self) -> None:
        """Take what the scheduler before this one has stored."""
        self._feed = Feed(self._store.page, await self._store.last())
        self._dead = await self._store.letter_counts()
        for sink in await self._store.sinks():
            self._know(sink)
        self._changed()

    # --- for admins -------------------------------------------------------------------------------------------------

    def couriers(self) -> list[Courier]:
        """All sinks by name, each with what becomes of its events."""
        return [self._couriers[name] for name in sorted(self._couriers)]

    def courier(self, name: str) -> Courier:
        """Raises NotFound."""
        if name not in self._couriers:
            raise NotFound(f"no sink {name[:64]!r}")
        return self._couriers[name]

    def dead(self, name: str) -> int:
        """The number of dead letters of a sink."""
        return self._dead.get(name, 0)

    async def add(self, sink: Sink) -> Courier:
        """Add a sink; it gets the events from now on.

        Raises:
            InvalidInput: its kind is unknown or cannot be used, or its options or its filter are wrong.
            Conflict: the name is taken, or there are too many sinks.
            Unavailable: the database refuses it.
        """
        sink = replace(sink, options=await self._checked(sink.kind, sink.options))
        _check_filter(sink.filter)
        async with self._turn:
            if sink.name in self._couriers:
                raise Conflict(f"there is a sink {sink.name!r}: remove it first, or choose another name")
            if len(self._couriers) >= MOST_SINKS:
                raise Conflict(f"there are {MOST_SINKS:,} sinks, and no more fit: remove one first")
            self._know(await self._store.add(sink))
            self._changed()
            return self._couriers[sink.name]

    async def remove(self, name: str) -> None:
        """Forget a sink, its events and its dead letters. Raises NotFound, Unavailable."""
        async with self._turn:
            self.courier(name)
            await self._stop(name)
            try:
                await self._store.remove(name)
            except BaseException:
                self._start(name)
                raise
            del self._couriers[name]
            self._dead.pop(name, None)
            self._saved.pop(name, None)
            forget_sink(name)
            self._changed()

    async def pause(self, name: str, reason: str = "") -> Courier:
        """Deliver nothing until the sink is resumed; events wait meanwhile. Raises NotFound, Unavailable."""
        return await self._set_paused(name, True, reason)

    async def resume(self, name: str) -> Courier:
        """Deliver again, over a new connection. Raises NotFound, Unavailable."""
        return await self._set_paused(name, False, "")

    async def test(self, name: str) -> float:
        """Send an event of the type `sink.test` to a receiver at once; returns the seconds that it took.

        Raises:
            NotFound: no such sink.
            TerraceError: the receiver does not take it, or cannot be reached.
        """
        sink = self.courier(name).sink
        began = time.monotonic()
        said = {"sink": name, "text": "a test: the receiver gets the events of Terrace"}
        event = SinkEvent(type="sink.test", key=f"sink/{name}", at=time.time(), data=said)
        try:
            kind, options = await self._ready(sink)
            async with asyncio.timeout(_TEST_S), kind.open(options, self._context_of(sink, testing=True)) as delivery:
                await delivery.deliver(event)
        except (ImportError, BrokenExtension) as exc:
            raise UpstreamError(f"the kind {sink.kind!r} cannot be used: {exc}") from exc
        except TerraceError:
            raise
        except TimeoutError as exc:
            raise UpstreamError(f"the receiver of {name} did not answer within {_TEST_S:g} s") from exc
        except OSError as exc:
            raise UpstreamError(f"the receiver of {name} cannot be reached: {exc}") from exc
        except BaseException as exc:  # code of others may raise anything
            if ends_task(exc):
                raise
            _log.error("the sink %s has failed on a test", name, exc_info=exc)
            raise UpstreamError(f"the kind {sink.kind!r} has failed: {reason_of(exc)}") from exc
        return time.monotonic() - began

    async def letters(self, name: str, *, after: int, most: int) -> Sequence[DeadLetter]:
        """Dead letters of a sink by the numbers of their events. Raises NotFound, Unavailable."""
        self.courier(name)
        return await self._store.letters(name, after=after, most=most)

    async def replay(self, name: str, numbers: Collection[int] | None = None) -> int:
        """Deliver dead letters again; returns their number. Those that fail again stay dead letters.

        Args:
            numbers: of events; None: all.

        Raises:
            NotFound: no such sink, or one of the numbers is not a dead letter.
            Unavailable: the database refuses it.
        """
        courier = self.courier(name)
        marked = await self._store.want(name, numbers)
        if numbers and not marked:
            raise NotFound(f"the sink {name!r} has no such dead letters")
        courier.replay()
        return marked

    async def _kind(self, name: str) -> SinkKind:
        """A kind of sink. Its package is imported in a thread, since an import may take long.

        Raises:
            TerraceError, ImportError: it cannot be used.
        """
        return await self._in_thread(f"the import of the kind {name!r}", name, partial(self._load_kind, name))

    async def _ready(self, sink: Sink) -> tuple[SinkKind, BaseModel]:
        """The kind of a sink and its options.

        Raises:
            TerraceError, ImportError: it cannot be used.
        """
        kind = await self._kind(sink.kind)
        key = "read", sink.kind, json.dumps(sink.options, sort_keys=True)
        return kind, await self._in_thread(_CHECK, key, partial(options_of, kind, sink.options))

    async def _checked(self, kind_name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options as they are stored: complete, and in plain JSON."""
        try:
            kind = await self._kind(kind_name)
            key = "store", kind_name, json.dumps(given, sort_keys=True)
            return await self._in_thread(_CHECK, key, partial(stored_options, kind, given))
        except (ImportError, MissingExtra, BrokenExtension) as exc:
            raise InvalidInput(f"the kind {kind_name!r} cannot be used here: {exc}") from exc

    async def _in_thread(self, what: str, key: Hashable, work: Callable[[], T]) -> T:
        """The outcome of code of others that may block. Raises BrokenExtension if it takes too long."""
        try:
            async with asyncio.timeout(_THREAD_S):
                return await self._threads.run((what, key), work)
        except TimeoutError as exc:
            raise BrokenExtension(f"{what} takes longer than {_THREAD_S:g} s") from exc

    async def _set_paused(self, name: str, paused: bool, reason: str) -> Courier:
        async with self._turn:
            courier = self.courier(name)
            await self._store.pause(name, paused, reason)
            await self._stop(name)
            sink = replace(courier.sink, paused=paused, reason=reason, position=courier.position)
            self._know(sink)
            return self._couriers[name]

    # --- deliveries -------------------------------------------------------------------------------------------------

    def _know(self, sink: Sink) -> None:
        before = self._couriers.get(sink.name)
        courier = self._couriers[sink.name] = Courier(
            sink,
            partial(self._ready, sink),
            self._context_of(sink),
            Office(
                feed=self._feed,
                letters=self._store,
                retry_s=self._limits.retry_s,
                elapsed=self._elapsed,
                slots=self._slots,
            ),
        )
        if before is not None:
            courier.delivered, courier.failed = before.delivered, before.failed
            courier.dropped, courier.lost_letters = before.dropped, before.lost_letters
        self._saved.setdefault(sink.name, sink.position)
        self._start(sink.name)

    def _context_of(self, sink: Sink, *, testing: bool = False) -> SinkContext:
        own_id = f"{sink.name}-{int(1000 * sink.created_at):x}"
        return dataclasses.replace(self._context, name=sink.name, id=own_id, filter=sink.filter, testing=testing)

    def _changed(self) -> None:
        self.use([each.sink.filter for each in self._couriers.values()])

    def _start(self, name: str) -> None:
        if self._running and not self._couriers[name].sink.paused:
            self._tasks[name] = asyncio.create_task(self._deliver(name), name=f"sink {name}")

    async def _deliver(self, name: str) -> None:
        reason = await self._couriers[name].run()
        _log.warning("the sink %s pauses: %s", name, reason)
        # In a task of its own, since it ends this one.
        self._pausing.add(task := asyncio.create_task(self._pause_gone(name, reason), name=f"pause of {name}"))
        task.add_done_callback(self._pausing.discard)

    async def _pause_gone(self, name: str, reason: str) -> None:
        while name in self._couriers:
            try:
                await self.pause(name, reason)
                return
            except Standby:
                return
            except Unavailable:
                await asyncio.sleep(_SAVE_S)

    async def _stop(self, name: str) -> None:
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
            await asyncio.wait([task], timeout=_STOP_S)

    async def run(self) -> None:
        """Deliver events until cancelled."""
        self._running = True
        for name in self._couriers:
            self._start(name)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._feed.run(), name="outbox")
                tasks.create_task(self._save_all(), name="positions of sinks")
                tasks.create_task(self._purge(), name="purge of the outbox")
        finally:
            self._running = False
            under_way = [*self._tasks.values(), *self._pausing]
            self._tasks.clear()
            for task in under_way:
                task.cancel()
            if under_way:
                await asyncio.wait(under_way, timeout=_STOP_S)

    async def _save_all(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_S)
            for courier in self._couriers.values():
                show_sink(
                    courier.sink.name, waiting=courier.behind, lag_s=courier.lag_s, dead=self.dead(courier.sink.name)
                )
            try:
                await self.save()
            except Unavailable as exc:
                _log.warning("the positions of sinks cannot be saved now: %s", exc)

    async def save(self) -> None:
        """Note how far each sink has come, and count dead letters. Raises Unavailable."""
        changed = {
            name: courier.position
            for name, courier in self._couriers.items()
            if courier.position != self._saved.get(name)
        }
        if changed:
            await self._store.save_positions(changed)
            self._saved.update((name, position) for name, position in changed.items() if name in self._couriers)
        touched = [each for each in self._couriers.values() if each.letters_changed]
        if touched:
            for each in touched:
                each.letters_changed = False
            self._dead = await self._store.letter_counts()

    async def _purge(self) -> None:
        while True:
            await asyncio.sleep(_PURGE_S)
            try:
                await self.purge()
            except Unavailable as exc:
                _log.warning("old events cannot be deleted now: %s", exc)

    async def purge(self) -> None:
        """Delete events that no sink needs, and those that are too old or too many. Raises Unavailable."""
        done = min((self._saved[name] for name in self._couriers), default=await self._store.last())
        end = await self._store.end_of(self._elapsed() - self._limits.keep_s, MOST_EVENTS)
        await self._store.delete_upto(done)
        if end > done:
            await self._store.delete_needed(end, self._drop)

    def _drop(self, events: Sequence[SinkEvent]) -> dict[str, int]:
        """Count by sink the events that it has not had, which are deleted now."""
        dropped = {}
        for name, courier in self._couriers.items():
            if courier.read_upto < events[-1].number and (count := courier.drop(events)):
                dropped[name] = count
        if dropped:
            _log.warning("events are deleted that sinks have not had: %s", dropped)
        return dropped


def _check_filter(conditions: EventFilter) -> None:
    """Raises InvalidInput."""
    for field in ("events", "sources", "labels"):
        values = getattr(conditions, field)
        if len(values) > _MOST_PATTERNS or any(not 0 < len(each) <= _MOST_PATTERN for each in values):
            raise InvalidInput(f"{field}: at most {_MOST_PATTERNS}, each of 1 to {_MOST_PATTERN} characters")
        if not all(each.isprintable() for each in values):
            raise InvalidInput(f"{field}: only printable characters")
    if unknown := unknown_types(conditions):
        raise InvalidInput(f"events: no event is called {unknown[0]!r}; there are {', '.join(EVENT_TYPES)}")
