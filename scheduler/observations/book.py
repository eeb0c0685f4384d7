"""The sources of the fleet: the last observation of each, its state by the word of its device, and its rights."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterable, Callable, Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Raw

from models.hierarchy import Hierarchy
from scheduler.core.observing import KnownSource, StoredBatch, StoredObservation
from tierkit.errors import Forbidden, LimitReached, NotFound
from tierkit.types import Health
from tierkit.wire.observations import DeviceStatus, ObservationBatch
from tierkit.wire.sources import SourceRights, seen_fields

__all__ = ["MOST_KNOWN", "SourceBook", "SourceEntry", "fields_of"]

MOST_KNOWN = 10_000
"""Sources of all nodes."""
_TICK_S = 1.0
_AGAIN_S = 60.0

_ENCODE = msgspec.json.Encoder().encode
_Key = tuple[str, str]
"""Node id and source."""
_UNKNOWN: dict[str, Any] = {
    "waiting_answers": None,
    "waiting_pictures": None,
    "spool_bytes": None,
    "spool_size_bytes": None,
    "spent_bytes": None,
    "bytes_per_day": None,
}


def fields_of(stored: StoredObservation, hierarchies: Mapping[str, Hierarchy]) -> dict[str, Any]:
    """A stored observation as users see it: the fields of a `SeenPicture`.

    Args:
        hierarchies: classes by digest.
    """
    fields = seen_fields(
        stored.content, node=stored.node_id, taken_at=stored.taken_at, classes=hierarchies.get(stored.hierarchy)
    )
    fields |= {"picture": stored.has_picture, "site": stored.site}
    if (person := stored.person) is not None:
        classes = hierarchies.get(person.hierarchy)
        fields |= {
            "person": str(person.label) if classes is None else classes.fine[person.label],
            "person_by": person.by,
            "person_at": datetime.fromtimestamp(round(person.at, 3), UTC),
        }
    return fields


class SourceEntry(msgspec.Struct, kw_only=True):
    """A source."""

    heard_elapsed: float | None = None
    """Time at which its latest batch was stored; None if it has sent nothing."""
    last: StoredObservation | None = None
    """The observation with the highest number."""
    last_picture: int | None = None
    shown: Raw | None = None
    """`last` as JSON; None until it is asked for."""


class SourceBook:
    """All sources that have sent something or that a device names, and the rights of sources.

    Args:
        health_of: returns the health of a node, None if it is not on the device list.
        site_of: returns the site of a node, None if it has none or is not on the list.
        fleet_version: returns another number when the health of a node has changed.
        elapsed: returns seconds of elapsed time.
    """

    def __init__(
        self,
        *,
        health_of: Callable[[str], Health | None],
        site_of: Callable[[str], str | None] = lambda _: None,
        fleet_version: Callable[[], int],
        elapsed: Callable[[], float],
    ) -> None:
        self.hierarchies: Mapping[str, Hierarchy] = {}
        """Classes by digest."""
        self.entries: dict[_Key, SourceEntry] = {}
        self.devices: dict[str, DeviceStatus] = {}
        """The last word of each node."""
        self._rights: dict[_Key, SourceRights] = {}
        self._health_of = health_of
        self.site_of = site_of
        self._fleet_version = fleet_version
        self.elapsed = elapsed
        self.heard: Callable[[str], None] = lambda _: None
        """Called with the id of a node that has said how its sources are."""
        self._changes = 0
        self._news = asyncio.Event()
        self._shown: dict[tuple[str | None, str | None, str | None, str | None], bytes] = {}
        """Lists as JSON, by the arguments of `snapshot`; they are dropped after a second."""
        self._shown_at = -math.inf
        self._shown_version = (-1, -1)

    async def load(
        self,
        hierarchies: Mapping[str, Hierarchy],
        known: AsyncIterable[Sequence[KnownSource]],
        rights: Iterable[tuple[str, str, str, bool]],
    ) -> None:
        """Take what the database has.

        Args:
            known: sources, some at a time.
            rights: node, source, name of a user, and whether they own it.
        """
        self.hierarchies = hierarchies
        async for part in known:
            for each in part:
                self.entries[each.node_id, each.source] = SourceEntry(
                    heard_elapsed=each.stored_elapsed, last=each.last, last_picture=each.last_picture
                )
        for node_id, source, name, owns in rights:
            before = self._rights.get((node_id, source), SourceRights())
            change = {"owner": name} if owns else {"readers": (*before.readers, name)}
            self._rights[node_id, source] = before.model_copy(update=change)

    # --- what is stored ---------------------------------------------------------------------------------------------

    def check_room(self, batch: ObservationBatch) -> None:
        """Raises LimitReached if a batch is about one source too many."""
        named = {each.source for each in batch.observations} | {gap.source for gap in batch.gaps}
        named |= _named_by(batch.device)
        new = sum((batch.node_id, source) not in self.entries for source in named)
        if new and len(self.entries) + new > MOST_KNOWN:
            raise LimitReached(f"the scheduler keeps at most {MOST_KNOWN:,} sources", retry_after_s=_AGAIN_S)

    def stored(self, batch: ObservationBatch, outcome: StoredBatch) -> None:
        """Take a batch that the database has."""
        now = self.elapsed()
        for source in outcome.updates:
            entry = self.entries.setdefault((batch.node_id, source), SourceEntry())
            entry.heard_elapsed = now
            newest = outcome.newest.get(source)
            if newest is not None and (entry.last is None or entry.last.content.sequence <= newest.content.sequence):
                has_picture = newest.content.sequence == entry.last_picture
                entry.last = msgspec.structs.replace(newest, has_picture=True) if has_picture else newest
                entry.shown = None
        if batch.device is not None:
            self._take_word(batch.node_id, batch.device)
        self.tell()

    def _take_word(self, node_id: str, status: DeviceStatus) -> None:
        before, named = _named_by(self.devices.get(node_id)), _named_by(status)
        self.devices[node_id] = status
        for source in named:
            self.entries.setdefault((node_id, source), SourceEntry())
        for source in before - named:
            entry = self.entries.get((node_id, source))
            if entry is not None and entry.heard_elapsed is None:
                del self.entries[node_id, source]
        self.heard(node_id)

    def has_picture(self, node_id: str, source: str, sequence: int) -> None:
        """The picture of an observation is stored."""
        if (entry := self.entries.get((node_id, source))) is None:
            return
        entry.last_picture = max(sequence, entry.last_picture or 0)
        if entry.last is not None and entry.last.content.sequence == sequence:
            entry.last, entry.shown = msgspec.structs.replace(entry.last, has_picture=True), None
        self.tell()

    def purged(self, before: float, received: int) -> None:
        """The database has deleted what was stored before this moment of elapsed time, and observations up to this
        number. Sources that a forgotten node has named, but that have sent nothing, go too."""
        for key, entry in list(self.entries.items()):
            heard = entry.heard_elapsed
            if (heard is None and self._health_of(key[0]) is None) or (heard is not None and heard < before):
                del self.entries[key]
            elif entry.last is not None and entry.last.received <= received:
                entry.last = entry.shown = entry.last_picture = None
        nodes = {node_id for node_id, _ in self.entries}
        self.devices = {node_id: status for node_id, status in self.devices.items() if node_id in nodes}
        self.tell()

    # --- rights -----------------------------------------------------------------------------------------------------

    def rights(self, node_id: str, source: str) -> SourceRights:
        """The users who may see a source."""
        return self._rights.get((node_id, source), SourceRights())

    def check_room_for_rights(self, node_id: str, source: str) -> None:
        """Raises LimitReached if one source too many would be shared."""
        if (node_id, source) not in self._rights and len(self._rights) >= MOST_KNOWN:
            raise LimitReached(f"at most {MOST_KNOWN:,} sources can be shared", retry_after_s=_AGAIN_S)

    def set_rights(self, node_id: str, source: str, rights: SourceRights) -> None:
        """Take rights that the database has."""
        if rights == SourceRights():
            self._rights.pop((node_id, source), None)
        else:
            self._rights[node_id, source] = rights
        self._shown_at = -math.inf
        self.tell()

    def may_see(self, reader: str | None, node_id: str, source: str) -> bool:
        """True if this user owns the source or may read it; None: an operator."""
        rights = self._rights.get((node_id, source))
        return reader is None or (rights is not None and reader in (rights.owner, *rights.readers))

    def check_sight(self, reader: str | None, node_id: str, source: str) -> None:
        """Raises NotFound for a source that a user may not see: it does not exist for them."""
        if not self.may_see(reader, node_id, source):
            raise NotFound(f"node {node_id!r} has no source {source!r}")

    def check_owner(self, reader: str | None, node_id: str, source: str) -> None:
        """Raises NotFound, Forbidden for a user who does not own a source."""
        self.check_sight(reader, node_id, source)
        if reader is not None and reader != self.rights(node_id, source).owner:
            raise Forbidden(f"only operators and the owner of {source!r} on {node_id!r} may do this")

    def visible(
        self, reader: str | None, node_id: str | None = None, source: str | None = None, site: str | None = None
    ) -> list[_Key]:
        """The sources that a user may see, by node and name. Sources that are shared but have sent nothing yet are
        among them.

        Args:
            reader: the user; None: an operator.
            node_id, source: only these; None: all.
            site: only sources of nodes that belong to it now; None: all.
        """
        if node_id is not None and source is not None:
            key = (node_id, source)
            there = (key in self.entries or key in self._rights) and site in (None, self.site_of(node_id))
            return [key] if there and self.may_see(reader, *key) else []
        return sorted(
            key
            for key in self.entries.keys() | self._rights.keys()
            if node_id in (None, key[0])
            and source in (None, key[1])
            and self.may_see(reader, *key)
            and (site is None or site == self.site_of(key[0]))
        )

    # --- for those who look -----------------------------------------------------------------------------------------

    @property
    def version(self) -> tuple[int, int]:
        """Another value when something has changed."""
        return self._changes, self._fleet_version()

    def tell(self) -> None:
        """Wake all that wait for a change."""
        self._changes += 1
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, version: tuple[int, int]) -> None:
        """Wait for something newer than a version; a change of health does not end the wait."""
        if self.version == version:
            await self._news.wait()

    def snapshot(
        self, reader: str | None, node_id: str | None = None, source: str | None = None, site: str | None = None
    ) -> tuple[bytes, tuple[int, int]]:
        """Sources as JSON of a `SourceList`, and the version that it shows; made at most once a second. Takes the
        arguments of `visible`."""
        now = time.monotonic()
        if now >= self._shown_at + _TICK_S:
            self._shown.clear()
            self._shown_at, self._shown_version = math.floor(now), self.version
        wanted = (reader, node_id, source, site)
        if wanted not in self._shown:
            keys = self.visible(reader, node_id, source, site)
            healths = {node_id: self._health_of(node_id) for node_id, _ in keys}
            rows = [self._fields(key, healths) for key in keys]
            self._shown[wanted] = _ENCODE({"sources": rows})
        return self._shown[wanted], self._shown_version

    def marks(self) -> dict[_Key, Hashable]:
        """The sources that have sent something or that a device names. Each has another value when it has changed."""
        states = {
            (node_id, each.name): each.state for node_id, status in self.devices.items() for each in status.sources
        }
        healths = {node_id: self._health_of(node_id) for node_id, _ in self.entries}
        return {
            key: (
                None if entry.last is None else (entry.last.content.sequence, entry.last.received),
                entry.last_picture,
                states.get(key),
                healths[key[0]],
                self.site_of(key[0]),
            )
            for key, entry in self.entries.items()
        }

    def now(self, node_id: str, source: str) -> dict[str, Any]:
        """A source as it is now: the fields of a `SourceNow`. Its observation has the fields of a `SeenPicture`."""
        key = (node_id, source)
        entry = self.entries.get(key)
        last = None if entry is None or entry.last is None else fields_of(entry.last, self.hierarchies)
        return self._fields(key, {node_id: self._health_of(node_id)}) | {"last": last}

    def heard_s(self, entry: SourceEntry) -> float | None:
        """Seconds since a source was heard."""
        return None if entry.heard_elapsed is None else round(max(0.0, self.elapsed() - entry.heard_elapsed), 1)

    def _fields(self, key: _Key, healths: Mapping[str, Health | None]) -> dict[str, Any]:
        (node_id, source), status = key, self.devices.get(key[0])
        entry = self.entries.get(key) or SourceEntry()
        if entry.shown is None and entry.last is not None:
            entry.shown = Raw(_ENCODE(fields_of(entry.last, self.hierarchies)))
        rights = self.rights(node_id, source)
        fields = {
            "node": node_id,
            "source": source,
            "owner": rights.owner,
            "readers": rights.readers,
            "state": "",
            "reason": "",
            "health": healths[node_id],
            "site": self.site_of(node_id),
            "heard_s": self.heard_s(entry),
            "last": entry.shown,
            "last_picture": entry.last_picture,
            **_UNKNOWN,
        }
        if status is not None:
            fields |= {name: getattr(status, name) for name in _UNKNOWN}
            for each in status.sources:
                if each.name == source:
                    fields |= {"state": each.state, "reason": each.reason}
        return fields


def _named_by(status: DeviceStatus | None) -> set[str]:
    return set() if status is None else {each.name for each in status.sources}
