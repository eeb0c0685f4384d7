"""Jobs under way: the facts of a job, a task and an attempt, which never change, and their state.

Only `scheduler.core.step` changes it. A task waits (ready, delayed or held), is under way (at least one attempt), or
is closed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from scheduler.core.job import Answer, AttemptReport
from scheduler.core.policy import JobPolicy, JobRules
from scheduler.core.site import NO_SITE
from tierkit.pacing import TokenBucket
from tierkit.types import Recovery, Scheme, Tier
from tierkit.wire.events import CoarseEvent, FallbackEvent, RoutedEvent, TaskEvent
from tierkit.wire.messages import Stage, Upstream

__all__ = [
    "Attempt",
    "AttemptFacts",
    "Coarse",
    "JobFacts",
    "OpenJob",
    "OpenTask",
    "Phase",
    "TaskFacts",
    "is_suspect",
]

_LOOK_AHEAD = 64
"""Ready tasks among which one is looked for that may go before one that waits for another device."""
_SUSPECT_NODES = 2
"""A task that this many nodes died with is a suspect. The suspects of a job go one at a time: an innocent
task is answered then, and only the poison task can lose its third node."""
_DURATIONS = 100
"""Attempts per job and device whose duration hedging remembers."""


# --- tasks ------------------------------------------------------------------------------------------------------------


class TaskFacts(Struct, frozen=True, kw_only=True):
    """One task that has no final answer yet, and what came of it before this scheduler took it up."""

    index: int
    first_image: int
    images: int
    attempts: int = 0
    failed_attempts: int = 0
    errors: int = 0
    coarse: CoarseEvent | None = None
    """Its coarse answer, which its recipient has."""


@dataclass(slots=True, kw_only=True)
class Tries:
    """Counts of what was tried for a task."""

    made: int = 0
    """Attempts so far, those under way included."""
    failed: int = 0
    trials: int = 0
    """Further failed attempts, each the trial of a device whose last answer, to another task, was wrong."""
    errors: int = 0
    """Failed attempts that are the device's own fault: it answered nonsense, or not in time."""
    moves: int = 0
    """Number of times it was taken from an upstream node that had become slow."""
    waits: int = 0
    """Number of times it came back without the fine answer that its job waits for."""
    refused: str = ""
    """Reason why end devices refused it until its attempts were used up: it now asks only for the coarse answer. Else
    ""."""


@dataclass(slots=True, kw_only=True)
class Blame:
    """Nodes that failed with a task."""

    tried: set[str] = field(default_factory=set)
    """Nodes of any tier with which an attempt failed, whatever the reason. The task goes to others, while there are
    any."""
    wrong: dict[str, str] = field(default_factory=dict)
    """End devices that answered it wrongly, with their incarnations."""
    wrong_above: dict[str, str] = field(default_factory=dict)
    """The same for upstream nodes."""
    deaths: set[str] = field(default_factory=set)
    """Nodes that died with it at its present stage."""


class Coarse(Struct, frozen=True):
    """The coarse answer of a task."""

    unsure: tuple[int, ...] | None
    """Positions of the images of which it is unsure; None if no threshold was asked for."""
    damaged: frozenset[int]
    """Positions of the images that cannot be read."""
    answer: Answer | None = None
    """The answer as it was delivered, in case it has to be withdrawn; None if another scheduler delivered it."""

    @classmethod
    def of(cls, event: CoarseEvent, answer: Answer | None = None) -> Coarse:
        return cls(event.unsure, frozenset(damage.index for damage in event.damaged), answer)


@dataclass(slots=True, eq=False)
class OpenTask:
    """The state of a task."""

    facts: TaskFacts
    tries: Tries = field(init=False)
    blame: Blame = field(default_factory=Blame)
    running: list[Attempt] = field(default_factory=list)
    """Its attempts under way; more than one when a straggler has been hedged."""
    coarse: Coarse | None = field(init=False)
    partial: tuple[RoutedEvent, str] | None = None
    """Finer answers so far of a task whose images go up one by one, with their line; final if no more arrive."""
    started: float | None = None
    """Time at which it was sent for the first time."""
    not_before: float = 0.0
    closed: bool = False

    def __post_init__(self) -> None:
        facts = self.facts
        self.tries = Tries(made=facts.attempts, failed=facts.failed_attempts, errors=facts.errors)
        self.coarse = None if facts.coarse is None else Coarse.of(facts.coarse)

    def elapsed_ms(self, now: float) -> float:
        """Milliseconds since it was sent for the first time."""
        return 0.0 if self.started is None else (now - self.started) * 1000

    def __lt__(self, other: OpenTask) -> bool:
        return (self.not_before, self.facts.index) < (other.not_before, other.facts.index)


def is_suspect(deaths: Collection[str]) -> bool:
    """True if a task may be a poison task, given the nodes that died with it."""
    return len(deaths) >= _SUSPECT_NODES


# --- attempts ---------------------------------------------------------------------------------------------------------


class Phase(StrEnum):
    """The phase of an attempt: acknowledging -> coarse -> fine -> answered -> ended. `scheduler.core.step` advances
    it."""

    ACKNOWLEDGING = "acknowledging"
    COARSE = "coarse"
    FINE = "fine"
    ANSWERED = "answered"
    ENDED = "ended"


_ACKNOWLEDGING, _COARSE, _FINE = Phase.ACKNOWLEDGING, Phase.COARSE, Phase.FINE
"""Phases under short names: looking up a member of an enumeration takes longer than everything else about an
attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """One try of a task on one end device, as it was decided."""

    id: int
    job_id: str
    task: int
    images: int
    number: int
    """Number of the task's attempt, from 1."""
    node_id: str
    incarnation: str
    model: str = ""
    """The network of the end device that gives the coarse answers."""
    sha256: str = ""
    reading: str = ""
    """See `Node.reading`."""
    release: int = 0
    """Number of the release to which it belongs."""
    site: str = NO_SITE
    upstreams: tuple[Upstream, ...] = ()
    """Upstream nodes in the order in which the device asks them, each with the form in which it gets the images."""
    incarnations: Mapping[str, str] = field(default_factory=dict)
    """Incarnations of the upstream nodes, by id."""
    stages: tuple[Stage, ...] = ()
    why: str = ""
    planned: bool = False
    """The scheme `adaptive` has sent it."""
    hedge: bool = False
    too_late: bool = False
    """No upstream node is asked because none would answer before the deadline: the coarse answer is final."""
    fine_only: bool = False
    trial: bool = False
    """The last answer of its device was wrong, to another task."""
    started: float
    started_at: float
    """Wall clock, seconds since 1970."""
    theta_cloud: float | None = None
    """The cloud's planned share (Eq. 5) when it was sent; None in other schemes than `mapping`."""
    deadline: float
    """Time at which it is given up."""
    due_at: float = 0.0
    """Time at which the device is expected to have computed the coarse answer."""
    first_asked: tuple[str, ...] = field(init=False)
    """The upstream node that is asked first; of each tier, where images go up tier after tier."""
    nodes: tuple[str, ...] = field(init=False)
    """The end device, and the upstream nodes that are asked first."""

    def __post_init__(self) -> None:
        first_asked = self.upstreams[:1]
        if self.stages:
            first = {node.tier: node for node in reversed(self.upstreams)}
            first_asked = tuple(first[stage.tier] for stage in self.stages if stage.tier in first)
        # Each decision asks for them many times.
        object.__setattr__(self, "first_asked", tuple(node.node_id for node in first_asked))
        object.__setattr__(self, "nodes", (self.node_id, *self.first_asked))

    def report(self, outcome: str = "running", reason: str = "", seconds: float | None = None) -> AttemptReport:
        """The attempt as users see it; `seconds` is its duration."""
        return AttemptReport(
            job_id=self.job_id,
            task=self.task,
            number=self.number,
            node_id=self.node_id,
            incarnation=self.incarnation,
            tier=Tier.END,
            upstream=self.upstreams[0].node_id if self.upstreams else None,
            stage="fine" if self.fine_only else "all",
            hedge=self.hedge,
            outcome=outcome,
            reason=reason,
            why=self.why,
            started_at=self.started_at,
            ended_at=None if seconds is None else self.started_at + seconds,
        )


@dataclass(slots=True, eq=False)
class Attempt:
    """The state of an attempt."""

    facts: AttemptFacts
    job: OpenJob
    task: OpenTask
    phase: Phase
    until: float
    """Time at which it is given up in its present phase."""
    coarse_at: float | None = None
    """Time at which the coarse answer of its device came."""
    leaving: str = ""
    """An upstream node that has left the list while the coarse answer was still to come."""
    fallback: tuple[FallbackEvent | RoutedEvent, str] | None = None
    """The device's report on upstream nodes that failed, with its line."""
    gave_coarse: bool = False
    """The coarse answer that its task has is from it."""
    reported: bool = False

    @property
    def owed(self) -> bool:
        """True if the device itself owes its answer; an answer that it awaits from an upstream node is not its own
        work."""
        return self.phase is _COARSE or (self.phase is _ACKNOWLEDGING and not self.facts.fine_only)

    @property
    def in_flight(self) -> bool:
        """True if an answer is still to come."""
        return self.phase is _FINE or self.phase is _COARSE or self.phase is _ACKNOWLEDGING


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A job that is not final, as it was submitted."""

    job_id: str
    policy: JobPolicy
    content: str = ""
    """Digest of its images."""
    deadline: float
    """Monotonic time at which it ends, complete or not."""
    interactive: bool = False
    """True if a user waits for the answer right now."""
    request_id: str | None = None
    """The caller's own id, where there is one task for it."""
    rules: JobRules = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", JobRules.of(self.policy))

    @property
    def keeps_window(self) -> bool:
        """True if its tasks go only to end devices that are alive and have room in their window."""
        policy = self.policy
        return not (self.interactive or policy.scheme is Scheme.ADAPTIVE or policy.recovery is Recovery.REASSIGN)

    def task_id(self, index: int) -> str:
        return f"{self.job_id}-{index}"

    def request_id_of(self, index: int) -> str:
        """The id that follows a task through all hops: the caller's own for an interactive request, else the task's."""
        return self.request_id or self.task_id(index)


class OpenJob:
    """The state of a job: the queue of its tasks, and its retry budget."""

    def __init__(self, facts: JobFacts, tasks: Iterable[TaskFacts], retries: TokenBucket) -> None:
        self.facts = facts
        self.open = {task.index: OpenTask(task) for task in tasks}
        """Tasks without a final answer."""
        self.ready = deque(self.open.values())
        self.delayed: list[OpenTask] = []
        """A heap by `not_before`."""
        self.held: list[OpenTask] = []
        """Their delay is over, but they wait for an upstream node, or for their turn as suspects."""
        self.retries = retries
        """The retry budget."""
        self.sending = False
        """True while a task is being sent and no other may be, with recovery `reassign`."""
        self.sent = 0
        """Tasks sent so far: what "in sequential order" counts."""
        self.ending = False
        self.answered = False
        """True once a stage of one of its tasks has been answered."""
        self.durations: dict[str, deque[float]] = {}
        """Seconds from the dispatch to the end of attempts, by device."""
        self._suspect: OpenTask | None = None
        """The one suspect that may be on its way."""

    def answer(self, task: OpenTask, stage: str, kind: str, event: TaskEvent, line: str, now: float) -> Answer:
        """The answer to a stage of a task, as its recipient takes it."""
        facts = task.facts
        self.answered = self.answered or kind != "failed"
        return Answer(
            job_id=self.facts.job_id,
            task=facts.index,
            first_image=facts.first_image,
            images=facts.images,
            stage=stage,
            kind=kind,
            ms=task.elapsed_ms(now),
            request_id=self.facts.request_id_of(facts.index),
            event=event,
            line=line,
        )

    # --- the queue ----------------------------------------------------------------------------------------------------

    def next_task(self) -> OpenTask | None:
        """The task that goes next, without taking it."""
        if self.ending or self.sending:
            return None
        return next((task for task in self.ready if not task.closed), None)  # one may be quarantined while it waits

    def next_tasks(self) -> list[OpenTask]:
        """The task that goes next, without taking it, and one that goes instead while that waits for a device that may
        have it: a first attempt may go to any. Waits are short: other retried tasks stay behind the first."""
        first = self.next_task()
        if first is None:
            return []
        if not (first.blame.tried or first.coarse):
            return [first]
        others = itertools.islice(self.ready, 1, _LOOK_AHEAD)
        other = next((task for task in others if not (task.blame.tried or task.coarse or task.closed)), None)
        return [first] if other is None else [first, other]

    @property
    def waiting(self) -> int:
        """Tasks that are not on their way."""
        return len(self.ready) + len(self.delayed) + len(self.held)

    @property
    def waits(self) -> bool:
        """True if none of its tasks is on its way."""
        return len(self.open) <= self.waiting

    @property
    def waits_for_upstream(self) -> bool:
        """True if a task lacks only a fine answer for which there is no upstream node now."""
        return any(task.coarse for task in self.held)

    def take(self, task: OpenTask, now: float) -> None:
        """Take one of `next_tasks` off the queue: it is sent now."""
        while self.ready[0].closed:
            self.ready.popleft()
        if self.ready[0] is task:
            self.ready.popleft()
        else:
            self.ready.remove(task)
        if task.started is None:
            task.started = now
        self.sent += 1

    def delay(self, task: OpenTask, until: float) -> None:
        """Let a task wait before it is sent again."""
        task.not_before = until
        heapq.heappush(self.delayed, task)
        if self._suspect is task:
            self._suspect = None

    def wake_delayed(self, now: float, *, has_upstream: bool) -> list[OpenTask]:
        """Make tasks ready whose wait is over. Suspects go one at a time.

        Returns:
            Tasks that lack only a fine answer while there is no upstream node. They are held.
        """
        due, self.held = self.held, []
        while self.delayed and self.delayed[0].not_before <= now:
            due.append(heapq.heappop(self.delayed))
        without_upstream: list[OpenTask] = []
        for task in due:
            if task.closed:
                continue
            if task.coarse and not has_upstream:
                self.held.append(task)
                without_upstream.append(task)
            elif is_suspect(task.blame.deaths) and not self._claim_suspect(task):
                self.held.append(task)
            elif self.facts.policy.recovery is Recovery.REASSIGN:
                self.ready.append(task)  # after all tasks have been assigned once (section 3.6 of the paper)
            else:
                self.ready.appendleft(task)
        return without_upstream

    def _claim_suspect(self, task: OpenTask) -> bool:
        present = self._suspect
        if present is not None and not present.closed and is_suspect(present.blame.deaths):
            return False
        self._suspect = task
        return True

    def close(self, task: OpenTask) -> None:
        """The task has its final answer."""
        task.closed = True
        del self.open[task.facts.index]

    def took(self, node_id: str, seconds: float) -> None:
        """An attempt on a device has ended as it should."""
        self.durations.setdefault(node_id, deque(maxlen=_DURATIONS)).append(seconds)
