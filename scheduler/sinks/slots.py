"""The bound on deliveries at a time over all sinks, shared out fairly."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

__all__ = ["SHARED", "Slots"]

SHARED = 256
"""Deliveries at a time beyond the first of each sink. A process may open 1,024 files on most systems."""


class Slots:
    """Places for deliveries. Each sink owns one, and all share some more.

    A shared place that becomes free goes to the waiting sink with the fewest places. So receivers that never answer
    leave a place to each other sink at any time, and an equal part of the shared ones within one time-out.
    """

    def __init__(self, shared: int = SHARED) -> None:
        self._free = shared
        self._used: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def place(self, sink: Hashable) -> AsyncIterator[None]:
        """Wait for a place, and hold it while the block runs."""
        if not self._used[sink]:
            self._used[sink] = 1
        elif not self._waiting and self._free:
            self._free -= 1
            self._used[sink] += 1
        else:
            await self._wait(sink)
        try:
            yield
        finally:
            self._give_back(sink)

    async def _wait(self, sink: Hashable) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sink, deque()).append(ready)
        try:
            await ready
        except asyncio.CancelledError:
            if not ready.cancelled():  # it had its place already
                self._give_back(sink)
            raise

    def _give_back(self, sink: Hashable) -> None:
        self._used[sink] -= 1
        if self._used[sink]:
            self._free += 1
        elif not self._grant(sink):
            del self._used[sink]
        while self._free and self._waiting:
            if self._grant(min(self._waiting, key=self._used.__getitem__)):
                self._free -= 1

    def _grant(self, sink: Hashable) -> bool:
        """Give a place to the first delivery of a sink that waits; returns False if none does."""
        waiting = self._waiting.get(sink, deque())
        granted = False
        while waiting and not granted:
            ready = waiting.popleft()
            granted = not ready.cancelled()
            if granted:
                self._used[sink] += 1
                ready.set_result(None)
        if not waiting:
            self._waiting.pop(sink, None)
        return granted
