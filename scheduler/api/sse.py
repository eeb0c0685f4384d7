"""Server-sent events of a job.

A job's stream reads the table by commit number and waits for news in between. Nothing is buffered per reader: a slow
one reads later, one that comes back names the last number it has seen (`Last-Event-ID`) and misses nothing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

__all__ = ["Events", "Hub", "as_server_sent"]


class Hub:
    """Tells the followers of a job that there is something new in the database."""

    def __init__(self) -> None:
        self._followers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def notify(self, job_id: str) -> None:
        for news in self._followers.get(job_id, ()):
            news.set()

    def notify_all(self) -> None:
        for job_id in list(self._followers):
            self.notify(job_id)

    @contextmanager
    def follow(self, job_id: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever something has changed; clear it before you look."""
        news = asyncio.Event()
        self._followers[job_id].add(news)
        try:
            yield news
        finally:
            self._followers[job_id].discard(news)
            if not self._followers[job_id]:
                del self._followers[job_id]


Events = AsyncGenerator[tuple[str, str, int] | None, None]
"""Kind, data (JSON on one line) and number of each event; None where nothing has happened for a while."""


async def as_server_sent(events: Events) -> AsyncGenerator[str, None]:
    """A `text/event-stream`. A comment, which readers skip, keeps the connection open while nothing happens."""
    async with aclosing(events):
        async for event in events:
            if event is None:
                yield ": waiting\n\n"
            else:
                kind, data, number = event
                yield f"event: {kind}\nid: {number}\ndata: {data}\n\n"
