"""Observations on the wire: what the sources of a device see, from its end node to the scheduler.

These are structs of msgspec, like the events of tasks: a fleet sends thousands a second. They are checked when they are
read, and unknown fields are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from tierkit.types import Tier
from tierkit.wire.events import Confidence, Count, Digest, ModelName, Named, Sent
from tierkit.wire.messages import NODE_ID_PATTERN

__all__ = [
    "MAX_BATCH",
    "Behind",
    "DeviceStatus",
    "FinerAnswer",
    "Gap",
    "KeptReport",
    "LocalAnswer",
    "Observation",
    "ObservationBatch",
    "Receipt",
    "ReportedSource",
    "read_batch",
    "read_receipt",
    "write_batch",
]

MAX_BATCH = 1000
"""Observations in one batch."""

SourceName = Annotated[str, Meta(pattern=NODE_ID_PATTERN.replace("$", r"\Z"))]
SequenceNumber = Annotated[int, Meta(ge=1, le=2**53)]
Text = Annotated[str, Meta(max_length=500)]
Age = Annotated[float, Meta(ge=0.0, le=1e9)]
"""Seconds; at most thirty-one years."""
Timestamp = Annotated[float, Meta(ge=0.0, le=1e11)]
"""Seconds since 1970."""
Bytes = Annotated[int, Meta(ge=0, le=2**53)]
SpoolId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]


class _Message(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class LocalAnswer(_Message, frozen=True, kw_only=True):
    """The answer of the device's own network: a superclass."""

    model: ModelName
    """Name of the network."""
    sha256: Digest
    """sha256 of the network."""
    label: Count
    """Number of the superclass."""
    confidence: Confidence
    """Probability of the superclass, 0 to 1."""
    ms: Age = 0.0
    """Milliseconds that the network took, with the wait for its turn; 0 from a node of an older Terrace."""


class FinerAnswer(_Message, frozen=True, kw_only=True):
    """The answer of an upstream node: a class, and the superclass that its probabilities add up to."""

    node_id: Named
    """Id of the node that answered."""
    tier: Tier
    """Tier of that node."""
    model: ModelName
    """Name of the network."""
    sha256: Digest
    """sha256 of the network."""
    label: Count
    """Number of the class."""
    confidence: Confidence
    """Probability of the class, 0 to 1."""
    coarse_label: Count
    """Number of the superclass."""
    coarse_confidence: Confidence
    """Probability of the superclass, 0 to 1."""
    sent: Sent | None = None
    """The form in which the picture went there, and what that cost."""


class Observation(_Message, frozen=True, kw_only=True):
    """One picture of a source and its answers. The answer in force is `finer` if there is one, otherwise `local`."""

    source: SourceName
    """Unique on its node."""
    sequence: SequenceNumber
    """Sequence number; it rises by one with each picture of the source. A missing one is in a `Gap`."""
    revision: Count = 0
    """Number of amendments so far; a reader keeps the observation with the highest one."""
    age_s: Age
    """Elapsed time between the picture and the moment at which this message was written."""
    taken_at: Timestamp | None = None
    """A label: when the picture was taken, by a clock that the device trusted. None: it did not know the time."""
    name: Text = ""
    """Name of the file, relative to the folder that it was taken from."""
    local: LocalAnswer | None = None
    """Answer of the device itself; None: the picture cannot be read."""
    release: Count = 0
    """Number of the release that gave the local answer; 0: none, on a node with its own networks or for the answer of a
    personal head."""
    finer: FinerAnswer | None = None
    """Answer of an upstream node; None without one."""
    unsure: bool = False
    """True if the local answer is below the threshold of the route."""
    waits: bool = False
    """True while the device still wants a better answer."""
    audit: bool = False
    """True if the local answer is sure, and the device wants one from above all the same, to compare them."""
    reason: Text = ""
    """Reason why there is no better answer, although one was wanted; or why the picture cannot be read."""


class Gap(_Message, frozen=True, kw_only=True):
    """Observations that a device lost because its spool was full: their numbers never come."""

    source: SourceName
    """Name of the source."""
    first: SequenceNumber
    """First sequence number that was lost."""
    last: SequenceNumber
    """Last sequence number that was lost."""


class ReportedSource(_Message, frozen=True, kw_only=True):
    """The state of a source on its device."""

    name: SourceName
    """Name of the source."""
    state: Annotated[str, Meta(max_length=16)]
    """starting, running, paused, finished, or waiting after a failure."""
    reason: Text = ""
    """Reason why it does not run."""


class KeptReport(_Message, frozen=True, kw_only=True):
    """The pictures that a device keeps to learn from, by its own word."""

    pictures: Count = 0
    """Number of kept pictures."""
    differs: Count = 0
    """Pictures with different superclasses in the local answer and the one from above."""
    unsure: Count = 0
    """Pictures with the same superclass, of which the local answer was unsure."""
    sure: Count = 0
    """Pictures with the same superclass, of which the local answer was sure."""
    labelled: Count = 0
    """Pictures with a label of a person."""
    bytes: Bytes = 0
    """Size of the kept pictures, in bytes."""
    size_bytes: Bytes = 0
    """Limit on `bytes`."""
    reason: Text = ""
    """Reason why no picture is kept now."""
    personal: bool = False
    """True if a personal head answers the pictures of its sources."""
    personal_reason: Text = ""
    """Reason why the newest personal head is not used."""


class DeviceStatus(_Message, frozen=True, kw_only=True):
    """The state of a device with sources when it wrote a batch."""

    sources: Annotated[tuple[ReportedSource, ...], Meta(max_length=256)] = ()
    """Sources of the device, with their states."""
    waiting_answers: Count = 0
    """Answers in its spool that neither the scheduler has nor this batch holds."""
    waiting_pictures: Count = 0
    """Pictures in its spool that wait for a better answer, or for the scheduler."""
    lost_answers: Count = 0
    """Answers that were dropped because the spool was full."""
    dropped_pictures: Count = 0
    """Pictures that were dropped because the spool was full."""
    spool_bytes: Count = 0
    """Estimate of the room that these answers and pictures take in the spool. Its file is larger: it keeps delivered
    answers until it is full."""
    spool_size_bytes: Count = 0
    """Limit on `spool_bytes`."""
    spent_bytes: Count = 0
    """Bytes sent and received in the last 24 hours."""
    bytes_per_day: Count | None = None
    """The budget for that; None without one."""
    kept: KeptReport | None = None
    """Pictures kept to learn from; None if the device keeps none."""


class ObservationBatch(_Message, frozen=True, kw_only=True):
    """POST /v1/observations: some observations of one node, in the order of their sequence numbers for each source, or
    none if only the state of a source has changed. It may be sent again. Answered by a `Receipt`."""

    node_id: Named
    """Id of the node that sends the batch."""
    incarnation: Annotated[str, Meta(min_length=8, max_length=64)]
    """Incarnation of the node's process."""
    spool: SpoolId
    """Names the spool that numbered them."""
    observations: Annotated[tuple[Observation, ...], Meta(max_length=MAX_BATCH)] = ()
    """New and amended observations."""
    gaps: Annotated[tuple[Gap, ...], Meta(max_length=MAX_BATCH)] = ()
    """Observations that the device has lost."""
    device: DeviceStatus | None = None
    """State of the device; None in batches of an older Terrace."""


class Behind(_Message, frozen=True, kw_only=True):
    """The point at which the numbers of a source go back. The device gives its observations from `first` on new
    numbers, above `highest`, and sends them again."""

    first: SequenceNumber
    """The lowest number that the scheduler has for another picture. From there on nothing was stored."""
    highest: Annotated[int, Meta(ge=0, le=2**53)]
    """The highest number that it has."""


class Receipt(_Message, frozen=True, kw_only=True):
    """The scheduler has stored the batch, and will not lose it."""

    stored: Count
    """Observations that are new, or a higher revision."""
    known: Count
    """Observations that it had already."""
    behind: dict[str, Behind] = {}
    """Sources whose numbers go back: another spool has numbered them, or a copy of this one."""


def _reader(kind: Any) -> Callable[[bytes], Any]:
    decode = msgspec.json.Decoder(kind).decode

    def read(body: bytes) -> Any:
        try:
            return decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            raise ValueError(str(exc)) from exc

    return read


read_batch: Callable[[bytes], ObservationBatch] = _reader(ObservationBatch)
"""Reads a batch. Raises ValueError for anything else."""

read_receipt: Callable[[bytes], Receipt] = _reader(Receipt)
"""Reads a receipt. Raises ValueError for anything else."""

write_batch: Callable[[ObservationBatch], bytes] = msgspec.json.Encoder().encode
"""Writes a batch as JSON."""
