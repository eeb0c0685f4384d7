"""The events of the outbox, read once for all sinks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence

from scheduler.core.outbox import SinkEvent
from tierkit.errors import Unavailable

__all__ = ["Feed"]

_log = logging.getLogger(__name__)

_KEPT = 2000
"""The latest events stay in memory: sinks that keep up read nothing from the database."""
_PAGE = 500
_PAUSE_S = 0.02
"""Least time between two looks at the database."""
_AGAIN_S = 1.0
"""Seconds to wait after the database did not answer."""
_LOOK_S = 5.0
"""Longest time between them, in case the end of a transaction was not heard."""


class Feed:
    """Reads new events, and wakes those who wait for some.

    Args:
        read: returns events with numbers above the first argument, in order; at most as many as the second says.
        last: number of the last event that was stored before this feed began.
    """

    def __init__(self, read: Callable[[int, int], Awaitable[list[SinkEvent]]], last: int) -> None:
        self.last = last
        """The highest number that was read."""
        self.waiting: set[asyncio.Event] = set()
        """Set when there is something new."""
        self._read = read
        self._events: list[SinkEvent] = []
        self._numbers: list[int] = []
        self._complete_after = last
        """All events with higher numbers are in memory."""
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Something may have been stored."""
        self._news.set()

    async def run(self) -> None:
        """Read what is stored, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._news.wait()
            self._news.clear()
            if not self.waiting:
                continue
            try:
                full = True
                while full:
                    page = await self._read(self.last, _PAGE)
                    full = len(page) == _PAGE
                    if page:
                        self._take(page)
            except Unavailable as exc:
                _log.warning("events cannot be read now: %s", exc)
                self._news.set()
                await asyncio.sleep(_AGAIN_S)
            await asyncio.sleep(_PAUSE_S)

    def _take(self, page: Sequence[SinkEvent]) -> None:
        self._events += page
        self._numbers += (each.number for each in page)
        self.last = self._numbers[-1]
        if len(self._events) > 2 * _KEPT:
            self._complete_after = self._numbers[-_KEPT - 1]
            del self._events[:-_KEPT], self._numbers[:-_KEPT]
        for event in self.waiting:
            event.set()

    async def after(self, number: int, most: int) -> tuple[Sequence[SinkEvent], int]:
        """Up to `most` events with numbers above `number`, and the number up to which these are all. Raises
        Unavailable."""
        last = self.last
        if number >= self._complete_after:
            start = bisect_right(self._numbers, number)
            page: Sequence[SinkEvent] = self._events[start : start + most]
        else:
            page = await self._read(number, most)
        return page, page[-1].number if page else max(number, last)
