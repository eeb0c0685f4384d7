"""The bound on deliveries at a time over all sinks, shared out fairly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scheduler.core.outbox import LANES
from tierkit.errors import Rejected

__all__ = ["SHARED", "SinkPlaces", "Slots"]

SHARED = 128
"""Deliveries at a time beyond the first of each sink. Most systems let a process open 1,024 files by default."""


class Slots:
    """Places for deliveries. Each sink owns one, and all share some more. A shared place that becomes free goes to the
    waiting sink with the fewest places."""

    def __init__(self, shared: int = SHARED) -> None:
        self.free = shared
        """Shared places that no sink has."""
        self.waiting: dict[SinkPlaces, None] = {}
        """Sinks with deliveries that wait for a place, in order."""

    def share_out(self) -> None:
        """Give free places to waiting sinks."""
        while self.free and (able := [each for each in self.waiting if each.used < each.most]):
            if min(able, key=lambda each: each.used).grant():
                self.free -= 1


class SinkPlaces:
    """The places of one sink.

    It may use more at a time with each delivery that the receiver answers, and half as many after each that fails. So
    receivers that never answer use no shared place.
    """

    def __init__(self, slots: Slots) -> None:
        self.used = 0
        self.most = 1
        """Places that it may use now, from 1 to `LANES`."""
        self._slots = slots
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it while the block runs, which delivers one event."""
        if self.used == 0:
            self.used = 1
        elif self.used < self.most and not self._waiting and self._slots.free:
            self._slots.free -= 1
            self.used += 1
        else:
            await self._wait()
        answered = False
        try:
            yield
            answered = True
        except Rejected:
            answered = True
            raise
        finally:
            self.most = min(LANES, self.most + 1) if answered else max(1, self.most // 2)
            self._give_back()

    async def _wait(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(ready)
        self._slots.waiting[self] = None
        try:
            await ready
        except asyncio.CancelledError:
            if not ready.cancelled():  # it had its place already
                self._give_back()
            raise

    def grant(self) -> bool:
        """Give a place to the first delivery that waits; returns False if none does."""
        granted = False
        while self._waiting and not granted:
            ready = self._waiting.popleft()
            granted = not ready.cancelled()
            if granted:
                self.used += 1
                ready.set_result(None)
        if not self._waiting:
            self._slots.waiting.pop(self, None)
        return granted

    def _give_back(self) -> None:
        self.used -= 1
        if self.used:
            self._slots.free += 1
        else:
            self.grant()
        self._slots.share_out()
