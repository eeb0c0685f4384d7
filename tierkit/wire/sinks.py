"""Sinks on the wire: receivers of events, and the events that they did not take. See `docs/how-to/sinks.md`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tierkit.wire.messages import NodeId

__all__ = [
    "DeadLetterNow",
    "DeadLetterPage",
    "NewSink",
    "ReplayRequest",
    "Replayed",
    "SentEvent",
    "SinkFilter",
    "SinkList",
    "SinkNow",
    "SinkTested",
]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, defer_build=True)


class _Wish(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SinkFilter(_Wish):
    """Conditions that an event must meet, all of them. An event without the field that a condition is about does not
    meet it."""

    events: tuple[str, ...] = ()
    """Types, such as job.*; empty: all."""
    sources: tuple[str, ...] = ()
    """Sources as NAME or NODE/NAME, such as door-*; empty: all events."""
    labels: tuple[str, ...] = ()
    """Classes or superclasses of the answer in force; empty: any, and none."""
    confidence: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    """Least confidence of that answer, 0 to 1."""


class NewSink(_Wish):
    """A sink to add."""

    name: NodeId
    """Name of the sink."""
    kind: Annotated[str, Field(max_length=63)]
    """webhook, or another kind that is installed on the scheduler's machine."""
    options: Mapping[str, Any] = {}
    """Options of its kind. Secrets are paths of files on the scheduler's machine."""
    filter: SinkFilter = SinkFilter()
    """Events that it gets; by default all."""


class SinkNow(_Value):
    """A sink as it is now."""

    name: str
    """Name of the sink."""
    kind: str
    """Kind of the sink."""
    options: Mapping[str, Any] = {}
    """Options of its kind; secrets are paths of files."""
    filter: SinkFilter = SinkFilter()
    """Events that it gets."""
    created_by: str | None = None
    """Name of the token that added it; None if no token was asked for."""
    created_at: datetime
    """Time at which it was added."""
    state: Literal["ok", "failing", "paused"]
    """ok: it takes events. failing: the last try failed. paused: events wait."""
    reason: str = ""
    """Reason why the last try failed, or why it is paused."""
    waiting: int = 0
    """The most events that the receiver may lack."""
    lag_s: float = 0.0
    """Age of the oldest event that is on its way."""
    delivered: int = 0
    """Events that the receiver took since the scheduler started."""
    failed: int = 0
    """Tries that failed since the scheduler started."""
    dead: int = 0
    """Events that were given up, and are kept as dead letters."""
    dropped: int = 0
    """Events that were deleted before the receiver had them."""
    lost_letters: int = 0
    """Dead letters that were deleted because there were too many."""


class SinkList(_Value):
    """All sinks, by name, and the kinds that can be added."""

    sinks: tuple[SinkNow, ...]
    """Sinks, by name."""
    kinds: tuple[str, ...] = ()
    """Kinds of sinks that are installed on the scheduler's machine."""


class SinkTested(_Value):
    """The receiver took a test event."""

    seconds: float
    """Seconds until the receiver had the event."""


class SentEvent(_Value):
    """An event, as every kind of sink sends it."""

    id: str
    """Id of the event, the same each time it is sent."""
    type: str
    """Type of the event, such as job.completed."""
    timestamp: datetime
    """Time of the event."""
    data: Mapping[str, Any]
    """Content of the event; its fields depend on the type."""


class DeadLetterNow(_Value):
    """An event that was given up."""

    number: int
    """The number of the event."""
    reason: str
    """Cause of the last failure."""
    attempts: int
    """Number of tries."""
    at: datetime
    """Time at which it was given up."""
    replaying: bool = False
    """True while it is delivered again."""
    event: SentEvent
    """The event itself."""


class DeadLetterPage(_Value):
    """Dead letters of a sink by number."""

    letters: tuple[DeadLetterNow, ...]
    """Dead letters of this page."""
    next: int | None = None
    """Number after which the next page begins; None at the end."""


EventNumber = Annotated[int, Field(ge=1, le=2**53)]


class ReplayRequest(_Wish):
    """Dead letters to deliver again."""

    numbers: Annotated[tuple[EventNumber, ...], Field(max_length=1000)] | None = None
    """The numbers of their events; None: all."""


class Replayed(_Value):
    """Dead letters that are delivered again."""

    count: int
    """Number of these dead letters."""
