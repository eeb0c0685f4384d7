"""Observations behind the HTTP API: nodes send them in batches, people read them in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from models.hierarchy import Hierarchy
from models.pictures import Picture
from scheduler.core import events
from scheduler.core.observing import StoredObservation, check_batch
from tierkit.errors import InvalidInput, UnsupportedMedia
from tierkit.picture_files import kind_of
from tierkit.wire.observations import ObservationBatch, Receipt
from tierkit.wire.sources import NumberRange, SeenGap, SeenPicture, seen_picture

__all__ = ["Observations"]

_GROUP = 5000
"""Observations and gaps that go into one transaction, before another batch waits for the next one."""
_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}


class _Store(Protocol):
    async def add(
        self, batches: Sequence[ObservationBatch], *, wall: float, elapsed: float
    ) -> Sequence[Receipt | InvalidInput]: ...

    def sources(self, node_id: str | None, source: str | None) -> AsyncGenerator[tuple[str, str], None]: ...

    def pages(self, node_id: str, source: str, after: int) -> AsyncGenerator[Sequence[StoredObservation], None]: ...

    def gaps(self, node_id: str, source: str, after: int) -> AsyncGenerator[tuple[int, int], None]: ...

    async def put_picture(
        self, node_id: str, source: str, sequence: int, content: bytes, *, elapsed: float
    ) -> None: ...

    async def picture(self, node_id: str, source: str, sequence: int) -> bytes: ...

    async def purge(self, before: float) -> int: ...


class Observations:
    """Take batches of observations, and show what is stored.

    Args:
        store: where they are kept.
        served: the classes that labels of new observations number.
        handle: takes the signs of life of nodes; raises NotFound and Conflict.
        elapsed: returns seconds of elapsed time.
        max_pixels: of a picture.
    """

    def __init__(
        self,
        store: _Store,
        served: Hierarchy,
        handle: Callable[[events.What], None],
        elapsed: Callable[[], float],
        *,
        max_pixels: int,
    ) -> None:
        self._store = store
        self._served = served
        self._handle = handle
        self._elapsed = elapsed
        self._max_pixels = max_pixels
        self._turn = asyncio.Lock()
        self._waiting: list[tuple[ObservationBatch, asyncio.Future[Receipt]]] = []

    async def accept(self, batch: ObservationBatch) -> Receipt:
        """Store a batch; returns when it is durable. Batches that come meanwhile share the next transaction.

        Raises:
            NotFound: the node is unknown, or was given up: it must register again.
            Conflict: another process has this node id.
            InvalidInput: a label is out of range, or the batch contradicts itself; nothing of it is stored.
            Unavailable: the database refuses it.
        """
        self._handle(events.Heard(batch.node_id, batch.incarnation))
        check_batch(batch, coarse=len(self._served.coarse), fine=len(self._served.fine))
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
        receipts = await self._store.add([batch for batch, _ in taken], wall=time.time(), elapsed=self._elapsed())
        for (_, future), receipt in zip(taken, receipts, strict=True):
            if future.done():
                continue
            if isinstance(receipt, Receipt):
                future.set_result(receipt)
            else:
                future.set_exception(receipt)
        self._waiting = [each for each in self._waiting if not each[1].done()]

    async def lines(
        self, node_id: str | None, source: str | None, after: int, hierarchies: Mapping[str, Hierarchy]
    ) -> AsyncGenerator[list[SeenPicture | SeenGap], None]:
        """Observations and gaps, by node, source and sequence number, some at a time.

        Args:
            node_id, source: only theirs; None for all.
            after: only higher sequence numbers.
            hierarchies: classes by digest.
        """
        async with aclosing(self._store.sources(node_id, source)) as sources:
            async for node, name in sources:
                async with aclosing(self._of_source(node, name, after, hierarchies)) as pages:
                    async for page in pages:
                        yield page

    async def _of_source(
        self, node_id: str, source: str, after: int, hierarchies: Mapping[str, Hierarchy]
    ) -> AsyncGenerator[list[SeenPicture | SeenGap], None]:
        async with (
            aclosing(self._store.gaps(node_id, source, after)) as gaps,
            aclosing(self._store.pages(node_id, source, after)) as pages,
        ):
            gap, at = await anext(gaps, None), after
            async for page in pages:
                lines: list[SeenPicture | SeenGap] = []
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
                    lines.append(_seen(node_id, stored, hierarchies.get(stored.hierarchy, self._served)))
                yield lines
            while gap is not None:
                if at < gap[1]:
                    yield [_gap(node_id, source, max(gap[0], at + 1), gap[1])]
                gap = await anext(gaps, None)

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
        await self._store.put_picture(node_id, source, sequence, content, elapsed=self._elapsed())

    async def picture(self, node_id: str, source: str, sequence: int) -> tuple[bytes, str]:
        """The picture of an observation and its media type. Raises NotFound, Unavailable."""
        content = await self._store.picture(node_id, source, sequence)
        return content, _TYPES[kind_of(content) or "JPEG"]

    async def purge(self, before: float) -> int:
        """Delete what was stored before this moment of elapsed time; returns the number of observations."""
        return await self._store.purge(before)


def _seen(node_id: str, stored: StoredObservation, classes: Hierarchy) -> SeenPicture:
    names = {"fine": classes.fine, "coarse": classes.coarse}
    seen = seen_picture(stored.content, node=node_id, taken_at=stored.taken_at, **names)
    return seen.model_copy(update={"picture": True}) if stored.has_picture else seen


def _gap(node_id: str, source: str, first: int, last: int) -> SeenGap:
    return SeenGap(gap=NumberRange(node=node_id, source=source, first=first, last=last))
