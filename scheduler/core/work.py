"""Jobs under way in the dispatcher's memory: tasks (ready, delayed, held, closed), attempts, and a retry budget."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from scheduler.core.device import Device
from scheduler.core.job import Answer, AttemptReport, JobImages
from scheduler.core.policy import JobPolicy, PrivacyRules
from tierkit.pacing import TokenBucket
from tierkit.spans import Span
from tierkit.types import Recovery, Scheme, Tier
from tierkit.wire.events import CoarseEvent, FallbackEvent, RoutedEvent, TaskEvent
from tierkit.wire.messages import Stage, Upstream
from tierkit.wire.trace import Trace, new_trace

__all__ = [
    "ActiveJob",
    "ActiveTask",
    "Attempt",
    "Phase",
    "Recipient",
    "elapsed_ms",
    "is_suspect",
]

_LOOK_AHEAD = 64
"""Ready tasks among which one is looked for that may go before one that waits for another device."""
_SUSPECT_NODES = 2
"""A task that this many nodes died with is a suspect. The suspects of a job go one at a time: an innocent
task is answered then, and only the poison task can lose its third node."""


class Recipient(Protocol):
    """A receiver of a job's answers: the database for a job, the waiting client for an interactive request."""

    def started(self) -> None:
        """The first task is on its way."""

    def answer(self, answer: Answer) -> None:
        """Called once per stage of a task, or once more after `withdrawn`. Never waits: `Dispatcher` sends no new tasks
        while too much is unwritten."""

    def withdrawn(self, answer: Answer) -> None:
        """A coarse answer that was given does not count: what it was a part of has turned out to be invalid. Another
        one may follow. Never waits."""

    def attempted(self, report: AttemptReport) -> None:
        """An attempt has ended. Never waits."""

    async def ended(self, state: str | None, reason: str) -> None:
        """Nothing more will come. `state` None: as the answers say. Returns when that is durable."""


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveTask:
    """One task that has no final answer yet."""

    index: int
    first_image: int
    images: int
    attempts: int = 0
    """Made so far, those under way included."""
    running: list[Attempt] = field(default_factory=list)
    """Those under way; more than one when a straggler has been hedged."""
    moves: int = 0
    """Number of times it was taken from an upstream node that had become slow."""
    failed_attempts: int = 0
    trials: int = 0
    """Further failed attempts, each the trial of a device whose last answer, to another task, was wrong."""
    errors: int = 0
    """Failed attempts that are the device's own fault: it answered nonsense, or not in time."""
    wrong: dict[str, str] = field(default_factory=dict)
    """End devices that answered it wrongly, with their incarnations."""
    wrong_above: dict[str, str] = field(default_factory=dict)
    """The same for upstream nodes."""
    tried: set[str] = field(default_factory=set)
    """Nodes of any tier with which an attempt of this task failed: it goes to others, while there are any."""
    deaths: set[str] = field(default_factory=set)
    """Nodes that died with it at its present stage."""
    started: float | None = None
    """When it was sent for the first time."""
    not_before: float = 0.0
    upstream_waits: int = 0
    """Number of times it came back without the fine answer that its job waits for."""
    refused: str = ""
    """Reason why end devices refused it until its attempts were used up: it now asks only for the coarse answer. Else
    ""."""
    has_coarse: bool = False
    coarse: Answer | None = None
    """The coarse answer, as long as it may have to be withdrawn."""
    unsure: tuple[int, ...] | None = None
    """Positions of the images of which the coarse answer is unsure; None where no threshold was asked for."""
    damaged: frozenset[int] = frozenset()
    """Positions of the images that cannot be read, by the coarse answer."""
    partial: tuple[RoutedEvent, str] | None = None
    """Finer answers so far of a task whose images go up one by one, with their line; final if no more arrive."""
    closed: bool = False

    def knows(self, event: CoarseEvent) -> None:
        """The coarse answer is known."""
        self.has_coarse, self.unsure = True, event.unsure
        self.damaged = frozenset(damage.index for damage in event.damaged)

    def __lt__(self, other: ActiveTask) -> bool:
        return (self.not_before, self.index) < (other.not_before, other.index)


class ActiveJob:
    """A job that is not final, with its tasks without a final answer.

    Args:
        images: of the whole job.
        content: their digest.
        tasks: those without a final answer, in order.
        deadline: monotonic time at which the job ends, complete or not.
        interactive: whether a user waits for the answer right now.
        request_id: of the caller, where there is one task for it.
        trace: of the job; default: a new one.
        created_at: seconds since 1970; default: now.
    """

    def __init__(
        self,
        *,
        job_id: str,
        policy: JobPolicy,
        images: JobImages,
        content: str,
        tasks: Iterable[ActiveTask],
        recipient: Recipient,
        deadline: float,
        interactive: bool = False,
        request_id: str | None = None,
        trace: Trace | None = None,
        created_at: float | None = None,
    ) -> None:
        self.job_id = job_id
        self.policy = policy
        self.privacy = PrivacyRules.of(policy)
        self.images = images
        self.content = content
        self.recipient = recipient
        self.deadline = deadline
        self.interactive = interactive
        self.keeps_window = not (
            interactive or policy.scheme is Scheme.ADAPTIVE or policy.recovery is Recovery.REASSIGN
        )
        """True if its tasks go only to end devices that are alive and have room in their window."""
        self.ready = deque(tasks)
        self.delayed: list[ActiveTask] = []
        """A heap by `not_before`."""
        self.held: list[ActiveTask] = []
        """Their delay is over, but they wait for an upstream node, or for their turn as suspects."""
        self.retries = TokenBucket(per_s=1.0, burst=math.inf)
        """The retry budget; the dispatcher sets its limit."""
        self.sending = False
        """True while a task is being sent and no other may be, with recovery `reassign`."""
        self.open = {task.index: task for task in self.ready}
        self.regardless: frozenset[str] | None = None
        """End devices at the start of the job, used by recovery `reassign`."""
        self.started = False
        self.ending = False
        self.finish_tag = 0.0
        """Finish tag of the task sent last. See `dispatch.choice.tags`."""
        self.held_back = ""
        """Why the scheme `adaptive` sends nothing of it at the moment."""
        self.sent = 0
        """Tasks sent so far: what "in sequential order" counts."""
        self.reason = ""
        """Why nothing of it can be sent now; "" when all goes well."""
        self.mapping: dict[str, str] = {}
        """Upstream node by end device, as last used."""
        self._request_id = request_id
        # Its id is the same after a restart, and the span is written once, at the end.
        began_ns = 0 if created_at is None else round(created_at * 1e9)
        self.span = Span("job", trace or new_trace(), span_id=job_id[-16:], began_ns=began_ns)
        self._suspect: ActiveTask | None = None
        """The one suspect that may be on its way."""

    @property
    def trace_id(self) -> str:
        """Id of the trace that it belongs to."""
        return "" if self.span.trace is None else self.span.trace.trace_id

    def task_id(self, task: ActiveTask) -> str:
        return f"{self.job_id}-{task.index}"

    def request_id(self, task: ActiveTask) -> str:
        """Follows the task through all hops: the caller's own id for an interactive request, else the task's."""
        return self._request_id or self.task_id(task)

    # --- the queue ------------------------------------------------------------------------------------------------

    def next_task(self) -> ActiveTask | None:
        """The task that goes next, without taking it."""
        while self.ready and self.ready[0].closed:
            self.ready.popleft()  # quarantined while it waited
        return self.ready[0] if self.ready and not self.ending and not self.sending else None

    def next_tasks(self) -> list[ActiveTask]:
        """The task that goes next, without taking it, and one that goes instead while that waits for a device that may
        have it: a first attempt may go to any."""
        first = self.next_task()
        if first is None:
            return []
        if not (first.tried or first.has_coarse):
            return [first]
        others = itertools.islice(self.ready, 1, _LOOK_AHEAD)
        other = next((task for task in others if not (task.tried or task.has_coarse or task.closed)), None)
        return [first] if other is None else [first, other]

    @property
    def waiting(self) -> int:
        """Tasks that are not on their way."""
        return len(self.ready) + len(self.delayed) + len(self.held)

    @property
    def waits(self) -> bool:
        """True if none of its tasks is in flight."""
        return len(self.open) <= self.waiting

    def begin(self, now: float, task: ActiveTask | None = None) -> ActiveTask:
        """Take the next task, or another one of `next_tasks`, to be sent now."""
        if task is None:
            task = self.ready.popleft()
        else:
            self.ready.remove(task)
        if task.started is None:
            task.started = now
        if not self.started:
            self.started = True
            self.recipient.started()
        self.sent += 1
        self.reason = self.held_back = ""
        return task

    def delay(self, task: ActiveTask, until: float) -> None:
        """Let a task wait before it is sent again."""
        task.not_before = until
        heapq.heappush(self.delayed, task)
        if self._suspect is task:
            self._suspect = None

    def wake_delayed(self, now: float, *, has_upstream: bool) -> list[ActiveTask]:
        """Make tasks ready whose wait is over. Suspects go one at a time.

        Returns:
            Tasks that lack only a fine answer while there is no upstream node. They are held.
        """
        due, self.held = self.held, []
        while self.delayed and self.delayed[0].not_before <= now:
            due.append(heapq.heappop(self.delayed))
        without_upstream: list[ActiveTask] = []
        for task in due:
            if task.closed:
                continue
            if task.has_coarse and not has_upstream:
                self.held.append(task)
                without_upstream.append(task)
            elif is_suspect(task.deaths) and not self._claim_suspect(task):
                self.held.append(task)
            elif self.policy.recovery is Recovery.REASSIGN:
                self.ready.append(task)  # after all tasks have been assigned once (section 3.6 of the paper)
            else:
                self.ready.appendleft(task)
        return without_upstream

    def _claim_suspect(self, task: ActiveTask) -> bool:
        present = self._suspect
        if present is not None and not present.closed and is_suspect(present.deaths):
            return False
        self._suspect = task
        return True

    @property
    def waits_for_upstream(self) -> bool:
        """True if a task lacks only a fine answer for which there is no upstream node now."""
        return any(task.has_coarse for task in self.held)

    def deadline_of(self, task: ActiveTask, now: float) -> float:
        """When the task must have its final answer; it counts from its first dispatch."""
        started = now if task.started is None else task.started
        return min(self.deadline, started + self.policy.task_deadline_s)

    # --- answers --------------------------------------------------------------------------------------------------

    def answer(self, task: ActiveTask, stage: str, kind: str, event: TaskEvent, line: str, now: float) -> Answer:
        """The answer to a stage of a task, as its recipient takes it."""
        return Answer(
            job_id=self.job_id,
            task=task.index,
            first_image=task.first_image,
            images=task.images,
            stage=stage,
            kind=kind,
            ms=elapsed_ms(task, now),
            request_id=self.request_id(task),
            event=event,
            line=line,
        )

    def close(self, task: ActiveTask) -> None:
        """The task has its final answer."""
        task.closed, task.coarse = True, None
        del self.open[task.index]


def elapsed_ms(task: ActiveTask, now: float) -> float:
    """Milliseconds since the task was sent for the first time."""
    return 0.0 if task.started is None else (now - task.started) * 1000


def is_suspect(deaths: Collection[str]) -> bool:
    """True if a task may be a poison task, given the nodes that died with it."""
    return len(deaths) >= _SUSPECT_NODES


class Phase(StrEnum):
    """The phase of an attempt: acknowledging -> coarse -> fine -> answered -> ended. `attempt_state` advances it."""

    ACKNOWLEDGING = "acknowledging"
    COARSE = "coarse"
    FINE = "fine"
    ANSWERED = "answered"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One try of a task on one end device."""

    job: ActiveJob
    task: ActiveTask
    device: Device
    upstreams: tuple[Upstream, ...] = ()
    """In the order in which the device asks them, with the form in which each gets the images."""
    incarnations: dict[str, str] = field(default_factory=dict)
    """Incarnations of the upstream nodes, by id."""
    stages: tuple[Stage, ...] = ()
    hedge: bool = False
    why: str = ""
    too_late: bool = False
    """No upstream node is asked because none would answer before the deadline: the coarse answer stands."""
    fine_only: bool = False
    trial: bool = False
    """The last answer of its device was wrong, to another task."""
    started: float
    started_at: float
    """Wall clock, seconds since 1970."""
    deadline: float
    """When it is given up."""
    until: float = 0.0
    """When it is given up in its present phase."""
    phase: Phase = Phase.COARSE
    leaving: str = ""
    """An upstream node that has left the list while the coarse answer was still to come."""
    fallback: tuple[FallbackEvent | RoutedEvent, str] | None = None
    """The device's report on upstream nodes that failed, with its line."""
    gave_coarse: bool = False
    """The coarse answer that its task has is from it."""
    reported: bool = False
    number: int = 0
    """From 1, of the task's attempts."""
    span: Span = field(init=False)
    node_id: str = field(init=False)
    first_asked: tuple[Upstream, ...] = field(init=False)
    """The upstream node that is asked first; of each tier, where images go up tier after tier."""

    def __post_init__(self) -> None:
        self.node_id = self.device.node_id
        self.span = Span("attempt", self.job.span.trace)
        self.first_asked = self.upstreams[:1]
        if self.stages:
            first = {node.tier: node for node in reversed(self.upstreams)}
            self.first_asked = tuple(first[stage.tier] for stage in self.stages if stage.tier in first)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The end device, and the upstream nodes that are asked first."""
        return self.node_id, *(node.node_id for node in self.first_asked)

    @property
    def owed(self) -> bool:
        """True if the device itself owes its answer; an answer that it awaits from an upstream node is not its own
        work."""
        return self.phase is Phase.COARSE or (self.phase is Phase.ACKNOWLEDGING and not self.fine_only)

    @property
    def lacks_fine(self) -> bool:
        """True if it has sent all its answers, and the task waits for a fine answer."""
        return self.phase is Phase.ANSWERED and not self.task.closed

    def report(self, outcome: str = "running", reason: str = "", ended_at: float | None = None) -> AttemptReport:
        """The attempt as users see it."""
        return AttemptReport(
            job_id=self.job.job_id,
            task=self.task.index,
            number=self.number,
            node_id=self.node_id,
            incarnation=self.device.incarnation,
            tier=Tier.END,
            upstream=self.upstreams[0].node_id if self.upstreams else None,
            stage="fine" if self.fine_only else "all",
            hedge=self.hedge,
            outcome=outcome,
            reason=reason,
            why=self.why,
            started_at=self.started_at,
            ended_at=ended_at,
        )
