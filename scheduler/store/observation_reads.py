"""Queries on observations: pages by time, the observations of a source by number, what came after a moment."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from sqlalchemy import (
    CTE,
    ColumnElement,
    FromClause,
    Row,
    Select,
    and_,
    exists,
    func,
    literal,
    or_,
    select,
    true,
    tuple_,
)

from scheduler.core.observing import KnownSource, Label, StoredObservation
from scheduler.core.seeking import Position, SoughtClass, SoughtObservations
from scheduler.store.reading import Reader
from scheduler.store.tables import (
    labels,
    observation_gaps,
    observation_pictures,
    observation_sources,
    observations,
    source_rights,
)
from tierkit.errors import NotFound
from tierkit.wire.observations import Observation

__all__ = ["IS_LABELLED", "SHOWN", "ObservationReads", "same_picture", "stored_of"]

_PART = 500
"""Rows that are read at a time."""
_WINDOW = 5000
"""Observations that are looked at in one query for a page."""
_KEY = ("node_id", "source", "sequence")
_ORDER = ("taken_at", "sequence", "node_id", "source")
_JUDGED = (*_ORDER, "site", "hierarchy", "coarse_label", "fine_label", "confidence", "revision")
"""Columns by which a search chooses."""

IS_LABELLED = and_(labels.c.current, labels.c.label.is_not(None))
"""A row of `labels` that counts."""

_read = msgspec.json.Decoder(Observation).decode


class ObservationReads:
    """All queries on observations. They raise Unavailable when the database does not answer."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def page(
        self, sought: SoughtObservations, limit: int, before: Position | None
    ) -> tuple[list[StoredObservation], Position | None]:
        """Search the next observations by time.

        It looks at a bounded number of observations, so it may find few or none before the end.

        Args:
            before: where it begins; None: at the newest.

        Returns:
            Those found, the newest first, and the position at which the search continues, None at the end.
        """
        window, most = _window(sought, before, limit)
        found = select(*(window.c[name] for name in _ORDER)).where(*_chosen(window, sought))
        hits = found.order_by(*(window.c[name].desc() for name in _ORDER)).limit(limit + 1).cte("hits")
        count = select(func.count().label("looked_at")).select_from(window).subquery("count")
        end = select(*(window.c[name].label(f"end_{name}") for name in _ORDER))
        end_of = end.order_by(*(window.c[name] for name in _ORDER)).limit(1).subquery("window_end")
        query = (
            select(count, end_of, *SHOWN)
            .select_from(count)
            .outerjoin(end_of, true())
            .outerjoin(hits, true())
            .outerjoin(observations, same_picture(observations, hits))
            .outerjoin(observation_pictures, same_picture(observation_pictures, hits))
            .outerjoin(labels, and_(same_picture(labels, hits), IS_LABELLED))
            .order_by(*(observations.c[name].desc() for name in _ORDER))
        )
        rows = await self._reader.rows(query)
        seen = [stored_of(row) for row in rows if row.content is not None]
        if len(seen) > limit:
            return seen[:limit], _position(seen[limit - 1])
        first = rows[0]
        if first.looked_at < most:
            return seen, None
        return seen, Position(first.end_taken_at, first.end_sequence, first.end_node_id, first.end_source)

    async def of_source(
        self, node_id: str, source: str, after: int, sought: SoughtObservations
    ) -> AsyncGenerator[list[StoredObservation], None]:
        """The observations of a source with higher numbers than `after`, in order, some at a time."""
        own = (observations.c.node_id == node_id, observations.c.source == source)
        query = _with_picture().where(*own, *_chosen(observations, sought)).order_by(observations.c.sequence)
        async with aclosing(self._paged(query, observations.c.sequence, after)) as pages:
            async for rows in pages:
                yield [stored_of(row) for row in rows]

    async def gaps(self, node_id: str, source: str, after: int) -> AsyncGenerator[tuple[int, int], None]:
        """First and last number of each gap of a source that ends after `after`, in order."""
        query = (
            select(observation_gaps.c.first, observation_gaps.c.last)
            .where(observation_gaps.c.node_id == node_id, observation_gaps.c.source == source)
            .order_by(observation_gaps.c.first)
        )
        # They do not overlap, so one order is the other.
        async with aclosing(self._paged(query, observation_gaps.c.last, after)) as pages:
            async for rows in pages:
                for row in rows:
                    yield row.first, row.last

    async def _paged(
        self, query: Select[Any], by: ColumnElement[int], after: int
    ) -> AsyncGenerator[Sequence[Row[Any]], None]:
        while rows := await self._reader.rows(query.where(by > after).limit(_PART)):
            yield rows
            if len(rows) < _PART:
                return
            after = rows[-1]._mapping[by]

    async def received(self, after: int, upto: int, sought: SoughtObservations) -> list[StoredObservation]:
        """Observations that were stored or amended after one number up to another, in that order; at most 500."""
        number = observations.c.received
        query = _with_picture().where(number > after, number <= upto, *_chosen(observations, sought))
        return [stored_of(row) for row in await self._reader.rows(query.order_by(number).limit(_PART))]

    async def sources(self) -> AsyncGenerator[list[KnownSource], None]:
        """All sources that have sent something, by node and name, some at a time."""
        known, pictures = observation_sources, observation_pictures
        key = tuple_(known.c.node_id, known.c.source)
        is_last = and_(*(observations.c[name] == known.c[name] for name in _KEY[:2]))
        its = observation_pictures.alias("its_pictures").c
        newest = select(func.max(its.sequence)).where(its.node_id == known.c.node_id, its.source == known.c.source)
        query = (
            select(
                known.c.node_id.label("its_node"),
                known.c.source.label("its_source"),
                known.c.stored_elapsed.label("its_elapsed"),
                newest.scalar_subquery().label("last_picture"),
                *SHOWN,
            )
            .select_from(known)
            .outerjoin(observations, and_(is_last, observations.c.sequence == known.c.highest))
            .outerjoin(pictures, same_picture(pictures, observations))
            .outerjoin(labels, and_(same_picture(labels, observations), IS_LABELLED))
            .order_by(*key.clauses)
            .limit(_PART)
        )
        last = ("", "")
        while rows := await self._reader.rows(query.where(key > tuple_(*map(literal, last)))):
            yield [
                KnownSource(
                    node_id=row.its_node,
                    source=row.its_source,
                    stored_elapsed=row.its_elapsed,
                    last=None if row.content is None else stored_of(row),
                    last_picture=row.last_picture,
                )
                for row in rows
            ]
            last = rows[-1].its_node, rows[-1].its_source

    async def rights(self) -> list[tuple[str, str, str, bool]]:
        """Node, source, name of a user, and whether they own it."""
        rows = await self._reader.rows(select(source_rights).order_by(source_rights.c.name))
        return [(row.node_id, row.source, row.name, row.owner) for row in rows]

    async def picture(self, node_id: str, source: str, sequence: int) -> bytes:
        """Raises NotFound."""
        pictures = observation_pictures
        own = zip(_KEY, (node_id, source, sequence), strict=True)
        query = select(pictures.c.content).where(*(pictures.c[name] == value for name, value in own))
        for row in await self._reader.rows(query):
            return bytes(row.content)
        raise NotFound(f"no picture of observation {sequence} of {source!r} on {node_id!r} is here")


SHOWN = (
    *(observations.c[name] for name in (*_KEY, "received", "taken_at", "hierarchy", "content", "site")),
    observation_pictures.c.sequence.is_not(None).label("has_picture"),
    *(labels.c[name].label(f"person_{name}") for name in ("label", "hierarchy", "said_by", "said_at")),
)
"""Columns of an observation as people see it."""


def same_picture(one: FromClause, other: FromClause) -> ColumnElement[bool]:
    """Rows of two tables are about the same picture."""
    return and_(*(one.c[name] == other.c[name] for name in _KEY))


def _with_picture() -> Select[Any]:
    joined = observations.outerjoin(observation_pictures, same_picture(observations, observation_pictures)).outerjoin(
        labels, and_(same_picture(labels, observations), IS_LABELLED)
    )
    return select(*SHOWN).select_from(joined)


def _window(sought: SoughtObservations, before: Position | None, limit: int) -> tuple[CTE, int]:
    """The next observations by time that the search looks at, and how many these are at most. What an index finds is
    chosen here, the rest among what is looked at."""
    table = observations.c
    where: list[ColumnElement[bool]] = []
    if before is not None:
        tie = tuple_(*(table[name] for name in _ORDER[1:])) < tuple_(*map(literal, msgspec.to_builtins(before)[1:]))
        where += [table.taken_at <= before.taken_at, or_(table.taken_at < before.taken_at, tie)]
    if sought.since is not None:
        where.append(table.taken_at >= sought.since)
    left = {"node": sought.node_id, "source": sought.source, "classes": sought.classes, "reader": sought.reader}
    left |= {"site": sought.site}
    if sought.node_id is not None and sought.source is not None:
        where += [table.node_id == sought.node_id, table.source == sought.source]
        left |= {"node": None, "source": None}
    elif sought.site is not None:
        where.append(table.site == sought.site)
        left |= {"site": None}
    elif sought.classes is not None and len(sought.classes) == 1:
        where.append(_is_class(observations, sought.classes[0]))
        left |= {"classes": None}
    all_fit = not any(left.values()) and sought.below is None and not sought.amended
    most = limit + 1 if all_fit else max(_WINDOW, limit + 1)
    query = select(*(table[name] for name in _JUDGED)).where(*where)
    return query.order_by(*(table[name].desc() for name in _ORDER)).limit(most).cte("looked_at"), most


def _chosen(table: FromClause, sought: SoughtObservations) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = []
    if sought.node_id is not None:
        where.append(table.c.node_id == sought.node_id)
    if sought.source is not None:
        where.append(table.c.source == sought.source)
    if sought.site is not None:
        where.append(table.c.site == sought.site)
    if sought.classes is not None:
        where.append(or_(*(_is_class(table, each) for each in sought.classes)))
    if sought.since is not None:
        where.append(table.c.taken_at >= sought.since)
    if sought.below is not None:
        where.append(table.c.confidence < sought.below)
    if sought.amended:
        where.append(table.c.revision > 0)
    if sought.reader is not None:
        rights = source_rights.c
        its = and_(rights.node_id == table.c.node_id, rights.source == table.c.source)
        where.append(exists().where(rights.name == sought.reader, its))
    return where


def _is_class(table: FromClause, sought: SoughtClass) -> ColumnElement[bool]:
    column, number = (
        (table.c.coarse_label, sought.coarse) if sought.coarse is not None else (table.c.fine_label, sought.fine)
    )
    return and_(column == number, table.c.hierarchy == sought.hierarchy)


def stored_of(row: Row[Any]) -> StoredObservation:
    """The observation of a row with the columns of `SHOWN`."""
    return StoredObservation(
        node_id=row.node_id,
        received=row.received,
        taken_at=row.taken_at,
        hierarchy=row.hierarchy,
        has_picture=bool(row.has_picture),
        site=row.site,
        content=_read(row.content),
        person=None
        if row.person_label is None
        else Label(
            label=row.person_label, hierarchy=row.person_hierarchy, by=row.person_said_by, at=row.person_said_at
        ),
    )


def _position(seen: StoredObservation) -> Position:
    content = seen.content
    return Position(seen.taken_at, content.sequence, seen.node_id, content.source)
