"""The file of the spool: who may use it, whether it is whole, how large it gets, and what one transaction is."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from end_node.spool.rows import SCHEMA, SCHEMA_VERSION, DamagedRow
from tierkit.atomic import alone_in, private_folder
from tierkit.errors import SetupError, SpoolUnavailable

__all__ = ["PAGE_BYTES", "SLACK_PAGES", "SpoolFile"]

_log = logging.getLogger(__name__)

_NAME = "spool.db"
_SET_ASIDE = "damaged-"
_APPLICATION = 0x54727370
"""Marks a file of SQLite as a spool."""

PAGE_BYTES = 4096
SLACK_PAGES = 48
"""Free pages that a transaction may need in addition to its picture: each of a dozen trees may grow at two levels."""
_WITNESS_BYTES = 64

_TROUBLE = (sqlite3.Error, UnicodeDecodeError, DamagedRow)
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


class SpoolFile:
    """An open file of SQLite. One process uses it, from one thread at a time.

    A quarter of the size, but no more than 32 MiB, is for the journal. SQLite begins it again when an eighth of it is
    full. A picture is written there first, so about a third of the journal is the limit for one picture.

    Args:
        folder: made private to its owner.
        size_bytes: limit for the file and its journal together.

    Raises:
        SetupError: another process uses the folder, or it cannot be used.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder, self.size_bytes = folder, size_bytes
        self.path = folder / _NAME
        journal = min(size_bytes // 4, 32 * 2**20)
        self.max_picture_bytes = (journal - journal // 8 - SLACK_PAGES * PAGE_BYTES) // 3
        self._max_journal_bytes = journal
        self.max_pages = (size_bytes - journal) // PAGE_BYTES
        self._witness = -1
        self._lost = False
        self._closing = contextlib.ExitStack()
        try:
            private_folder(folder, of=_NAME)
        except OSError as error:
            raise SetupError(f"cannot use the folder {folder} for the spool: {error.strerror}") from error
        try:
            self._closing.enter_context(
                alone_in(folder, otherwise=f"another process uses the spool in {folder}: give this node another folder")
            )
            self._witness = os.open(folder / "last", os.O_RDWR | os.O_CREAT, 0o600)
            self._closing.callback(os.close, self._witness)
            self.connection, self.id = self._open_or_begin()
        except BaseException as error:
            self._closing.close()
            if isinstance(error, sqlite3.Error | OSError):
                raise SetupError(f"cannot use the spool in {folder}: {error}") from error
            raise

    def close(self) -> None:
        self.connection.close()
        self._closing.close()

    @property
    def set_aside(self) -> tuple[Path, ...]:
        """Files that were damaged or are not a spool."""
        return tuple(sorted(self.folder.glob(f"{_SET_ASIDE}*.db")))

    @property
    def bytes_used(self) -> int:
        """Size of the file with its journal."""
        return self._size("") + self._size("-wal")

    @property
    def free_pages(self) -> int:
        """Pages that may still be written."""
        used: int = self.value("PRAGMA page_count") - self.value("PRAGMA freelist_count")
        return self.max_pages - used

    def value(self, query: str, *parameters: object) -> int:
        """Return the single number of a query."""
        found: int = self.connection.execute(query, parameters).fetchone()[0]
        return found

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Read from the file.

        Raises:
            SpoolUnavailable: it cannot be read. If it is damaged, it is set aside, and a new one begins.
        """
        self._begin_again()
        try:
            yield self.connection
        except _TROUBLE as error:
            self._fail(error)

    @contextlib.contextmanager
    def writing(self, size: int = 0) -> Iterator[sqlite3.Connection]:
        """Run one transaction. When it ends it is on the disk, or nothing of it has happened.

        Args:
            size: bytes that it will write.

        Raises:
            SpoolUnavailable: it cannot be written: the disk is full or broken. If the file is damaged, it is set aside,
                and a new one begins.
        """
        self._begin_again()
        try:
            if self._size("-wal") + 2 * size + SLACK_PAGES * PAGE_BYTES > self._max_journal_bytes:
                self._empty_journal()
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
                change = self.value("SELECT change FROM state")
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise
        except _TROUBLE as error:
            self._fail(error)
        self._note_last(change)

    def next_change(self) -> int:
        """Count a change, and return its number."""
        self.connection.execute("UPDATE state SET change = change + 1")
        return self.value("SELECT change FROM state")

    def _fail(self, error: Exception) -> None:
        if _is_damage(error):
            self._lost = True
            with contextlib.suppress(OSError):
                self._set_aside(str(error), self.connection)
            self._begin_again()
            raise SpoolUnavailable(
                f"the spool {self.path} was damaged ({error}): it was set aside, and a new one has begun"
            ) from error
        raise SpoolUnavailable(f"the spool {self.path} cannot be used now: {error}") from error

    def _begin_again(self) -> None:
        """Begin a new file, if the last one was set aside. Its disk may have been full since."""
        if not self._lost:
            return
        try:
            self.connection, self.id = self._open_or_begin()
        except (sqlite3.Error, OSError) as error:
            raise SpoolUnavailable(f"the spool {self.path} was damaged, and no new one can begin: {error}") from error
        self._lost = False

    def _size(self, suffix: str) -> int:
        try:
            return self.path.with_name(_NAME + suffix).stat().st_size
        except OSError:
            return 0

    def _empty_journal(self) -> None:
        busy, _, _ = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:  # cannot be: this is the only connection
            raise SpoolUnavailable(f"another program reads the spool {self.path}")

    def _open_or_begin(self) -> tuple[sqlite3.Connection, str]:
        if not self._size(""):
            return self._begin()
        connection = None
        try:
            connection = self._connect()
            return connection, self._checked(connection)
        except (*_TROUBLE, _NotASpool) as error:
            if _is_damage(error):
                self._set_aside(str(error), connection)
                return self._begin()
            if connection is not None:
                connection.close()
            raise

    def _connect(self, *first: str) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=0)
        try:
            for pragma in (
                *first,
                "locking_mode = EXCLUSIVE",  # needs no shared memory, which a full disk would break
                "secure_delete = OFF",  # or each picture that goes would be written once more, as zeros
                "journal_mode = WAL",
                "synchronous = FULL",
                f"wal_autocheckpoint = {self._max_journal_bytes // 8 // PAGE_BYTES}",
                "cache_size = -2048",
            ):
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _checked(self, connection: sqlite3.Connection) -> str:
        """Return the id of a spool that can be used."""

        def single(query: str) -> object:
            row = connection.execute(query).fetchone()
            return row[0] if row else None

        if not single("SELECT count(*) FROM sqlite_master") and not single("PRAGMA application_id"):
            return self._prepare(connection)  # a crash came before its tables
        if single("PRAGMA application_id") != _APPLICATION:
            raise _NotASpool("it is not a spool")
        version = single("PRAGMA user_version")
        if version != SCHEMA_VERSION:
            raise _NotASpool(f"it has version {version}, and this Terrace knows version {SCHEMA_VERSION}")
        if self._size("") % PAGE_BYTES and not self._size("-wal"):
            raise _NotASpool("its end is missing")
        # Pictures are not read: they may be gigabytes.
        for table in ("state", "sources", "observations", "gaps"):
            trouble = single(f"PRAGMA quick_check({table})")
            if trouble != "ok":
                raise _NotASpool(str(trouble))
        row = connection.execute("SELECT spool, change FROM state").fetchone()
        if row is None:
            raise _NotASpool("its state is missing")
        spool, change = str(row[0]), int(row[1])
        if not re.fullmatch("[0-9a-f]{16}", spool):
            raise _NotASpool("its id is damaged")
        with contextlib.suppress(ValueError):  # a witness that cannot be read proves nothing
            witness, last = os.pread(self._witness, _WITNESS_BYTES, 0).decode("ascii").split()
            if witness == spool and int(last) > change:
                # With the same id, it would give out numbers for a second time.
                raise _NotASpool(f"its last {int(last) - change} changes are missing")
        connection.execute(f"PRAGMA max_page_count = {self.max_pages}")
        return spool

    def _begin(self) -> tuple[sqlite3.Connection, str]:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = self._connect(f"page_size = {PAGE_BYTES}", "auto_vacuum = INCREMENTAL")
        try:
            return connection, self._prepare(connection)
        except BaseException:
            connection.close()
            raise

    def _prepare(self, connection: sqlite3.Connection) -> str:
        spool = secrets.token_hex(8)
        connection.execute(f"PRAGMA max_page_count = {self.max_pages}")
        connection.executescript(
            f"BEGIN; {SCHEMA} INSERT INTO state (spool) VALUES ('{spool}');"
            f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
        return spool

    def _set_aside(self, why: str, connection: sqlite3.Connection | None) -> None:
        number = next(n for n in itertools.count(1) if not (self.folder / f"{_SET_ASIDE}{n}.db").exists())
        name = f"{_SET_ASIDE}{number}.db"
        try:
            for suffix in ("-wal", ""):  # the journal first: the file never gets the journal of another one
                with contextlib.suppress(FileNotFoundError):
                    self.path.with_name(_NAME + suffix).rename(self.folder / (name + suffix))
        finally:
            if connection is not None:  # only now: SQLite removes the journal, if it finds it under its name
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
        _log.error("the spool %s cannot be used: %s. It is kept as %s, and a new one begins", self.path, why, name)

    def _note_last(self, change: int) -> None:
        """Note the last change outside the file, where a damaged journal cannot hide it."""
        with contextlib.suppress(OSError):
            os.pwrite(self._witness, f"{self.id} {change}".ljust(_WITNESS_BYTES - 1).encode() + b"\n", 0)


def _is_damage(error: Exception) -> bool:
    if not isinstance(error, sqlite3.Error) or str(error).startswith("no such"):
        return True
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _DAMAGE


class _NotASpool(Exception):
    """The file is not a spool, or is one that cannot be used."""
