"""Copies of segments on a worker: fetched from the source that the host names, checked, and passed on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from tierkit.errors import (
    InvalidAnswer,
    NotFound,
    SetupError,
    TerraceError,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from training.messages import DataAnswer, DataReport, Keeps
from training.worker.connection import HostConnection
from training.worker.store import Store

__all__ = ["Copier"]

log = logging.getLogger(__name__)

_TOLD_S = 2.0
"""Between two reports to the host while a copy is under way."""
_AT_ONCE = 2
"""Chunks that are requested at a time: while one is on its way, the source prepares the next."""
_CHUNK_S = 60.0
"""Budget of one chunk over a slow link."""
_STALLED_S = 20.0
"""Silence after which a source is given up."""
_AGAIN_S = 0.2
_FULL_S = 600.0
"""Time for which a disk that could not keep a segment counts as full, whatever room it reports."""

Outcome = Literal["whole", "wrong", "lacks", "gone", "full", "ended"]


class Copier:
    """Copies one segment after the other for as long as it runs.

    Args:
        url: where this worker passes on what it has; None where others cannot reach it.
    """

    def __init__(
        self,
        host: HostConnection,
        store: Store,
        have: Callable[[Callable[[], Awaitable[DataAnswer]]], Awaitable[DataAnswer]],
        *,
        keeps: Keeps,
        url: str | None = None,
    ) -> None:
        self._host, self.store, self._have = host, store, have
        self._keeps: Keeps = keeps
        self.url = url
        self.key = ""
        """Key that all workers of this run require; "" until the host has sent it."""
        self.in_use: frozenset[int] = frozenset()
        """Segments that batches are drawn from. They are kept, whether they are wanted or not."""
        self.copied = 0
        """Number of segments."""
        self._full_until = 0.0
        self._ready = asyncio.Event()

    async def ready(self) -> None:
        """Return when there is something to train on: one segment, or all of them."""
        await self._ready.wait()

    async def run(self) -> None:
        """Copy until there is an error.

        Raises:
            InvalidAnswer: the host itself sends wrong bytes.
            SetupError: the disk is full, or fails, and there is too little on it to train on.
            NotFound: the host has forgotten this worker, or gives no images away.
            TooLarge: there is no room for any segment.
        """
        news: dict[str, Any] = {}
        while True:
            answer = await self._tell(news)
            self._look(answer)
            news = {}
            if answer.segment is None:
                await asyncio.sleep(_AGAIN_S)  # a host that is ending lets nobody wait
                continue
            began, before = time.monotonic(), len(self.store.lacks(answer.segment))
            outcome = await self._copy(answer)
            if outcome == "whole":
                size = before * self.store.manifest.chunk_bytes
                news = {"got": answer.segment, "bytes_per_s": size / max(1e-6, time.monotonic() - began)}
            elif outcome in ("wrong", "lacks", "gone"):
                news = {"failed": outcome, "failed_segment": answer.segment, "failed_source": answer.source}
            self._look(answer)

    async def _tell(self, news: Mapping[str, Any]) -> DataAnswer:
        """Report to the host, with `news` as fields of `DataReport`. Without news the answer may wait."""
        full = time.monotonic() < self._full_until
        report = DataReport(
            worker=self._host.name,
            incarnation=self._host.incarnation,
            url=self.url,
            keeps=self._keeps,
            room=len(self.store.holds) if full else await asyncio.to_thread(self.store.room),
            holds=self.store.holds,
            waits=not news,
            **news,
        )
        answer = await self._have(lambda: self._host.data(report))
        parts = len(self.store.manifest.segments)
        if max((*answer.wanted, answer.segment or 0)) >= parts:
            raise InvalidAnswer(f"the host names a segment of the training images that is none of the {parts:,}")
        return answer

    def _look(self, answer: DataAnswer) -> None:
        """Apply an answer of the host."""
        self.key = answer.key
        wanted = frozenset(answer.wanted)
        holds = set(self.store.holds)
        if wanted and (holds >= wanted or (self._keeps == "own" and holds & wanted)):
            self._ready.set()
        if holds >= wanted:
            self.store.keep_only(wanted | self.in_use, time.monotonic())

    async def _copy(self, answer: DataAnswer) -> Outcome:
        """Copy a segment, and report to the host meanwhile, which may end the copy."""
        assert answer.segment is not None
        self.store.begin(answer.segment)
        copying = asyncio.create_task(self._fetched(answer), name="copy of a segment")
        try:
            while True:
                await asyncio.wait({copying}, timeout=_TOLD_S)
                if copying.done():
                    return await copying
                now = await self._tell({"share": self.store.share(answer.segment)})
                self.key = now.key
                if (now.segment, now.source) != (answer.segment, answer.source):
                    return "ended"
        finally:
            copying.cancel()
            with contextlib.suppress(asyncio.CancelledError, TerraceError):
                await copying

    async def _fetched(self, answer: DataAnswer) -> Outcome:
        """The outcome of a copy."""
        segment = answer.segment
        assert segment is not None
        missing = iter(self.store.lacks(segment))
        came_at = time.monotonic()

        async def some() -> None:
            nonlocal came_at
            for number in missing:
                while not await self._one(answer, segment, number, came_at):
                    pass
                came_at = time.monotonic()

        try:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(_AT_ONCE):
                        group.create_task(some())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        except InvalidAnswer as error:
            if answer.source is None:
                raise
            log.warning("%s has sent a wrong chunk: %s", answer.source, error)
            return "wrong"
        except NotFound:
            if answer.source is None:
                raise
            log.warning("%s lacks the segment that it should have", answer.source)
            return "lacks"
        except SetupError as error:  # of this machine
            if self._keeps == "all" or not self.store.holds:
                raise
            log.warning("%s; this worker goes on with the segments that it has", error)
            self._full_until = time.monotonic() + _FULL_S
            return "full"
        except TerraceError as error:
            if answer.source is None and not isinstance(error, Unavailable | UpstreamTimeout | UpstreamError):
                raise
            log.warning("%s sends nothing: %s", answer.source or "the host", error)
            return "gone"
        self.copied += 1
        return "whole"

    async def _one(self, answer: DataAnswer, segment: int, number: int, came_at: float) -> bool:
        """Fetch a chunk and keep it. False if its source does not have it yet."""
        entry, span = self.store.manifest.segments[segment], self.store.manifest.chunk(segment, number)
        left_s = came_at + _STALLED_S - time.monotonic()
        try:
            content = await self._host.chunk(
                answer.source, entry.sha256, span, answer.key, budget_s=max(_AGAIN_S, min(_CHUNK_S, left_s))
            )
        except UpstreamUnavailable:
            raise
        except Unavailable:  # its own copy is under way
            if time.monotonic() - came_at > _STALLED_S:
                raise
            await asyncio.sleep(_AGAIN_S)
            return False
        await self.store.put(segment, number, content)
        return True
