"""Messages between host and workers. The weights and updates that go with them are in `training.payloads`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat

from models.manifest import Digest
from models.training.config import TrainConfig
from tierkit.documents import Frozen
from tierkit.errors import InvalidAnswer
from tierkit.types import WorkerStanding
from tierkit.wire.messages import NodeId, checked_url
from training.own_data import OwnData
from training.payloads import Format
from training.strategies.config import HostedConfig, Steps
from training.trust.score import FIRST
from training.units import UnitLease, Verdict, WorkUnit

__all__ = [
    "CURVES",
    "CURVES_PLOT",
    "LEASE_HEADER",
    "MOST_LOSS",
    "RESULT",
    "SPEC",
    "SPENT_ON",
    "UPDATE_HEADER",
    "VERSION_HEADER",
    "DataAnswer",
    "DataReport",
    "GrantedLease",
    "Join",
    "Keeps",
    "Progress",
    "RunSpec",
    "RunStatus",
    "Times",
    "UpdateAnswer",
    "UpdateHead",
    "WorkerData",
    "WorkerStatus",
    "known_times",
]

LEASE_HEADER = "Terrace-Lease"
"""Header of the weights that a lease starts from: a `GrantedLease` as JSON."""
UPDATE_HEADER = "Terrace-Update"
"""Header of an update: an `UpdateHead` as JSON."""
VERSION_HEADER = "Terrace-Version"
"""Header of weights: their version."""

SPEC = "run.json"
"""File in the folder of a host's run, with its specification."""
RESULT = "result.json"
"""File in the folder of a finished run, with its result."""
CURVES = "curves.json"
"""File in the folder of a host's run, with loss, accuracy, bytes and staleness."""
CURVES_PLOT = "curves.png"
"""File in the folder of a finished run, with a plot of the curves."""

_MOST_STEPS = 10**9
_MOST_VALUES = 250_000_000
"""Most values of a network that is trained for another machine: 1 GB in fp32."""
_MOST_COUNT = 2**53

MOST_LOSS = 1e6
_LONGEST_S = 1e7
"""Bounds on the loss and the times that a worker reports, because they are added up and shown to others."""

SpentOn = Annotated[str, Field(pattern=r"^[a-z]{1,16}$")]
Times = dict[SpentOn, NonNegativeFloat]
"""Seconds by what they were spent on: a word of `SPENT_ON`."""

SPENT_ON = ("load", "forward", "backward", "step", "send", "wait", "apply")


def known_times(times: Times) -> Times:
    """Remove words that are not in `SPENT_ON`. A newer worker may know more, and its update still counts."""
    return {name: times[name] for name in SPENT_ON if name in times}


Incarnation = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""Random identifier of one process of a worker, drawn when it starts."""


Keeps = Literal["own", "all"]
"""Training images that a worker fetches: its own segments, or all of them."""

SegmentNumber = Annotated[int, Field(ge=0, lt=1_024)]
LeaseNumber = Annotated[int, Field(ge=0, lt=2**63)]


class RunSpec(Frozen):
    """Description of a run: network, strategy and data. It stays the same for the whole run."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    network: TrainConfig
    choice: Annotated[str, Field(max_length=255)]
    """The strategy as it was asked for: its name, or its file's."""
    strategy: Annotated[HostedConfig, Field(discriminator="family")]
    workers: Annotated[int, Field(ge=1, le=1_000_000)]
    """Number of expected workers."""
    wire: Format
    values: Annotated[int, Field(ge=1, le=_MOST_VALUES)]
    """Number of weights of the network."""
    buffers: Annotated[int, Field(ge=0, le=_MOST_VALUES)]
    data_sha256: Annotated[str, Field(max_length=128)]
    """Digest of all training images and labels, in their order."""
    answers_sha256: Digest | None = None
    """`models.training.answers.TeacherAnswers.digest` of the teacher's answers; None for a run without a teacher."""
    lease_s: Annotated[float, Field(gt=0, le=1e9)]
    """Seconds within which a worker must show progress."""
    own: OwnData | None = None
    """The start of a run whose workers train on kept pictures; None if all train on one data set."""


class Join(Frozen):
    """A worker introduces itself."""

    name: NodeId
    incarnation: Incarnation
    data_sha256: Annotated[str, Field(max_length=128)]
    fetches: bool = False
    """True if it has no training images yet, and gets them from the run."""


class DataReport(Frozen):
    """Progress of a worker with its training images. It is sent after a change, and every few seconds."""

    worker: NodeId
    incarnation: Incarnation
    url: Annotated[str, Field(max_length=300), AfterValidator(checked_url)] | None = None
    """URL at which it passes on its segments; null if others cannot reach it."""
    keeps: Keeps
    room: Annotated[int, Field(ge=0, le=1_024)]
    """Segments that fit on its disk, those that it has among them, but not those that it is about to drop."""
    holds: Annotated[tuple[SegmentNumber, ...], Field(max_length=1_024)] = ()
    """Segments that it has as a whole."""
    got: SegmentNumber | None = None
    """The copy of this segment is whole."""
    bytes_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Speed at which it came."""
    share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Fraction of the current segment that has been copied."""
    failed: Literal["wrong", "lacks", "gone"] | None = None
    """Reason why the copy could not continue: the source sent wrong bytes, lacks a segment that it had announced, or is
    gone.
    """
    failed_segment: SegmentNumber | None = None
    failed_source: Annotated[str, Field(max_length=300), AfterValidator(checked_url)] | None = None
    """Segment and source of the failed copy: the URL of a worker, or null for the host."""
    waits: bool = True
    """True if the answer may wait until there is something to copy."""


class DataAnswer(Frozen):
    """Instructions to a worker about its training images."""

    key: Annotated[str, Field(pattern=r"^[\w-]{1,100}$")]
    """Opens the workers of this run that pass segments on, and is asked for by this one."""
    wanted: Annotated[tuple[SegmentNumber, ...], Field(max_length=1_024)]
    """Segments that it is to have. It may drop others once it has these."""
    segment: SegmentNumber | None = None
    """Segment to copy now; null for none."""
    source: Annotated[str, Field(max_length=300), AfterValidator(checked_url)] | None = None
    """URL of the worker to copy it from; null for the host."""


class WorkerData(Frozen):
    """The training images of one worker, as the host knows them."""

    name: str
    holds: tuple[int, ...]
    wanted: tuple[int, ...]
    serves: bool
    """True if others may copy from it."""
    trusted: bool
    """False once it has sent wrong bytes, or lacked what it said that it had."""
    segment: int | None
    """Segment that it is copying."""
    source: str | None
    """The worker that it copies it from; "" for the host."""
    share: float = 0.0
    """Fraction of that copy that is there, by the last report."""


class GrantedLease(Frozen, extra="ignore"):
    """A lease in the form sent to its worker. Unknown fields from a newer host are ignored."""

    number: LeaseNumber
    version: Annotated[int, Field(ge=0, le=_MOST_COUNT)]
    first: Annotated[int, Field(ge=0, le=_MOST_STEPS)]
    push: Steps
    """Steps to compute, and to push as one update."""
    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    segments: Annotated[tuple[SegmentNumber, ...], Field(max_length=1_024)] = ()
    """See `training.units.WorkUnit`."""

    @classmethod
    def of(cls, lease: UnitLease) -> GrantedLease:
        """Return the message that grants a lease."""
        unit = asdict(lease.unit)
        return cls(number=lease.number, push=unit.pop("steps"), **unit)

    @property
    def unit(self) -> WorkUnit:
        """Unit to compute."""
        return WorkUnit(steps=self.push, **self.model_dump(exclude={"number", "push"}))

    def check(self, spec: RunSpec, steps: int) -> None:
        """Check that a run of `steps` steps can grant this.

        Raises:
            InvalidAnswer: it has more steps than the strategy's period, or some beyond the end, or a segment twice; or
                a portion has segments, or batches of two passes.
        """
        if self.push > spec.strategy.period or self.first + self.push > steps:
            raise InvalidAnswer(
                f"the host has granted {self.push:,} steps from {self.first:,} on: a lease of this run has at most "
                f"{spec.strategy.period:,}, and the run {steps:,}"
            )
        if len(set(self.segments)) < len(self.segments):
            raise InvalidAnswer("the host has granted a lease that names a segment twice")
        if spec.strategy.sends == "portion":
            batches = steps // spec.network.all_epochs
            if self.segments or self.first // batches != (self.first + self.push - 1) // batches:
                raise InvalidAnswer(
                    f"the host has granted {self.push:,} batches from {self.first:,} on as a portion, which has no "
                    f"segments and only batches of one pass of {batches:,}"
                )


class Progress(Frozen):
    """A worker is still at it."""

    worker: NodeId
    incarnation: Incarnation
    shown: Annotated[int, Field(ge=0, le=_MOST_STEPS)]
    """The first step that it has not computed."""


class UpdateHead(Frozen):
    """Sender, lease and steps of an update."""

    worker: NodeId
    incarnation: Incarnation
    lease: LeaseNumber
    first: Annotated[int, Field(ge=0, le=_MOST_STEPS)]
    stop: Annotated[int, Field(ge=0, le=_MOST_STEPS)]
    loss: Annotated[float, Field(ge=-MOST_LOSS, le=MOST_LOSS)] | None
    """Mean over the steps; null where it is not finite, or larger than any that means something."""
    times: Annotated[
        dict[SpentOn, Annotated[float, Field(ge=0, le=_LONGEST_S)]], Field(max_length=16), AfterValidator(known_times)
    ] = Field(default_factory=dict)
    """Seconds spent since the worker's last update; words that are not known here are left out."""


class UpdateAnswer(Frozen):
    """Result of an update. Once it is sent, the update is on the host's disk."""

    verdict: Verdict
    version: Annotated[int, Field(ge=0, le=_MOST_COUNT)]
    """Current version of the weights."""
    finished: bool
    """True if the run has all that it needs."""
    host_s: Annotated[float, Field(ge=0, le=_LONGEST_S)] = 0.0
    """Seconds from the last byte of the update to this answer, which the link has not taken."""


class WorkerStatus(Frozen):
    """One worker of a run, as the host sees it."""

    name: str
    updates: int
    staleness: float
    """Mean number of times that the weights had changed since the version that its updates come from."""
    bytes_sent: int
    bytes_received: int
    idle_s: float
    """Seconds since it was heard last."""
    left: bool = False
    """True if it has gone."""
    score: float = FIRST
    """Similarity of its updates to the other workers' updates, from 0 to 1."""
    standing: WorkerStanding = "active"
    """Standing of the worker. Updates of paused, dropped and quarantined workers do not count."""


class RunStatus(Frozen):
    """Current state of a run."""

    id: str
    network: str
    strategy: str
    state: Literal["running", "finished", "stopped", "failed"]
    done: int
    """Steps."""
    steps: int
    version: int
    seconds: float
    loss: float | None
    """Mean of the last 100 updates."""
    accuracy: float | None
    """Last measured accuracy on the held-out images; once the run has finished, the accuracy on the test images."""
    updates: int
    bytes_sent: int
    bytes_received: int
    faults: int
    """Leases that expired, and updates that were not taken."""
    times: Times
    """Seconds of all workers together; `apply` is the host's time."""
    workers: tuple[WorkerStatus, ...]
    result: dict[str, Any] | None
    error: str | None = None
    """Why it has failed."""
    computed: bool = False
    """True if nothing is left to compute, though the result may not be there yet."""
    missing: int | None = None
    """Workers that must still be ready before the first unit is handed out; None once it was, or without waiting."""
