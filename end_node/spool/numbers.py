"""Sequence numbers of the sources: those that the scheduler has moved up, and those that were lost."""

from __future__ import annotations

import sqlite3
from bisect import bisect_right

__all__ = ["Numbers", "close_gap", "open_gap"]


class Numbers:
    """Present sequence numbers of the observations.

    A row keeps the number that it was first given. When the scheduler already has higher numbers of a source, from an
    earlier spool, all numbers of the source from some row on are shifted up. So a million rows move at once.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._moves: dict[str, tuple[list[int], list[int]]] = {}
        for source, first, shift in connection.execute("SELECT source, first, shift FROM moves ORDER BY source, first"):
            self.move(source, first, shift)

    def move(self, source: str, first: int, shift: int) -> None:
        """Shift what was given out from `first` on."""
        firsts, shifts = self._moves.setdefault(source, ([0], [0]))
        if firsts[-1] == first:
            shifts[-1] = shift
        else:
            firsts.append(first)
            shifts.append(shift)

    def shift(self, source: str, given: int) -> int:
        """Return the present number less the number that was given out."""
        firsts, shifts = self._moves.get(source, ([0], [0]))
        return shifts[bisect_right(firsts, given) - 1]

    def given(self, source: str, sequence: int) -> int | None:
        """Return the number that was given out for a present number; None if there is none."""
        _, shifts = self._moves.get(source, ([0], [0]))
        for shift in reversed(shifts):
            if sequence > shift and self.shift(source, sequence - shift) == shift:
                return sequence - shift
        return None


def open_gap(connection: sqlite3.Connection, source: str, given: int) -> None:
    """Add a number to the gaps, joined with its neighbours."""
    first = last = given
    below = connection.execute("SELECT first FROM gaps WHERE source = ? AND last = ?", (source, given - 1)).fetchone()
    above = connection.execute("SELECT last FROM gaps WHERE source = ? AND first = ?", (source, given + 1)).fetchone()
    if below is not None:
        first = below[0]
    if above is not None:
        last = above[0]
        connection.execute("DELETE FROM gaps WHERE source = ? AND first = ?", (source, given + 1))
    connection.execute("INSERT OR REPLACE INTO gaps VALUES (?, ?, ?)", (source, first, last))


def close_gap(connection: sqlite3.Connection, source: str, first: int, last: int) -> None:
    """Remove the numbers from `first` to `last` from the gaps."""
    touched = connection.execute(
        "SELECT first, last FROM gaps WHERE source = ? AND first <= ? AND last >= ?", (source, last, first)
    ).fetchall()
    for begins, ends in touched:
        connection.execute("DELETE FROM gaps WHERE source = ? AND first = ?", (source, begins))
        for part in ((begins, first - 1), (last + 1, ends)):
            if part[0] <= part[1]:
                connection.execute("INSERT INTO gaps VALUES (?, ?, ?)", (source, *part))
