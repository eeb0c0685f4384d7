"""Events and effects: the input and output of `attempt_state`.

Times are those of the scheduler's monotonic clock; an effect happens at the time of its event. Import the module, not
the names: `events.LineCame`.
"""

from __future__ import annotations

from typing import NamedTuple

from scheduler.core.job import Answer
from scheduler.core.work import ActiveJob, ActiveTask, Attempt
from tierkit.wire.events import FallbackReason, TaskEvent

# --- events: what has happened ---------------------------------------------------------------------------------------


class Acknowledged(NamedTuple):
    """The device is there (recovery `reassign`)."""

    attempt: Attempt
    now: float


class LineCame(NamedTuple):
    """A line of the answer, checked."""

    attempt: Attempt
    event: TaskEvent
    line: str
    now: float


class TimeUp(NamedTuple):
    """`Attempt.until` has passed: the time for the coarse answer, or the deadline."""

    attempt: Attempt
    now: float


class Ended(NamedTuple):
    """The answer stream has ended, or `error` ended it."""

    attempt: Attempt
    error: Exception | None
    now: float


class NodeChanged(NamedTuple):
    """The device list thinks differently of a node, or has struck it off."""

    node_id: str
    now: float


class Move(NamedTuple):
    """The fine stage shall go to another upstream node, since this one has become slow."""

    attempt: Attempt
    why: str
    now: float


class JobEnded(NamedTuple):
    """The job is ending: what is under way for it stops."""

    job: ActiveJob
    now: float


class GiveUp(NamedTuple):
    """No further answer to this task will come."""

    job: ActiveJob
    task: ActiveTask
    reason: FallbackReason
    detail: str
    now: float


class NoUpstream(NamedTuple):
    """There is no upstream node for a task that lacks only its fine answer."""

    job: ActiveJob
    task: ActiveTask
    now: float


Event = Acknowledged | LineCame | TimeUp | Ended | NodeChanged | Move | JobEnded | GiveUp | NoUpstream


# --- effects: what shall be done -------------------------------------------------------------------------------------


class WaitUntil(NamedTuple):
    """Wait for the attempt's next line until then, and no longer."""

    attempt: Attempt
    at: float


class Released(NamedTuple):
    """The device owes nothing more for this attempt."""

    attempt: Attempt
    answered: bool


class Finished(NamedTuple):
    """The attempt is over: its connection closes, which its device and the upstream node notice, and its device has a
    place again."""

    attempt: Attempt


class Report(NamedTuple):
    """Keep the attempt's row; in the same step as the task's final answer, so that both or none are kept."""

    attempt: Attempt
    outcome: str
    reason: str


class Deliver(NamedTuple):
    """Hand an answer to the job's recipient."""

    job: ActiveJob
    answer: Answer


class TakeBack(NamedTuple):
    """A coarse answer that was delivered does not count."""

    job: ActiveJob
    answer: Answer


class Closed(NamedTuple):
    """The task has its final answer."""

    job: ActiveJob
    task: ActiveTask
    outcome: str


class FailJob(NamedTuple):
    """End the job as failed."""

    job: ActiveJob
    reason: str


class Learn(NamedTuple):
    """What an answer says of the speed of nodes and links."""

    attempt: Attempt
    event: TaskEvent


class Accused(NamedTuple):
    """A node could not be reached."""

    node_id: str
    incarnation: str
    reason: str


class AnsweredWrongly(NamedTuple):
    """A node gave a wrong answer, or none in time. `counts`: False where the task may be to blame as well."""

    node_id: str
    incarnation: str
    reason: str
    counts: bool


class AnsweredRightly(NamedTuple):
    """A node gave a right answer."""

    node_id: str
    incarnation: str


class Pardoned(NamedTuple):
    """One wrong answer of a node was its task's fault as much."""

    node_id: str
    incarnation: str


class SetAside(NamedTuple):
    """A node said "not now": give it no new task before `until`."""

    node_id: str
    incarnation: str
    until: float


Effect = (
    WaitUntil
    | Released
    | Finished
    | Report
    | Deliver
    | TakeBack
    | Closed
    | FailJob
    | Learn
    | Accused
    | AnsweredWrongly
    | AnsweredRightly
    | Pardoned
    | SetAside
)
