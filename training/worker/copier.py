"""Copies of segments on a worker: fetched from the source that the host names, checked, and passed on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tierkit.copies.copier import Outcome, copied, while_wanted
from tierkit.copies.store import Store
from tierkit.errors import InvalidAnswer, SetupError
from training.messages import DataAnswer, DataReport, Keeps
from training.worker.connection import HostConnection

__all__ = ["Copier"]

log = logging.getLogger(__name__)

_AGAIN_S = 0.2
_FULL_S = 600.0
"""Time for which a disk that could not keep a segment counts as full, whatever room it reports."""


class Copier:
    """Copies one segment after the other for as long as it runs.

    Args:
        url: URL at which this worker passes on its segments; None if others cannot reach it.
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
                size = before * self.store.files[answer.segment].chunk_bytes
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
        parts = len(self.store.files)
        if max((*answer.wanted, answer.segment or 0)) >= parts:
            raise InvalidAnswer(f"the host names a segment beyond the {parts:,} of the training images")
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
        segment = answer.segment
        assert segment is not None
        self.store.begin(segment)

        async def wanted() -> bool:
            now = await self._tell({"share": self.store.share(segment)})
            self.key = now.key
            return (now.segment, now.source) == (segment, answer.source)

        return await while_wanted(self._fetched(segment, answer), wanted)

    async def _fetched(self, segment: int, answer: DataAnswer) -> Outcome:
        async def chunk(sha256: str, span: range, budget_s: float) -> bytes:
            return await self._host.chunk(answer.source, sha256, span, answer.key, budget_s=budget_s)

        try:
            outcome = await copied(self.store, segment, chunk, source=answer.source)
        except SetupError as error:  # of this machine
            if self._keeps == "all" or not self.store.holds:
                raise
            log.warning("%s; this worker goes on with the segments that it has", error)
            self._full_until = time.monotonic() + _FULL_S
            return "full"
        self.copied += outcome == "whole"
        return outcome
