"""Rows of observations: what the sources of devices have seen, stored once each and in the order of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import (
    ColumnElement,
    Delete,
    Table,
    bindparam,
    delete,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from scheduler.core.learning import agrees, usefulness
from scheduler.core.observing import (
    HeldObservation,
    NewObservation,
    SourceBatch,
    SourceNumbers,
    SourceUpdate,
    StoredBatch,
    StoredObservation,
    joined,
    sort_out,
)
from scheduler.core.outbox import SinkEvent, observation_event
from scheduler.store.commit import GroupCommit
from scheduler.store.observation_reads import ObservationReads
from scheduler.store.reading import Reader
from scheduler.store.tables import (
    labels,
    observation_gaps,
    observation_pictures,
    observation_sources,
    observations,
    source_rights,
)
from tierkit.errors import InvalidInput, NotFound
from tierkit.types import Tier
from tierkit.wire.observations import Behind, Gap, Observation, ObservationBatch, Receipt
from tierkit.wire.sources import SourceRights

__all__ = ["MOST_PICTURES", "MOST_SOURCES", "ObservationStore"]

MOST_SOURCES = 256
"""Sources of one node."""
MOST_PICTURES = 100
"""The latest pictures of a source that are kept."""
_NUMBERS_PER_S = 1_000_000
_PART = 200
"""Rows deleted in one transaction; other writes wait for its end."""

_read = msgspec.json.Decoder(Observation).decode


_NO_SITES: Mapping[str, str] = MappingProxyType({})


class _Now(Struct, frozen=True, kw_only=True):
    """The moment of a transaction."""

    wall: float
    elapsed: float
    numbers: Iterator[int]
    """Numbers for `observations.received`."""
    sites: Mapping[str, str]
    """Sites by node; other nodes have none."""


class ObservationStore:
    """All statements that change observations. They raise Unavailable when the database does not answer.

    Args:
        hierarchy: digest of the classes that are served now.
    """

    def __init__(self, reader: Reader, commit: GroupCommit, hierarchy: str) -> None:
        self.reads = ObservationReads(reader)
        self._reader = reader
        self._commit = commit
        self._hierarchy = hierarchy
        self.fields_of: Callable[[StoredObservation], Mapping[str, Any]] = lambda _: {}
        """Returns the data of an event: an observation as users see it."""
        self._received: int | None = None
        """The last number of `observations.received`; None until it is read."""

    async def last_received(self) -> int:
        """The highest number in `received`; 0 if nothing is stored."""
        if self._received is None:
            (row,) = await self._reader.rows(select(func.max(observations.c.received)))
            self._received = row[0] or 0
        return self._received

    async def add(
        self, batches: Sequence[ObservationBatch], *, wall: float, elapsed: float, sites: Mapping[str, str] = _NO_SITES
    ) -> list[StoredBatch | InvalidInput]:
        """Store batches in one transaction; returns what became of each, or why it is refused.

        Args:
            sites: by node; others have none.
        """
        stored: list[StoredBatch | InvalidInput] = []
        received = await self.last_received()
        # Elapsed time never goes back, so no number comes twice, even if the latest rows were deleted.
        numbers = count(max(received + 1, int(elapsed * _NUMBERS_PER_S)))
        now = _Now(wall=wall, elapsed=elapsed, numbers=numbers, sites=sites)

        async def write(connection: AsyncConnection) -> None:
            stored.clear()
            group = await _Group.begin(connection, {batch.node_id for batch in batches}, elapsed)
            for batch in batches:
                stored.append(await self._add(group, batch, now))
            await group.flush()

        await self._commit.execute(write)
        self._received = next(numbers) - 1
        return stored

    async def _add(self, group: _Group, batch: ObservationBatch, now: _Now) -> StoredBatch | InvalidInput:
        stored = known = 0
        behind: dict[str, Behind] = {}
        updates: dict[str, SourceUpdate] = {}
        newest: dict[str, StoredObservation] = {}
        events: list[SinkEvent] = []
        sources = group.sources.setdefault(batch.node_id, {})
        parts = _by_source(batch)
        if len(sources.keys() | parts.keys()) > MOST_SOURCES:
            return InvalidInput(f"node {batch.node_id!r} has too many sources: {MOST_SOURCES} is the limit")
        for source, part in parts.items():
            before = sources.get(source)
            own = {"node_id": batch.node_id, "source": source}
            held = await group.held(own, part.observations, before)
            change = sort_out(part, numbers=before, held=held, wall=now.wall)
            if change.first_behind is not None:
                behind[source] = Behind(first=change.first_behind, highest=0 if before is None else before.highest)
                if not change.accepted and not change.gaps:
                    continue
            # Of one that comes twice in a batch, both count.
            stored, known = stored + change.accepted - change.known, known + change.known
            updates[source] = change
            new = [self._numbered(batch.node_id, each, now) for each in change.new]
            if new:
                newest[source] = max(new, key=lambda each: each.content.sequence)
            group.write(own, zip(change.new, new, strict=True))
            if self._commit.outbox.used:
                events += [
                    observation_event(self.fields_of(row), amended=each.amends)
                    for each, row in zip(change.new, new, strict=True)
                    if each.differs
                ]
            group.note(own, SourceNumbers(batch.spool, change.highest), is_new=before is None)
            if change.gaps:
                await group.add_gaps(own, change.gaps)
        if events:
            await self._commit.outbox.write(group.connection, events)
        receipt = Receipt(stored=stored, known=known, behind=behind)
        return StoredBatch(receipt=receipt, updates=updates, newest=newest)

    def _numbered(self, node_id: str, new: NewObservation, now: _Now) -> StoredObservation:
        return StoredObservation(
            node_id=node_id,
            site=now.sites.get(node_id),
            received=next(now.numbers),
            taken_at=new.taken_at,
            hierarchy=self._hierarchy,
            has_picture=False,
            content=new.observation,
        )

    async def set_rights(self, node_id: str, source: str, rights: SourceRights) -> None:
        """Store who may see a source."""
        own = {"node_id": node_id, "source": source}
        owner = () if rights.owner is None else (rights.owner,)
        readers = [name for name in dict.fromkeys(rights.readers) if name != rights.owner]
        rows = [{**own, "name": name, "owner": name == rights.owner} for name in (*owner, *readers)]

        async def write(connection: AsyncConnection) -> None:
            await connection.execute(delete(source_rights).where(*_is(source_rights, own)))
            if rows:
                await connection.execute(insert(source_rights), rows)

        await self._commit.execute(write)

    async def put_picture(self, node_id: str, source: str, sequence: int, content: bytes, *, elapsed: float) -> None:
        """Store the picture of an observation, and drop the oldest one of its source. Raises NotFound."""
        own = {"node_id": node_id, "source": source}
        pictures = observation_pictures
        found = False

        async def write(connection: AsyncConnection) -> None:
            nonlocal found
            its = select(observations.c.content).where(*_is(observations, own), observations.c.sequence == sequence)
            seen = await connection.scalar(its)
            found = seen is not None
            if seen is None:
                return
            own_pictures = _is(pictures, own)
            await connection.execute(delete(pictures).where(*own_pictures, pictures.c.sequence == sequence))
            values = {**own, "sequence": sequence, "stored_elapsed": elapsed, "content": content}
            values["useful"] = usefulness(_read(seen))
            await connection.execute(insert(pictures).values(values))
            # Labelled pictures are for export, and stay as long as their observations.
            labelled = select(labels.c.sequence).where(*_is(labels, own), labels.c.current, labels.c.label.is_not(None))
            others = (*own_pictures, pictures.c.sequence.not_in(labelled))
            newest = select(pictures.c.sequence).where(*others).order_by(pictures.c.sequence.desc())
            if (oldest := await connection.scalar(newest.offset(MOST_PICTURES).limit(1))) is not None:
                await connection.execute(delete(pictures).where(*others, pictures.c.sequence <= oldest))

        await self._commit.execute(write)
        if not found:
            raise NotFound(f"no observation {sequence} of {source!r} on {node_id!r}")

    async def purge(self, before: float, most: int) -> tuple[int, int]:
        """Delete what was stored before this moment of elapsed time, and observations beyond the latest `most`, some
        rows at a time.

        Returns:
            The number of observations that are left, and the highest number in `received` that was deleted, or 0.
        """
        received = observations.c.received
        by_number = select(received).order_by(received.desc()).offset(most).limit(1)
        beyond = next((row.received for row in await self._reader.rows(by_number)), 0)
        key = ("node_id", "source")
        deleted = await self._purge_all(observations, ("received",), received <= beyond, received, _PART)
        for table, columns, part in (
            (observations, ("received",), _PART),
            (observation_pictures, (*key, "sequence"), 20),
            (observation_gaps, (*key, "first"), _PART),
            (labels, ("number",), _PART),
        ):
            stored = table.c.stored_elapsed
            gone = await self._purge_all(table, columns, stored < before, stored, part)
            deleted = max(deleted, gone if table is observations else 0)
        sources = observation_sources.c
        silent = sources.stored_elapsed
        await self._purge_all(observation_sources, ("node_id", "source", "highest"), silent < before, silent, _PART)
        (row,) = await self._reader.rows(select(func.count()).select_from(observations))
        return row[0], deleted

    async def _purge_all(
        self, table: Table, key: Sequence[str], old: ColumnElement[bool], by: ColumnElement[Any], part: int
    ) -> int:
        """Delete the old rows of a table, a part of them in each transaction; returns the last column of their keys at
        its highest, or 0."""
        columns, highest = [table.c[name] for name in key], 0
        while rows := await self._reader.rows(select(*columns).where(old).order_by(by).limit(part)):
            # An observation that is amended meanwhile has another number, and stays.
            statement = delete(table).where(old, tuple_(*columns).in_([tuple(row) for row in rows]))
            await self._commit.execute(partial(_execute, statement))
            highest = max(highest, *(row[-1] for row in rows))
        return highest


async def _execute(statement: Delete, connection: AsyncConnection) -> None:
    await connection.execute(statement)


def _by_source(batch: ObservationBatch) -> dict[str, SourceBatch]:
    parts: dict[str, SourceBatch] = {}
    for seen in batch.observations:
        parts.setdefault(seen.source, SourceBatch(spool=batch.spool)).observations.append(seen)
    for gap in batch.gaps:
        parts.setdefault(gap.source, SourceBatch(spool=batch.spool)).gaps.append(gap)
    return parts


def _is(table: Table, own: dict[str, str]) -> list[ColumnElement[bool]]:
    return [table.c[name] == value for name, value in own.items()]


class _Group:
    """The rows of one transaction. They are written together, at its end or before a query that may need them."""

    def __init__(
        self, connection: AsyncConnection, sources: dict[str, dict[str, SourceNumbers]], elapsed: float
    ) -> None:
        self.sources = sources
        """The numbering of each source, by node."""
        self.connection = connection
        self._elapsed = elapsed
        self._inserts: list[dict[str, Any]] = []
        self._updates: list[dict[str, Any]] = []
        self._uses: list[dict[str, Any]] = []
        self._new_sources: dict[tuple[str, str], dict[str, Any]] = {}
        self._old_sources: dict[tuple[str, str], dict[str, Any]] = {}

    @classmethod
    async def begin(cls, connection: AsyncConnection, nodes: Collection[str], elapsed: float) -> _Group:
        """A group of batches of these nodes."""
        sources: dict[str, dict[str, SourceNumbers]] = {}
        rows = await connection.execute(_SOURCES_OF, {"nodes": list(nodes)})
        for row in rows:
            sources.setdefault(row.node_id, {})[row.source] = SourceNumbers(row.spool, row.highest)
        return cls(connection, sources, elapsed)

    async def held(
        self, own: dict[str, str], seen: Sequence[Observation], numbers: SourceNumbers | None
    ) -> dict[int, HeldObservation]:
        """The stored observations with the numbers of these."""
        known = [each.sequence for each in seen if numbers is not None and each.sequence <= numbers.highest]
        if not known:
            return {}
        await self.flush()
        found = {}
        for row in await self.connection.execute(_HELD, {**own, "known": known}):
            content = _read(row.content)
            found[row.sequence] = HeldObservation(
                revision=row.revision,
                local=content.local,
                name=content.name,
                taken_at=row.taken_at,
                labelled=row.labelled,
                finer=content.finer,
            )
        return found

    def write(self, own: dict[str, str], new: Iterable[tuple[NewObservation, StoredObservation]]) -> None:
        """Store observations of a source."""
        for each, stored in new:
            key = {**own, "sequence": each.observation.sequence}
            values: dict[str, Any] = {name: getattr(stored, name) for name in ("received", "hierarchy", "site")}
            values["stored_elapsed"] = self._elapsed
            if each.amends:
                its = {f"its_{name}": value for name, value in key.items()}
                self._updates.append({**its, **_values(each), **values})
                if each.observation.finer is not None:
                    self._uses.append({**its, "useful": usefulness(each.observation)})
            else:
                self._inserts.append({**key, **_values(each), **values})

    def note(self, own: dict[str, str], numbers: SourceNumbers, *, is_new: bool) -> None:
        """Store the numbering of a source."""
        key = (own["node_id"], own["source"])
        self.sources[key[0]][key[1]] = numbers
        values = {"spool": numbers.spool, "highest": numbers.highest, "stored_elapsed": self._elapsed}
        if is_new or key in self._new_sources:
            self._new_sources[key] = {**own, **values}
        else:
            self._old_sources[key] = {"its_node_id": key[0], "its_source": key[1], **values}

    async def flush(self) -> None:
        """Write what has gathered."""
        for statement, rows in (
            (_INSERT, self._inserts),
            (_UPDATE, self._updates),
            (_UPDATE_USE, self._uses),
            (_INSERT_SOURCE, list(self._new_sources.values())),
            (_UPDATE_SOURCE, list(self._old_sources.values())),
        ):
            if rows:
                await self.connection.execute(statement, rows)
        self._inserts, self._updates, self._uses = [], [], []
        self._new_sources, self._old_sources = {}, {}

    async def add_gaps(self, own: dict[str, str], gaps: Collection[Gap]) -> None:
        """Store gaps of a source; gaps that overlap or touch become one."""
        table, its, connection = observation_gaps, _is(observation_gaps, own), self.connection
        for first, last in joined([(gap.first, gap.last) for gap in gaps]):
            touching = (*its, table.c.first <= last + 1, table.c.last >= first - 1)
            found = (await connection.execute(select(table.c.first, table.c.last).where(*touching))).all()
            (whole,) = joined([(first, last), *((row.first, row.last) for row in found)])
            if found:
                await connection.execute(delete(table).where(*touching))
            row = {**own, "first": whole[0], "last": whole[1], "stored_elapsed": self._elapsed}
            await connection.execute(insert(table).values(row))


# Made once: what they are costs more than what they do.
_KEY = ("node_id", "source", "sequence")
_SOURCES_OF = select(observation_sources).where(observation_sources.c.node_id.in_(bindparam("nodes", expanding=True)))
_HELD = select(*(observations.c[name] for name in ("sequence", "revision", "taken_at", "labelled", "content"))).where(
    observations.c.node_id == bindparam("node_id"),
    observations.c.source == bindparam("source"),
    observations.c.sequence.in_(bindparam("known", expanding=True)),
)
_INSERT, _INSERT_SOURCE = insert(observations), insert(observation_sources)
_UPDATE = update(observations).where(*(observations.c[name] == bindparam(f"its_{name}") for name in _KEY))
_UPDATE_USE = update(observation_pictures).where(
    *(observation_pictures.c[name] == bindparam(f"its_{name}") for name in _KEY)
)
_UPDATE_SOURCE = update(observation_sources).where(
    *(observation_sources.c[name] == bindparam(f"its_{name}") for name in _KEY[:2])
)


def _values(new: NewObservation) -> dict[str, Any]:
    seen = new.observation
    answer = seen.finer or seen.local
    return {
        "revision": seen.revision,
        "taken_at": new.taken_at,
        "labelled": new.labelled,
        "coarse_label": seen.finer.coarse_label if seen.finer else seen.local.label if seen.local else None,
        "fine_label": None if seen.finer is None else seen.finer.label,
        "confidence": None if answer is None else answer.confidence,
        "tier": None if answer is None else Tier.END if seen.finer is None else seen.finer.tier,
        "unsure": seen.unsure,
        "waits": seen.waits,
        "agrees": agrees(seen),
        "content": msgspec.json.encode(seen).decode(),
    }
