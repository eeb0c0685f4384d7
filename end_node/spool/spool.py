"""The spool: each answer is stored with a number, and with its picture as long as something waits for it."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from end_node.spool.file import PAGE_BYTES, SpoolFile
from end_node.spool.numbers import Numbers, close_gap
from end_node.spool.room import SPOOL_FULL, Room
from end_node.spool.rows import COLUMNS, DamagedRow, Draft, Held, Row, SpoolStats, body_of, read_row
from tierkit.elapsed import Elapsed, Kept, boot_id, continued, since_boot
from tierkit.errors import SetupError, SpoolUnavailable
from tierkit.wire.observations import FinerAnswer, Gap, Observation

__all__ = ["Spool"]

_TOO_LARGE = "the picture is too large for the spool"

_MARK_BYTES = 32
"""Room for one mark, with what its tree adds."""
_ROW_BYTES, _PICTURE_BYTES = 280, 800
"""Room for an answer with its indexes, and for a picture beyond its own bytes, on average."""
_HIGHEST = 2**52
"""Highest plausible number: above it, a scheduler's answer is wrong."""
_TRAFFIC_MINUTES = 48 * 60
_CHUNK = 200
"""Rows that one transaction changes, where there may be millions."""
_TEXT = 500
"""Characters of a text that the scheduler takes."""


def device_elapsed(kept: Kept | None) -> Elapsed:
    """Return elapsed time of this machine, continued from the last note."""
    boot, at = boot_id(), since_boot()
    start = continued(kept, boot=boot, since_boot=at, wall=time.time(), same_machine=True)
    return Elapsed(start, boot=boot, clock=since_boot)


class Spool:
    """Observations, and the pictures that are still needed, on the disk of a device.

    Each method is synchronous and waits for the disk. Call all methods from one worker thread. The change that a method
    made is on the disk when it returns. Each method raises SpoolUnavailable if the disk is full or broken. Then nothing
    has happened, and the method works again when there is room.

    When the spool is full, `add` and `amend` drop, in this order and the oldest first: delivered answers, pictures with
    sure answers, pictures with unsure answers, and answers that were not delivered. A picture never displaces one of a
    later class.
    """

    def __init__(self, file: SpoolFile, resume: Callable[[Kept | None], Elapsed]) -> None:
        self._file = file
        self._room = Room(file)
        with file.reading() as connection:
            elapsed, boot, since, began = connection.execute(
                "SELECT elapsed, boot, since_boot, boot_began FROM state"
            ).fetchone()
        kept = Kept(elapsed=elapsed, boot=boot, since_boot=since) if elapsed else None
        self._elapsed = resume(kept)
        now = self._elapsed.kept()
        self._began = elapsed if kept is not None and (not boot or now.boot != boot) else began
        """Elapsed time when this start of the machine began: what was taken before is older than its clock."""
        self._load()
        self._shrink()

    @classmethod
    def open(cls, folder: Path, *, size_bytes: int, resume: Callable[[Kept | None], Elapsed] = device_elapsed) -> Self:
        """Open the spool of a folder, or begin one there.

        A file that is damaged, or comes from another program or a newer Terrace, is renamed and reported in the
        statistics. A new spool with a new id then begins.

        Args:
            size_bytes: limit for the file and its journal together, at least 4 MiB.
            resume: Returns elapsed time, continued from the last note.

        Raises:
            SetupError: another process uses the folder, or it cannot be used.
        """
        file = SpoolFile(folder, size_bytes)
        try:
            try:
                return cls(file, resume)
            except SpoolUnavailable:  # damaged where the first look did not see it: a new file has begun
                return cls(file, resume)
        except BaseException as error:
            file.close()
            if isinstance(error, SpoolUnavailable):
                raise SetupError(str(error)) from error
            raise

    def close(self) -> None:
        self._file.close()

    @property
    def id(self) -> str:
        """16 hexadecimal digits. A new file has a new one: its numbers begin again."""
        return self._file.id

    @property
    def last_change(self) -> int:
        """Number of the last change."""
        with self._reading():
            return self._file.value("SELECT change FROM state")

    # Answers and amendments.

    def add(self, draft: Draft) -> Observation:
        """Store an answer under the next number of its source, and its picture if something needs it.

        Raises:
            SpoolUnavailable: the disk is full or broken; or the marks of files fill half of the spool.
        """
        wanted = draft.waits or draft.keeps or draft.to_scheduler
        picture = draft.picture if wanted and draft.picture else None
        reason = draft.reason
        if picture is not None and len(picture) > self._file.max_picture_bytes:
            picture, reason = None, _TOO_LARGE if draft.waits else reason
        if draft.mark and (self._marks + 1) * _MARK_BYTES > self._file.max_pages * PAGE_BYTES // 2:
            raise SpoolUnavailable(
                f"the spool has no room for the marks of more than {self._marks} files: raise its size, or have files "
                "moved or deleted once they are answered"
            )
        marked = 0
        with self._writing(len(picture or b"")) as connection:
            if picture is not None and not self._room.for_picture(len(picture), unsure=draft.unsure):
                picture, reason = None, SPOOL_FULL if draft.waits else reason
            if picture is None:
                self._room.make()
                if wanted and draft.picture:
                    self._room.count_dropped(unsure=draft.unsure)
            connection.execute(
                "INSERT INTO sources VALUES (?, 1) ON CONFLICT DO UPDATE SET last = last + 1", (draft.source,)
            )
            given = self._file.value("SELECT last FROM sources WHERE source = ?", draft.source)
            key = self._file.next_change()
            added = Observation(
                source=draft.source,
                sequence=given + self._numbers.shift(draft.source, given),
                age_s=max(0.0, draft.age_s),
                taken_at=draft.taken_at,
                name=_text(draft.name),
                local=draft.local,
                release=draft.release,
                unsure=draft.unsure,
                waits=draft.waits and picture is not None,
                audit=draft.audit,
                reason=_text(reason),
            )
            row = (
                *(key, draft.source, given, 0, self._noted.elapsed - added.age_s, draft.taken_at, draft.unsure),
                *(added.waits, draft.margin, len(picture or b""), body_of(added, given)),
            )
            connection.execute(
                f"INSERT INTO observations ({COLUMNS}, change, keeps, owed) VALUES ({'?, ' * 13}?)",
                (*row, key, draft.keeps and picture is not None, draft.to_scheduler and picture is not None),
            )
            if picture is not None:
                connection.execute("INSERT INTO pictures VALUES (?, ?)", (key, picture))
            if draft.mark:
                mark = _digest(draft.source, draft.mark)
                marked = connection.execute("INSERT OR IGNORE INTO marks VALUES (?)", (mark,)).rowcount
        self._marks += marked
        return added

    def amend(
        self,
        key: int,
        *,
        finer: FinerAnswer | None = None,
        reason: str = "",
        waits: bool = False,
        unsure: bool | None = None,
    ) -> Observation | None:
        """Store a better answer, or why there is none. The picture goes, unless something else needs it.

        Args:
            key: of a `Held`.
            finer: None leaves an earlier one in force.
            waits: True if a better answer is still wanted.
            unsure: None leaves it as it was.

        Returns:
            The observation, or None if it was dropped in the meantime.
        """
        with self._writing() as connection:
            self._room.make()
            found = self._row("WHERE key = ?", key)
            if found is None:
                return None
            before = self._observation(found, self._now())
            body = body_of(replace(before, finer=finer or before.finer, reason=_text(reason)), found[2])
            connection.execute(
                "UPDATE observations SET body = ?, waits = ?, unsure = ?, revision = revision + 1, change = ? "
                "WHERE key = ?",
                (
                    body,
                    waits and before.waits,
                    before.unsure if unsure is None else unsure,
                    self._file.next_change(),
                    key,
                ),
            )
            self._drop_unneeded(key)
            after = self._row("WHERE key = ?", key)
            assert after is not None
        return self._observation(after, self._now())

    def label(self, wall: float) -> int:
        """Fill in the wall clock where it was not known: `wall` is the time now, in seconds since 1970.

        Pictures from before the last start of the machine stay without, because the time in between is unknown.

        Returns:
            The number of observations that were amended. Call again until it is 0: one call does a limited number.
        """
        with self._reading() as connection:
            keys = [
                (key, taken)
                for key, taken in connection.execute(
                    "SELECT key, taken FROM observations WHERE taken_at IS NULL AND taken > ? ORDER BY taken LIMIT ?",
                    (self._began, _CHUNK),
                )
            ]
        if not keys:
            return 0
        offset = wall - self._now()
        with self._writing(len(keys) * PAGE_BYTES // 4) as connection:
            for key, taken in keys:
                connection.execute(
                    "UPDATE observations SET taken_at = ?, revision = revision + 1, change = ? WHERE key = ?",
                    (max(0.0, taken + offset), self._file.next_change(), key),
                )
        return len(keys)

    # What waits for an upstream node, and for the scheduler.

    def waiting(self, limit: int) -> list[Held]:
        """Return observations that want a better answer, the most unsure first."""
        return self._held("WHERE waits ORDER BY margin, key LIMIT ?", limit)

    def owed(self, limit: int) -> list[Held]:
        """Return observations whose picture the scheduler gets, the most unsure first."""
        return self._held("WHERE owed ORDER BY margin, key LIMIT ?", limit)

    def picture(self, key: int) -> bytes | None:
        """Return a picture; None if the spool does not hold it."""
        with self._reading() as connection:
            row = connection.execute("SELECT content FROM pictures WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def handed_over(self, key: int) -> None:
        """Note that the scheduler has the picture. It goes, unless something else needs it."""
        with self._writing() as connection:
            connection.execute("UPDATE observations SET owed = 0 WHERE key = ?", (key,))
            self._drop_unneeded(key)

    def find(self, source: str, sequence: int) -> Held | None:
        """Return an observation by its present number; None if the spool does not have it."""
        given = self._numbers.given(source, sequence)
        if given is None:
            return None
        found = self._held("WHERE source = ? AND sequence = ? LIMIT 1", source, given)
        return found[0] if found else None

    # Delivery to the scheduler.

    def undelivered(self, limit: int) -> tuple[list[Observation], list[Gap]]:
        """Return what the scheduler does not have: new observations, then amendments, and gaps.

        The observations of a source come in the order of their numbers, then the amendments in the order in which they
        happened. `limit` is for observations and gaps each.
        """
        with self._reading() as connection:
            rows = self._rows("WHERE acked < 0 ORDER BY key LIMIT ?", limit)
            rows += self._rows(
                "WHERE acked >= 0 AND revision > acked ORDER BY change LIMIT ?", max(0, limit - len(rows))
            )
            gaps = connection.execute("SELECT source, first, last FROM gaps ORDER BY 1, 2 LIMIT ?", (limit,)).fetchall()
        now = self._now()
        return [self._observation(row, now) for row in rows], [
            Gap(source=source, first=first + shift, last=last + shift)
            for source, first, last in gaps
            for shift in [self._numbers.shift(source, first)]
        ]

    def delivered(self, observations: Iterable[Observation], gaps: Iterable[Gap] = ()) -> None:
        """Note that the scheduler has exactly these revisions, and these gaps."""
        with self._writing() as connection:
            for each in observations:
                connection.execute(
                    "UPDATE observations SET acked = max(acked, min(revision, ?)) WHERE source = ? AND sequence = ?",
                    (each.revision, each.source, self._numbers.given(each.source, each.sequence)),
                )
            for gap in gaps:
                first = self._numbers.given(gap.source, gap.first)
                if first is not None:
                    close_gap(connection, gap.source, first, first + gap.last - gap.first)

    def renumber(self, source: str, above: int) -> None:
        """Move all undelivered observations and gaps of a source above a number, in order; the next ones follow.

        Raises:
            ValueError: the number is absurd.
        """
        if above > _HIGHEST:
            raise ValueError(f"sequence number {above} is not possible")
        with self._writing() as connection:
            (first,) = connection.execute(
                "SELECT min(first) FROM (SELECT min(sequence) AS first FROM observations WHERE source = ? AND acked < 0"
                " UNION ALL SELECT first FROM gaps WHERE source = ?"
                " UNION ALL SELECT last + 1 FROM sources WHERE source = ?)",
                (source, source, source),
            ).fetchone()
            first = first or 1  # the source has no observation yet
            before = self._numbers.shift(source, first)
            shift = above + 1 - first
            if shift <= before:
                return
            connection.execute("INSERT OR REPLACE INTO moves VALUES (?, ?, ?)", (source, first, shift))
            self._file.next_change()
        self._numbers.move(source, first, shift)

    # What local programs and sources need.

    def changes(self, after: int, limit: int) -> list[tuple[int, Observation]]:
        """Return observations that were added or amended after a change, each with the number of its last change."""
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT change, {COLUMNS} FROM observations WHERE change > ? ORDER BY change LIMIT ?", (after, limit)
            ).fetchall()
        now = self._now()
        return [(change, self._observation(tuple(row), now)) for change, *row in rows]

    def known(self, source: str, marks: Collection[str]) -> set[str]:
        """Return the marks that were added before."""
        digests = {_digest(source, mark): mark for mark in marks}
        with self._reading() as connection:
            found = "SELECT 1 FROM marks WHERE mark = ?"
            return {mark for digest, mark in digests.items() if connection.execute(found, (digest,)).fetchone()}

    def spend(self, sent_bytes: int, received_bytes: int) -> None:
        """Count bytes on the wire, and note elapsed time. Call it about once a minute, not for each message."""
        with self._writing() as connection:
            self._room.make()
            minute = int(self._noted.elapsed // 60)
            connection.execute(
                "INSERT INTO traffic VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET sent = sent + excluded.sent, "
                "received = received + excluded.received",
                (minute, sent_bytes, received_bytes),
            )
            connection.execute("DELETE FROM traffic WHERE minute < ?", (minute - _TRAFFIC_MINUTES,))

    def spent(self, last_s: float = 86400.0) -> list[tuple[float, int]]:
        """Return the bytes of the last minutes, both directions together: age of the end of the minute in seconds (not
        below 0), bytes; the oldest first. A minute that lies only partly in the period counts in full."""
        now = self._now()
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT minute, sent + received FROM traffic WHERE minute >= ? ORDER BY minute",
                (int((now - last_s) // 60),),
            ).fetchall()
        return [(max(0.0, now - 60.0 * (minute + 1)), count) for minute, count in rows]

    def put(self, name: str, document: Any) -> None:
        """Store a small JSON document under a name; None removes it."""
        body = json.dumps(document)
        with self._writing(len(body)) as connection:
            self._room.make(len(body))
            if document is None:
                connection.execute("DELETE FROM documents WHERE name = ?", (name,))
            else:
                connection.execute("INSERT OR REPLACE INTO documents VALUES (?, ?)", (name, body))

    def get(self, name: str) -> Any:
        """Return a document; None if there is none."""
        with self._reading() as connection:
            row = connection.execute("SELECT body FROM documents WHERE name = ?", (name,)).fetchone()
            try:
                return None if row is None else json.loads(row[0])
            except ValueError as error:
                raise DamagedRow(f"document '{name}': {error}") from error

    def stats(self) -> SpoolStats:
        count = self._file.value
        with self._reading() as connection:
            sure, unsure, lost = connection.execute("SELECT dropped_sure, dropped_unsure, lost FROM state").fetchone()
            undelivered = count("SELECT count(*) FROM observations WHERE acked < 0")
            undelivered += count("SELECT count(*) FROM observations WHERE acked >= 0 AND revision > acked")
            waiting, size = count("SELECT count(*) FROM observations WHERE waits"), "SELECT coalesce(sum(size), 0)"
            pictures = count(f"{size} FROM observations WHERE waits")
            pictures += count(f"{size} FROM observations WHERE owed AND NOT waits")
            needed = pictures + waiting * _PICTURE_BYTES + undelivered * _ROW_BYTES
            room = self._file.max_pages * PAGE_BYTES
            return SpoolStats(
                bytes_used=self._file.bytes_used,
                size_bytes=self._file.size_bytes,
                waiting_bytes=min(needed, room),
                room_bytes=room,
                undelivered=undelivered,
                waiting=waiting,
                owed=count("SELECT count(*) FROM observations WHERE owed"),
                gaps=count("SELECT count(*) FROM gaps"),
                dropped_sure=sure,
                dropped_unsure=unsure,
                lost=lost,
                set_aside=self._file.set_aside,
            )

    # Inside.

    def _load(self) -> None:
        with self._file.reading() as connection:
            self._numbers = Numbers(connection)
            self._marks = self._file.value("SELECT count(*) FROM marks")
        self._loaded = self._file.id

    def _now(self) -> float:
        return self._elapsed.now()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._file.reading() as connection:
                yield connection
        finally:
            self._follow()

    @contextmanager
    def _writing(self, size: int = 0) -> Iterator[sqlite3.Connection]:
        try:
            with self._file.writing(size) as connection:
                self._noted = self._elapsed.kept()
                connection.execute(
                    "UPDATE state SET elapsed = ?, boot = ?, since_boot = ?, boot_began = ?",
                    (self._noted.elapsed, self._noted.boot, self._noted.since_boot, self._began),
                )
                yield connection
        finally:
            self._follow()

    def _follow(self) -> None:
        """Begin with the new file, if the old one was damaged."""
        if self._file.id != self._loaded:
            self._began = 0.0
            self._load()

    def _rows(self, where: str, *parameters: Any) -> list[Row]:
        with self._reading() as connection:
            return connection.execute(f"SELECT {COLUMNS} FROM observations {where}", parameters).fetchall()

    def _row(self, where: str, *parameters: Any) -> Row | None:
        found = self._rows(where, *parameters)
        return found[0] if found else None

    def _held(self, where: str, *parameters: Any) -> list[Held]:
        now = self._now()
        return [
            Held(key=row[0], observation=self._observation(row, now), margin=row[8], size=row[9])
            for row in self._rows(where, *parameters)
        ]

    def _observation(self, row: Row, now: float) -> Observation:
        source, given = row[1], row[2]
        with self._reading():
            return read_row(row, given + self._numbers.shift(source, given), now)

    def _shrink(self) -> None:
        """Drop what is too much since the size was set lower, and give the disk back."""
        while self._room.excess_pages:
            with self._writing():
                shrunk = self._room.shrink()
            if not shrunk:
                break

    def _drop_unneeded(self, key: int) -> None:
        """Drop a picture that nothing needs."""
        connection = self._file.connection
        dropped = connection.execute(
            "UPDATE observations SET size = 0 WHERE key = ? AND size > 0 AND NOT (waits OR keeps OR owed)", (key,)
        )
        if dropped.rowcount:
            connection.execute("DELETE FROM pictures WHERE key = ?", (key,))


def _digest(source: str, mark: str) -> int:
    content = f"{source}\0{mark}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode()[:_TEXT]
