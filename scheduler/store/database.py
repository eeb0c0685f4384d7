"""Opening of the database: connection settings by dialect, and the tables in their current form."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, event, func, inspect, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from scheduler.store.tables import SCHEMA, VERSION_TABLE, lease, properties, results
from tierkit.errors import DatabaseUnavailable, MissingExtra, SetupError

__all__ = ["REFUSALS", "last_seq", "may_be_written", "open_database", "plain_reason", "transact"]

Value = TypeVar("Value")

REFUSALS = (SQLAlchemyError, OSError)
"""Errors that a database raises if it refuses something, or is away."""

_BUSY_TIMEOUT_MS = 10_000
_CONNECT_S = 5.0
_ANSWER_S = 10.0
"""Seconds for each statement of a server; a server that is silent for longer is away."""
_OPEN_TRANSACTION_MS = 5_000
"""A server ends the transaction of a scheduler that was silent for this long. It may have been stopped, or its machine
lost, and another scheduler waits for its locks."""
_CONNECTIONS = 10
"""Connections for the queries of `scheduler.store.reading`, and further ones for writes and the lease."""
_MIGRATION_LOCK = 0x7465727261636500
"""Key of PostgreSQL's advisory lock that allows one migration at a time."""
_LEGACY = "6"
"""The last schema before Alembic; its tables equal revision 0001."""
_KNOWN = "what works are sqlite+aiosqlite:///FILE and postgresql+asyncpg://USER:PASSWORD@HOST/DATABASE"


async def open_database(url: str) -> AsyncEngine:
    """Return an engine on a database with the present tables. Makes them in an empty database, and migrates the tables
    of an older Terrace; a scheduler of that version then does not lead any more.

    Raises:
        DatabaseUnavailable: its server is not there now.
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
                # Its driver begins a transaction with the first change of rows alone; a migration is one as a whole.
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                await connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            await connection.run_sync(_migrate, where)
            # Writing something shows at start, and not at the first job, that the database is read-only.
            await connection.execute(update(properties).values(value=properties.c.value))
    except REFUSALS as exc:
        await engine.dispose()
        if "unsupported startup parameter" in plain_reason(exc):  # PgBouncer, with a code as if it were away
            raise SetupError(
                f"the database {where} is behind a PgBouncer that refuses a parameter of the connection: set"
                " ignore_startup_parameters = idle_in_transaction_session_timeout in pgbouncer.ini, and the parameter"
                " for the role (docs/explanation/sizing.md has the command)"
            ) from exc
        said = f"the database {where} cannot be opened for writing: {plain_reason(exc)}"
        raise (DatabaseUnavailable if _is_away(exc) else SetupError)(said) from exc
    except TypeError as exc:
        await engine.dispose()
        raise SetupError(
            f"the database URL {where} has an option that its driver does not know ({exc}); for TLS it is ssl=require"
        ) from exc
    except BaseException:  # also when it is cancelled: connections would outlive the event loop
        await engine.dispose()
        raise
    return engine


async def transact(engine: AsyncEngine, work: Callable[[AsyncConnection], Awaitable[Value]]) -> Value:
    """Run `work` in a transaction.

    On SQLite it is completed even if the caller is cancelled, which then waits for its end. Otherwise the driver could
    leave a statement of the transaction behind, which locks the file until Python next collects garbage.

    Raises:
        One of REFUSALS: the database refuses it.
    """

    async def whole() -> Value:
        async with engine.begin() as connection:
            return await work(connection)

    if engine.dialect.name != "sqlite":
        return await whole()
    task = asyncio.create_task(whole(), name="transaction")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # the caller is told nothing more
        raise


async def last_seq(engine: AsyncEngine) -> int:
    """The highest result number in the database, 0 for none."""
    async with engine.connect() as connection:
        return await connection.scalar(select(func.max(results.c.seq))) or 0


def plain_reason(exc: BaseException) -> str:
    """Return the driver's message, without the statement and SQLAlchemy's link."""
    if isinstance(exc, TimeoutError):
        return "it does not answer in time"
    return next(iter(str(getattr(exc, "orig", None) or exc).splitlines()), type(exc).__name__)


def may_be_written(exc: BaseException) -> bool:
    """True if a transaction that failed in this way may be in the database all the same: its end was never heard of."""
    return isinstance(exc, OSError) or (isinstance(exc, DBAPIError) and exc.connection_invalidated)


def _is_away(exc: BaseException) -> bool:
    """True if a server cannot be reached, or takes no connections yet, or no more of them."""
    code = getattr(getattr(exc, "orig", exc), "sqlstate", None) or ""
    if "rejected SSL upgrade" in str(exc):  # it is there, and speaks no TLS
        return False
    return isinstance(exc, OSError) or code.startswith(("08", "53", "57P"))


def _engine(url: str) -> tuple[AsyncEngine, str]:
    """An engine, and its URL as it may be shown: without the password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # Neither the URL nor the error's text, which may repeat it: a password would stand in the log.
        raise SetupError(f"the database URL is not a URL; {_KNOWN}") from None
    if "@" in (parsed.host or ""):  # a part of a password, perhaps
        raise SetupError(f"the database URL has an @ too many: write one in a name or password as %40; {_KNOWN}")
    where = parsed.difference_update_query(["password"]).render_as_string(hide_password=True)
    try:
        if parsed.drivername == "sqlite+aiosqlite":
            return create_async_engine(parsed), where
        if parsed.drivername != "postgresql+asyncpg":
            raise SetupError(f"the database URL {where} has no driver that works here; {_KNOWN}")
        return create_async_engine(
            parsed,
            pool_size=_CONNECTIONS,
            pool_pre_ping=True,  # a connection from before the server's restart is no reason to refuse a request
            connect_args={
                "timeout": _CONNECT_S,
                "command_timeout": _ANSWER_S,
                "server_settings": {
                    "application_name": "terrace",
                    "idle_in_transaction_session_timeout": str(_OPEN_TRANSACTION_MS),
                },
            },
        ), where
    except ImportError as exc:
        raise MissingExtra("postgres", f"the database {where}") from exc
    except (SQLAlchemyError, TypeError, ValueError) as exc:
        raise SetupError(f"the database URL {where} has no driver or option that works here; {_KNOWN}") from exc


def _migrate(connection: Connection, where: str) -> None:
    found = _revision(connection, where)
    if found == SCHEMA:
        return
    from alembic import command  # takes 0.1 s, and is not needed again
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise SetupError(
            f"the database {where} was made by a newer Terrace (schema {found[:20]}, this one knows {SCHEMA}): update "
            "Terrace or use another --state folder (--database, where that is given)"
        )
    tables = inspect(connection).get_table_names()
    if found == "0001" and VERSION_TABLE not in tables:
        command.stamp(config, found)
    command.upgrade(config, SCHEMA)
    # An older scheduler that leads does not know what its tables are now.
    connection.execute(update(lease).values(epoch=lease.c.epoch + 1, expires_at=0.0))


def _revision(connection: Connection, where: str) -> str | None:
    """The revision of the tables; None if there are none."""
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE in tables:
        return str(connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}")) or "none")
    if properties.name not in tables:
        return None
    found = connection.scalar(select(properties.c.value).where(properties.c.name == "schema_version"))
    if found != _LEGACY:
        raise SetupError(
            f"the database {where} was made before the first release (schema {str(found)[:20]!r}), or is damaged; use "
            "another --state folder"
        )
    return "0001"


class _SameFile:
    """Refuses connections and commits once the file at the path has been removed or replaced. Otherwise SQLite would
    write into the removed file, and a new connection would make an empty one."""

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
    """Open and close the file; makes an empty one, readable only by its owner, if it is missing. Returns None for a
    database that is not a plain file."""
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
