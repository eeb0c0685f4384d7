"""Room in the spool: what is dropped when it is full."""

from __future__ import annotations

from msgspec.structs import replace

from end_node.spool.file import PAGE_BYTES, SLACK_PAGES, SpoolFile
from end_node.spool.numbers import open_gap
from end_node.spool.rows import COLUMNS, body_of, read_row

__all__ = ["SPOOL_FULL", "Room"]

SPOOL_FULL = "the spool was full"

_PICTURE_SURE, _PICTURE_UNSURE, _ANSWER = 1, 2, 3
"""Ranks of what is lost when it is dropped. A delivered answer has rank 0. See the column `rank`."""
_CHUNK = 200
"""Rows and pages that one transaction frees when the size was set lower."""


class Room:
    """Drops rows inside the transactions of the spool, by rank and then by age."""

    def __init__(self, file: SpoolFile) -> None:
        self._file = file

    def make(self, size: int = 0) -> None:
        """Make room for a row, and for `size` bytes in addition."""
        self._make(size, _ANSWER)

    def for_picture(self, size: int, *, unsure: bool) -> bool:
        """Make room for a picture. If it would displace something of a higher rank, return False and change nothing."""
        connection = self._file.connection
        connection.execute("SAVEPOINT room")
        fits = self._make(size, _PICTURE_UNSURE if unsure else _PICTURE_SURE)
        if not fits:
            connection.execute("ROLLBACK TO room")
        connection.execute("RELEASE room")
        return fits

    def count_dropped(self, *, unsure: bool) -> None:
        """Count a picture that was dropped."""
        column = "dropped_unsure" if unsure else "dropped_sure"
        self._file.connection.execute(f"UPDATE state SET {column} = {column} + 1")

    @property
    def excess_pages(self) -> int:
        """Pages above the limit, which was lower when the file grew."""
        return max(0, self._file.value("PRAGMA page_count") - self._file.max_pages)

    def shrink(self) -> bool:
        """Drop some of what is above the limit, and give free pages back. Return False if nothing could be done."""
        before = self._file.value("PRAGMA page_count"), self._file.free_pages
        for _ in range(_CHUNK):
            if self._file.free_pages >= SLACK_PAGES or not self._drop_next(_ANSWER):
                break
        self._file.connection.execute(f"PRAGMA incremental_vacuum({min(_CHUNK, self.excess_pages)})").fetchall()
        self._file.connection.execute(f"PRAGMA max_page_count = {self._file.max_pages}")
        return before != (self._file.value("PRAGMA page_count"), self._file.free_pages)

    def _make(self, size: int, worst: int) -> bool:
        """Drop rows up to the rank `worst` until there is room; return False if that does not suffice."""
        needed = size // (PAGE_BYTES - 4) + 1 + SLACK_PAGES
        while self._file.free_pages < needed:
            if not self._drop_next(worst):
                return False
        return True

    def _drop_next(self, worst: int) -> bool:
        connection = self._file.connection
        row = connection.execute(
            f"SELECT {COLUMNS}, rank, acked FROM observations WHERE rank <= ? ORDER BY rank, key LIMIT 1", (worst,)
        ).fetchone()
        if row is None:
            return False
        *columns, rank, acked = row
        key, source, given = columns[:3]
        if rank in (_PICTURE_SURE, _PICTURE_UNSURE):
            self.count_dropped(unsure=rank == _PICTURE_UNSURE)
            connection.execute("DELETE FROM pictures WHERE key = ?", (key,))
            connection.execute("UPDATE observations SET size = 0, owed = 0, keeps = 0 WHERE key = ?", (key,))
            observation = read_row(tuple(columns), given, 0.0)
            if observation.waits:
                body = body_of(replace(observation, reason=SPOOL_FULL), given)
                connection.execute(
                    "UPDATE observations SET waits = 0, body = ?, revision = revision + 1, change = ? WHERE key = ?",
                    (body, self._file.next_change(), key),
                )
            return True
        connection.execute("DELETE FROM observations WHERE key = ?", (key,))
        if rank == _ANSWER:
            connection.execute("UPDATE state SET lost = lost + 1")
            if acked < 0:
                open_gap(connection, source, given)
        return True
