"""Events for other systems: what they say, which sink wants them, and what follows a failed delivery. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Any
from zlib import crc32

from msgspec import Struct

from scheduler.core.job import JobRow
from scheduler.core.release import ReleaseChange
from tierkit.pacing import backoff_s
from tierkit.types import Health, JobState
from tierkit.wire.messages import Registration
from tierkit.wire.releases import RolloutState

__all__ = [
    "EVENT_TYPES",
    "LANES",
    "NO_FILTER",
    "DeadLetter",
    "EventFilter",
    "Sink",
    "SinkEvent",
    "after_failure",
    "is_online",
    "job_event",
    "lane_of",
    "matches",
    "node_event",
    "observation_event",
    "release_event",
    "source_event",
    "unknown_types",
]

LANES = 32
"""Events of a sink that are on their way at a time. Those with the same key are delivered one at a time."""
_FIRST_S = 1.0
_LONGEST_S = 60.0
_LEAST_ATTEMPTS = 5
"""An event that is older than the limit when it is first tried, since its sink was paused, gets as many attempts."""

EVENT_TYPES = (
    "job.submitted",
    "job.started",
    "job.completed",
    "job.failed",
    "job.cancelled",
    "node.joined",
    "node.left",
    "node.alive",
    "node.suspect",
    "node.draining",
    "node.dead",
    "release.started",
    "release.rolling_out",
    "release.promoted",
    "release.rolled_back",
    "release.stopped",
    "source.online",
    "source.offline",
    "observation.added",
    "observation.amended",
)

_OF_JOBS = {
    JobState.QUEUED: "job.submitted",
    JobState.RUNNING: "job.started",
    JobState.COMPLETED: "job.completed",
    JobState.FAILED: "job.failed",
    JobState.CANCELLED: "job.cancelled",
}
_OF_NODES = {
    Health.ALIVE: "node.alive",
    Health.SUSPECT: "node.suspect",
    Health.DRAINING: "node.draining",
    Health.DEAD: "node.dead",
    Health.REMOVED: "node.left",
}
_OF_RELEASES = {
    RolloutState.CANARY: "release.started",
    RolloutState.ROLLING: "release.started",
    RolloutState.DONE: "release.promoted",
    RolloutState.ROLLED_BACK: "release.rolled_back",
    RolloutState.STOPPED: "release.stopped",
}
_FIGURES = (
    "answered_coarse",
    "answered_fine",
    "fallback",
    "failed_images",
    "damaged_images",
    "coarse_accuracy",
    "fine_accuracy",
)
"""The part of a job's summary that its last event has."""
_STARTING = "starting"


class SinkEvent(Struct, frozen=True, kw_only=True):
    """Something that has become true."""

    number: int = 0
    """Rises with each stored event; 0 for an event that is not stored, such as a test."""
    type: str
    key: str
    """The thing that it is about. Events of one key are delivered in order."""
    at: float = 0.0
    """Seconds since 1970."""
    elapsed: float = 0.0
    """The same moment in elapsed time."""
    data: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The same at each try, so that a receiver knows an event that comes again."""
        return f"evt_{self.number}" if self.number else f"evt_test_{int(self.at * 1000)}"


class EventFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions that an event must meet, all of them. An event without the field that a condition is about does not
    meet it."""

    events: tuple[str, ...] = ()
    """Types, such as job.*; empty: all."""
    sources: tuple[str, ...] = ()
    """Sources as NAME or NODE/NAME, such as door-*; empty: all events."""
    labels: tuple[str, ...] = ()
    """Classes or superclasses of the answer in force; empty: any, and none."""
    confidence: float | None = None
    """Least confidence of that answer."""


NO_FILTER = EventFilter()


class Sink(Struct, frozen=True, kw_only=True):
    """A receiver of events, as it is stored."""

    name: str
    kind: str
    """Name of an entry point of the group `terrace.sinks`."""
    filter: EventFilter = NO_FILTER
    options: Mapping[str, Any] = {}
    """Options of its kind."""
    created_by: str | None = None
    """Name of a token; None if no token was asked for."""
    created_at: float
    """Seconds since 1970."""
    paused: bool = False
    reason: str = ""
    """Reason why it is paused."""
    position: int = 0
    """All events up to this number are dealt with."""
    dropped: int = 0
    """Events that were deleted before the receiver had them."""
    lost_letters: int = 0
    """Dead letters that were deleted because there were too many."""


class DeadLetter(Struct, frozen=True, kw_only=True):
    """An event that a receiver refused, or did not take in time."""

    sink: str
    event: SinkEvent
    reason: str
    attempts: int
    at: float
    """Time at which it was given up, seconds since 1970."""
    wanted: bool = False
    """It is to be delivered again."""


# --- who wants what ---------------------------------------------------------------------------------------------------


def matches(conditions: EventFilter, event: SinkEvent) -> bool:
    """True if an event meets all conditions."""
    if conditions.events and not _any_of(conditions.events).fullmatch(event.type):
        return False
    data = event.data
    if conditions.sources and not _is_source(conditions.sources, data):
        return False
    if conditions.labels and _labels(data).isdisjoint(conditions.labels):
        return False
    if conditions.confidence is None:
        return True
    confidence = data.get("confidence")
    return confidence is not None and confidence >= conditions.confidence


def unknown_types(conditions: EventFilter) -> list[str]:
    """The patterns for types that no event can have."""
    return [each for each in conditions.events if not any(fnmatchcase(known, each) for known in EVENT_TYPES)]


@lru_cache(maxsize=4096)
def _any_of(patterns: tuple[str, ...], slash: bool | None = None) -> re.Pattern[str]:
    """An expression that matches what one of the patterns matches; compiled once for each filter.

    Args:
        slash: only patterns with a slash, or only those without; None: all.
    """
    chosen = [each for each in patterns if slash is None or ("/" in each) == slash]
    return re.compile("|".join(map(translate, chosen)) or r"(?!)")


def _is_source(patterns: tuple[str, ...], data: Mapping[str, Any]) -> bool:
    source = data.get("source")
    if source is None:
        return False
    if _any_of(patterns, slash=False).fullmatch(source):
        return True
    return _any_of(patterns, slash=True).fullmatch(f"{data.get('node')}/{source}") is not None


def _labels(data: Mapping[str, Any]) -> set[str | None]:
    """The class of the answer in force, and its superclass."""
    fine = data.get("fine")
    return {data.get("label"), fine.get("coarse_label") if isinstance(fine, Mapping) else None} - {None}


# --- delivery ---------------------------------------------------------------------------------------------------------


def lane_of(key: str) -> int:
    """The lane of a key. It delivers its events in order, one at a time."""
    return crc32(key.encode()) % LANES


def after_failure(attempts: int, *, age_s: float, retry_s: float, chance: float) -> float | None:
    """Seconds until an event is tried again; None to give it up.

    Args:
        attempts: so far, at least 1.
        age_s: since the event was stored.
        retry_s: age at which it is given up.
        chance: 0 to 1.
    """
    if age_s >= retry_s and attempts >= _LEAST_ATTEMPTS:
        return None
    return backoff_s(attempts, first_s=_FIRST_S, cap_s=_LONGEST_S, chance=chance)


# --- what events say --------------------------------------------------------------------------------------------------


def job_event(job: JobRow, state: JobState, *, reason: str = "", summary: Mapping[str, Any] | None = None) -> SinkEvent:
    """A job has another state.

    Args:
        summary: of a job that has ended.
    """
    data: dict[str, Any] = {
        "id": job.id,
        "name": job.policy.name,
        "owner": job.owner,
        "site": job.policy.site,
        "scheme": job.policy.scheme,
        "state": state,
        "reason": reason,
        "images": job.images,
    }
    if summary is not None:
        data |= {name: summary.get(name) for name in _FIGURES}
    return SinkEvent(type=_OF_JOBS[state], key=f"job/{job.id}", data=data)


def node_event(registration: Registration, health: Health | None, reason: str, *, known: bool = False) -> SinkEvent:
    """A node has registered, or has another health.

    Args:
        health: None: it has registered.
        known: its process was known before, or the node took its leave.
    """
    if health is None:
        kind, health = "node.alive" if known else "node.joined", Health.ALIVE
    else:
        kind = "node.left" if known and health.gone else _OF_NODES[health]
    node_id, tier, site = registration.node_id, registration.tier, registration.site
    data = {"id": node_id, "tier": tier, "site": site, "health": health, "reason": reason}
    return SinkEvent(type=kind, key=f"node/{node_id}", data=data)


def release_event(change: ReleaseChange, before: ReleaseChange | None, *, new: str, old: str) -> SinkEvent | None:
    """A change from one release to another has another state; None if it has not.

    Args:
        before: the change as it was; None at its begin.
        new, old: NAME@NUMBER of the two releases.
    """
    if before is not None and before.state is change.state:
        return None
    kind = _OF_RELEASES[change.state]
    if before is not None and change.state is RolloutState.ROLLING:
        kind = "release.rolling_out"
    data = {
        "release": new,
        "previous": old,
        "kind": change.kind,
        "state": change.state,
        "share": change.share,
        "by": change.by,
        "reason": change.reason,
    }
    return SinkEvent(type=kind, key="release", data=data)


def is_online(state: str, health: Health | None) -> bool | None:
    """True if a source gives pictures; None while it starts.

    Args:
        state: by the last word of its device.
        health: of its node; None if the scheduler does not know the node.
    """
    if health is None or health.gone:
        return False
    return None if state == _STARTING else state == "running"


def source_event(fields: Mapping[str, Any], *, online: bool) -> SinkEvent:
    """A source begins or stops giving pictures.

    Args:
        fields: node, source, site, state, reason and health.
    """
    key = f"source/{fields['node']}/{fields['source']}"
    return SinkEvent(type="source.online" if online else "source.offline", key=key, data=fields)


def observation_event(fields: Mapping[str, Any], *, amended: bool) -> SinkEvent:
    """A source has seen something, or the answer to that is another one.

    Args:
        fields: an observation in the API has the same.
    """
    key = f"source/{fields['node']}/{fields['source']}"
    return SinkEvent(type="observation.amended" if amended else "observation.added", key=key, data=fields)
