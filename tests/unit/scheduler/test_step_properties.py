"""What holds of the state machine in any order of events: each stage is answered once, nothing is lost, each charge is
given back, and everything ends.

A few hundred random sequences run each time, and 10,000 with `--hypothesis-profile=long`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import example, given, settings as hypothesis_settings, strategies as st
from msgspec.structs import replace

from scheduler.core import events
from scheduler.core.device import NO_INTENT, Device, Intent
from scheduler.core.escalation import JobGate, stages_of
from scheduler.core.events import Failure, FailureKind
from scheduler.core.fleet import Ledger
from scheduler.core.health import DetectorTimes, Probe
from scheduler.core.job import FAILED_OUTCOMES, Answer
from scheduler.core.limits import attempt_deadline
from scheduler.core.policy import JobPolicy
from scheduler.core.step import State, may_move, step
from scheduler.core.work import Attempt, AttemptFacts, JobFacts, OpenJob, OpenTask, Phase, TaskFacts
from tests.unit.scheduler import test_step
from tests.unit.scheduler.test_step import COARSE, EDGE, FINE, LOST, NO_CLOUD, registration
from tierkit.errors import TerraceError
from tierkit.types import Escalate, Recovery, Scheme, Tier, UpstreamLoss
from tierkit.wire.events import (
    CoarseEvent,
    FallbackReason,
    FineEvent,
    RoutedEvent,
    TaskEvent,
    WrongAnswer,
)
from tierkit.wire.messages import Heartbeat, Registration, Upstream

T = TypeVar("T")

TIMES = DetectorTimes(heartbeat_s=0.5, suspect_s=1.2, probe_s=0.5, lease_s=2.5, stall_s=8.0, set_aside_s=1.0)
SWEEP_S = 0.5
LIMITS = replace(test_step.LIMITS, max_attempts=4, task_deadline_s=12.0, retries_per_s=2.0, retry_burst=3.0)
SHA = "0" * 64
ENDS, UPPERS = ("end-0", "end-1", "end-2"), ("edge-0", "edge-1", "cloud-0")
OURS = "an error of ours"
RESTING = "end-2"
"""The end device that has a power budget."""
FAILURES = [
    Failure(FailureKind.UNREACHABLE, "broke", may_have_held=True),
    *[Failure(FailureKind.INVALID, "nonsense")] * 4,
    Failure(FailureKind.BUSY, "busy", retry_after_s=1.0),
    *(Failure(kind, kind.value) for kind in FailureKind),
    None,
]
REASONS: list[FallbackReason] = ["upstream_unavailable", "upstream_timeout", "upstream_error", "deadline", "damaged"]
GATES = (
    JobGate(lower=Tier.END, upper=Tier.EDGE, below=0.5, lower_sha256=SHA),
    JobGate(lower=Tier.EDGE, upper=Tier.CLOUD, below=0.5),
)


class Picks:
    """Choices that follow from one number: 0 takes the first option each time."""

    def __init__(self, number: int) -> None:
        # Drawn numbers are mostly small; spread, they last for all choices of a step.
        spread = number * 0x9E3779B97F4A7C15 % 2**64
        self._rest = spread ^ (spread >> 32)

    def of(self, options: Sequence[T]) -> T:
        self._rest, at = divmod(self._rest, len(options))
        return options[at]

    def some(self, options: Sequence[T]) -> list[T]:
        """Some of them, beginning anywhere."""
        first, most = self.of(range(len(options))) if options else 0, self.of(range(len(options) + 1))
        return [*options[first:], *options[:first]][: len(options) - most]

    @property
    def jitter(self) -> float:
        return self._rest % 997 / 997


class Play:
    """The state, what surrounds it, and the books that must balance."""

    def __init__(self, jobs: Sequence[JobFacts], tasks: int) -> None:
        self.now = 1.0
        self.jobs = {facts.job_id: facts for facts in jobs}
        self.tasks = tasks
        self.made: dict[tuple[str, int], list[str]] = {}
        """Outcomes of the attempts of each task."""
        self.delivered: dict[tuple[str, int, str], Answer] = {}
        self.closed: set[tuple[str, int]] = set()
        self.ends: dict[str, events.JobEnds] = {}
        self.processes: dict[str, Registration] = {}
        """Processes of nodes that run."""
        self.silent: set[str] = set()
        self.lives: list[list[tuple[events.Event, list[events.Effect], list[float]]]] = []
        """All events since each start of the scheduler, with their effects, and the waits after them."""
        self._ids, self._incarnations = itertools.count(1), itertools.count(1)
        self.begin()
        for node_id in (*ENDS, *UPPERS):
            self.register(self.process(node_id))

    def begin(self) -> None:
        """A scheduler starts, and takes up what has no final answer yet."""
        self.ledger = Ledger(TIMES, sweep_s=SWEEP_S)
        self.state = State(limits=LIMITS, ledger=self.ledger)
        self.under_way: dict[int, AttemptFacts] = {}
        self.until: dict[int, float] = {}
        self.over: list[int] = []
        self.reported: set[int] = set()
        self.started: set[str] = set()
        self.to_look_up: list[events.LookUp] = []
        self.jitter = 0.5
        self.lives.append([])

    def add(self, facts: JobFacts) -> None:
        self.feed(events.JobAdded(facts, [self.left_of(facts, index) for index in self.open_tasks(facts)]))

    def open_tasks(self, facts: JobFacts) -> list[int]:
        return [index for index in range(self.tasks) if (facts.job_id, index) not in self.closed]

    def left_of(self, facts: JobFacts, index: int) -> TaskFacts:
        """A task without a final answer, as a scheduler takes it up."""
        outcomes = self.made.get((facts.job_id, index), [])
        coarse = self.delivered.get((facts.job_id, index, "coarse"))
        return TaskFacts(
            index=index,
            first_image=index,
            images=1,
            attempts=len(outcomes),
            failed_attempts=sum(outcome in FAILED_OUTCOMES for outcome in outcomes),
            errors=outcomes.count("error"),
            coarse=coarse.event if coarse is not None and isinstance(coarse.event, CoarseEvent) else None,
        )

    def restart(self) -> None:
        """The scheduler is killed, and another one takes up what it has left."""
        known = [self.ledger.known(view.device.node_id) for view in self.ledger.view(self.now)]
        self.begin()
        self.feed(events.Restored([node for node in known if node is not None]))
        for facts in self.jobs.values():
            if facts.job_id not in self.ends:
                self.add(facts)

    # --- nodes ----------------------------------------------------------------------------------------------------

    def process(self, node_id: str, url: str = "") -> Registration:
        """A new process of a node."""
        made = registration(node_id, f"{next(self._incarnations):016x}", url)
        return made.model_copy(update={"images_per_minute": 60}) if node_id == RESTING else made

    def register(self, process: Registration) -> None:
        if self.feed(events.Registered(process)) is not None:
            self.processes[process.node_id] = process

    def beat(self, node_id: str, *, draining: bool = False) -> None:
        """The process of a node sends its heartbeat, and registers again where it is told to."""
        process = self.processes[node_id]
        beat = Heartbeat(
            incarnation=process.incarnation, in_flight=0, queued_images=0, images_done=int(self.now), draining=draining
        )
        if self.feed(events.Beat(node_id, beat)) is None:
            self.register(process)

    def tick(self, seconds: float) -> None:
        """Time passes for all."""
        self.now += seconds
        for node_id in [name for name in self.processes if seconds and name not in self.silent]:
            self.beat(node_id)
        self.feed(events.Swept())

    # --- events and effects ---------------------------------------------------------------------------------------

    def feed(self, what: events.What) -> list[events.Effect] | None:
        """Take an event; returns its effects, or None if it is refused."""
        event = events.Event(what, self.now, self.jitter)
        try:
            effects = step(self.state, event)
        except TerraceError:
            assert isinstance(what, events.MAY_BE_REFUSED)
            return None
        self.lives[-1].append((event, effects, waits(self.state)))
        for effect in effects:
            self.perform(effect)
        while self.to_look_up:
            asked = self.to_look_up.pop()
            found = self.has_upstream and self.jitter < 0.6
            self.feed(events.LookedUp(asked.attempt, asked.report, asked.line, found))
        self.check()
        return effects

    @property
    def has_upstream(self) -> bool:
        return any(self.ledger.alive(tier, self.now) for tier in (Tier.EDGE, Tier.CLOUD))

    def perform(self, effect: events.Effect) -> None:
        match effect:
            case events.Dispatch(facts, _, until):
                assert facts.id not in self.under_way
                self.under_way[facts.id], self.until[facts.id] = facts, until
            case events.WaitUntil(attempt, at):
                assert attempt in self.under_way
                self.until[attempt] = at
            case events.Finished(facts):
                del self.under_way[facts.id], self.until[facts.id]
                self.over.append(facts.id)
            case events.Report(facts, report):
                assert facts.id not in self.reported, "one row for each attempt"
                self.reported.add(facts.id)
                self.made.setdefault((facts.job_id, facts.task), []).append(report.outcome)
            case events.Deliver(answer):
                key = answer.job_id, answer.task, answer.stage
                assert key not in self.delivered, "a stage is answered once"
                assert answer.job_id not in self.ends
                assert (answer.job_id, answer.task, "final") not in self.delivered
                self.delivered[key] = answer
            case events.TakeBack(answer):
                assert (answer.job_id, answer.task) not in self.closed
                assert self.delivered.pop((answer.job_id, answer.task, "coarse")) is answer
            case events.TaskClosed(job_id, task):
                assert (job_id, task) not in self.closed
                self.closed.add((job_id, task))
            case events.JobStarted(job_id):
                assert job_id not in self.started
                self.started.add(job_id)
            case events.JobEnds(job_id, state, reason):
                assert "internal error" not in reason
                assert job_id not in self.ends, "a job ends once"
                assert state is not None or not self.open_tasks(self.jobs[job_id])
                self.ends[job_id] = effect
            case events.LookUp():
                self.to_look_up.append(effect)
            case events.NodeChanged(change):
                assert "cannot be judged" not in change.reason or OURS in change.reason

    # --- what holds between any two events ------------------------------------------------------------------------

    def check(self) -> None:
        attempts = self.ledger.assigned.attempts
        assert attempts.keys() == self.under_way.keys()
        for attempt in attempts.values():
            job, task, facts = attempt.job, attempt.task, attempt.facts
            assert attempt in task.running
            assert job.open.get(facts.task) is task or attempt.phase is Phase.ANSWERED, "an attempt has a task"
            assert attempt.phase is not Phase.ENDED
            if not task.closed:
                self.check_nodes(attempt)
        for job_id, job in self.state.jobs.items():
            self.check_job(job_id, job)
        self.check_fleet()

    def check_nodes(self, attempt: Attempt) -> None:
        """No attempt stays with a node that is gone. With `reassign` one may go to a node that is gone already."""
        facts, regardless = attempt.facts, attempt.job.facts.policy.recovery is Recovery.REASSIGN
        device = self.ledger.find(facts.node_id)
        assert device is not None
        assert device.incarnation == facts.incarnation
        assert device.told[1] or regardless, "a node that is lost keeps no tasks"
        above = [self.ledger.find(node_id) for node_id in facts.first_asked]
        assert attempt.leaving or all(upper is not None and upper.told[1] for upper in above)

    def check_job(self, job_id: str, job: OpenJob) -> None:
        assert job.ending == (job_id in self.ends)
        assert job.open.keys() == set(self.open_tasks(job.facts))
        running = [attempt for attempt in self.ledger.assigned.attempts.values() if attempt.job is job]
        assert job.sending == any(attempt.phase is Phase.ACKNOWLEDGING for attempt in running)
        waiting = Counter(task.facts.index for task in (*job.ready, *job.delayed, *job.held) if not task.closed)
        for index, task in job.open.items():
            assert all(attempt in running for attempt in task.running)
            if not job.ending:
                assert waiting[index] == (not task.running), "a task waits, or is under way"
            assert (task.coarse is None) == ((job_id, index, "coarse") not in self.delivered)
        for index in range(self.tasks):
            stages = ("coarse", "final") if job.facts.policy.scheme is Scheme.END else ("final",)
            answered = any((job_id, index, stage) in self.delivered for stage in stages)
            assert answered == ((job_id, index) in self.closed)

    def check_fleet(self) -> None:
        """The indexes of the ledger, worked out from the beginning."""
        ledger, attempts = self.ledger, self.ledger.assigned.attempts.values()
        for node_id in (*ENDS, *UPPERS):
            there = [attempt for attempt in attempts if node_id in attempt.facts.nodes]
            assert list(ledger.assigned.at(node_id)) == there
        room, able = [], []
        for node_id in ENDS:
            if (device := ledger.find(node_id)) is None:
                continue
            here = [attempt for attempt in attempts if attempt.facts.node_id == node_id]
            owed = [attempt for attempt in here if attempt.owed]
            mine = [each for each in owed if each.facts.incarnation == device.incarnation]
            assert device.given == len(mine), "each charge is given back"
            if device.listed:
                assert device.takes_tasks
                able.append(node_id)
                if max(len(owed), sum(not attempt.facts.planned for attempt in here)) < ledger.assigned.window:
                    room.append(node_id)
        assert ledger.assigned.with_room().after(None, len(ENDS)) == room
        assert ledger.assigned.not_full().after(None, len(ENDS)) == able

    # --- sending --------------------------------------------------------------------------------------------------

    def alive(self, tiers: Iterable[Tier]) -> list[Device]:
        return [device for tier in tiers for device in self.ledger.alive(tier, self.now)]

    def send(self, job: OpenJob, picks: Picks) -> bool:
        """Send a task that may go next to a device that may have it."""
        ends = self.alive([Tier.END])
        tasks = job.next_tasks()
        if job.facts.policy.recovery is Recovery.REASSIGN:
            ends = [device for device in map(self.ledger.find, ENDS) if device is not None and device.takes_tasks]
        elif not ends:
            ends = self.ledger.last_resort(Tier.END, self.now)
        elif job.facts.keeps_window:
            ends = [self.ledger.get(node_id) for node_id in self.ledger.assigned.with_room().after(None, len(ENDS))]
        if not (tasks and ends):
            return False
        task = picks.of(tasks)
        device = picks.of([device for device in ends if device.node_id not in task.blame.tried] or ends)
        too_late = picks.of(range(8)) == 7
        uppers = [] if too_late else self.uppers(job, task, picks)
        if task.coarse and not uppers:
            self.feed(events.NotSent(job.facts.job_id, task.facts.index, too_late))
        else:
            self.feed(events.AttemptBegun(self.attempt(job, task, device, uppers, too_late=too_late)))
        return True

    def hedge(self, attempt: Attempt, picks: Picks) -> None:
        job, task = attempt.job, attempt.task
        others = [device for device in self.alive([Tier.END]) if device.node_id not in attempt.facts.nodes]
        alone = len(task.running) == 1 and attempt.phase is not Phase.ANSWERED
        if not (alone and others) or job.ending or job.facts.policy.recovery is not Recovery.MONITOR:
            return
        uppers = self.uppers(job, task, picks)
        if uppers or not task.coarse:
            self.feed(events.AttemptBegun(self.attempt(job, task, picks.of(others), uppers, hedge=True)))

    def uppers(self, job: OpenJob, task: OpenTask, picks: Picks) -> list[Device]:
        if job.facts.policy.scheme is Scheme.END or (task.tries.refused and not task.coarse):
            return []
        return picks.some(self.alive([Tier.EDGE, Tier.CLOUD]))

    def attempt(self, job: OpenJob, task: OpenTask, device: Device, uppers: list[Device], **given: Any) -> AttemptFacts:
        policy = job.facts.policy
        return AttemptFacts(
            id=next(self._ids),
            job_id=job.facts.job_id,
            task=task.facts.index,
            images=task.facts.images,
            number=task.tries.made + 1,
            node_id=device.node_id,
            incarnation=device.incarnation,
            upstreams=tuple(
                Upstream(node_id=up.node_id, tier=up.tier, url="http://u", model="m", sha256=SHA, encoding=None)
                for up in uppers
            ),
            incarnations={upper.node_id: upper.incarnation for upper in uppers},
            stages=stages_of(policy.gates, policy.escalate, SHA) if uppers else (),
            planned=policy.scheme is Scheme.ADAPTIVE,
            fine_only=task.coarse is not None and (not policy.gates or task.coarse.unsure is not None),
            trial=device.wrong.count > 0 and device.node_id not in task.blame.tried,
            started=self.now,
            started_at=0.0,
            deadline=attempt_deadline(LIMITS, job.facts, task.started, self.now),
            **given,
        )

    # --- answers --------------------------------------------------------------------------------------------------

    def answer(self, attempt: Attempt) -> None:
        """The next line as it should be; after the last one, the end of the stream."""
        facts, number = attempt.facts, attempt.facts.id
        match attempt.phase:
            case Phase.ACKNOWLEDGING:
                self.feed(events.Acknowledged(number))
            case Phase.COARSE:
                self.feed(events.LineCame(number, coarse(facts), "coarse"))
            case Phase.FINE:
                final = routed(facts, []) if facts.stages else fine(facts)
                self.feed(events.LineCame(number, final, "fine"))
            case _:
                self.feed(events.Ended(number))

    def line(self, attempt: Attempt, picks: Picks) -> None:
        """Any line, whatever has come before it."""
        facts = attempt.facts
        names = [node.node_id for node in facts.upstreams]
        wrong = tuple(WrongAnswer(node_id=name, detail="nonsense") for name in picks.some(names))
        tried = tuple(picks.some(names))
        lost = replace(LOST, reason=picks.of(REASONS), tried=tried, wrong=wrong)
        said: list[TaskEvent] = [coarse(facts), lost, routed(facts, picks.some([Tier.EDGE, Tier.CLOUD]))]
        if facts.upstreams:
            said.append(fine(facts, wrong))
        self.feed(events.LineCame(facts.id, picks.of(said), "line"))

    def let_end(self, *, answering: bool) -> None:
        """From now on all nodes are there, take tasks and answer, or none ever answers. Whatever has happened, all
        ends."""
        self.silent.clear()
        for node_id in (*ENDS, *UPPERS):
            if (device := self.ledger.find(node_id)) is not None and device.intent != NO_INTENT:
                self.feed(events.Intended(node_id, NO_INTENT))
            if node_id not in self.processes:
                self.register(self.process(node_id))
            elif self.processes[node_id].lease_s is not None:
                self.register(self.processes[node_id].model_copy(update={"lease_s": None}))
        patience = 60 if answering else 2000
        last = self.now + patience
        while self.state.jobs or self.ledger.assigned.attempts:
            assert self.now < last, "everything ends"
            self.tick(1.0 if answering else 4.0)
            for job_id in list(self.state.jobs):
                self.feed(events.JobDue(job_id, self.has_upstream))
                if job_id in self.ends:
                    self.feed(events.JobGone(job_id))
            for job in self.state.jobs.values():
                while self.send(job, Picks(0)):
                    pass
            for attempt in list(self.ledger.assigned.attempts.values()):
                while answering and attempt.phase is not Phase.ENDED:
                    self.answer(attempt)
            for attempt_id, until in list(self.until.items()):
                if attempt_id in self.until and until <= self.now:
                    self.feed(events.TimeUp(attempt_id))

    def check_end(self) -> None:
        assert self.ends.keys() == self.jobs.keys()
        assert not self.under_way
        assert self.reported >= set(self.over)
        assert not any(view.device.given for view in self.ledger.view(self.now))

    def check_again(self) -> None:
        """The same events give the same effects again."""
        for life in self.lives:
            state = State(limits=LIMITS, ledger=Ledger(TIMES, sweep_s=SWEEP_S))
            for event, effects, waited in life:
                assert step(state, event) == effects
                assert waits(state) == waited


def waits(state: State) -> list[float]:
    """Until when tasks and nodes wait, which no effect says."""
    tasks = [task.not_before for job in state.jobs.values() for task in job.delayed]
    return tasks + [device.not_before for device in map(state.ledger.find, ENDS) if device is not None]


def coarse(facts: AttemptFacts) -> CoarseEvent:
    return replace(COARSE, node_id=facts.node_id, unsure=(0,) if facts.stages else None)


def fine(facts: AttemptFacts, wrong: tuple[WrongAnswer, ...] = ()) -> FineEvent:
    node = facts.upstreams[0]
    return replace(FINE, node_id=node.node_id, tier=node.tier, wrong=wrong)


def routed(facts: AttemptFacts, losses: Sequence[Tier]) -> RoutedEvent:
    """What came of the images that went up one by one: each tier that was asked has answered, or has not."""
    answers = tuple(
        replace(EDGE, tier=node.tier, node_id=node.node_id) for node in facts.upstreams[:1] if node.tier not in losses
    )
    lost = tuple(replace(NO_CLOUD, tier=tier, tried=facts.first_asked[:1]) for tier in sorted(losses))
    return RoutedEvent(task_id="j-0", answers=answers, losses=lost)


USUAL = ["send", "send", "answer", "answer", "line", "end", "due", "tick"]
NODES = [
    *("up", "probe", "lose", "start", "restart_node", "move_node", "register_again", "rival", "stale"),
    *("silence", "draining", "leave", "forget", "refuse", "intend", "long_lease", "observe"),
]
UNUSUAL = ["tick", "die", "die", "hedge", "move", "time", "late", "stop", "gone", "restart", "restart", *NODES]


def take_step(play: Play, what: str, picks: Picks) -> None:
    play.now += picks.of([0.01, 0.1, 0.0])
    play.jitter = picks.jitter
    if what in ("answer", "line", "end", "hedge", "move", "time", "late"):
        of_an_attempt(play, what, picks)
    elif what in ("send", "die", "due", "stop", "gone"):
        of_a_job(play, what, picks)
    elif what == "tick":
        play.tick(picks.of([0.5, 0.0, 1.0, 2.0, 4.0]))
    elif what in NODES:
        of_a_node(play, what, picks)
    elif picks.of([False, True]):
        play.restart()


def of_an_attempt(play: Play, what: str, picks: Picks) -> None:
    if what == "late":
        if play.over:
            number = picks.of(play.over[-5:])
            late = [
                events.Ended(number),
                events.TimeUp(number),
                events.Acknowledged(number),
                events.Move(number, "slow"),
                events.LineCame(number, LOST, "line"),
            ]
            assert play.feed(picks.of(late)) == [], "what comes after the end changes nothing"
        return
    if not play.ledger.assigned.attempts:
        return
    attempt = picks.of(list(play.ledger.assigned.attempts.values()))
    number = attempt.facts.id
    match what:
        case "answer":
            play.answer(attempt)
        case "line":
            play.line(attempt, picks)
        case "end":
            play.feed(events.Ended(number, picks.of(FAILURES)))
            assert number not in play.under_way
        case "hedge":
            play.hedge(attempt, picks)
        case "move" if may_move(attempt):
            play.feed(events.Move(number, "slow"))
            assert number not in play.under_way
        case "time":
            play.now = max(play.now, play.until[number])
            play.feed(events.TimeUp(number))
            assert number not in play.under_way


def of_a_job(play: Play, what: str, picks: Picks) -> None:
    if not play.state.jobs:
        return
    job_id = picks.of(list(play.state.jobs))
    job = play.state.jobs[job_id]
    match what:
        case "send":
            play.send(job, picks)
        case "die":
            if play.send(job, picks) and play.under_way:
                lost = list(play.under_way.values())[-1].node_id
                play.feed(events.Unwatched(lost, play.ledger.get(lost).incarnation, OURS))
                play.register(play.process(lost))
                play.tick(picks.of([2.0, 4.0]))
                play.feed(events.JobDue(job_id, play.has_upstream))
        case "due":
            if picks.of(range(16)) == 15:
                play.now = max(play.now, job.facts.deadline)
            play.feed(events.JobDue(job_id, play.has_upstream and picks.of([True, True, False])))
        case "stop":
            if picks.of(range(8)) == 7:
                play.feed(events.JobStopped(job_id, "cancelled", "enough"))
        case "gone":
            if job.ending:
                play.feed(events.JobGone(job_id))


def of_a_node(play: Play, what: str, picks: Picks) -> None:
    node_id = picks.of((*ENDS, *UPPERS))
    if what == "lose" and play.under_way:
        node_id = picks.of([name for facts in play.under_way.values() for name in facts.nodes])
    device, process = play.ledger.find(node_id), play.processes.get(node_id)
    match what:
        case "up":
            for each in play.processes:
                play.feed(events.Intended(each, NO_INTENT)) if picks.of(range(2)) else None
                play.beat(each)
        case "start" if process is None:
            play.register(play.process(node_id))
        case "restart_node":
            play.register(play.process(node_id))
        case "move_node" if process is not None:
            moved = process.model_copy(update={"url": f"http://{node_id}:{picks.of(range(2, 5))}"})
            play.register(moved)
        case "register_again" if process is not None:
            play.register(process)
        case "rival":
            play.register(play.process(node_id, "http://rival:1"))
        case "long_lease":
            play.register(play.process(node_id).model_copy(update={"lease_s": picks.of([1.0, 60.0])}))
        case "observe" if process is not None:
            play.feed(events.Heard(node_id, picks.of([process.incarnation, "f" * 16])))
        case "stale":
            stale = Heartbeat(incarnation="f" * 16, in_flight=0, queued_images=0, images_done=0)
            assert play.feed(events.Beat(node_id, stale)) is None
        case "silence":
            play.silent ^= {node_id}
        case "draining" if process is not None:
            play.beat(node_id, draining=picks.of([True, False]))
        case "refuse":
            play.feed(events.TurnedAway(node_id, "no token", None, Tier.END))
        case _ if device is not None:
            incarnation = device.incarnation
            match what:
                case "probe":
                    outcome, ago_s = picks.of(list(Probe)), picks.of([0.0, 0.3, 1.0])
                    play.feed(events.Probed(node_id, incarnation, outcome, play.now - ago_s))
                case "lose":
                    play.processes.pop(node_id, None)
                    play.feed(events.Unwatched(node_id, incarnation, OURS))
                case "leave":
                    play.processes.pop(node_id, None)
                    play.feed(events.TookLeave(node_id, incarnation))
                case "forget":
                    play.feed(events.Forgotten(node_id))
                case "intend":
                    intents = [Intent(drained=True), NO_INTENT, Intent(removed=True), Intent(trusted=False)]
                    play.feed(events.Intended(node_id, picks.of(intents)))


POLICIES = st.builds(
    lambda scheme, recovery, loss, gated, interactive, deadline_s: (
        JobPolicy(
            scheme=scheme,
            recovery=recovery,
            on_upstream_loss=loss,
            deadline_s=deadline_s,
            task_deadline_s=deadline_s if loss is UpstreamLoss.WAIT else 10.0,
            escalate=Escalate.THRESHOLD if gated else Escalate.ALWAYS,
            gates=GATES if gated and scheme is not Scheme.END else (),
        ),
        interactive,
    ),
    scheme=st.sampled_from([Scheme.END_EDGE, Scheme.ADAPTIVE, Scheme.END]),
    recovery=st.sampled_from([Recovery.MONITOR, Recovery.REASSIGN, Recovery.NONE]),
    loss=st.sampled_from(UpstreamLoss),
    gated=st.booleans(),
    interactive=st.sampled_from([False, False, False, True]),
    deadline_s=st.sampled_from([1000.0, 30.0]),
)


@pytest.mark.timeout(1800)
@hypothesis_settings(max_examples=max(300, hypothesis_settings().max_examples))
@given(
    policies=st.lists(POLICIES, min_size=1, max_size=2),
    tasks=st.integers(1, 4),
    unusual=st.lists(st.sampled_from(UNUSUAL), max_size=10),
    steps=st.lists(st.integers(0, 2**32), min_size=30, max_size=80),
    answering=st.sampled_from([True, True, True, False]),
)
@example(  # a node falls silent for one rounding longer than it may, and somebody asks for it meanwhile
    policies=[(JobPolicy(scheme=Scheme.END_EDGE, deadline_s=1000, task_deadline_s=10), False)],
    tasks=1,
    unusual=["tick", "silence", "tick"],
    steps=[0] * 21 + [191, 210, 69279, 134217729, 325, 2130, 293, 0, 0],
    answering=True,
)
def test_in_any_order_of_events_nothing_is_lost_or_answered_twice_and_everything_ends(
    policies, tasks, unusual, steps, answering
):
    jobs = [
        JobFacts(job_id=f"j{number}", policy=policy, deadline=1.0 + policy.deadline_s, interactive=interactive)
        for number, (policy, interactive) in enumerate(policies)
    ]
    play = Play(jobs, tasks)
    for facts in jobs:
        play.add(facts)
    for picks in map(Picks, steps):
        take_step(play, picks.of(USUAL + unusual), picks)
    play.let_end(answering=answering)
    play.check_end()
    play.check_again()
