"""The answer stream of an end node (NDJSON): what each line says, how it is written and how it is read.

These are structs of msgspec, and the other messages (`tierkit.wire.messages`) models of pydantic: events come with each
task, and msgspec reads them four times as fast. Events are checked when they are read, not when they are made. Unknown
fields are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tierkit.types import Tier
from tierkit.wire.messages import NODE_ID_PATTERN

__all__ = [
    "CoarseEvent",
    "Damage",
    "ErrorEvent",
    "FallbackEvent",
    "FallbackReason",
    "FineEvent",
    "RoutedEvent",
    "Sent",
    "StageAnswer",
    "StageLoss",
    "TaskEvent",
    "UpperTiming",
    "UpstreamAnswer",
    "WrongAnswer",
    "read_event",
    "read_sent",
    "written",
]

Name = Annotated[str, Meta(max_length=63)]
"""Name of a node that the reader knows. The reader compares it, which is faster than matching a pattern."""
Named = Annotated[str, Meta(pattern=NODE_ID_PATTERN.replace("$", r"\Z"))]
"""Name of a node that the reader need not know. Python's `$` would accept a line break at the end."""
# Bounds on all numbers and texts: sums and averages of what nodes say must be numbers as well.
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(gt=0, le=2**31 - 1)]
Bytes = Annotated[int, Meta(ge=0, le=2**50)]
Duration = Annotated[float, Meta(ge=0.0, le=1e9)]
"""Milliseconds; at most some eleven days."""
Id = Annotated[str, Meta(max_length=128)]
ModelName = Annotated[str, Meta(max_length=120)]
Detail = Annotated[str, Meta(max_length=16 * 1024)]
Digest = Annotated[str, Meta(max_length=64)]
"""sha256 of a network; it is compared with the requested sha256."""
Confidence = Annotated[float, Meta(ge=0.0, le=1.0)]


class _Message(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class _Event(_Message, frozen=True, tag_field="event"):
    @property
    def event(self) -> str:
        """Kind of the event, as the line gives it."""
        return str(self.__struct_config__.tag)


FallbackReason = Literal[
    "no_upstream",
    "forbidden",
    "upstream_unavailable",
    "upstream_timeout",
    "upstream_error",
    "deadline",
    "quarantined",
    "damaged",
]


class Damage(_Message, frozen=True, kw_only=True):
    """An image that the node could not read."""

    index: Count
    """Its position in the task."""
    reason: Annotated[str, Meta(max_length=300)]


class CoarseEvent(_Event, tag="coarse", frozen=True, kw_only=True):
    """First line of an answer: one superclass per image."""

    task_id: Id
    node_id: Name
    model: ModelName
    sha256: Digest = ""
    """sha256 of the network that answered; "" in results of an older Terrace."""
    labels: tuple[Count, ...]
    confidences: tuple[Confidence, ...]
    queue_ms: Duration
    compute_ms: Duration
    """Compute time of the whole batch."""
    batch_images: Positive | None = None
    """Images of the batch that the task was computed in; None if the node does not say."""
    unsure: tuple[Count, ...] | None = None
    """Positions of the images that go up by the first stage's threshold, rising; None if there is none."""
    damaged: tuple[Damage, ...] = ()
    """The images that have no answer, rising; their labels and confidences are 0, here and in the fine answer."""


class UpperTiming(_Message, frozen=True, kw_only=True):
    """Milliseconds that a task waited in an upstream node, and that its batch was computed there."""

    queue_ms: Duration
    compute_ms: Duration
    """Compute time of the whole batch."""
    batch_images: Positive


class Sent(_Message, frozen=True, kw_only=True):
    """Form in which images went to an upstream node, and its cost."""

    form: Annotated[str, Meta(max_length=32)]
    """`pixels`, or the kind of the encoder whose features went there."""
    upload_bytes: Bytes
    """Body of the request to that node, as it went over the wire."""
    encode_ms: Duration = 0.0
    """Time of the head for these images."""
    encoded_by: Named | None = None
    """The node that ran the head; None for pixels."""
    relay_bytes: Bytes = 0
    """Body of the request to the node that encoded, where the end node sent pixels to it."""


class WrongAnswer(_Message, frozen=True, kw_only=True):
    """An upstream node that was asked and answered with an error or with nonsense."""

    node_id: Named
    detail: Detail


class UpstreamAnswer(_Message, frozen=True, kw_only=True):
    """Answer of one upstream node: one class per image, and the superclass that its probabilities add up to."""

    node_id: Name
    tier: Tier
    model: ModelName
    sha256: Digest = ""
    """sha256 of the network that answered; "" in results of an older Terrace."""
    labels: tuple[Count, ...]
    confidences: tuple[Confidence, ...]
    coarse_labels: tuple[Count, ...]
    coarse_confidences: tuple[Confidence, ...]
    round_trip_ms: Duration
    timing: UpperTiming | None = None
    """The upstream node's share of `round_trip_ms`, as it reports it; None if it does not."""
    sent: Sent | None = None
    wrong: tuple[WrongAnswer, ...] = ()
    """Wrong answers of the nodes that were asked before it."""


class FineEvent(_Event, UpstreamAnswer, tag="fine", frozen=True, kw_only=True):
    """The finer answer of an upstream node for a whole task."""

    task_id: Id


class StageAnswer(UpstreamAnswer, frozen=True, kw_only=True):
    """The finer answer of an upstream node for some images of a task."""

    indices: Annotated[tuple[Count, ...], Meta(min_length=1)]
    """Positions in the task, rising."""


class StageLoss(_Message, frozen=True, kw_only=True):
    """Images that should have gone up to a tier of which no node answered: the answer from below is final."""

    tier: Tier
    indices: Annotated[tuple[Count, ...], Meta(min_length=1)]
    reason: FallbackReason
    detail: Detail
    tried: tuple[Named, ...]
    wrong: tuple[WrongAnswer, ...] = ()
    """Wrong answers of the nodes that were tried."""


class RoutedEvent(_Event, tag="routed", frozen=True, kw_only=True):
    """The finer answers of a task whose images went up one by one, as sure as they were.

    The answer of an image is the one of the highest tier that has it in its `indices`. Images in none of them stay with
    their coarse answer: because it was sure, or (where a loss names them) because no node of the tier answered.
    """

    task_id: Id
    answers: tuple[StageAnswer, ...]
    """Answers by tier, rising."""
    losses: tuple[StageLoss, ...]
    """Losses by tier, rising."""


class FallbackEvent(_Event, tag="fallback", frozen=True, kw_only=True):
    """Sent instead of the fine answer: the coarse answer is final. `reason` gives the cause."""

    task_id: Id
    reason: FallbackReason
    detail: Detail
    tried: tuple[Named, ...]
    wrong: tuple[WrongAnswer, ...] = ()
    """Wrong answers of the nodes that were tried."""


class ErrorEvent(_Event, tag="error", frozen=True, kw_only=True):
    """Last line when the end node itself failed after it had begun to answer."""

    task_id: Id
    error: Detail


TaskEvent = CoarseEvent | FineEvent | RoutedEvent | FallbackEvent | ErrorEvent

_write = msgspec.json.Encoder().encode


def _reader(kind: Any) -> Callable[[str], Any]:
    decode = msgspec.json.Decoder(kind).decode

    def read(line: str) -> Any:
        try:
            return decode(line)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise ValueError(str(exc)) from exc

    return read


read_event: Callable[[str], TaskEvent] = _reader(TaskEvent)
"""Reads one line of an answer stream. Raises ValueError if it is not an event."""

read_sent: Callable[[str], Sent] = _reader(Sent)
"""Reads a node's report of the data that it sent upstream. Raises ValueError if it is not one."""


def written(message: TaskEvent | Sent) -> bytes:
    """A message as JSON, in one line without its end."""
    return _write(message)
