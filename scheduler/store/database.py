"""Opening the database: connection settings by dialect, tables, schema version."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import event, func, insert, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from scheduler.store.tables import SCHEMA_VERSION, UPGRADES, metadata, properties, results
from tierkit.errors import SetupError

__all__ = ["last_seq", "open_database", "plain_reason"]

_BUSY_TIMEOUT_MS = 10_000
_KNOWN = "what works are sqlite+aiosqlite:///FILE and postgresql+asyncpg://USER:PASSWORD@HOST/DATABASE"


async def open_database(url: str) -> AsyncEngine:
    """An engine on a database that holds the present tables; creates them in an empty one, and brings those of an older
    Terrace up to date.

    Raises:
        SetupError: it cannot be opened or written, or a newer Terrace has made it.
    """
    engine, where = _engine(url)
    if engine.dialect.name == "sqlite":
        guard = await asyncio.to_thread(_probe_sqlite, engine.url.database, where)
        if guard is not None:
            event.listen(engine.sync_engine, "connect", guard.check)
            event.listen(engine.sync_engine, "commit", guard.check)
        event.listen(engine.sync_engine, "connect", _tune_sqlite)
    try:
        async with engine.begin() as connection:
            if engine.dialect.name == "sqlite":
                # Its driver begins a transaction with the first change of rows alone; an upgrade is one as a whole.
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            await connection.run_sync(metadata.create_all)
            await _check_version(connection, where)
    except (SQLAlchemyError, OSError) as exc:
        await engine.dispose()
        raise SetupError(f"the database {where} cannot be opened for writing: {plain_reason(exc)}") from exc
    except BaseException:
        await engine.dispose()
        raise
    return engine


async def last_seq(engine: AsyncEngine) -> int:
    """The highest result number in the database, 0 for none."""
    async with engine.connect() as connection:
        return await connection.scalar(select(func.max(results.c.seq))) or 0


def plain_reason(exc: SQLAlchemyError | OSError) -> str:
    """What the driver said, without the statement and SQLAlchemy's link."""
    return next(iter(str(getattr(exc, "orig", None) or exc).splitlines()), type(exc).__name__)


def _engine(url: str) -> tuple[AsyncEngine, str]:
    """An engine, and its URL as it may be shown: without the password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # Neither the URL nor the error's text, which may repeat it: a password would stand in the log.
        raise SetupError(f"the database URL is no URL; {_KNOWN}") from None
    where = parsed.render_as_string(hide_password=True)
    try:
        return create_async_engine(parsed), where
    except ImportError as exc:
        raise SetupError(f"the database {where} needs a driver that is not installed: pip install {exc.name}") from exc
    except (SQLAlchemyError, TypeError, ValueError) as exc:
        raise SetupError(f"the database URL {where} has no driver or option that works here; {_KNOWN}") from exc


async def _check_version(connection: AsyncConnection, where: str) -> None:
    found = await connection.scalar(select(properties.c.value).where(properties.c.name == "schema_version"))
    if found is None:
        await connection.execute(insert(properties).values(name="schema_version", value=str(SCHEMA_VERSION)))
    elif not (len(found) < 9 and found.isascii() and found.isdigit() and int(found)):
        raise SetupError(f"the database {where} is damaged: its schema is {found[:20]!r}; use another --state folder")
    elif int(found) > SCHEMA_VERSION:
        raise SetupError(
            f"the database {where} was made by a newer Terrace (schema {found}, this one knows {SCHEMA_VERSION}): "
            "update Terrace or use another --state folder"
        )
    else:
        for version in range(int(found), SCHEMA_VERSION):
            for statement in UPGRADES[version]:
                await connection.execute(text(statement))
        await connection.execute(
            update(properties).where(properties.c.name == "schema_version").values(value=str(SCHEMA_VERSION))
        )
    # Writing something shows at start, and not at the first job, that the database is read-only.
    await connection.execute(update(properties).values(value=properties.c.value))


class _SameFile:
    """Refuses connections and commits when the file at the path is no longer the one that was opened: SQLite would go
    on writing into the removed one, and a new connection would make an empty one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = path.stat()

    def check(self, *_: object) -> None:
        try:
            same = os.path.samestat(self._path.stat(), self._opened)
        except OSError:
            same = False
        if not same:
            said = f"the file {self._path} is gone or another one; put it back, or stop the scheduler"
            raise OperationalError("", {}, sqlite3.OperationalError(said))


def _probe_sqlite(path: str | None, where: str) -> _SameFile | None:
    """Open and close the file, which makes an empty one where there is none, its owner's alone; None for what is no
    plain file."""
    # A connection that cannot be opened leaves the asynchronous driver's thread behind, which complains on standard
    # error when the event loop has gone; this one leaves nothing.
    plain = path is not None and path != ":memory:" and not path.startswith("file:")
    try:
        if path is not None and plain:
            # SQLite gives the files beside it the same mode, and says what is wrong where nothing can be made.
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with contextlib.closing(sqlite3.connect(path or ":memory:", uri=(path or "").startswith("file:"))) as probe:
            probe.execute("PRAGMA schema_version")
        return _SameFile(Path(path)) if path is not None and plain else None
    except (sqlite3.Error, OSError) as exc:
        raise SetupError(f"the database {where} cannot be opened for writing: {exc}") from exc


def _tune_sqlite(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    # WAL: readers never wait for the writer. FULL: what is committed is on the disk, even if the power fails; group
    # commit makes that cheap.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={_BUSY_TIMEOUT_MS}", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
