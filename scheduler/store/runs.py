"""Rows of training runs, which outlast the scheduler."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import and_, delete, insert, or_, select, update
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from scheduler.core.curve import Point
from scheduler.core.run import RunDetails, RunRow
from scheduler.store.commit import GroupCommit
from scheduler.store.reading import Reader
from scheduler.store.tables import runs
from tierkit.types import RunState

__all__ = ["RunStore"]


_SHORT = [runs.c[each.name] for each in fields(RunRow)]
_WHOLE = [*_SHORT, *(runs.c[each.name] for each in fields(RunDetails))]


class RunStore:
    """All statements on runs. Reads and writes raise Unavailable when the database does not answer."""

    def __init__(self, reader: Reader, commit: GroupCommit) -> None:
        self._reader = reader
        self._commit = commit

    async def add(self, row: RunRow, details: RunDetails) -> None:
        """Store a new run."""
        statement = insert(runs).values({**asdict(row), **_texts(details)})
        undo = delete(runs).where(runs.c.id == row.id)
        await self._commit.execute(lambda connection: connection.execute(statement), undo=(undo,))

    async def save(self, changed: Sequence[tuple[RunRow, RunDetails]]) -> None:
        """Write runs as they are now, in one transaction."""

        async def write(connection: AsyncConnection) -> None:
            for row, details in changed:
                values = {**asdict(row), **_texts(details)}
                await connection.execute(update(runs).where(runs.c.id == row.id).values(values))

        if changed:
            await self._commit.execute(write)

    async def get(self, run_id: str) -> tuple[RunRow, RunDetails] | None:
        found = await self._reader.rows(select(*_WHOLE).where(runs.c.id == run_id))
        return _whole(found[0]) if found else None

    async def unended(self, most: int) -> list[tuple[RunRow, RunDetails]]:
        """Return the unfinished runs whose hosts were heard last."""
        query = select(*_WHOLE).where(runs.c.finished_at.is_(None)).order_by(runs.c.heard_at.desc()).limit(most)
        return [_whole(row) for row in await self._reader.rows(query)]

    async def unended_of(self, run_ids: Collection[str]) -> frozenset[str]:
        """Return the ids of these runs that are stored and have no end."""
        query = select(runs.c.id).where(runs.c.finished_at.is_(None), runs.c.id.in_(run_ids))
        return frozenset(row.id for row in await self._reader.rows(query))

    async def page(
        self, *, limit: int, before: tuple[float, str] | None, owner: str | None, unended: bool
    ) -> list[RunRow]:
        """Up to `limit` runs, newest first.

        Args:
            before: creation time and id of a run; only older runs are returned.
            owner: only runs of this owner; None for all.
            unended: only runs without an end.
        """
        query = select(*_SHORT).order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(limit)
        if before is not None:
            at, run_id = before
            query = query.where(or_(runs.c.created_at < at, and_(runs.c.created_at == at, runs.c.id < run_id)))
        if owner is not None:
            query = query.where(runs.c.owner == owner)
        if unended:
            query = query.where(runs.c.finished_at.is_(None))
        return [_short(row) for row in await self._reader.rows(query)]

    async def purge(self, before: float) -> Collection[str]:
        """Delete runs whose hosts were heard last before this moment of elapsed time; returns their ids."""
        old: set[str] = set()

        async def write(connection: AsyncConnection) -> None:
            gone = await connection.execute(delete(runs).where(runs.c.heard_elapsed < before).returning(runs.c.id))
            old.update(gone.scalars())

        await self._commit.execute(write)
        return old


def _short(row: Row[Any]) -> RunRow:
    values = {each.name: row._mapping[each.name] for each in fields(RunRow)}
    return RunRow(**{**values, "state": RunState(row.state)})


def _whole(row: Row[Any]) -> tuple[RunRow, RunDetails]:
    return _short(row), RunDetails(
        config=json.loads(row.config),
        workers=json.loads(row.workers),
        curve=tuple(Point(*point) for point in json.loads(row.curve)),
        result=None if row.result is None else json.loads(row.result),
        more_urls=json.loads(row.more_urls),
        wants=json.loads(row.wants),
    )


def _texts(details: RunDetails) -> dict[str, str | None]:
    return {
        "config": json.dumps(details.config),
        "workers": json.dumps(details.workers),
        "curve": json.dumps(details.curve),
        "result": None if details.result is None else json.dumps(details.result),
        "more_urls": json.dumps(details.more_urls),
        "wants": json.dumps(details.wants),
    }
