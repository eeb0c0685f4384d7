"""Rows of sinks, of the events that wait for them, and of dead letters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Executable, and_, bindparam, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from scheduler.core.outbox import DeadLetter, EventFilter, Sink, SinkEvent
from scheduler.store.commit import GroupCommit
from scheduler.store.outbox import as_json
from scheduler.store.reading import Reader
from scheduler.store.tables import dead_letters, outbox, sinks
from tierkit.errors import SetupError

__all__ = ["MOST_LETTERS", "SinkStore"]

_log = logging.getLogger(__name__)

MOST_LETTERS = 10_000
"""Dead letters of a sink; the oldest go first."""
_PART = 200
"""Rows that are deleted in one transaction: other writes wait meanwhile."""

_read_data = msgspec.json.Decoder(dict[str, Any]).decode
_read_event = msgspec.json.Decoder(SinkEvent).decode
_read_filter = msgspec.json.Decoder(EventFilter).decode


class SinkStore:
    """All statements on sinks and their events. They raise Unavailable when the database does not answer."""

    def __init__(self, reader: Reader, commit: GroupCommit) -> None:
        self._reader = reader
        self._commit = commit

    # --- sinks ------------------------------------------------------------------------------------------------------

    async def sinks(self) -> list[Sink]:
        """All sinks by name. Raises SetupError for a row that cannot be read."""
        rows = await self._reader.rows(select(sinks).order_by(sinks.c.name))
        try:
            return [
                Sink(**{**row._mapping, "filter": _read_filter(row.filter), "options": _read_data(row.options)})
                for row in rows
            ]
        except msgspec.MsgspecError as exc:
            raise SetupError(f"the table terrace_sinks has a row that cannot be read: {exc}") from exc

    async def add(self, sink: Sink) -> Sink:
        """Store a new sink; returns it as it is stored. It gets the events from now on."""
        row = msgspec.structs.asdict(sink) | {
            "filter": msgspec.json.encode(sink.filter).decode(),
            "options": as_json(sink.options),
        }
        stored = sink

        async def write(connection: AsyncConnection) -> None:
            nonlocal stored
            stored = msgspec.structs.replace(sink, position=await connection.scalar(_LAST) or 0)
            await connection.execute(insert(sinks).values(row | {"position": stored.position}))

        await self._commit.execute(write, undo=(delete(sinks).where(sinks.c.name == sink.name),))
        return stored

    async def remove(self, name: str) -> None:
        """Delete a sink and its dead letters."""

        async def write(connection: AsyncConnection) -> None:
            await connection.execute(delete(dead_letters).where(dead_letters.c.sink == name))
            await connection.execute(delete(sinks).where(sinks.c.name == name))

        await self._commit.execute(write)

    async def pause(self, name: str, paused: bool, reason: str) -> None:
        """Stop or resume the deliveries of a sink."""
        await self._execute(update(sinks).where(sinks.c.name == name).values(paused=paused, reason=reason))

    async def save_positions(self, positions: Mapping[str, int]) -> None:
        """Note by name how far sinks have come."""
        rows = [{"its_name": name, "to": position} for name, position in positions.items()]
        statement = update(sinks).where(sinks.c.name == bindparam("its_name")).values(position=bindparam("to"))
        await self._commit.execute(lambda connection: connection.execute(statement, rows))

    # --- events -----------------------------------------------------------------------------------------------------

    async def last(self) -> int:
        """The highest number of a stored event; 0 for none."""
        (row,) = await self._reader.rows(_LAST)
        return row[0] or 0

    async def page(self, after: int, most: int) -> list[SinkEvent]:
        """Up to `most` events with numbers above `after`, in order."""
        rows = await self._reader.rows(select(outbox).where(outbox.c.number > after).order_by(_NUMBER).limit(most))
        return [
            SinkEvent(
                number=row.number,
                type=row.type,
                key=row.key,
                at=row.at,
                elapsed=row.stored_elapsed,
                data=_data_of(row.number, row.content),
            )
            for row in rows
        ]

    async def end_of(self, before: float, most: int) -> int:
        """The highest number of the events that are too old or too many; 0 for none.

        Args:
            before: moment of elapsed time.
            most: events that may stay.
        """
        both = select(func.min(_NUMBER).label("first"), func.max(_NUMBER).label("last"))
        (ends,) = await self._reader.rows(both)
        if ends.last is None:
            return 0
        young = select(_NUMBER).where(outbox.c.stored_elapsed >= before).order_by(_NUMBER).limit(1)
        end = next((row.number - 1 for row in await self._reader.rows(young)), ends.last)
        if ends.last - ends.first >= most:
            many = select(_NUMBER).order_by(_NUMBER.desc()).offset(most).limit(1)
            end = max([end, *(row.number for row in await self._reader.rows(many))])
        return int(end)

    async def delete_upto(self, number: int) -> None:
        """Delete the events up to a number, some at a time."""
        while (first := await self._first()) is not None and first <= number:
            await self._execute(delete(outbox).where(outbox.c.number <= min(number, first + _PART)))

    async def delete_needed(self, upto: int, dropped: Callable[[Sequence[SinkEvent]], Mapping[str, int]]) -> None:
        """Delete the events up to a number, some at a time, and count for each sink those that it has not had.

        Args:
            dropped: returns these counts for some events.
        """
        while page := [each for each in await self.page(0, _PART) if each.number <= upto]:
            statements: list[Executable] = [delete(outbox).where(outbox.c.number <= page[-1].number)]
            for name, count in dropped(page).items():
                more = {"dropped": sinks.c.dropped + count}
                statements.append(update(sinks).where(sinks.c.name == name).values(more))
            await self._execute(*statements)

    async def _first(self) -> int | None:
        found = await self._reader.rows(select(_NUMBER).order_by(_NUMBER).limit(1))
        return next((row.number for row in found), None)

    # --- dead letters -----------------------------------------------------------------------------------------------

    async def bury(self, letter: DeadLetter) -> int:
        """Store a dead letter; returns the number of older ones that were dropped."""
        its = dead_letters.c
        key = and_(its.sink == letter.sink, its.number == letter.event.number)
        row = {
            "sink": letter.sink,
            "number": letter.event.number,
            "reason": letter.reason,
            "attempts": letter.attempts,
            "at": letter.at,
            "wanted": False,
            "content": as_json(letter.event),
        }
        lost = 0

        async def write(connection: AsyncConnection) -> None:
            nonlocal lost
            await connection.execute(delete(dead_letters).where(key))
            await connection.execute(insert(dead_letters).values(row))
            newest = select(its.number).where(its.sink == letter.sink).order_by(its.number.desc())
            last = await connection.scalar(newest.offset(MOST_LETTERS).limit(1))
            if last is not None:
                gone = delete(dead_letters).where(its.sink == letter.sink, its.number <= last)
                lost = (await connection.execute(gone)).rowcount
                more = {"lost_letters": sinks.c.lost_letters + lost}
                await connection.execute(update(sinks).where(sinks.c.name == letter.sink).values(more))

        await self._commit.execute(write)
        return lost

    async def letters(self, sink: str, *, after: int = 0, most: int, wanted: bool = False) -> list[DeadLetter]:
        """Up to `most` dead letters of a sink by number, those above `after`.

        Args:
            wanted: only those that are to be delivered again.
        """
        its = dead_letters.c
        query = select(dead_letters).where(its.sink == sink, its.number > after).order_by(its.number).limit(most)
        if wanted:
            query = query.where(its.wanted)
        return [
            DeadLetter(
                sink=row.sink,
                event=_read_event(row.content),
                reason=row.reason,
                attempts=row.attempts,
                at=row.at,
                wanted=row.wanted,
            )
            for row in await self._reader.rows(query)
        ]

    async def letter_counts(self) -> dict[str, int]:
        """Dead letters by sink."""
        query = select(dead_letters.c.sink, func.count().label("letters")).group_by(dead_letters.c.sink)
        return {row.sink: row.letters for row in await self._reader.rows(query)}

    async def want(self, sink: str, numbers: Collection[int] | None) -> int:
        """Mark dead letters for another delivery; returns their number.

        Args:
            numbers: of events; None: all.
        """
        its, marked = dead_letters.c, 0
        its_letters = its.sink == sink if numbers is None else and_(its.sink == sink, its.number.in_(numbers))

        async def write(connection: AsyncConnection) -> None:
            nonlocal marked
            marked = (await connection.execute(update(dead_letters).where(its_letters).values(wanted=True))).rowcount

        await self._commit.execute(write)
        return marked

    async def unbury(self, sink: str, number: int) -> None:
        """Delete a dead letter that was delivered."""
        its = dead_letters.c
        await self._execute(delete(dead_letters).where(its.sink == sink, its.number == number))

    async def _execute(self, *statements: Executable) -> None:
        await self._commit.execute(partial(_each, statements))


_NUMBER = outbox.c.number
_LAST = select(func.max(_NUMBER))


def _data_of(number: int, content: str) -> dict[str, Any]:
    """The data of an event; empty if its row is damaged."""
    try:
        return _read_data(content)
    except msgspec.DecodeError as exc:
        _log.error("the event %d in the table terrace_outbox is damaged: %s", number, exc)
        return {}


async def _each(statements: Sequence[Executable], connection: AsyncConnection) -> None:
    for statement in statements:
        await connection.execute(statement)
