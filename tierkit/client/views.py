"""What the job API answers, as frozen values.

A client may be older than its scheduler, so fields it does not know are ignored here (the services among themselves
refuse them, see `tierkit.wire.messages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tierkit.errors import UpstreamError
from tierkit.types import Health, Scheme, Tier

__all__ = [
    "Attempt",
    "AttemptPage",
    "CoarseAnswer",
    "CoarseResults",
    "Decision",
    "Device",
    "DeviceList",
    "Event",
    "Explanation",
    "FailedResults",
    "FallbackResults",
    "FineAnswer",
    "FineResults",
    "ImageResult",
    "Job",
    "JobPage",
    "JobState",
    "NodeShare",
    "Sent",
    "SentShare",
    "StateChange",
    "parse",
]


class JobState(StrEnum):
    """Where a job stands; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseAnswer:
    """The superclass of one image, from the end device."""

    index: int
    label: str
    confidence: float
    node: str
    ms: float
    """From the dispatch of the image's task to the moment this answer reached the scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FineAnswer:
    """The class of one image, from an edge or cloud node, and the superclass its probabilities add up to."""

    index: int
    label: str
    confidence: float
    coarse_index: int
    coarse_label: str
    node: str
    tier: Tier
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageResult:
    """All that is known of one image of a job."""

    index: int
    name: str | None = None
    coarse: CoarseAnswer | None = None
    fine: FineAnswer | None = None
    answered_by: Tier | None = None
    """The tier whose answer stands; None while that is open."""
    not_escalated: bool = False
    """Whether it stands because it was sure: the image was not sent further up."""
    fallback: str | None = None
    """Why the coarse (or a lower tier's) answer stands for a finer one."""
    error: str | None = None
    resized_from: tuple[int, int] | None = None
    """Height and width as sent, where they were not the networks' own."""
    true_fine: str | None = None
    true_coarse: str | None = None
    request_id: str | None = None

    @property
    def label(self) -> str | None:
        """The finest answer there is, as a class name."""
        answer = self.fine or self.coarse
        return answer.label if answer else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """How many of a job's images one node answered."""

    tier: Tier
    coarse_images: int = 0
    fine_images: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SentShare:
    """What went to upper nodes in one form, for the answers that came."""

    tasks: int
    """Answers of upper nodes; one per task and tier."""
    upload_bytes: int
    """Bodies of the requests to the upper nodes."""
    relay_bytes: int = 0
    """Bodies of the requests to edge nodes that encoded."""
    encode_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as the scheduler last told of it. Accuracies are None without labels, latencies None before an answer."""

    id: str
    name: str | None = None
    state: JobState
    reason: str = ""
    scheme: Scheme
    privacy: str | None = None
    images: int
    tasks: int
    answered_coarse: int = 0
    answered_fine: int = 0
    fallback: int = 0
    failed_images: int = 0
    """Images without any answer; of a running job, those given up so far."""
    sent_up: Mapping[Tier, int] = field(default_factory=dict)
    """Images sent to a tier, where they go up one by one."""
    final_tier: Mapping[Tier, int] = field(default_factory=dict)
    """Images by the tier whose answer stands."""
    quarantined_images: int = 0
    """Images of tasks that no node gets any more, since three different ones died with them."""
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    elapsed_s: float | None = None
    images_per_s: float | None = None
    coarse_accuracy: float | None = None
    fine_accuracy: float | None = None
    coarse_from_fine_accuracy: float | None = None
    final_coarse_accuracy: float | None = None
    """Of the superclasses of the answers that stand."""
    coarse_p50_ms: float | None = None
    coarse_p99_ms: float | None = None
    fine_p50_ms: float | None = None
    fine_p99_ms: float | None = None
    sent: Mapping[str, SentShare] = field(default_factory=dict)
    """By form: pixels, conv1 or bottleneck."""
    by_node: Mapping[str, NodeShare] = field(default_factory=dict)
    mapping: Mapping[str, str] = field(default_factory=dict)
    resized_images: int = 0
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.state.final


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """One page of the list of jobs, newest first."""

    jobs: tuple[Job, ...]
    next_cursor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of a task of a job on an end device."""

    task: int
    attempt: int
    """From 1, in the order in which the attempts of this task began."""
    first_image: int
    images: int
    node: str
    incarnation: str
    tier: Tier
    upstream: str | None = None
    """The upper node that the device was to ask first."""
    stage: str = "all"
    """all | fine: whether the coarse answer was known already"""
    hedge: bool = False
    outcome: str
    """running | ok | refused | unreachable | lost | error | fallback | rerouted | cancelled | late"""
    reason: str = ""
    started_at: datetime
    ended_at: datetime | None = None
    ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPage:
    """One page of the attempts of a job, by task."""

    attempts: tuple[Attempt, ...]
    next_cursor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Why a task was sent where it was."""

    task: int
    attempt: int
    node: str
    upstream: str | None = None
    """The upper node that the device was to ask first."""
    why: str
    outcome: str
    """What came of it, as in `Attempt`."""
    started_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One page of the decisions of a job, by task and attempt."""

    job: str
    scheme: Scheme
    state: str
    now: str
    """Why nothing of it is sent at the moment; "" while tasks go, and at the end."""
    decisions: tuple[Decision, ...]
    next_cursor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One node of the device list."""

    node_id: str
    tier: Tier
    url: str
    health: Health
    reason: str = ""
    """Why the failure detector thinks so."""
    trusted: bool | None = None
    version: str | None = None
    models: tuple[Mapping[str, Any], ...] = ()
    outstanding: int = 0
    """Tasks that the scheduler has given it."""
    in_flight: int = 0
    queued_images: int = 0
    images_done: int = 0
    silent_s: float | None = None
    """Seconds since its last sign of life."""
    reached: bool | None = None
    """Whether the scheduler has reached it by itself, at the address that it gave."""
    phi: float | None = None
    """Suspicion by silence."""
    images_per_minute: int | None = None
    """Its power budget; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceList:
    """All nodes that the scheduler knows."""

    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """In which form the images of a task went to an upper node, and what that cost."""

    form: str
    """`pixels`, or the kind of encoder: `conv1` or `bottleneck`."""
    upload_bytes: int
    encode_ms: float = 0.0
    encoded_by: str | None = None
    """The node that encoded; None for pixels."""
    relay_bytes: int = 0
    """Bytes to that node, where it is not the end device itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Results:
    """Answers that arrived together: the images of one task."""

    results: tuple[ImageResult, ...]
    task: int = 0
    first_index: int = 0
    sent: tuple[Sent, ...] = ()
    """Of each tier that answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseResults(_Results):
    """Coarse answers have arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FineResults(_Results):
    """Fine answers have arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackResults(_Results):
    """The coarse answers of these images stand; each result says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedResults(_Results):
    """These images got no answer; each result says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """The job went into another state; the last event of a stream carries the final one."""

    job: Job


Event = CoarseResults | FineResults | FallbackResults | FailedResults | StateChange

T = TypeVar("T")

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def parse(kind: type[T], data: bytes | str) -> T:
    """Read JSON into one of these classes; `UpstreamError` where it is not what the API promises."""
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        adapter = _ADAPTERS[kind] = TypeAdapter(kind)
    try:
        value: T = adapter.validate_json(data)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        raise UpstreamError(
            f"the scheduler sent an answer that is no {kind.__name__}: {place}: {first['msg']}"
        ) from exc
    return value
