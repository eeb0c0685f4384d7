"""Rows of learning: labels of people, the pictures to label, and improvements."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, delete, exists, func, insert, literal, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from scheduler.core.learning import MOST_AUDITED, MOST_IMPROVEMENTS, MOST_SOURCES, SoughtPictures
from scheduler.core.observing import Label, StoredObservation
from scheduler.store.commit import GroupCommit
from scheduler.store.observation_reads import IS_LABELLED, SHOWN, same_picture, stored_of
from scheduler.store.reading import Reader
from scheduler.store.tables import improvements, labels, observation_pictures, observations, source_rights
from tierkit.errors import Conflict, Forbidden, NotFound
from tierkit.wire.learning import Improvement, LabelOfPerson

__all__ = ["MOST_LABELLED", "MOST_LABELS_OF_PICTURE", "LearningStore"]

MOST_LABELLED = 1000
"""Labelled pictures of a source."""
MOST_LABELS_OF_PICTURE = 10
"""Changes of a picture's label that are remembered, the latest."""
_NUMBERS_PER_S = 1_000_000
_PICTURE = ("node_id", "source", "sequence")
_Picture = tuple[str, str, int]


class LearningStore:
    """All statements on labels and improvements. They raise Unavailable when the database does not answer."""

    def __init__(self, reader: Reader, commit: GroupCommit) -> None:
        self._reader = reader
        self._commit = commit
        self._last: int | None = None
        """The last number of a label; None until it is read."""

    # --- labels -----------------------------------------------------------------------------------------------------

    async def last_numbers(self) -> dict[str, int]:
        """The last number of a label by node."""
        newest = func.max(labels.c.number).label("newest")
        rows = await self._reader.rows(select(labels.c.node_id, newest).group_by(labels.c.node_id))
        return {row.node_id: row.newest for row in rows}

    async def count(self, reader: str | None = None) -> int:
        """Pictures with a label, of the sources that this user may see; None: of all."""
        query = select(func.count()).select_from(labels).where(IS_LABELLED)
        if reader is not None:
            query = query.where(_may_see(reader, labels))
        (row,) = await self._reader.rows(query)
        return int(row[0])

    async def add(self, picture: _Picture, label: Label, *, elapsed: float) -> tuple[int, Label | None]:
        """Store the label of a picture; returns the number of the label, and the label that it replaces.

        Args:
            picture: node, source and sequence number.

        Raises:
            NotFound: the scheduler does not have the picture, or not any more.
            Conflict: too many pictures of the source are labelled.
        """
        pictures, problem = observation_pictures, ""
        number = await self._next(elapsed)
        before: Label | None = None

        async def write(connection: AsyncConnection) -> None:
            nonlocal before, problem
            there = select(pictures.c.sequence).where(*_is(pictures, picture))
            if await connection.scalar(there) is None:
                problem = "gone"
                return
            before = await _current(connection, picture)
            own = (labels.c.node_id == picture[0], labels.c.source == picture[1])
            labelled = select(func.count()).select_from(labels).where(*own, IS_LABELLED)
            if before is None and (await connection.scalar(labelled) or 0) >= MOST_LABELLED:
                problem = "many"
                return
            values = {"label": label.label, "hierarchy": label.hierarchy, "said_by": label.by, "said_at": label.at}
            await _write(connection, picture, {"number": number, "stored_elapsed": elapsed, **values})

        await self._commit.execute(write)
        if problem == "gone":
            raise NotFound(_no_picture(picture))
        if problem:
            raise Conflict(
                f"{MOST_LABELLED:,} pictures of {picture[1]!r} are labelled, and more are not kept: export them with "
                "`terrace datasets export`, and take labels back"
            )
        return number, before

    async def take_back(self, picture: _Picture, by: str | None, *, only_own: bool, at: float, elapsed: float) -> int:
        """Take the label of a picture back; returns the number of this change.

        Args:
            only_own: True for users who take back only their own labels.

        Raises:
            NotFound: it has none.
            Forbidden: another user has set it.
        """
        number = await self._next(elapsed)
        before: Label | None = None

        async def write(connection: AsyncConnection) -> None:
            nonlocal before
            before = await _current(connection, picture)
            if before is None or (only_own and before.by != by):
                return
            values = {"label": None, "hierarchy": before.hierarchy, "said_by": by, "said_at": at}
            await _write(connection, picture, {"number": number, "stored_elapsed": elapsed, **values})

        await self._commit.execute(write)
        if before is None:
            raise NotFound(f"picture {picture[2]} of {picture[1]!r} on {picture[0]!r} has no label")
        if only_own and before.by != by:
            raise Forbidden(f"{before.by!r} has set this label: only they and operators may take it back")
        return number

    async def news(self, node_id: str, after: int, limit: int) -> list[LabelOfPerson]:
        """Labels of a device's pictures that were set or taken back after a number, in that order."""
        query = select(labels).where(labels.c.node_id == node_id, labels.c.number > after, labels.c.current)
        return [
            LabelOfPerson(
                number=row.number,
                source=row.source,
                sequence=row.sequence,
                label=row.label,
                classes=row.hierarchy,
                by=row.said_by,
                at=row.said_at,
            )
            for row in await self._reader.rows(query.order_by(labels.c.number).limit(limit))
        ]

    async def _next(self, elapsed: float) -> int:
        if self._last is None:
            (row,) = await self._reader.rows(select(func.max(labels.c.number)))
            self._last = row[0] or 0
        # Elapsed time never goes back, so no number comes twice, even if the latest rows were deleted.
        self._last = next(count(max(self._last + 1, int(elapsed * _NUMBERS_PER_S))))
        return self._last

    # --- pictures ---------------------------------------------------------------------------------------------------

    async def pictures(
        self, sought: SoughtPictures, before: tuple[float, str, str, int] | None, limit: int
    ) -> list[tuple[float, StoredObservation]]:
        """Pictures that the scheduler has, with their observations, in order: those to label, the most useful first,
        and others by node, source and number. Each with the first part of its position.

        Args:
            before: the position after which the page begins: that part, node, source and number.
        """
        which, reader, least = sought.which, sought.reader, sought.least
        where = {"node_id": sought.node_id, "source": sought.source, "site": sought.site}
        pictures = observation_pictures.c
        conditions: list[ColumnElement[bool]] = [
            observations.c[name] == value for name, value in where.items() if value is not None
        ]
        if reader is not None:
            conditions.append(_may_see(reader, observation_pictures))
        use: ColumnElement[Any] = pictures.useful if which == "disagree" else literal(0.0)
        if which == "labelled":
            conditions.append(labels.c.label.is_not(None))
        else:
            conditions.append(labels.c.label.is_(None))
            conditions.append(
                pictures.useful.is_not(None)
                if which == "disagree"
                else and_(observations.c.fine_label.is_not(None), observations.c.confidence >= least)
            )
        key = tuple_(*(pictures[name] for name in _PICTURE))
        if before is not None:
            after = key > tuple_(*map(literal, before[1:]))
            conditions.append(
                or_(pictures.useful < before[0], and_(pictures.useful == before[0], after))
                if which == "disagree"
                else after
            )
        query = (
            select(use.label("use"), *SHOWN)
            .select_from(observation_pictures)
            .join(observations, same_picture(observations, observation_pictures))
            .outerjoin(labels, and_(same_picture(labels, observation_pictures), IS_LABELLED))
            .where(*conditions)
            .limit(limit)
        )
        if which == "disagree":
            query = query.order_by(pictures.useful.desc())
        query = query.order_by(*(pictures[name] for name in _PICTURE))
        return [(float(row.use), stored_of(row)) for row in await self._reader.rows(query)]

    async def audited(self) -> list[tuple[str, str, int, bool]]:
        """Node, source, number and agreement of the latest audited pictures, the oldest first."""
        most = min(MOST_AUDITED * MOST_SOURCES, 100_000)
        table = observations.c
        query = (
            select(table.node_id, table.source, table.sequence, table.agrees)
            .where(table.agrees.is_not(None))
            .order_by(table.received.desc())
            .limit(most)
        )
        return [(row[0], row[1], row[2], bool(row[3])) for row in reversed(await self._reader.rows(query))]

    # --- improvements -----------------------------------------------------------------------------------------------

    async def improvements(self) -> list[Improvement]:
        """The newest first. Rows that another version wrote in another form are left out."""
        query = select(improvements).order_by(improvements.c.created_at.desc(), improvements.c.id)
        rows = await self._reader.rows(query.limit(MOST_IMPROVEMENTS))
        return [Improvement.model_validate_json(row.content) for row in rows]

    async def save_improvement(self, improvement: Improvement, dropped: Collection[str]) -> None:
        """Write an improvement as it is now, and delete others."""
        assert improvement.created_at is not None
        row = {
            "id": improvement.id,
            "created_at": improvement.created_at.timestamp(),
            "said_by": improvement.by,
            "content": improvement.model_dump_json(),
        }

        async def write(connection: AsyncConnection) -> None:
            table = improvements
            await connection.execute(delete(table).where(table.c.id.in_([improvement.id, *dropped])))
            await connection.execute(insert(table).values(row))

        await self._commit.execute(write)


def _is(table: Any, picture: _Picture) -> list[ColumnElement[bool]]:
    return [table.c[name] == value for name, value in zip(_PICTURE, picture, strict=True)]


async def _current(connection: AsyncConnection, picture: _Picture) -> Label | None:
    rows = await connection.execute(select(labels).where(*_is(labels, picture), IS_LABELLED))
    for row in rows:
        return Label(label=row.label, hierarchy=row.hierarchy, by=row.said_by, at=row.said_at)
    return None


async def _write(connection: AsyncConnection, picture: _Picture, values: dict[str, Any]) -> None:
    """Add a label, and forget the oldest ones of the picture."""
    its = _is(labels, picture)
    await connection.execute(update(labels).where(*its, labels.c.current).values(current=False))
    key = dict(zip(_PICTURE, picture, strict=True))
    await connection.execute(insert(labels).values({**key, **values, "current": True}))
    newest = select(labels.c.number).where(*its).order_by(labels.c.number.desc())
    if (oldest := await connection.scalar(newest.offset(MOST_LABELS_OF_PICTURE).limit(1))) is not None:
        await connection.execute(delete(labels).where(*its, labels.c.number <= oldest))


def _no_picture(picture: _Picture) -> str:
    return f"no picture of observation {picture[2]} of {picture[1]!r} on {picture[0]!r} is here"


def _may_see(reader: str, table: Table) -> ColumnElement[bool]:
    """True for rows of sources that a user may see."""
    rights = source_rights.c
    its = and_(rights.node_id == table.c.node_id, rights.source == table.c.source)
    return exists().where(rights.name == reader, its)
