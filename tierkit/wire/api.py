"""Answers of the job API: the scheduler writes these values as JSON, and the client reads them.

A client may be older or newer than its scheduler. So unknown fields are ignored here (the services among themselves
refuse them, see `tierkit.wire.messages`), and fields that came later have a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, computed_field

from tierkit.errors import InvalidAnswer
from tierkit.types import Health, JobState, Privacy, Scheme, Share, SiteHealth, Tier

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
    "PictureAnswers",
    "Sent",
    "SentShare",
    "SiteChange",
    "SiteList",
    "SiteNow",
    "StateChange",
    "TaskResults",
    "parse",
]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, defer_build=True)


class Sent(_Value):
    """Form in which the images of a task went to an upstream node, and its cost."""

    form: str
    """`pixels`, or the kind of encoder: `conv1` or `bottleneck`."""
    upload_bytes: int
    """Bytes of the request to the upstream node."""
    encode_ms: float = 0.0
    """Milliseconds that the encoder's head took for these images."""
    encoded_by: str | None = None
    """The node that encoded; None for pixels."""
    relay_bytes: int = 0
    """Bytes to that node, where it is not the end device itself."""


class CoarseAnswer(_Value):
    """The superclass of one picture, from the end device."""

    index: int
    """Index of the superclass, from 0."""
    label: str
    """Name of the superclass."""
    confidence: float
    """Probability of the superclass, 0 to 1."""
    node: str
    """Id of the end device that answered."""
    model: str = ""
    """Name of the network that answered."""
    sha256: str = ""
    """sha256 of that network; "" in results of an older Terrace."""
    ms: float | None = None
    """From the dispatch of the picture's task to the moment this answer reached the scheduler; None in observations."""


class FineAnswer(_Value):
    """The class of one picture, from an edge or cloud node, and the superclass its probabilities add up to."""

    index: int
    """Index of the class, from 0."""
    label: str
    """Name of the class."""
    confidence: float
    """Probability of the class, 0 to 1."""
    coarse_index: int
    """Index of the superclass, from 0."""
    coarse_label: str
    """Name of the superclass."""
    coarse_confidence: float | None = None
    """Confidence in that superclass; None in results of an older Terrace."""
    node: str
    """Id of the node that answered."""
    tier: Tier
    """Tier of that node: `edge` or `cloud`."""
    model: str = ""
    """Name of the network that answered."""
    sha256: str = ""
    """sha256 of that network, or of the encoder's tail if that answered; "" in results of an older Terrace."""
    ms: float | None = None
    """From the dispatch of the picture's task to the moment this answer reached the scheduler; None in observations."""
    sent: Sent | None = None
    """The form in which the picture went up, and what that cost; None if other images of its task went with it."""


class PictureAnswers(_Value):
    """The answers to one picture: what an image result of a job and an observation of a source have in common."""

    name: str | None = None
    """File name, where there is one."""
    site: str | None = None
    """Site of the device that gave the coarse answer; None: no site."""
    coarse: CoarseAnswer | None = None
    """Answer of the end device; None before it comes."""
    fine: FineAnswer | None = None
    """Answer of an upstream node; None before it comes, or if none was asked."""
    answered_by: Tier | None = None
    """The tier of the final answer; None while that is open, and if there is none."""
    fallback: str | None = None
    """Reason why the coarse (or a lower tier's) answer is final instead of a finer one."""
    damaged: str | None = None
    """Fault of the file. It then has no answer, or one from the part that can be decoded (on_bad_input=answer)."""

    @computed_field  # type: ignore[prop-decorator]  # as pydantic's documentation has it
    @property
    def label(self) -> str | None:
        """Name of the class or superclass of the final answer, or of the finest so far."""
        answer = self.fine or self.coarse
        return answer.label if answer else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def confidence(self) -> float | None:
        """Confidence of that answer."""
        answer = self.fine or self.coarse
        return answer.confidence if answer else None


class ImageResult(PictureAnswers):
    """All that is known of one image of a job."""

    index: int
    """Position in the upload, from 0."""
    not_escalated: bool = False
    """True if its answer is final because it was sure: the image was not sent further up."""
    error: str | None = None
    """Reason why there is no answer."""
    resized_from: tuple[int, int] | None = None
    """Height and width as sent, where they were not the networks' own."""
    true_fine: str | None = None
    """Class from the labels of the submission; None without a label."""
    true_coarse: str | None = None
    """Superclass of `true_fine`; None without a label."""
    request_id: str | None = None
    """Names this image in the logs of all services."""
    trace_id: str | None = None
    """Id of the trace that its job belongs to."""


class NodeShare(_Value):
    """Number of a job's images that one node answered."""

    tier: Tier
    """Tier of the node."""
    coarse_images: int = 0
    """Images with a coarse answer from this node."""
    fine_images: int = 0
    """Images with a fine answer from this node."""


class SentShare(_Value):
    """Data sent to upstream nodes in one form; only answered requests count."""

    tasks: int
    """Answers of upstream nodes; one per task and tier."""
    upload_bytes: int
    """Bodies of the requests to the upstream nodes."""
    relay_tasks: int = 0
    """Answers for which an edge node encoded."""
    relay_bytes: int = 0
    """Bodies of the requests to edge nodes that encoded."""
    encode_ms: float = 0.0
    """Spent on encoding."""


class DamagedImage(_Value):
    """An image that cannot be read."""

    index: int
    """Position in the upload, from 0."""
    name: str | None = None
    """File name, where there is one."""
    reason: str
    """Fault of the file, in words."""


class Job(_Value):
    """A job as the scheduler last reported it. Without labels, accuracies are null; before an answer, latencies are
    null. The latency of an image counts from the dispatch of its task to the moment the answer reached the scheduler.
    """

    id: str
    """Id of the job: 20 hex digits, in the order of submission."""
    name: str | None = None
    """Name for people, given at the submission; None without one."""
    owner: str | None = None
    """Name of the token that submitted it; None if none was asked for."""
    site: str | None = None
    """The site where it runs; None: anywhere."""
    release: str | None = None
    """NAME@NUMBER of the release whose networks answer it; None in jobs of an older Terrace."""
    state: JobState
    """State of the job; `completed`, `failed` and `cancelled` are final."""
    reason: str = ""
    """Reason why it waits, failed or misses answers; "" when all is well."""
    scheme: Scheme
    """Tiers that serve its tasks."""
    privacy: Privacy | None = None
    """Form in which its images may leave the end devices."""
    images: int
    """Images of the job."""
    tasks: int
    """Tasks into which the images are divided."""
    answered_coarse: int = 0
    """Images with a coarse answer so far."""
    answered_fine: int = 0
    """Images with a fine answer so far."""
    fallback: int = 0
    """Images whose coarse (or lower tier's) answer is final because no node above answered."""
    failed_images: int = 0
    """Images without any answer; of a running job, those given up so far."""
    damaged_images: int = 0
    """Unanswered images that cannot be read."""
    damaged_answered: int = 0
    """Images that are answered from what can be decoded of a damaged file."""
    damaged: tuple[DamagedImage, ...] = ()
    """The first 1000 of them."""
    sent_up: Mapping[Tier, int] = Field(default_factory=dict)
    """Images sent to a tier, where they go up one by one."""
    final_tier: Mapping[Tier, int] = Field(default_factory=dict)
    """Images by the tier of their final answer."""
    theta_cloud: float | None = None
    """The cloud's planned share in the scheme mapping: the mean of Eq. 5 at the dispatch of the tasks, over the images
    that upstream nodes have answered since the scheduler's last start. None before the first."""
    cloud_share: float | None = None
    """The share of these images that the cloud answered."""
    quarantined_images: int = 0
    """Images of tasks that no node gets any more, since three different ones died with them."""
    created_at: datetime | None = None
    """Time of the submission."""
    started_at: datetime | None = None
    """Time at which its first task was sent; None before."""
    finished_at: datetime | None = None
    """Time at which it reached its final state; None before."""
    elapsed_s: float | None = None
    """From the dispatch of the first task until now or the end."""
    images_per_s: float | None = None
    """Images answered (coarse or better) per second of elapsed_s."""
    coarse_accuracy: float | None = None
    """Accuracy of the coarse answers, 0 to 1."""
    fine_accuracy: float | None = None
    """Accuracy of the fine answers, 0 to 1."""
    coarse_from_fine_accuracy: float | None = None
    """Accuracy of the superclasses that fine answers belong to, 0 to 1."""
    final_coarse_accuracy: float | None = None
    """Accuracy of the superclasses of the final answers."""
    coarse_p50_ms: float | None = None
    """Median latency of coarse answers, in milliseconds."""
    coarse_p99_ms: float | None = None
    """99th percentile of the latency of coarse answers, in milliseconds."""
    fine_p50_ms: float | None = None
    """Median latency of fine answers, in milliseconds."""
    fine_p99_ms: float | None = None
    """99th percentile of the latency of fine answers, in milliseconds."""
    sent: Mapping[str, SentShare] = Field(default_factory=dict)
    """Data sent to upstream nodes for the answers that arrived, by its form: pixels, conv1 or bottleneck. Failed
    attempts are not counted."""
    by_node: Mapping[str, NodeShare] = Field(default_factory=dict)
    """Answered images by node."""
    mapping: Mapping[str, str] = Field(default_factory=dict)
    """Upstream node by end device, as last used."""
    resized_images: int = 0
    """Images that were resized because they do not have the networks' input size."""
    left_out: Mapping[str, int] = Field(default_factory=dict)
    """Files in archives of the upload that are not pictures, by reason; only in the answer to the submission."""
    flat: bool = False
    """True if all tiers answer the same classes. What is called coarse is then the first answer, of the end device, and
    what is called fine the one from above."""
    trace_id: str | None = None
    """Id of the trace that it belongs to; None in jobs of an older Terrace."""
    policy: Mapping[str, Any] = Field(default_factory=dict)
    """Policy fields of the job, with the values in force."""

    @property
    def done(self) -> bool:
        """True if nothing more will come."""
        return self.state.final


class JobPage(_Value):
    """One page of the list of jobs, newest first."""

    jobs: tuple[Job, ...]
    """Jobs of this page."""
    next_cursor: str | None = None
    """Value of `cursor` for the next page; None on the last one."""


class Attempt(_Value):
    """One attempt of a task of a job on an end device."""

    task: int
    """Number of the task in its job, from 0."""
    attempt: int
    """Number of the attempt, from 1, in the order in which the attempts of this task began."""
    first_image: int
    """Index of the task's first image in the upload."""
    images: int
    """Images of the attempt."""
    node: str
    """End device that was asked."""
    incarnation: str
    """Incarnation of that device: its id changes at each start of the process."""
    tier: Tier
    """Tier of that device."""
    upstream: str | None = None
    """The upstream node that the device was to ask first."""
    stage: str = "all"
    """all | fine: whether the coarse answer was known already"""
    hedge: bool = False
    """True if it was made because another attempt took too long."""
    outcome: str
    """running | ok | refused | unreachable | lost | error | fallback | rerouted | cancelled | late (jobs.md)"""
    reason: str = ""
    """Cause of the outcome; "" for `ok`."""
    started_at: datetime
    """Time at which the task was sent."""
    ended_at: datetime | None = None
    """Time of its end; None while it runs."""
    ms: float | None = None
    """Milliseconds from its start to its end."""


class AttemptPage(_Value):
    """One page of the attempts of a job, by task."""

    attempts: tuple[Attempt, ...]
    """Attempts of this page."""
    next_cursor: str | None = None
    """Value of `cursor` for the next page; None on the last one."""


class Decision(_Value):
    """Node chosen for a task, and the reason."""

    task: int
    """Number of the task in its job, from 0."""
    attempt: int
    """Number of the attempt, from 1 for each task."""
    node: str
    """End device that was chosen."""
    upstream: str | None = None
    """The upstream node that the device was to ask first."""
    why: str
    """Reason for this device and upstream node."""
    outcome: str
    """Outcome of the attempt; for the values, see `Attempt`."""
    started_at: datetime
    """Time at which the task was sent."""


class Explanation(_Value):
    """One page of the decisions of a job, by task and attempt."""

    job: str
    """Id of the job."""
    scheme: Scheme
    """Tiers that serve its tasks."""
    state: JobState
    """State of the job."""
    now: str
    """Reason why nothing of it is sent at the moment; "" while tasks go, and at the end."""
    decisions: tuple[Decision, ...]
    """Decisions of this page."""
    next_cursor: str | None = None
    """Value of `cursor` for the next page; None on the last one."""


class Device(_Value):
    """One node of the device list."""

    node_id: str
    """Id of the node."""
    tier: Tier
    """Tier of the node."""
    url: str
    """URL at which the scheduler and other nodes reach it."""
    site: str | None = None
    """The place to which it belongs; None: no site."""
    health: Health
    """Verdict of the failure detector; only `alive` nodes get new tasks."""
    reason: str = ""
    """Reason why the failure detector thinks so."""
    trusted: bool | None = None
    """True if it may see pixels, by the scheduler's own list."""
    incarnation: str = ""
    """Id of the node's process, new at each start."""
    version: str | None = None
    """Version of Terrace that it runs."""
    models: tuple[Mapping[str, Any], ...] = ()
    """Networks that it serves, each with `name`, `sha256`, `ms_per_image`, `classes` and `reading`."""
    network: str = ""
    """The model that tasks ask it for."""
    accuracy: float | None = None
    """Accuracy of that network's own answers on the images that the model set was measured on; None if unknown."""
    outstanding: int = 0
    """Tasks that the scheduler has given it."""
    in_flight: int = 0
    """Requests that it is answering."""
    queued_images: int = 0
    """Images that wait there for their batch."""
    running_images: int = 0
    """Images of the batch that it is computing."""
    images_done: int = 0
    """Images that it has answered since its start."""
    silent_s: float | None = None
    """Seconds since its last sign of life."""
    reached: bool | None = None
    """True if the scheduler has reached it by itself, at the address that it gave."""
    phi: float | None = None
    """Suspicion by silence: 8 means that one heartbeat in 10^8 comes so late."""
    joined_s: float | None = None
    """Seconds since it registered."""
    images_per_minute: int | None = None
    """Power budget in images per minute; None: no limit."""
    allowed_upstreams: tuple[str, ...] = ()
    """URLs below which a node must lie for this one to send images or features there; empty: anywhere."""
    sources: bool = False
    """True if it has sources of pictures."""
    lease_s: float | None = None
    """The long lease that it asked for: it takes no tasks. None for other nodes."""


class DeviceList(_Value):
    """Nodes that the scheduler knows."""

    devices: tuple[Device, ...]
    """Nodes of the device list."""


class SiteNow(_Value):
    """A site of the fleet as it is now."""

    site: str
    """Name of the site."""
    share: Share
    """The rule on pictures that leave it."""
    health: SiteHealth
    """Health of the site, from the health of its nodes."""
    reason: str
    """The nodes that are not well, or why nothing is wrong."""
    nodes: Mapping[Tier, int]
    """Nodes on the device list."""
    alive: Mapping[Tier, int]
    """Nodes that are alive."""
    images_per_s: float = 0.0
    """Images that its nodes answered in the last seconds."""
    n_map: int | None = None
    """End devices for each of its edge nodes (Eq. 4); None if there is none to compute it for."""
    theta_cloud: float | None = None
    """Share of its tasks for which its edge nodes have no place (Eq. 5)."""
    cloud_share: float | None = None
    """The cloud's actual share of its images in the scheme mapping since that share last changed; None before the
    first."""
    cloud_nodes: float = 0.0
    """Share of the cloud nodes that belong to no site, in nodes: in proportion to the end devices for which the
    edge nodes of the sites have no place."""


class SiteList(_Value):
    """The sites of the fleet, in order."""

    sites: tuple[SiteNow, ...]
    """Sites that the caller may see."""


class SiteChange(_Value):
    """Nodes of a site with which something was done."""

    nodes: tuple[str, ...]
    """Ids of the nodes that have changed."""


class TaskResults(_Value):
    """Answers that arrived together: the images of one task."""

    results: tuple[ImageResult, ...]
    """One result for each image of the task."""
    task: int = 0
    """Number of the task in its job, from 0."""
    first_index: int = 0
    """Index of the task's first image in the upload, from 0."""

    sent: tuple[Sent, ...] = ()
    """Data sent upstream, by tier that answered."""


class CoarseResults(TaskResults):
    """Coarse answers have arrived."""


class FineResults(TaskResults):
    """Fine answers have arrived."""


class FallbackResults(TaskResults):
    """The coarse answers of these images stand; each result says why."""


class FailedResults(TaskResults):
    """These images got no answer; each result says why."""


class StateChange(_Value):
    """The job went into another state; the last event of a stream carries the final one."""

    job: Job


Event = CoarseResults | FineResults | FallbackResults | FailedResults | StateChange

T = TypeVar("T")

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def parse(kind: type[T], data: bytes | str) -> T:
    """Read JSON into one of these classes; `InvalidAnswer` where it is not what the API promises."""
    try:
        value: T = _adapter(kind).validate_json(data)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        raise InvalidAnswer(
            f"the scheduler sent an answer that is not a {kind.__name__}: {place}: {first['msg']}"
        ) from exc
    return value
