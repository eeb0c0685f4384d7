"""The kept sample on the disk of a device: the node writes it, and a worker of a training run reads it."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from models.kept.sample import Cell, KeptPicture, Kind, which_to_drop
from tierkit.atomic import alone_in, private_folder
from tierkit.errors import SetupError, SpoolUnavailable

__all__ = ["KeptCounts", "KeptPage", "KeptStore"]

log = logging.getLogger(__name__)

_NAME = "kept.db"
_SET_ASIDE = "damaged-kept.db"
_APPLICATION, _VERSION = 0x5472706B, 1
_PAGE_BYTES = 4096
_LEAST_BYTES = 1 << 20
_SPARE_PAGES = 16
_AT_ONCE = 50
_WAIT_S = 5.0
_ROWS = "SELECT key, body, content FROM kept WHERE key > ? ORDER BY key LIMIT ?"
_SCHEMA = """
CREATE TABLE kept (
    key INTEGER PRIMARY KEY AUTOINCREMENT, source TEXT NOT NULL, sequence INTEGER NOT NULL, target INTEGER NOT NULL,
    kind TEXT NOT NULL, labelled INTEGER NOT NULL, body BLOB NOT NULL, content BLOB NOT NULL, UNIQUE (source, sequence)
);
CREATE INDEX kept_cells ON kept (labelled, target, kind, key);
CREATE TABLE state (dropped INTEGER NOT NULL);
INSERT INTO state VALUES (0);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCounts:
    """The size of a kept sample."""

    pictures: int = 0
    differs: int = 0
    unsure: int = 0
    sure: int = 0
    labelled: int = 0
    dropped: int = 0
    """Pictures that had to go for others, since the sample began."""
    bytes: int = 0
    """Bytes on the disk."""
    size_bytes: int = 0
    """Limit on `bytes`."""


class KeptPage(NamedTuple):
    """Page of kept pictures from a sample."""

    pictures: list[tuple[int, KeptPicture, bytes]]
    after: int
    """Key of the last row, to read on with."""
    more: bool


class KeptStore:
    """A kept sample, which makes room by itself: see `models.kept.sample.which_to_drop`.

    Each method waits for the disk, and raises SpoolUnavailable if that is full or broken; nothing has happened then.
    One process writes; others open the sample with `reading`. Call all methods from one thread at a time.

    Args:
        folder: made private to its owner.
        size_bytes: limit for the file and its journal, at least 1 MiB.

    Raises:
        SetupError: another process writes there, or the folder cannot be used.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._path, self._size_bytes = folder / _NAME, max(_LEAST_BYTES, size_bytes)
        # The rest is for the journal, which holds the pages that one picture changes.
        self._pages = self._size_bytes * 7 // 8 // _PAGE_BYTES
        self._closing = contextlib.ExitStack()
        try:
            private_folder(folder, of=_NAME)
        except OSError as error:
            raise SetupError(f"cannot keep pictures in {folder}: {error.strerror}") from error
        self._closing.enter_context(
            alone_in(folder, otherwise=f"another process keeps pictures in {folder}: give this node another folder")
        )
        try:
            self._connection = self._opened()
            self._shrink()
        except (sqlite3.Error, OSError, SpoolUnavailable) as error:
            self._closing.close()
            raise SetupError(f"cannot keep pictures in {folder}: {error}") from error

    @classmethod
    def reading(cls, folder: Path) -> Self:
        """Open the sample of another process, to read from it.

        Raises:
            SetupError: there is none, or it cannot be read.
        """
        store = cls.__new__(cls)
        store._path, store._size_bytes, store._closing = folder / _NAME, 0, contextlib.ExitStack()
        if not store._path.is_file():
            raise SetupError(
                f"{folder} holds no kept pictures: a node makes the folder, with [learn] and a source with learn = true"
            )
        try:
            store._connection = _connect(f"file:{store._path}?mode=ro", uri=True)
            if (trouble := _trouble(store._connection)) is not None:
                raise sqlite3.DatabaseError(trouble)
        except sqlite3.Error as error:
            raise SetupError(f"cannot read the kept pictures in {folder}: {_reason(error)}") from error
        return store

    def close(self) -> None:
        self._connection.close()
        self._closing.close()

    def keep(self, picture: KeptPicture, content: bytes) -> bool:
        """Keep a picture, and drop others for it. A picture that is there already gets the new answers, unless a person
        has labelled it.

        Returns:
            False if it is too large, or labelled by a person before.
        """
        needed = len(content) + 4 * _PAGE_BYTES
        if needed > self._size_bytes // 8:
            return False
        with self._writing() as connection:
            there = connection.execute(
                "SELECT labelled FROM kept WHERE source = ? AND sequence = ?", (picture.source, picture.sequence)
            ).fetchone()
            if there is not None:
                if there[0] and picture.person is None:
                    return False
                connection.execute(
                    "DELETE FROM kept WHERE source = ? AND sequence = ?", (picture.source, picture.sequence)
                )
            self._make_room(connection, needed)
            row = (picture.source, picture.sequence, *picture.cell, picture.as_json(), content)
            connection.execute(
                "INSERT INTO kept (source, sequence, target, kind, labelled, body, content) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            )
        return True

    def label(self, source: str, sequence: int, person: int | None, *, name: str, at: float) -> bool:
        """Note which fine class a person names, or that the label is taken back. False if the picture is not here."""
        with self._writing() as connection:
            row = connection.execute(
                "SELECT key, body FROM kept WHERE source = ? AND sequence = ?", (source, sequence)
            ).fetchone()
            if row is None:
                return False
            picture = KeptPicture.parse(row[1]).labelled(person, name, at)
            connection.execute(
                "UPDATE kept SET target = ?, kind = ?, labelled = ?, body = ? WHERE key = ?",
                (*picture.cell, picture.as_json(), row[0]),
            )
        return True

    def forget(self, source: str, first: int) -> None:
        """Drop the pictures of a source from a number on: other pictures have these numbers now."""
        with self._writing() as connection:
            connection.execute("DELETE FROM kept WHERE source = ? AND sequence >= ?", (source, first))

    def counts(self) -> KeptCounts:
        """The size of the sample."""
        with self._reading() as connection:
            kinds: dict[Kind, int] = dict(connection.execute("SELECT kind, count(*) FROM kept GROUP BY kind"))
            (labelled,) = connection.execute("SELECT count(*) FROM kept WHERE labelled").fetchone()
            (dropped,) = connection.execute("SELECT dropped FROM state").fetchone()
        return KeptCounts(
            pictures=sum(kinds.values()),
            differs=kinds.get("differs", 0),
            unsure=kinds.get("unsure", 0),
            sure=kinds.get("sure", 0),
            labelled=labelled,
            dropped=dropped,
            bytes=self._path.stat().st_size,
            size_bytes=self._size_bytes,
        )

    def read(self, after: int = 0, limit: int = 200) -> list[tuple[int, KeptPicture, bytes]]:
        """Pictures with higher keys than `after`, in the order in which they were kept. Rows that are damaged are left
        out and logged."""
        return list(_parsed(self._rows(after, limit)))

    def page(self, after: int, limit: int, most_bytes: int) -> KeptPage:
        """The next pictures, at least one. Damaged rows are left out.

        Args:
            after: key of the last picture that was read; 0 at the beginning.
            limit: number of pictures.
            most_bytes: most bytes of their files together, unless the first is larger.
        """
        rows: list[tuple[int, bytes, bytes]] = []
        more, size = False, 0
        # An open cursor would keep the writer out.
        with self._reading() as connection, contextlib.closing(connection.execute(_ROWS, (after, limit + 1))) as found:
            for row in found:
                size += len(row[2])
                if rows and (len(rows) == limit or size > most_bytes):
                    more = True
                    break
                rows.append(row)
        return KeptPage(list(_parsed(rows)), rows[-1][0] if rows else after, more)

    def read_all(self) -> Iterator[tuple[int, KeptPicture, bytes]]:
        """Yield all pictures, some at a time."""
        after = 0
        while rows := self._rows(after, _AT_ONCE):
            yield from _parsed(rows)
            after = rows[-1][0]

    def _rows(self, after: int, limit: int) -> list[tuple[int, bytes, bytes]]:
        with self._reading() as connection:
            return connection.execute(_ROWS, (after, limit)).fetchall()

    def _make_room(self, connection: sqlite3.Connection, needed: int) -> None:
        """Drop pictures until a transaction can write `needed` bytes."""
        wanted = needed // _PAGE_BYTES + _SPARE_PAGES
        while self._pages - _used(connection) < wanted and _drop_one(connection):
            pass

    def _shrink(self) -> None:
        """Make a file smaller that had another limit before, a few pictures at a time, so that its journal is small."""
        dropped = True
        while dropped and _used(self._connection) > self._pages - _SPARE_PAGES:
            with self._writing() as connection:
                dropped = _drop_one(connection)
        self._connection.execute(f"PRAGMA max_page_count = {self._pages}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._connection
        except (sqlite3.Error, OSError) as error:
            raise SpoolUnavailable(
                f"the kept pictures in {self._path.parent} cannot be used now: {_reason(error)}"
            ) from error

    def _opened(self) -> sqlite3.Connection:
        if self._path.exists():
            connection = None
            try:
                connection = _connect(str(self._path))
                if (trouble := _trouble(connection)) is None:
                    return connection
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                trouble = str(error)
            if connection is not None:
                connection.close()
            log.error("kept pictures are set aside as %s, since their file is damaged: %s", _SET_ASIDE, trouble)
            self._path.replace(self._path.with_name(_SET_ASIDE))
            self._path.with_name(f"{_NAME}-journal").unlink(missing_ok=True)
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = _connect(str(self._path))
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = FULL")
        connection.executescript(
            f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_VERSION}; COMMIT;"
        )
        return connection


def _parsed(rows: Iterable[tuple[int, bytes, bytes]]) -> Iterator[tuple[int, KeptPicture, bytes]]:
    for key, body, content in rows:
        try:
            yield key, KeptPicture.parse(body), content
        except ValueError as error:
            log.warning("a kept picture is left out, since its row is damaged: %s", error, extra={"key": key})


def _drop_one(connection: sqlite3.Connection) -> bool:
    """Drop the picture that the others can spare; False if there is none."""
    rows = connection.execute("SELECT target, kind, labelled, count(*) FROM kept GROUP BY target, kind, labelled")
    counts = {Cell(target, kind, bool(labelled)): count for target, kind, labelled, count in rows}
    if not counts:
        return False
    connection.execute(
        "DELETE FROM kept WHERE key = (SELECT min(key) FROM kept WHERE target = ? AND kind = ? AND labelled = ?)",
        which_to_drop(counts),
    )
    connection.execute("UPDATE state SET dropped = dropped + 1")
    return True


def _used(connection: sqlite3.Connection) -> int:
    return _number(connection, "PRAGMA page_count") - _number(connection, "PRAGMA freelist_count")


def _connect(target: str, *, uri: bool = False) -> sqlite3.Connection:
    connection = sqlite3.connect(target, isolation_level=None, check_same_thread=False, timeout=_WAIT_S, uri=uri)
    try:
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute("PRAGMA cache_size = -2048")
    except BaseException:
        connection.close()
        raise
    return connection


def _trouble(connection: sqlite3.Connection) -> str | None:
    """Say why a file is not a kept sample that can be used; None if it is one."""
    if _number(connection, "PRAGMA application_id") != _APPLICATION:
        return "it is not a kept sample"
    if (version := _number(connection, "PRAGMA user_version")) != _VERSION:
        return f"it has version {version}, and this Terrace knows version {_VERSION}"
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    return None if found == "ok" else str(found)


def _reason(error: Exception) -> str:
    """One line, with what helps against a damaged file."""
    said = " ".join(str(error).split())
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return f"{_NAME} is damaged ({said}). Restart the end node: it sets the file aside and begins another one"
    return said


def _number(connection: sqlite3.Connection, query: str) -> int:
    found: int = connection.execute(query).fetchone()[0]
    return found
