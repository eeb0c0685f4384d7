"""Reads from the database: a bounded number of queries at a time, each with its own connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncEngine

from scheduler.store.database import REFUSALS, plain_reason
from tierkit.errors import Unavailable

__all__ = ["Reader"]

_MOST_READING = 8
"""Concurrent queries, each with a separate connection; later ones wait for their turn."""


class Reader:
    """Runs queries; one for all that read from a database."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._slots = asyncio.Semaphore(_MOST_READING)
        self._reading: set[asyncio.Task[Any]] = set()

    async def rows(self, query: Any) -> Sequence[Row[Any]]:
        """Return the rows of a query. The caller may be cancelled when its client hangs up, but a query that has begun
        is completed: otherwise the driver would leave its connection open, and its thread waiting.

        Raises:
            Unavailable: the database does not answer.
        """
        await self._slots.acquire()
        reading = asyncio.create_task(self._read(query), name="reading")
        self._reading.add(reading)
        reading.add_done_callback(self._done)
        return await asyncio.shield(reading)

    async def finish(self) -> None:
        """Wait for the queries under way, before the database is closed."""
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def _read(self, query: Any) -> Sequence[Row[Any]]:
        try:
            async with self._engine.connect() as connection:
                return (await connection.execute(query)).all()
        except REFUSALS as exc:
            raise Unavailable(f"the database does not answer now: {plain_reason(exc)}") from exc

    def _done(self, reading: asyncio.Task[Any]) -> None:
        self._reading.discard(reading)
        self._slots.release()
