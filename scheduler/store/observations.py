"""Rows of observations: what the sources of devices have seen, stored once each and in the order of their numbers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    delete,
    func,
    insert,
    literal,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from scheduler.core.observing import (
    HeldObservation,
    NewObservation,
    SourceBatch,
    SourceNumbers,
    StoredObservation,
    joined,
    sort_out,
)
from scheduler.store.commit import GroupCommit
from scheduler.store.reading import Reader
from scheduler.store.tables import observation_gaps, observation_pictures, observation_sources, observations
from tierkit.errors import InvalidInput, NotFound
from tierkit.types import Tier
from tierkit.wire.observations import Behind, Gap, Observation, ObservationBatch, Receipt

__all__ = ["MOST_PICTURES", "MOST_SOURCES", "ObservationStore"]

MOST_SOURCES = 256
"""Sources of one node."""
MOST_PICTURES = 100
"""The latest pictures of a source that are kept."""
_PAGE = 500
"""Rows that are read, or deleted, at a time."""

_read = msgspec.json.Decoder(Observation).decode


class ObservationStore:
    """All statements on observations. Reads and writes raise Unavailable when the database does not answer.

    Args:
        hierarchy: digest of the classes that are served now.
    """

    def __init__(self, reader: Reader, commit: GroupCommit, hierarchy: str) -> None:
        self._reader = reader
        self._commit = commit
        self._hierarchy = hierarchy
        self._received: int | None = None
        """The last number of `observations.received`; None until it is read."""

    async def add(
        self, batches: Sequence[ObservationBatch], *, wall: float, elapsed: float
    ) -> list[Receipt | InvalidInput]:
        """Store batches in one transaction; returns the receipt of each, or why it is refused."""
        receipts: list[Receipt | InvalidInput] = []

        async def write(connection: AsyncConnection) -> None:
            receipts.clear()
            for batch in batches:
                receipts.append(await self._add(connection, batch, wall, elapsed))

        await self._commit.execute(write)
        return receipts

    async def _add(
        self, connection: AsyncConnection, batch: ObservationBatch, wall: float, elapsed: float
    ) -> Receipt | InvalidInput:
        stored = known = 0
        behind: dict[str, Behind] = {}
        rows = await connection.execute(
            select(observation_sources).where(observation_sources.c.node_id == batch.node_id)
        )
        sources = {row.source: SourceNumbers(row.spool, row.highest) for row in rows}
        parts = _by_source(batch)
        if len(sources.keys() | parts.keys()) > MOST_SOURCES:
            return InvalidInput(f"node {batch.node_id!r} has too many sources: {MOST_SOURCES} is the limit")
        for source, part in parts.items():
            numbers = sources.get(source)
            own = {"node_id": batch.node_id, "source": source}
            held = await _held(connection, own, part.observations, numbers)
            change = sort_out(part, numbers=numbers, held=held, wall=wall)
            if change.first_behind is not None:
                behind[source] = Behind(first=change.first_behind, highest=0 if numbers is None else numbers.highest)
                if not change.accepted and not change.gaps:
                    continue
            # Of one that comes twice in a batch, both count.
            stored, known = stored + change.accepted - change.known, known + change.known
            await self._write(connection, own, change.new, elapsed)
            if change.gaps:
                await _add_gaps(connection, own, change.gaps, elapsed)
            values = {"spool": batch.spool, "highest": change.highest, "stored_elapsed": elapsed}
            if numbers is None:
                await connection.execute(insert(observation_sources).values(**own, **values))
            else:
                await connection.execute(
                    update(observation_sources).where(*_is(observation_sources, own)).values(values)
                )
        return Receipt(stored=stored, known=known, behind=behind)

    async def _write(
        self, connection: AsyncConnection, own: dict[str, str], new: Sequence[NewObservation], elapsed: float
    ) -> None:
        if self._received is None:
            self._received = await connection.scalar(select(func.max(observations.c.received))) or 0
        rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for each in new:
            self._received += 1
            key = {**own, "sequence": each.observation.sequence}
            stored = {"received": self._received, "stored_elapsed": elapsed, "hierarchy": self._hierarchy}
            if each.amends:
                key = {f"its_{name}": value for name, value in key.items()}
            rows[each.amends].append({**key, **_values(each), **stored})
        if rows[False]:
            await connection.execute(insert(observations), rows[False])
        if rows[True]:
            its = [observations.c[name] == bindparam(f"its_{name}") for name in ("node_id", "source", "sequence")]
            await connection.execute(update(observations).where(*its), rows[True])

    async def pages(self, node_id: str, source: str, after: int) -> AsyncGenerator[Sequence[StoredObservation], None]:
        """The observations of a source with higher numbers than `after`, in order, some at a time."""
        its = {name: observations.c[name] == observation_pictures.c[name] for name in ("node_id", "source", "sequence")}
        query = (
            select(
                observations.c.sequence,
                observations.c.taken_at,
                observations.c.hierarchy,
                observations.c.content,
                observation_pictures.c.sequence.is_not(None).label("has_picture"),
            )
            .outerjoin(observation_pictures, and_(*its.values()))
            .where(observations.c.node_id == node_id, observations.c.source == source)
            .order_by(observations.c.sequence)
        )
        async with aclosing(self._paged(query, observations.c.sequence, after)) as pages:
            async for rows in pages:
                yield [
                    StoredObservation(
                        taken_at=row.taken_at,
                        hierarchy=row.hierarchy,
                        has_picture=bool(row.has_picture),
                        content=_read(row.content),
                    )
                    for row in rows
                ]

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
        while rows := await self._reader.rows(query.where(by > after).limit(_PAGE)):
            yield rows
            if len(rows) < _PAGE:
                return
            after = rows[-1]._mapping[by]

    async def sources(self, node_id: str | None, source: str | None) -> AsyncGenerator[tuple[str, str], None]:
        """Node id and name of each source that has observations or gaps, in order."""
        key = tuple_(observation_sources.c.node_id, observation_sources.c.source)
        query = select(observation_sources.c.node_id, observation_sources.c.source).order_by(*key.clauses).limit(_PAGE)
        if node_id is not None:
            query = query.where(observation_sources.c.node_id == node_id)
        if source is not None:
            query = query.where(observation_sources.c.source == source)
        last = ("", "")
        while rows := await self._reader.rows(query.where(key > tuple_(*map(literal, last)))):
            for row in rows:
                yield row.node_id, row.source
            last = rows[-1].node_id, rows[-1].source

    async def put_picture(self, node_id: str, source: str, sequence: int, content: bytes, *, elapsed: float) -> None:
        """Store the picture of an observation, and drop the oldest one of its source. Raises NotFound."""
        own = {"node_id": node_id, "source": source}
        pictures = observation_pictures
        found = False

        async def write(connection: AsyncConnection) -> None:
            nonlocal found
            number = select(observations.c.sequence).where(*_is(observations, own), observations.c.sequence == sequence)
            found = await connection.scalar(number) is not None
            if not found:
                return
            own_pictures = _is(pictures, own)
            await connection.execute(delete(pictures).where(*own_pictures, pictures.c.sequence == sequence))
            values = {**own, "sequence": sequence, "stored_elapsed": elapsed, "content": content}
            await connection.execute(insert(pictures).values(values))
            newest = select(pictures.c.sequence).where(*own_pictures).order_by(pictures.c.sequence.desc())
            if (oldest := await connection.scalar(newest.offset(MOST_PICTURES).limit(1))) is not None:
                await connection.execute(delete(pictures).where(*own_pictures, pictures.c.sequence <= oldest))

        await self._commit.execute(write)
        if not found:
            raise NotFound(f"no observation {sequence} of {source!r} on {node_id!r}")

    async def picture(self, node_id: str, source: str, sequence: int) -> bytes:
        """Raises NotFound."""
        pictures = observation_pictures
        its = (*_is(pictures, {"node_id": node_id, "source": source}), pictures.c.sequence == sequence)
        for row in await self._reader.rows(select(pictures.c.content).where(*its)):
            return bytes(row.content)
        raise NotFound(f"no picture of observation {sequence} of {source!r} on {node_id!r} is here")

    async def purge(self, before: float) -> int:
        """Delete what was stored before this moment of elapsed time, some rows at a time; returns the number of
        observations."""
        deleted = 0
        for table, number in (
            (observations, observations.c.received),
            (observation_pictures, observation_pictures.c.sequence),
            (observation_gaps, observation_gaps.c.first),
        ):
            while count := await self._purge(table, number, before):
                deleted += count if table is observations else 0
        sources = observation_sources
        old = delete(sources).where(sources.c.stored_elapsed < before)
        await self._commit.execute(lambda connection: connection.execute(old))
        return deleted

    async def _purge(self, table: Table, number: ColumnElement[int], before: float) -> int:
        old = table.c.stored_elapsed < before
        some = select(number).where(old).order_by(table.c.stored_elapsed).limit(_PAGE)
        numbers = [row[0] for row in await self._reader.rows(some)]
        if numbers:
            statement = delete(table).where(old, number.in_(numbers))
            await self._commit.execute(lambda connection: connection.execute(statement))
        return len(numbers)


def _by_source(batch: ObservationBatch) -> dict[str, SourceBatch]:
    parts: dict[str, SourceBatch] = {}
    for seen in batch.observations:
        parts.setdefault(seen.source, SourceBatch(spool=batch.spool)).observations.append(seen)
    for gap in batch.gaps:
        parts.setdefault(gap.source, SourceBatch(spool=batch.spool)).gaps.append(gap)
    return parts


def _is(table: Table, own: dict[str, str]) -> list[ColumnElement[bool]]:
    return [table.c[name] == value for name, value in own.items()]


async def _held(
    connection: AsyncConnection, own: dict[str, str], seen: Sequence[Observation], numbers: SourceNumbers | None
) -> dict[int, HeldObservation]:
    """The stored observations with these numbers."""
    known = [each.sequence for each in seen if numbers is not None and each.sequence <= numbers.highest]
    if not known:
        return {}
    query = select(
        observations.c.sequence,
        observations.c.revision,
        observations.c.taken_at,
        observations.c.labelled,
        observations.c.content,
    ).where(*_is(observations, own), observations.c.sequence.in_(known))
    held = {}
    for row in await connection.execute(query):
        content = _read(row.content)
        held[row.sequence] = HeldObservation(
            revision=row.revision,
            local=content.local,
            name=content.name,
            taken_at=row.taken_at,
            labelled=row.labelled,
        )
    return held


async def _add_gaps(connection: AsyncConnection, own: dict[str, str], gaps: Collection[Gap], elapsed: float) -> None:
    """Store gaps of a source; gaps that overlap or touch become one."""
    table, its = observation_gaps, _is(observation_gaps, own)
    for first, last in joined([(gap.first, gap.last) for gap in gaps]):
        touching = (*its, table.c.first <= last + 1, table.c.last >= first - 1)
        found = (await connection.execute(select(table.c.first, table.c.last).where(*touching))).all()
        (whole,) = joined([(first, last), *((row.first, row.last) for row in found)])
        if found:
            await connection.execute(delete(table).where(*touching))
        await connection.execute(insert(table).values(**own, first=whole[0], last=whole[1], stored_elapsed=elapsed))


def _values(new: NewObservation) -> dict[str, Any]:
    seen = new.observation
    answer = seen.finer or seen.local
    return {
        "revision": seen.revision,
        "taken_at": new.taken_at,
        "labelled": new.labelled,
        "label": None if answer is None else answer.label,
        "confidence": None if answer is None else answer.confidence,
        "tier": None if answer is None else Tier.END if seen.finer is None else seen.finer.tier,
        "unsure": seen.unsure,
        "waits": seen.waits,
        "content": msgspec.json.encode(seen).decode(),
    }
