"""Events and effects: the input and the output of `step`.

They carry ids and values that never change, so that events can be kept and taken again. Times come from the
scheduler's monotonic clock; an effect happens at the time of its event. Import the module, not the names:
`events.LineCame`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct

from scheduler.core.device import Intent, KnownNode
from scheduler.core.fleet import Change
from scheduler.core.health import Probe
from scheduler.core.job import Answer, AttemptReport
from scheduler.core.policy import JobPolicy
from scheduler.core.work import AttemptFacts, JobFacts, TaskFacts
from tierkit.types import Tier
from tierkit.wire.events import CoarseEvent, FallbackEvent, RoutedEvent, TaskEvent
from tierkit.wire.messages import Heartbeat, Registration


class What(Struct, frozen=True):
    """Base of all events."""


class Effect(Struct, frozen=True):
    """Base of all effects."""


# --- events of nodes --------------------------------------------------------------------------------------------------


class Restored(What, frozen=True):
    """The nodes that the scheduler before this one knew. Comes once, first."""

    nodes: Sequence[KnownNode]
    sites: Mapping[str, Intent] = MappingProxyType({})
    """Operator's intent for each known site."""


class Registered(What, frozen=True):
    """A node asks for a place on the device list."""

    registration: Registration


class Beat(What, frozen=True):
    """A heartbeat has come."""

    node_id: str
    beat: Heartbeat


class Heard(What, frozen=True):
    """A node has sent observations."""

    node_id: str
    incarnation: str


class Probed(What, frozen=True):
    """A probe that began then has ended."""

    node_id: str
    incarnation: str
    outcome: Probe
    began: float


class Unwatched(What, frozen=True):
    """An error of ours keeps the scheduler from watching a node."""

    node_id: str
    incarnation: str
    error: str


class TurnedAway(What, frozen=True):
    """A node was refused a place, or a heartbeat. See `Ledger.refused`."""

    node_id: str
    why: str
    claim: Registration | None = None
    tier: Tier | None = None


class Barred(What, frozen=True):
    """These networks of a node get no work; the reasons stand next to their sha256."""

    node_id: str
    incarnation: str
    networks: Mapping[str, str]


class Intended(What, frozen=True):
    """An operator wants something else with a node."""

    node_id: str
    intent: Intent


class TookLeave(What, frozen=True):
    """The process of a node takes its leave."""

    node_id: str
    incarnation: str


class Forgotten(What, frozen=True):
    """An operator strikes a node off the list."""

    node_id: str


class SiteIntended(What, frozen=True):
    """An operator wants something else with a whole site, and with the nodes that will register for it."""

    site: str
    intent: Intent


class SiteForgotten(What, frozen=True):
    """An operator strikes a site off the list."""

    site: str


class Swept(What, frozen=True):
    """Time has passed: all nodes are judged again. Comes several times a second."""


# --- events of jobs ---------------------------------------------------------------------------------------------------


class JobAdded(What, frozen=True):
    """A job is taken up, with its tasks that have no final answer."""

    job: JobFacts
    tasks: Sequence[TaskFacts]
    answered: bool = False
    """True if one of its tasks has an answer already."""


class JobDue(What, frozen=True):
    """A job may have come to its end, its deadline or the end of a task's wait.

    `has_upstream`: whether there is an upstream node for it now.
    """

    job_id: str
    has_upstream: bool


class JobStopped(What, frozen=True):
    """A user or an error ends a job in a state."""

    job_id: str
    state: str
    reason: str


class JobGone(What, frozen=True):
    """The end of a job has been taken by its recipient."""

    job_id: str


# --- events of attempts -----------------------------------------------------------------------------------------------


class AttemptBegun(What, frozen=True):
    """It was decided to make an attempt now. A hedge costs a token of the retry budget."""

    attempt: AttemptFacts


class JobMoved(What, frozen=True):
    """A job without answers belongs to another release from now on."""

    job_id: str
    policy: JobPolicy


class NotSent(What, frozen=True):
    """It was the turn of a task that lacks only its fine answer, and no upstream node is asked."""

    job_id: str
    task: int
    too_late: bool


class Acknowledged(What, frozen=True):
    """The device is there (recovery `reassign`)."""

    attempt: int


class LineCame(What, frozen=True):
    """A line of the answer, checked."""

    attempt: int
    event: TaskEvent
    line: str


class TimeUp(What, frozen=True):
    """`Attempt.until` has passed: the time for the coarse answer, or the deadline."""

    attempt: int


class Ended(What, frozen=True):
    """The answer stream has ended, or a failure ended it."""

    attempt: int
    failure: Failure | None = None


class Move(What, frozen=True):
    """The upstream node has become slow: the fine stage goes to another one."""

    attempt: int
    why: str


class LookedUp(What, frozen=True):
    """The answer to `LookUp`."""

    attempt: AttemptFacts
    report: FallbackEvent | RoutedEvent
    line: str
    found: bool


class FailureKind(StrEnum):
    """Kinds of failures that end an answer stream."""

    BUSY = "busy"
    """The device said "not now" (503)."""
    UNREACHABLE = "unreachable"
    """The connection was refused, or broke."""
    REFUSED = "refused"
    """The device answered with an error status: it may be the route that it refuses."""
    INVALID = "invalid"
    """The answer contradicts itself or the question: nothing of it is believed."""
    LATE = "late"
    """The device says that the time was not enough."""
    WRONG = "wrong"
    """Any other fault of the device."""
    OURS = "ours"
    """A fault of the scheduler."""


class Failure(Struct, frozen=True):
    """A failure that ended an answer stream."""

    kind: FailureKind
    reason: str
    retry_after_s: float = 0.0
    may_have_held: bool = False
    """The device may have had the task when the connection broke."""


MAY_BE_REFUSED = (Registered, Beat, Heard, Intended, TookLeave, Forgotten, SiteIntended, SiteForgotten)
"""Events for which `step` may raise a `TerraceError`."""


class Event(Struct, frozen=True):
    """Something has happened."""

    what: What
    now: float
    jitter: float
    """Evenly distributed in [0, 1): the only chance there is in what follows."""


# --- effects -------------------------------------------------------------------------------------


class Dispatch(Effect, frozen=True):
    """Send the task to the device, and wait for its answer."""

    attempt: AttemptFacts
    acknowledge: bool
    """Ask first whether it is there."""
    until: float
    """Give it up then; `WaitUntil` may change it."""


class WaitUntil(Effect, frozen=True):
    """Wait for the attempt's next line until then, and no longer."""

    attempt: int
    at: float


class Finished(Effect, frozen=True):
    """The attempt is over: its connection closes, which its device and the upstream node notice."""

    attempt: AttemptFacts


class Report(Effect, frozen=True):
    """Keep the attempt's row; in the same step as the task's final answer, so that both or none are kept."""

    attempt: AttemptFacts
    report: AttemptReport


class Deliver(Effect, frozen=True):
    """Hand an answer to the job's recipient."""

    answer: Answer


class TakeBack(Effect, frozen=True):
    """A coarse answer that was delivered does not count."""

    answer: Answer


class TaskClosed(Effect, frozen=True):
    """A task has its final answer."""

    job_id: str
    task: int
    outcome: str
    ms: float


class JobStarted(Effect, frozen=True):
    """The first task of a job is on its way."""

    job_id: str


class JobBelongs(Effect, frozen=True):
    """A job belongs to another release now."""

    facts: JobFacts


class JobEnds(Effect, frozen=True):
    """Nothing more comes of a job: its recipient concludes. `state` None: as the answers say."""

    job_id: str
    state: str | None
    reason: str


class Learn(Effect, frozen=True):
    """An answer tells the speed of nodes and links, and whether tiers agree."""

    attempt: AttemptFacts
    event: TaskEvent
    coarse: CoarseEvent | None = None
    """The coarse answer that its task had, if this scheduler has it."""


class LookUp(Effect, frozen=True):
    """See whether there is a node now that could give what this report lacks, and say so: `LookedUp`."""

    attempt: AttemptFacts
    report: FallbackEvent | RoutedEvent
    line: str


class NodeChanged(Effect, frozen=True):
    """A node has another health, is new on the list, or is off it."""

    change: Change


class LookAgain(Effect, frozen=True):
    """Look at all jobs at this time."""

    at: float
