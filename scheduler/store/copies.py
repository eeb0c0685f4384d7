"""Copies of files in the database. Used by schedulers that share the database but no disk."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection
from pathlib import Path
from weakref import WeakValueDictionary

from sqlalchemy import Executable, Table, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from scheduler.store.commit import GroupCommit
from scheduler.store.database import REFUSALS, plain_reason
from tierkit.atomic import replace_file
from tierkit.errors import Unavailable

__all__ = ["FileCopies"]

_PART_BYTES = 4 * 1024**2
"""Results are committed between two parts."""


class FileCopies:
    """Written before what refers to them, by the leading scheduler; read by the next leader.

    Args:
        table: `inputs` or `networks`.
    """

    def __init__(self, engine: AsyncEngine, commit: GroupCommit, table: Table) -> None:
        self._table = table
        self._engine = engine
        self._commit = commit
        self._whole: set[str] = set()
        """Files that the database holds completely."""
        self._turns = WeakValueDictionary[str, asyncio.Lock]()
        """Locks by file: one caller saves it, and others with the same content wait."""

    async def save(self, sha256: str, path: Path) -> None:
        """Copy a file, unless that has been done.

        Raises:
            Unavailable: the database does not accept it.
        """
        async with self._turns.setdefault(sha256, asyncio.Lock()):
            if sha256 in self._whole:
                return
            await self._write(delete(self._table).where(self._table.c.sha256 == sha256))
            with path.open("rb") as file:
                for part in itertools.count():
                    if not (content := await asyncio.to_thread(file.read, _PART_BYTES)):
                        break
                    await self._write(insert(self._table).values(sha256=sha256, part=part, content=content))
            self._whole.add(sha256)

    async def fetch(self, sha256: str, path: Path) -> None:
        """Write a file from its copy, parts that there are not left out.

        Raises:
            Unavailable: the database does not answer.
            SetupError: the file cannot be written.
        """
        parts = select(self._table.c.content).where(self._table.c.sha256 == sha256)
        with replace_file(path) as file:
            for part in itertools.count():
                try:
                    async with self._engine.connect() as connection:
                        content = await connection.scalar(parts.where(self._table.c.part == part))
                except REFUSALS as exc:
                    raise Unavailable(f"the database does not answer now: {plain_reason(exc)}") from exc
                if content is None:
                    break
                await asyncio.to_thread(file.write, content)

    def remove(self, sha256: str) -> None:
        """The last job with this content has ended."""
        if sha256 in self._whole:
            self._whole.remove(sha256)
            self._commit.put(delete(self._table).where(self._table.c.sha256 == sha256))

    async def keep_only(self, wanted: Collection[str]) -> None:
        """Remove all others: of jobs that have ended, or never were.

        Raises:
            Unavailable: the database does not accept it.
        """
        await self._write(delete(self._table).where(self._table.c.sha256.not_in(wanted)))
        self._whole = set(wanted)

    async def _write(self, statement: Executable) -> None:
        await self._commit.execute(lambda connection: connection.execute(statement))
