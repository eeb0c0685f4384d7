"""The event streams: server-sent events of a job, from the results table, and lines of an interactive request.

A job's stream reads the table by commit number and waits for news in between. Nothing is buffered per reader: a slow
one reads later, one that comes back names the last number it has seen (`Last-Event-ID`) and misses nothing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Hub", "comment", "server_sent"]


class Hub:
    """Tells whoever follows a job that there is something new in the database."""

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


def server_sent(kind: str, data: str, *, number: int) -> str:
    """One event of a `text/event-stream`; `data` is JSON on one line."""
    return f"event: {kind}\nid: {number}\ndata: {data}\n\n"


def comment(text: str) -> str:
    """A line that readers skip; keeps connections open."""
    return f": {text}\n\n"
