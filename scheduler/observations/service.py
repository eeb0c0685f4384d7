"""Observations behind the HTTP API: nodes send them in batches, people read them in order."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from models.hierarchy import Hierarchy
from models.pictures import Picture
from scheduler.core import events
from scheduler.core.observing import KnownSource, StoredBatch, StoredObservation, check_batch
from scheduler.core.seeking import Position, SoughtObservations, cursor_of, position_of
from scheduler.metrics import STORED_OBSERVATIONS, count_batch
from scheduler.observations.book import SourceBook, fields_of
from tierkit.errors import InvalidInput, UnsupportedMedia
from tierkit.picture_files import kind_of
from tierkit.wire.observations import Observation, ObservationBatch, Receipt
from tierkit.wire.sources import SourceRights

__all__ = ["MOST_READERS", "MOST_RECEIVED", "Observations"]

MOST_READERS = 100
"""Readers of a source."""
MOST_RECEIVED = 500
"""Observations that are read at a time for those who follow."""
_SEARCH_S = 0.05
"""Seconds after which the search for a page ends with the results so far."""
_PAUSE_S = 0.2
_KEEP_ALIVE_S = 15.0
_GROUP = 5000
"""Observations and gaps that go into one transaction, before another batch waits for the next one."""
_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}


class _Reads(Protocol):
    async def page(
        self, sought: SoughtObservations, limit: int, before: Position | None
    ) -> tuple[list[StoredObservation], Position | None]: ...

    def of_source(
        self, node_id: str, source: str, after: int, sought: SoughtObservations
    ) -> AsyncGenerator[list[StoredObservation], None]: ...

    def gaps(self, node_id: str, source: str, after: int) -> AsyncGenerator[tuple[int, int], None]: ...

    async def received(self, after: int, upto: int, sought: SoughtObservations) -> list[StoredObservation]: ...

    async def picture(self, node_id: str, source: str, sequence: int) -> bytes: ...

    def sources(self) -> AsyncGenerator[list[KnownSource], None]: ...

    async def rights(self) -> list[tuple[str, str, str, bool]]: ...


class _Store(Protocol):
    @property
    def reads(self) -> _Reads: ...

    async def last_received(self) -> int: ...

    async def add(
        self, batches: Sequence[ObservationBatch], *, wall: float, elapsed: float, sites: Mapping[str, str]
    ) -> Sequence[StoredBatch | InvalidInput]: ...

    async def put_picture(
        self, node_id: str, source: str, sequence: int, content: bytes, *, elapsed: float
    ) -> None: ...

    async def set_rights(self, node_id: str, source: str, rights: SourceRights) -> None: ...

    async def purge(self, before: float, most: int) -> tuple[int, int]: ...


class Observations:
    """Take batches of observations, and show what is stored.

    Args:
        store: where they are kept.
        book: the sources; it takes what is stored.
        served: the classes that labels of new observations number.
        handle: takes the signs of life of nodes; raises NotFound and Conflict.
        max_pixels: of a picture.
    """

    def __init__(
        self,
        store: _Store,
        book: SourceBook,
        served: Hierarchy,
        *,
        handle: Callable[[events.What], None],
        max_pixels: int,
    ) -> None:
        self._store = store
        self._reads = store.reads
        self.book = book
        self._served = served
        self._handle = handle
        self._max_pixels = max_pixels
        self._turn = asyncio.Lock()
        self._waiting: list[tuple[ObservationBatch, asyncio.Future[Receipt]]] = []
        self._stopping = False
        self.observed: Callable[[str, Sequence[tuple[Observation, bool]]], None] = lambda *_: None
        """Called with the id of a node and its new observations; each with whether it amends one that was known."""
        self.last_received = 0
        """The highest number that an observation was stored under."""
        self.count: int | None = None
        """Observations that were stored when old ones were deleted last."""

    async def load(self, hierarchies: Mapping[str, Hierarchy]) -> None:
        """Take what the scheduler before this one has stored.

        Args:
            hierarchies: classes by digest.
        """
        self.last_received = await self._store.last_received()
        async with aclosing(self._reads.sources()) as known:
            await self.book.load(hierarchies, known, await self._reads.rights())

    # --- from nodes -------------------------------------------------------------------------------------------------

    async def accept(self, batch: ObservationBatch) -> Receipt:
        """Store a batch; returns when it is durable. Batches that come meanwhile share the next transaction.

        Raises:
            NotFound: the node is unknown, or was given up: it must register again.
            Conflict: another process has this node id.
            InvalidInput: a label is out of range, or the batch contradicts itself; nothing of it is stored.
            LimitReached: it has a source too many.
            Unavailable: the database refuses it.
        """
        self._handle(events.Heard(batch.node_id, batch.incarnation))
        check_batch(batch, coarse=len(self._served.coarse), fine=len(self._served.fine))
        self.book.check_room(batch)
        receipt: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._waiting.append((batch, receipt))
        try:
            async with self._turn:
                if not receipt.done():
                    await self._store_waiting()
        except BaseException:
            receipt.cancel()
            self._waiting = [each for each in self._waiting if each[1] is not receipt]
            raise
        return receipt.result()

    async def _store_waiting(self) -> None:
        taken: list[tuple[ObservationBatch, asyncio.Future[Receipt]]] = []
        size = 0
        for each in self._waiting:
            size += len(each[0].observations) + len(each[0].gaps)
            if taken and size > _GROUP:
                break
            taken.append(each)
        batches = [batch for batch, _ in taken]
        sites = {batch.node_id: site for batch in batches if (site := self.book.site_of(batch.node_id))}
        outcomes = await self._store.add(batches, wall=time.time(), elapsed=self.book.elapsed(), sites=sites)
        self.last_received = await self._store.last_received()
        for (batch, future), outcome in zip(taken, outcomes, strict=True):
            if isinstance(outcome, StoredBatch):
                self.book.stored(batch, outcome)
                _count(outcome)
                self.observed(
                    batch.node_id,
                    [(new.observation, new.amends) for update in outcome.updates.values() for new in update.new],
                )
            if future.done():
                continue
            if isinstance(outcome, StoredBatch):
                future.set_result(outcome.receipt)
            else:
                future.set_exception(outcome)
        self._waiting = [each for each in self._waiting if not each[1].done()]

    async def put_picture(self, node_id: str, source: str, sequence: int, content: bytes) -> None:
        """Keep the picture of an observation as one of the latest of its source.

        Raises:
            UnsupportedMedia: it is not a JPEG, PNG or WebP file.
            InvalidInput: it is damaged, or too large.
            NotFound: there is no such observation.
            Unavailable: the database refuses it.
        """
        if kind_of(content) not in _TYPES:
            raise UnsupportedMedia("a picture of an observation must be a JPEG, PNG or WebP file")
        name, most = f"picture {sequence} of {source}", self._max_pixels
        await asyncio.to_thread(Picture, content, name, max_bytes=len(content), max_pixels=most)
        await self._store.put_picture(node_id, source, sequence, content, elapsed=self.book.elapsed())
        self.book.has_picture(node_id, source, sequence)

    # --- for users --------------------------------------------------------------------------------------------------

    async def page(
        self, sought: SoughtObservations, limit: int, cursor: str | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Observations (the fields of a `SeenPicture`), the newest first, and the cursor of the next page. The search
        ends with some of them, or none, when it has taken long; the cursor continues it.

        Raises:
            InvalidInput: no page has given this cursor.
        """
        before = None if cursor is None else position_of(cursor)
        found: list[StoredObservation] = []
        ends_at = time.monotonic() + _SEARCH_S
        while True:
            part, before = await self._reads.page(sought, limit - len(found), before)
            found += part
            if before is None or len(found) >= limit or time.monotonic() > ends_at:
                break
        rows = [fields_of(each, self.book.hierarchies) for each in found]
        return rows, None if before is None else cursor_of(before)

    async def lines(self, sought: SoughtObservations, after: int) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Observations and gaps (the fields of `SeenPicture` and `SeenGap`), by node, source and sequence number, some
        at a time; gaps only if nothing of the content is sought.

        Args:
            after: only higher sequence numbers.
        """
        for node_id, source in self.book.visible(sought.reader):
            if sought.node_id in (None, node_id) and sought.source in (None, source):
                of_source = self._of_source(node_id, source, after, sought)
                async with aclosing(of_source) as pages:
                    async for page in pages:
                        yield page

    async def _of_source(
        self, node_id: str, source: str, after: int, sought: SoughtObservations
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        async with (
            aclosing(self._reads.gaps(node_id, source, after)) as gaps,
            aclosing(self._reads.of_source(node_id, source, after, sought)) as pages,
        ):
            gap, at = None if sought.by_content else await anext(gaps, None), after
            async for page in pages:
                lines: list[dict[str, Any]] = []
                for stored in page:
                    sequence = stored.content.sequence
                    while gap is not None and gap[0] < sequence:
                        # An observation inside a gap came before the device lost it.
                        first, last = max(gap[0], at + 1), min(gap[1], sequence - 1)
                        if first <= last:
                            lines.append(_gap(node_id, source, first, last))
                        if gap[1] > sequence:
                            break
                        gap = await anext(gaps, None)
                    at = sequence
                    lines.append(fields_of(stored, self.book.hierarchies))
                yield lines
            while gap is not None:
                if at < gap[1]:
                    yield [_gap(node_id, source, max(gap[0], at + 1), gap[1])]
                gap = await anext(gaps, None)

    async def follow_sources(
        self, reader: str | None, node_id: str | None, source: str | None, site: str | None = None
    ) -> AsyncGenerator[bytes | None, None]:
        """Sources as JSON of a `SourceList`: at once, and at most once a second when something has changed. None while
        nothing happens. Takes the arguments of `SourceBook.visible`."""
        shown: tuple[int, int] | None = None
        while not self._stopping:
            content, version = self.book.snapshot(reader, node_id, source, site)
            yield None if version == shown else content
            shown = version
            now = time.monotonic()
            # All readers look at the same moment, so that they share one snapshot.
            await asyncio.sleep(1 + math.floor(now) - now)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.book.changed(version), _KEEP_ALIVE_S)

    def stop_streams(self) -> None:
        """End what others follow."""
        self._stopping = True
        self.book.tell()

    async def follow(
        self, sought: SoughtObservations, after: int | None
    ) -> AsyncGenerator[tuple[str, object, int] | None, None]:
        """Observations as they are stored or amended: kind, the fields of a `SeenPicture`, and a number that rises.
        Before them `begin`, whose number is where the stream begins. None while nothing happens.

        Args:
            after: the number after which it begins; None: only what comes from now on.
        """
        at = self.last_received if after is None else min(after, self.last_received)
        yield "begin", {}, at
        while not self._stopping:
            version, upto = self.book.version, self.last_received
            part = await self._reads.received(at, upto, sought) if at < upto else []
            for stored in part:
                at = stored.received
                yield (
                    "amended" if stored.content.revision else "observation",
                    fields_of(stored, self.book.hierarchies),
                    at,
                )
            if len(part) < MOST_RECEIVED:
                at = upto
                await asyncio.sleep(_PAUSE_S)
                try:
                    await asyncio.wait_for(self.book.changed(version), _KEEP_ALIVE_S)
                except TimeoutError:
                    yield None

    async def set_rights(self, node_id: str, source: str, rights: SourceRights) -> SourceRights:
        """Say who may see a source; returns the rights as they are then.

        Raises:
            InvalidInput: too many readers.
            LimitReached: too many sources are shared.
        """
        readers = tuple(sorted(set(rights.readers) - {rights.owner}))
        if len(readers) > MOST_READERS:
            raise InvalidInput(f"a source has at most {MOST_READERS} readers")
        self.book.check_room_for_rights(node_id, source)
        rights = SourceRights(owner=rights.owner, readers=readers)
        await self._store.set_rights(node_id, source, rights)
        self.book.set_rights(node_id, source, rights)
        return rights

    async def picture(self, node_id: str, source: str, sequence: int) -> tuple[bytes, str]:
        """The picture of an observation and its media type. Raises NotFound, Unavailable."""
        content = await self._reads.picture(node_id, source, sequence)
        return content, _TYPES[kind_of(content) or "JPEG"]

    async def purge(self, before: float, most: int) -> None:
        """Delete what was stored before this moment of elapsed time, and all but the latest `most` observations."""
        self.count, deleted = await self._store.purge(before, most)
        STORED_OBSERVATIONS.set(self.count)
        self.book.purged(before, deleted)


def _count(stored: StoredBatch) -> None:
    new = [each for update in stored.updates.values() for each in update.new]
    ages_s = [each.observation.age_s for each in new if not each.amends]
    count_batch(ages_s, amended=len(new) - len(ages_s), known=stored.receipt.known)


def _gap(node_id: str, source: str, first: int, last: int) -> dict[str, Any]:
    return {"gap": {"node": node_id, "source": source, "first": first, "last": last}}
