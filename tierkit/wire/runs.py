"""Training runs on the wire: what the host of a run tells the scheduler, and what the job API answers about runs.

What a host sends is checked strictly, and every number is bounded. Answers are read by clients of other versions, which
ignore what they do not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tierkit.types import RunState, WorkerOrder, WorkerStanding
from tierkit.wire.messages import PLAIN, Flag, Incarnation, NodeId, NodeUrl, Total

__all__ = [
    "LONGEST_INVITATION_S",
    "RUN_ID_PATTERN",
    "BegunRun",
    "CurvePoint",
    "Invitation",
    "InvitationWish",
    "Label",
    "Message",
    "Run",
    "RunMatch",
    "RunOrders",
    "RunPage",
    "RunProgress",
    "RunReport",
    "RunStart",
    "RunSummary",
    "RunWants",
    "RunWorker",
    "Value",
    "WorkerCopies",
    "WorkerOffer",
    "WorkerReport",
    "WorkerWish",
]

RUN_ID_PATTERN = "^[0-9a-f]{32}$"

_MOST_WORKERS = 1000
"""Workers in one report."""
_MOST_OBJECT_BYTES = 64 * 1024
_MOST_NESTED = 32
_LARGEST_INTEGER = 2**53


def _check_plain(value: Any, levels: int) -> None:
    """Check that every reader of JSON can read this value. Raises ValueError with the rule in words."""
    if levels < 0:
        raise ValueError(f"must not be nested more than {_MOST_NESTED} levels deep")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("must hold text without half characters") from None
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check_plain(name, levels)
            _check_plain(inner, levels - 1)
    elif isinstance(value, list):
        for inner in value:
            _check_plain(inner, levels - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must hold no NaN and no infinities")
    elif isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise ValueError("must hold no whole number beyond 2^53")


def _small_object(value: dict[str, Any]) -> dict[str, Any]:
    _check_plain(value, _MOST_NESTED)
    if (size := len(json.dumps(value))) > _MOST_OBJECT_BYTES:
        raise ValueError(f"must have at most {_MOST_OBJECT_BYTES} bytes as JSON, and has {size}")
    return value


SmallObject = Annotated[dict[str, Any], AfterValidator(_small_object)]
"""A JSON object that the scheduler keeps and does not look into."""
Label = Annotated[str, Field(min_length=1, max_length=200)]
Amount = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[str, Field(pattern="^[0-9a-f]{8}$")]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


class Message(BaseModel):
    """Base of what hosts, workers and people send."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Value(BaseModel):
    """Base of what the scheduler answers."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, defer_build=True)


class RunWants(Message):
    """The workers that a run is for."""

    workers: Annotated[int, Field(ge=0, le=1_000_000), PLAIN] | None = None
    """Number of workers; null for any number, 0 for a run of ranks, because it takes none."""
    min_gflops: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] | None = None
    """Billions of fp32 operations a second that each must do at least."""
    min_memory_bytes: Annotated[int, Field(gt=0, le=2**53), PLAIN] | None = None
    """Bytes of memory that each must have free at least."""
    kept: Flag = False
    """True if they train on pictures that they have kept themselves."""
    start_at: Annotated[int, Field(ge=1, le=1_000), PLAIN] | None = None
    """Number of ready workers before which no work is handed out; null for no waiting."""


class RunStart(Message):
    """POST /v1/runs: a host begins a run, or continues it after a restart. Answered by a `Run`."""

    id: Annotated[str, Field(pattern=RUN_ID_PATTERN)]
    """32 hex digits, chosen by the host."""
    network: Label
    """Name of the network that is trained."""
    strategy: Label
    """Name of the training strategy."""
    config: SmallObject = Field(default_factory=dict)
    """Configuration of the run for people and workers: any JSON object up to 64 KiB."""
    url: NodeUrl
    """URL at which workers reach the host."""
    more_urls: Annotated[tuple[NodeUrl, ...], Field(max_length=7)] = ()
    """Further URLs, in the order in which workers try them after `url`."""
    wants: RunWants = RunWants()
    """Workers that the run is for."""
    steps: Annotated[int, Field(ge=1, le=2**53), PLAIN]
    """Training steps of the whole run."""
    incarnation: Incarnation
    """Id of the host's process, new at each start; reports of an older one are refused."""


class WorkerCopies(Message):
    """The training images of a worker that gets them from the run, in segments. The message is short because a host may
    have a thousand such workers."""

    holds: Annotated[str, Field(max_length=100)]
    """Numbers of the segments that it has, such as "0-3, 7"; a long list is cut short."""
    has: Annotated[int, Field(ge=0, le=1024), PLAIN]
    """Number of segments that it has."""
    wants: Annotated[int, Field(ge=0, le=1024), PLAIN]
    """Number of segments that it is assigned."""
    serves: Flag
    """True if others may copy from it."""
    segment: Annotated[int, Field(ge=0, lt=1024), PLAIN] | None = None
    """Segment that it is copying."""
    source: Annotated[str, Field(max_length=63)] | None = None
    """The worker that it copies it from; "" for the host."""
    share: Share = 0.0
    """Share of that copy that has arrived."""


class WorkerReport(Message):
    """One worker, as its host sees it. Counts are totals of the run."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the worker."""
    updates: Total
    """Updates that it has sent."""
    staleness: Amount
    """Versions of the weights between those that its updates come from and those that they met, on average."""
    bytes_sent: Total
    """Bytes that the host has sent to it."""
    bytes_received: Total
    """Bytes that the host has received from it."""
    idle_s: Amount
    """Seconds since its host heard it last."""
    left: Flag = False
    """True if it has gone."""
    score: Share = 0.5
    """Similarity of its updates to those that other workers sent, from 0 to 1."""
    standing: WorkerStanding = "active"
    """Standing of the worker: the updates of a paused, dropped or quarantined worker do not count."""
    copies: WorkerCopies | None = None
    """Null for a worker that does not get its training images from the run."""


class WorkerWish(Message):
    """PUT /v1/runs/{id}/workers/{name}: what an operator wants with a worker. Answered by the `Run`."""

    order: WorkerOrder
    """pause: no work for it. drop: no work ever, under this name. trust: its updates count without a score. resume: its
    updates are judged again."""


def _different_workers(workers: Sequence[WorkerReport]) -> Sequence[WorkerReport]:
    if len({worker.name for worker in workers}) != len(workers):
        raise ValueError("must name each worker once")
    return workers


class RunReport(Message):
    """PUT /v1/runs/{id}/report, every second. Answered by `RunOrders`."""

    incarnation: Incarnation
    """Incarnation of the host; reports of an older one are refused."""
    state: Literal["running", "finished", "failed"]
    """`finished` or `failed` in the last report, `running` before."""
    done: Total
    """Steps whose updates are in the weights."""
    version: Total
    """Version of the weights."""
    loss: Finite | None = None
    """Mean training loss since the report before; null if nothing was measured."""
    accuracy: Share | None = None
    """Accuracy on the test images, 0 to 1; null if nothing was measured since the report before."""
    missing: Annotated[int, Field(ge=0, le=1_000), PLAIN] | None = None
    """Workers that must still be ready before the first work is handed out; null once it was."""
    tickets: Annotated[tuple[TokenId, ...], Field(max_length=_MOST_WORKERS)] = ()
    """Ids of the tokens whose tickets were shown to it."""
    workers: Annotated[
        tuple[WorkerReport, ...], Field(max_length=_MOST_WORKERS), AfterValidator(_different_workers)
    ] = ()
    """Workers of the run, each once."""
    result: SmallObject | None = None
    """Result in the last report: any JSON object of at most 64 KiB."""
    error: Annotated[str, Field(max_length=2000)] | None = None
    """Reason why it failed."""


class RunOrders(Value):
    """Orders for the host of a run."""

    stop: bool
    """End the run, and say so in a last report."""
    coming: tuple[str, ...] = ()
    """Workers that were sent to this host in the last minute."""
    workers: Mapping[str, WorkerOrder] = Field(default_factory=dict)
    """Orders of operators for some of its workers; repeated until a report shows that they are carried out."""
    revoked: tuple[str, ...] = ()
    """The `tickets` in the report whose tokens are not valid any more."""


class WorkerOffer(Message):
    """POST /v1/matches: a worker asks for a run. Answered by a `RunMatch`."""

    name: NodeId
    """Name of the worker in the run; with a token, one that the token allows."""
    run: Annotated[str, Field(pattern=RUN_ID_PATTERN)] | None = None
    """The run that it chooses; null for the oldest that still wants workers."""
    gflops: Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)] | None = None
    """Billions of fp32 operations a second, as it has measured."""
    memory_bytes: Annotated[int, Field(ge=0, le=2**53), PLAIN] | None = None
    """Free memory in bytes."""
    kept: Flag = False
    """True if it has kept pictures and trains on these only."""


LONGEST_INVITATION_S = 366 * 86_400


class InvitationWish(Message):
    """POST /v1/runs/{id}/invitations. Answered by an `Invitation`."""

    uses: Annotated[int, Field(ge=1, le=1_000), PLAIN] = 1
    """Number of names under which workers may come with it."""
    expires_s: Annotated[float, Field(strict=True, gt=0, le=LONGEST_INVITATION_S)] = 604_800.0
    """Validity in seconds, at most 366 days."""


class Invitation(Value):
    """A token of workers for one run; it is shown only once."""

    name: NodeId
    """Name of the token; the names of its workers begin with it and "-"."""
    token: str = Field(pattern="^[A-Za-z0-9._~-]{16,512}$", repr=False)
    """The token itself; the scheduler keeps only its hash."""
    run: str
    """Id of the run."""
    uses: int
    """Number of names under which workers may come with it."""
    expires: datetime
    """Time until which it is valid."""


class RunMatch(Value):
    """The run that a worker is sent to. From then on it talks only to the host."""

    run: Annotated[str, Field(pattern=RUN_ID_PATTERN)]
    """Id of the run."""
    network: str
    """Name of the network that is trained."""
    strategy: str
    """Name of the training strategy."""
    urls: Annotated[tuple[NodeUrl, ...], Field(min_length=1)]
    """URLs of the host, to be tried in this order."""
    config: Mapping[str, Any] = Field(default_factory=dict)
    """Configuration of the run, from its host."""
    ticket: str = Field("", pattern="^[!-~]{0,512}$", repr=False)
    """Ticket that the worker shows to the host in the header Terrace-Ticket. It is good for this run and this name; ""
    if no token was asked for."""
    ticket_s: float = 0.0
    """Seconds for which it is valid."""


class RunWorker(Value):
    """One worker of a run, as its host last reported it; counts are totals of the run."""

    name: str
    """Name of the worker."""
    updates: int
    """Updates that it has sent."""
    staleness: float
    """Versions of the weights between those that its updates come from and those that they met, on average."""
    bytes_sent: int
    """Bytes that the host has sent to it."""
    bytes_received: int
    """Bytes that the host has received from it."""
    idle_s: float
    """Seconds since its host heard it last."""
    left: bool = False
    """True if it has gone; what it did stays."""
    score: float = 0.5
    """Similarity of its updates to those that other workers sent, from 0 to 1."""
    standing: WorkerStanding = "active"
    """Standing of the worker: the updates of a paused, dropped or quarantined worker do not count."""
    wish: WorkerOrder | None = None
    """An operator's order for it, until its host has reported that it is carried out."""
    copies: WorkerCopies | None = None
    """Null for a worker that does not get its training images from the run."""


class CurvePoint(Value):
    """Loss and accuracy at a moment of the run; null if the host has not measured since the point before. Counts are
    totals of its workers; null if the report had no workers."""

    at: datetime
    """Time of the report."""
    done: int
    """Steps whose updates are in the weights."""
    loss: float | None = None
    """Mean training loss."""
    accuracy: float | None = None
    """Accuracy on the test images, 0 to 1."""
    updates: int | None = None
    """Updates of all workers so far."""
    bytes_moved: int | None = None
    """Bytes of updates and weights."""
    staleness: float | None = None
    """Mean over the updates."""


class RunSummary(Value):
    """A training run as the list shows it."""

    id: str
    """Id of the run, 32 hex digits."""
    owner: str | None = None
    """Name of the token of its host; None if none was asked for."""
    network: str
    """Name of the network that is trained."""
    strategy: str
    """Name of the training strategy."""
    state: RunState
    """State of the run; `stopped`, `finished` and `failed` are final. `interrupted`: its host was silent for 10 s.
    `stopping`: it was asked to stop, and its host has not reported the end yet."""
    reason: str = ""
    """Reason why it is interrupted, has stopped or failed; "" when all is well."""
    steps: int
    """Training steps of the whole run."""
    done: int = 0
    """Steps whose updates are in the weights."""
    version: int = 0
    """Version of the weights."""
    loss: float | None = None
    """Latest training loss that the host reported; None before the first."""
    accuracy: float | None = None
    """Latest accuracy on the test images, 0 to 1; None before the first."""
    worker_count: int = 0
    """Workers in the last report that have not left, and are not dropped or quarantined."""
    missing: int | None = None
    """Workers that must still be ready before the first work is handed out; null once it was."""
    created_at: datetime
    """Time at which the run began."""
    heard_at: datetime
    """Time of the host's last report; for a run under way, accurate to some seconds after a change of the scheduler."""
    finished_at: datetime | None = None
    """Time at which it reached its final state; None before."""


class RunProgress(RunSummary):
    """A run with its workers: what the event `report` carries."""

    workers: tuple[RunWorker, ...] = ()
    """Workers in the last report."""
    point: CurvePoint | None = None
    """Measurement in the latest report; null if it has none."""


class Run(RunProgress):
    """A training run with its workers, configuration, curve and result."""

    url: str
    """URL at which workers reach its host."""
    more_urls: tuple[str, ...] = ()
    """Further URLs of its host."""
    wants: RunWants = RunWants()
    """Workers that the run is for."""
    config: Mapping[str, Any] = Field(default_factory=dict)
    """Configuration of the run, from its host; the scheduler does not interpret it."""
    curve: tuple[CurvePoint, ...] = ()
    """Loss and accuracy over time, in up to 500 points; a long run keeps fewer of the early ones."""
    result: Mapping[str, Any] | None = None
    """Result in the host's last report."""


class BegunRun(Run):
    """A run as only its host sees it."""

    secret: str | None = Field(None, repr=False)
    """Secret by which the host verifies the tickets of its workers; null if the scheduler asks for no tokens."""


class RunPage(Value):
    """One page of the list of runs, newest first."""

    runs: tuple[RunSummary, ...]
    """Runs of this page."""
    next_cursor: str | None = None
    """Value of `cursor` for the next page; None on the last one."""
