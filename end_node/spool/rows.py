"""Rows of the spool, and the values that it takes and returns."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tierkit.wire.observations import FinerAnswer, LocalAnswer, Observation

__all__ = [
    "COLUMNS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "DamagedRow",
    "Draft",
    "Held",
    "Row",
    "SpoolStats",
    "body_of",
    "read_row",
]

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE state (
    spool TEXT NOT NULL,
    change INTEGER NOT NULL DEFAULT 0,          -- number of the last change
    elapsed REAL NOT NULL DEFAULT 0,            -- note of elapsed time
    boot TEXT NOT NULL DEFAULT '',
    since_boot REAL NOT NULL DEFAULT 0,
    boot_began REAL NOT NULL DEFAULT 0,         -- elapsed time when this start of the machine began
    dropped_sure INTEGER NOT NULL DEFAULT 0,
    dropped_unsure INTEGER NOT NULL DEFAULT 0,
    lost INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE sources (source TEXT PRIMARY KEY, last INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE observations (
    key INTEGER PRIMARY KEY,                    -- number of the change that added it: the oldest has the lowest
    source TEXT NOT NULL,
    sequence INTEGER NOT NULL,                  -- as first given out; see `moves`
    revision INTEGER NOT NULL DEFAULT 0,
    acked INTEGER NOT NULL DEFAULT -1,          -- revision that the scheduler has
    change INTEGER NOT NULL,
    taken REAL NOT NULL,                        -- elapsed time
    taken_at REAL,
    unsure INTEGER NOT NULL,
    waits INTEGER NOT NULL,
    keeps INTEGER NOT NULL,
    owed INTEGER NOT NULL,                      -- the scheduler gets the picture
    margin REAL NOT NULL,
    size INTEGER NOT NULL,                      -- bytes of the picture; 0 if there is none
    body BLOB NOT NULL,
    -- Eviction goes by rank: a delivered answer, a picture with a sure answer, one with an unsure answer, an answer.
    rank INTEGER GENERATED ALWAYS AS
        (CASE WHEN size > 0 THEN 1 + unsure WHEN revision > acked THEN 3 ELSE 0 END) VIRTUAL,
    UNIQUE (source, sequence)
);
CREATE INDEX by_rank ON observations (rank, key);
CREATE UNIQUE INDEX by_change ON observations (change);
CREATE INDEX fresh ON observations (key) WHERE acked < 0;
CREATE INDEX amended ON observations (change) WHERE acked >= 0 AND revision > acked;
CREATE INDEX waiting ON observations (margin, key, size) WHERE waits;
CREATE INDEX owed ON observations (margin, key, size, waits) WHERE owed;
CREATE INDEX untimed ON observations (taken) WHERE taken_at IS NULL;
CREATE TABLE pictures (key INTEGER PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE gaps (
    source TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, PRIMARY KEY (source, first)
) WITHOUT ROWID;
CREATE TABLE moves (
    source TEXT NOT NULL, first INTEGER NOT NULL, shift INTEGER NOT NULL, PRIMARY KEY (source, first)
) WITHOUT ROWID;
CREATE TABLE marks (mark INTEGER PRIMARY KEY);  -- digest of a source and a mark of it
CREATE TABLE traffic (minute INTEGER PRIMARY KEY, sent INTEGER NOT NULL, received INTEGER NOT NULL);
CREATE TABLE documents (name TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
"""

_OLDEST_S = 1e10
"""Highest age that a message may have."""

Row = tuple[Any, ...]
"""A row of `observations`, with `COLUMNS`."""

COLUMNS = "key, source, sequence, revision, taken, taken_at, unsure, waits, margin, size, body"


class Draft(Struct, frozen=True, kw_only=True):
    """A picture that has just been answered. The spool gives it its sequence number."""

    source: str
    age_s: float = 0.0
    """Elapsed time since the picture was taken."""
    taken_at: float | None = None
    """Wall clock, in seconds since 1970; None if the device does not know the time."""
    name: str = ""
    local: LocalAnswer | None = None
    release: int = 0
    """Number of the release that gave the local answer; 0 on a node that follows none."""
    unsure: bool = False
    reason: str = ""
    margin: float = 0.0
    """Distance of the local answer from the threshold. The smallest one is the most unsure."""
    picture: bytes | None = None
    """Stored only if `waits`, `keeps` or `to_scheduler`."""
    waits: bool = False
    """True if an upstream node is to answer the picture."""
    keeps: bool = False
    """True if the picture stays on the device after it is answered, as long as there is room."""
    to_scheduler: bool = False
    """True if the scheduler gets the picture."""
    audit: bool = False
    """True if the answer is sure, and the picture goes up to compare the answers."""
    mark: str = ""
    """Identifies the file, so that it is taken once; "" if the picture is not a file."""


class Held(Struct, frozen=True, kw_only=True):
    """An observation whose picture the spool holds."""

    key: int
    """Identifies the observation in the spool. It stays the same when the source is renumbered."""
    observation: Observation
    margin: float
    size: int
    """Bytes of the picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolStats:
    """Figures of the spool. The counters hold for the whole life of its file."""

    bytes_used: int
    """Size of its files."""
    size_bytes: int
    """Limit for them."""
    waiting_bytes: int
    """Estimate of the room that answers and pictures take which have to leave the device. The rest may be dropped."""
    room_bytes: int
    """Limit for `waiting_bytes`: beyond it some of that is dropped."""
    undelivered: int
    """Observations that the scheduler does not have yet, amendments included."""
    waiting: int
    """Pictures that wait for a better answer."""
    owed: int
    """Pictures that the scheduler gets, and does not have yet."""
    gaps: int
    """Gaps that the scheduler has not heard of yet."""
    dropped_sure: int
    """Pictures with sure answers that were dropped, because the spool was full."""
    dropped_unsure: int
    """Pictures with unsure answers that were dropped, because the spool was full."""
    lost: int
    """Answers that were dropped before the scheduler had them."""
    set_aside: tuple[Path, ...]
    """Damaged or foreign files in the folder of the spool, renamed and otherwise untouched."""


class DamagedRow(Exception):
    """A row cannot be read, although SQLite sees no fault in the file."""


class _Body(Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str = ""
    local: LocalAnswer | None = None
    release: int = 0
    finer: FinerAnswer | None = None
    audit: bool = False
    reason: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Body).decode


def body_of(observation: Observation, given: int) -> bytes:
    """Return the column `body` for an observation in the row with the number `given`.

    SQLite checks no content. So the body ends with a checksum, which covers the source and the number too.
    """
    body = _encode(
        _Body(
            name=observation.name,
            local=observation.local,
            release=observation.release,
            finer=observation.finer,
            audit=observation.audit,
            reason=observation.reason,
        )
    )
    return body + _checksum(body, observation.source, given)


def _checksum(body: bytes, source: str, given: int) -> bytes:
    return zlib.crc32(body, zlib.crc32(f"{source} {given}".encode())).to_bytes(4, "big")


def read_row(row: Row, sequence: int, now: float) -> Observation:
    """Return the observation of a row under its present sequence number, with its age at elapsed time `now`.

    Raises:
        DamagedRow: its checksum is wrong, or it has values of another kind.
    """
    _, source, given, revision, taken, taken_at, unsure, waits, _, _, stored = row
    try:
        body = stored[:-4]
        if stored[-4:] != _checksum(body, source, given):
            raise DamagedRow("an answer has the wrong checksum")
        read = _decode(body)
        age_s = min(max(0.0, now - taken), _OLDEST_S)
    except (TypeError, msgspec.MsgspecError) as error:
        raise DamagedRow(f"an answer cannot be read: {error}") from error
    return Observation(
        source=source,
        sequence=sequence,
        revision=revision,
        age_s=age_s,
        taken_at=taken_at,
        name=read.name,
        local=read.local,
        release=read.release,
        finer=read.finer,
        unsure=bool(unsure),
        waits=bool(waits),
        audit=read.audit,
        reason=read.reason,
    )
