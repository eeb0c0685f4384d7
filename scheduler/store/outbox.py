"""Events as rows: written in the transaction that makes them true, as far as a sink wants them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from sqlalchemy import Executable, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from scheduler.core.outbox import EventFilter, SinkEvent, matches
from scheduler.store.tables import outbox

__all__ = ["Outbox", "as_json"]


class Outbox:
    """Turns what becomes true into rows, as far as a sink wants it. Costs nothing while there is no sink.

    Args:
        wall: returns seconds since 1970.
        elapsed: returns seconds of elapsed time.
    """

    def __init__(self, *, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._filters: tuple[EventFilter, ...] = ()

    @property
    def used(self) -> bool:
        """True if there is a sink."""
        return bool(self._filters)

    def use(self, filters: Iterable[EventFilter]) -> None:
        """Keep events that one of these wants, from now on."""
        self._filters = tuple(dict.fromkeys(filters))

    def rows(self, events: Iterable[SinkEvent]) -> list[Executable]:
        """Statements that store events. They belong into the transaction that makes these true."""
        return [insert(outbox).values(row).inline() for row in self._rows(events)]

    async def write(self, connection: AsyncConnection, events: Iterable[SinkEvent]) -> None:
        """Store events in a transaction."""
        if rows := self._rows(events):
            await connection.execute(_INSERT, rows)

    def _rows(self, events: Iterable[SinkEvent]) -> list[dict[str, Any]]:
        if not self._filters:
            return []
        at, elapsed = self._wall(), self._elapsed()
        return [
            {"type": each.type, "key": each.key, "at": at, "stored_elapsed": elapsed, "content": as_json(each.data)}
            for each in events
            if any(matches(conditions, each) for conditions in self._filters)
        ]


_INSERT = insert(outbox).inline()


def as_json(value: Any) -> str:
    """A value as JSON that any database holds."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # half a character, which no database holds
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=False).encode(errors="replace").decode()
