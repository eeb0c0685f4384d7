"""What becomes of attempts and their tasks: every step of the state machine. `test_step_properties` says what holds in
any order of events."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from scheduler.core import events
from scheduler.core.events import Failure, FailureKind
from scheduler.core.fleet import Ledger
from scheduler.core.health import DetectorTimes
from scheduler.core.limits import TaskLimits, attempt_deadline
from scheduler.core.policy import JobPolicy
from scheduler.core.step import State, step
from scheduler.core.work import Attempt, AttemptFacts, JobFacts, OpenJob, Phase, TaskFacts
from scheduler.dispatch.loop import _failure
from tierkit.errors import UpstreamError
from tierkit.types import Recovery, Scheme, Tier, UpstreamLoss
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent, RoutedEvent, StageAnswer, StageLoss, WrongAnswer
from tierkit.wire.messages import Heartbeat, ModelOffer, Registration, Upstream

TIMES = DetectorTimes(heartbeat_s=0.2, suspect_s=0.5, probe_s=0.2, lease_s=1.0, stall_s=5.0, set_aside_s=1.0)
LIMITS = TaskLimits(
    max_attempts=3,
    coarse_timeout_s=5.0,
    task_deadline_s=30.0,
    acknowledge_s=1.0,
    set_aside_s=1.0,
    retries_per_s=100.0,
    retry_burst=100.0,
)
FIRST = "a" * 16
"""Incarnation of each node at the beginning."""

COARSE = CoarseEvent(
    task_id="j-0", node_id="end-0", model="m", labels=(0,), confidences=(0.5,), queue_ms=0, compute_ms=1
)
FINE = FineEvent(
    task_id="j-0",
    node_id="edge-0",
    tier=Tier.EDGE,
    model="m",
    labels=(0,),
    confidences=(0.5,),
    coarse_labels=(0,),
    coarse_confidences=(0.5,),
    round_trip_ms=1,
)
LOST = FallbackEvent(task_id="j-0", reason="upstream_unavailable", detail="refused", tried=("edge-0",))
LATE = replace(LOST, reason="deadline", tried=())
EDGE = StageAnswer(
    tier=Tier.EDGE,
    node_id="edge-0",
    model="m",
    indices=(0,),
    labels=(0,),
    confidences=(0.5,),
    coarse_labels=(0,),
    coarse_confidences=(0.5,),
    round_trip_ms=1,
)
NO_CLOUD = StageLoss(tier=Tier.CLOUD, indices=(0,), reason="upstream_timeout", detail="slow", tried=("cloud-0",))
NO_TIME = replace(NO_CLOUD, reason="deadline")
NO_EDGE = replace(NO_CLOUD, tier=Tier.EDGE)

BROKEN = Failure(FailureKind.UNREACHABLE, "broke", may_have_held=True)
CLOSED = Failure(FailureKind.UNREACHABLE, "refused")
NONSENSE = Failure(FailureKind.INVALID, "nonsense")
BUSY = Failure(FailureKind.BUSY, "busy", retry_after_s=1.0)
REFUSED = _failure(UpstreamError("no", status_code=403))
WRONG = Failure(FailureKind.WRONG, "nonsense")


def routed(*answers: StageAnswer, losses: tuple[StageLoss, ...] = ()) -> RoutedEvent:
    return RoutedEvent(task_id="j-0", answers=answers, losses=losses)


def registration(node_id: str, incarnation: str = FIRST, url: str = "") -> Registration:
    offer = ModelOffer(name="m", sha256="0" * 64, ms_per_image=1.0)
    return Registration(
        node_id=node_id,
        tier=Tier(node_id.partition("-")[0]),
        incarnation=incarnation,
        url=url or f"http://{node_id}:1",
        models=(offer,),
        version="1",
    )


class World:
    """A fleet, a job, and what came of it."""

    def __init__(self, tasks: int = 1, *, more_above: bool = True, **policy: Any) -> None:
        self.now = 1.0
        self.more_above = more_above
        """Whether some upstream node could give a job what is missing."""
        self.ledger = Ledger(TIMES)
        self.state = State(limits=LIMITS, ledger=self.ledger)
        self.answers: list[tuple[int, str, str]] = []
        self.outcomes: list[str] = []
        self.sent: list[AttemptFacts] = []
        """Attempts that were sent and are not over, by the effects."""
        self._ids = itertools.count(1)
        for node_id in ("end-0", "end-1", "edge-0", "edge-1"):
            self.feed(events.Registered(registration(node_id)))
        settled = JobPolicy(**{"scheme": Scheme.END_EDGE, "deadline_s": 100, "task_deadline_s": 10, **policy})
        facts = JobFacts(job_id="j", policy=settled, deadline=100.0)
        self.feed(events.JobAdded(facts, [TaskFacts(index=k, first_image=k, images=1) for k in range(tasks)]))
        self.job: OpenJob = self.state.jobs["j"]

    def feed(self, what: events.What) -> list[events.Effect]:
        """Take an event, and those that its effects bring about; returns the effects."""
        effects = step(self.state, events.Event(what, self.now, 0.5))
        for effect in list(effects):
            match effect:
                case events.Dispatch(attempt):
                    self.sent.append(attempt)
                case events.Finished(attempt):
                    self.sent.remove(attempt)
                case events.Deliver(answer):
                    self.answers.append((answer.task, answer.stage, answer.kind))
                case events.TakeBack(answer):
                    self.answers.remove((answer.task, answer.stage, answer.kind))
                case events.Report(_, report):
                    self.outcomes.append(report.outcome)
                case events.LookUp(attempt, report, line):
                    effects += self.feed(events.LookedUp(attempt, report, line, self.more_above))
        return effects

    def start(self, end: str = "end-0", *uppers: str, task: int | None = None, **given: Any) -> Attempt:
        """Send the next task, or a hedge for the one that is given."""
        sent = self.job.next_task() if task is None else self.job.open[task]
        assert sent is not None
        nodes = tuple(
            Upstream(node_id=name, tier=Tier.EDGE, url=f"http://{name}", model="m", sha256="0" * 64, encoding=None)
            for name in uppers
        )
        facts = AttemptFacts(
            id=next(self._ids),
            job_id="j",
            task=sent.facts.index,
            images=1,
            number=sent.tries.made + 1,
            node_id=end,
            incarnation=self.ledger.get(end).incarnation,
            upstreams=nodes,
            incarnations={name: self.ledger.get(name).incarnation for name in uppers},
            hedge=task is not None,
            fine_only=sent.coarse is not None,
            started=self.now,
            started_at=0.0,
            deadline=attempt_deadline(LIMITS, self.job.facts, sent.started, self.now),
            **given,
        )
        self.feed(events.AttemptBegun(facts))
        return self.ledger.assigned.attempts[facts.id]

    def again(self, end: str = "end-0", *uppers: str) -> Attempt:
        """Send the task that failed once more, when its wait is over."""
        self.now = max(self.now, *(task.not_before for task in self.job.delayed))
        self.feed(events.JobDue("j", has_upstream=True))
        return self.start(end, *uppers)

    def lines(self, attempt: Attempt, *said: Any) -> None:
        for event in said:
            self.feed(events.LineCame(attempt.facts.id, event, "line"))

    def end(self, attempt: Attempt, failure: Failure | None = None) -> list[events.Effect]:
        return self.feed(events.Ended(attempt.facts.id, failure))

    def kill(self, node_id: str) -> None:
        """A node is given up as dead, and stays on the list."""
        self.feed(events.Unwatched(node_id, self.ledger.get(node_id).incarnation, "killed"))

    def give_up_at_the_deadline(self) -> None:
        self.now = self.job.facts.deadline
        self.feed(events.JobDue("j", has_upstream=True))

    @property
    def kinds(self) -> list[str]:
        return [kind for _, _, kind in self.answers]

    @property
    def queued(self) -> list[int]:
        """Tasks that wait to be sent, again or for the first time."""
        job = self.job
        return [task.facts.index for task in (*job.ready, *job.delayed, *job.held) if not task.closed]


def at(phase: Phase, **policy: Any) -> tuple[World, Attempt]:
    """An attempt that has come to a phase."""
    if phase is Phase.ACKNOWLEDGING:
        policy["recovery"] = Recovery.REASSIGN
    world = World(**policy)
    attempt = world.start("end-0", "edge-0")
    if phase in (Phase.FINE, Phase.ANSWERED, Phase.ENDED):
        world.lines(attempt, COARSE)
    if phase in (Phase.ANSWERED, Phase.ENDED):
        world.lines(attempt, FINE)
    if phase is Phase.ENDED:
        world.end(attempt)
    assert attempt.phase is phase
    return world, attempt


def event_for(name: str, attempt: Attempt) -> events.What:
    """An event of this name that is about the attempt."""
    number = attempt.facts.id
    made: dict[str, events.What] = {
        "acknowledged": events.Acknowledged(number),
        "coarse": events.LineCame(number, COARSE, "line"),
        "fine": events.LineCame(number, FINE, "line"),
        "fallback": events.LineCame(number, LOST, "line"),
        "broken": events.Ended(number, BROKEN),
        "nonsense": events.Ended(number, NONSENSE),
        "not now": events.Ended(number, BUSY),
        "over": events.Ended(number),
        "time up": events.TimeUp(number),
        "move": events.Move(number, "slow"),
        "end gone": events.Forgotten("end-0"),
        "upper gone": events.Forgotten("edge-0"),
        "job ended": events.JobStopped("j", "cancelled", "enough"),
    }
    return made[name]


A, C, F, W, E = Phase.ACKNOWLEDGING, Phase.COARSE, Phase.FINE, Phase.ANSWERED, Phase.ENDED


@pytest.mark.parametrize(
    ("phase", "event", "to", "outcome", "queued"),
    [
        (A, "acknowledged", C, None, False),
        (A, "broken", E, "unreachable", True),
        (A, "time up", E, "error", True),
        (A, "end gone", E, "lost", True),
        (A, "upper gone", A, None, False),
        (A, "job ended", E, "cancelled", False),
        (C, "coarse", F, None, False),
        (C, "broken", E, "unreachable", True),
        (C, "nonsense", E, "error", True),
        (C, "not now", E, "refused", True),
        (C, "time up", E, "error", True),
        (C, "end gone", E, "lost", True),
        (C, "upper gone", C, None, False),
        (C, "job ended", E, "cancelled", False),
        (F, "fine", W, "ok", False),
        (F, "fallback", W, None, False),
        (F, "broken", E, "unreachable", True),
        (F, "nonsense", E, "error", True),
        (F, "not now", E, "refused", True),
        (F, "time up", E, "deadline", False),
        (F, "end gone", E, "lost", True),
        (F, "upper gone", E, "rerouted", True),
        (F, "move", E, "rerouted", True),
        (F, "job ended", E, "cancelled", False),
        (W, "over", E, "ok", False),
        (W, "broken", E, "ok", False),
        (W, "time up", E, "ok", False),
        (W, "end gone", W, "ok", False),
        (W, "upper gone", W, "ok", False),
        (W, "job ended", W, "ok", False),
        *((E, name, E, "ok", False) for name in ("coarse", "fine", "broken", "time up", "end gone", "job ended")),
    ],
)
def test_every_phase_and_event(phase: Phase, event: str, to: Phase, outcome: str | None, queued: bool):
    world, attempt = at(phase)
    if event == "time up":
        world.now = attempt.until
    world.feed(event_for(event, attempt))
    assert attempt.phase is to
    assert world.outcomes == ([] if outcome is None else [outcome])
    assert world.queued == ([0] if queued else [])
    assert world.sent == ([] if to is E else [attempt.facts])
    assert world.ledger.assigned.outstanding("end-0") == (to is not E)
    assert world.ledger.assigned.owed("end-0") == attempt.owed == (to in (A, C))
    if (device := world.ledger.find("end-0")) is not None:
        assert device.given == attempt.owed


def test_a_fine_answer_closes_the_task_and_drops_the_attempt_beside_it():
    world = World()
    first = world.start("end-0", "edge-0")
    second = world.start("end-1", "edge-0", task=0)
    world.lines(first, COARSE, FINE)
    assert (first.phase, second.phase) == (Phase.ANSWERED, Phase.ENDED)
    assert world.outcomes == ["ok", "cancelled"]
    world.lines(second, COARSE, FINE, LOST)
    world.end(first)
    assert world.answers == [(0, "coarse", "coarse"), (0, "final", "fine")]
    assert world.job.open == {}


def test_a_coarse_answer_that_comes_as_its_time_is_up_does_not_end_the_task():
    world = World()
    attempt = world.start("end-0", "edge-0")
    coarse_until = attempt.until
    world.lines(attempt, COARSE)
    world.now = coarse_until
    world.feed(events.TimeUp(attempt.facts.id))
    assert (world.kinds, world.outcomes, world.queued) == (["coarse"], ["error"], [0])


def test_scheme_end_is_closed_by_the_coarse_answer():
    world = World(scheme=Scheme.END)
    world.lines(world.start(), COARSE)
    assert world.kinds == ["coarse"]
    assert world.job.open == {}


@pytest.mark.parametrize(
    ("loss", "lines", "upper", "kinds", "queued"),
    [
        (UpstreamLoss.FALLBACK, (COARSE,), False, ["coarse", "fallback"], False),
        (UpstreamLoss.FALLBACK, (COARSE, LOST), True, ["coarse"], True),
        (UpstreamLoss.FALLBACK, (COARSE, LATE), True, ["coarse", "fallback"], False),
        (UpstreamLoss.WAIT, (COARSE,), False, ["coarse"], True),
        (UpstreamLoss.WAIT, (COARSE, LOST), True, ["coarse"], True),
        (UpstreamLoss.WAIT, (COARSE, LATE), True, ["coarse", "fallback"], False),
    ],
)
def test_a_lost_upper_node(loss, lines, upper, kinds, queued):
    world = World(on_upstream_loss=loss)
    attempt = world.start("end-0", *["edge-0"] * upper)
    world.lines(attempt, *lines)
    world.end(attempt)
    assert world.kinds == kinds
    assert bool(world.queued) == queued


@pytest.mark.parametrize(("failed", "more_above"), [(2, True), (0, False)])
def test_the_coarse_answer_stands_when_upper_nodes_have_failed_too_often_or_none_is_left(failed, more_above):
    world = World(more_above=more_above)
    for _ in range(failed):
        world.end(world.start("end-1") if not world.outcomes else world.again("end-1"), CLOSED)
    attempt = world.again("end-0", "edge-0") if failed else world.start("end-0", "edge-0")
    world.lines(attempt, COARSE, LOST)
    world.end(attempt)
    assert (world.kinds, world.outcomes[failed:]) == (["coarse", "fallback"], ["fallback"])


@pytest.mark.parametrize("status", [400, 401, 403, 413, 431, 500])
@pytest.mark.parametrize("loss", list(UpstreamLoss))
def test_a_route_that_end_devices_refuse_does_not_cost_the_coarse_answer(status: int, loss: UpstreamLoss):
    world = World(on_upstream_loss=loss)
    refused = _failure(UpstreamError("no", status_code=status))
    world.end(world.start("end-0", "edge-0"), refused)
    for _ in range(LIMITS.max_attempts - 1):
        assert world.kinds == []
        world.end(world.again("end-0", "edge-0"), refused)
    assert world.job.open[0].tries.refused
    attempt = world.again("end-0")  # without upstream nodes: `refused` says so
    world.lines(attempt, COARSE)
    world.end(attempt)
    assert world.kinds == (["coarse"] if loss is UpstreamLoss.WAIT else ["coarse", "fallback"])


@pytest.mark.parametrize("failure", [REFUSED, CLOSED])
def test_a_task_that_is_refused_without_upper_nodes_as_well_has_failed(failure: Failure):
    world = World()
    world.end(world.start("end-0", "edge-0"), REFUSED)
    for _ in range(LIMITS.max_attempts - 1):
        world.end(world.again("end-0", "edge-0"), REFUSED)
    world.end(world.again("end-0"), failure)
    assert world.kinds == ["failed"]


def test_with_recovery_none_the_first_failure_of_the_upper_nodes_counts():
    world = World(recovery=Recovery.NONE)
    world.lines(world.start("end-0", "edge-0"), COARSE, LOST)
    assert world.kinds == ["coarse", "fallback"]


@pytest.mark.parametrize(
    ("event", "recovery", "kind"),
    [
        (routed(EDGE), Recovery.MONITOR, "fine"),
        (routed(), Recovery.MONITOR, "fine"),  # the coarse answer was sure: no fallback
        (routed(EDGE, losses=(NO_CLOUD,)), Recovery.MONITOR, None),
        (routed(EDGE, losses=(NO_CLOUD,)), Recovery.NONE, "fine"),
        (routed(EDGE, losses=(NO_TIME,)), Recovery.MONITOR, "fine"),
        (routed(losses=(NO_EDGE,)), Recovery.MONITOR, None),
        (routed(losses=(NO_EDGE,)), Recovery.NONE, "fallback"),
        (routed(replace(EDGE, tier=Tier.CLOUD), losses=(NO_EDGE,)), Recovery.MONITOR, "fine"),
    ],
)
def test_images_that_went_up_one_by_one(event: RoutedEvent, recovery: Recovery, kind: str | None):
    world = World(recovery=recovery)
    world.lines(world.start("end-0", "edge-0"), COARSE, event)
    assert [said for _, stage, said in world.answers if stage == "final"] == ([] if kind is None else [kind])


@pytest.mark.parametrize(("deaths", "kind"), [(0, "fine"), (3, "fallback")])
def test_what_there_is_of_the_finer_answers_stands_when_no_more_comes(deaths, kind):
    """It does not stand for a task that is quarantined."""
    world = World()
    world.feed(events.Registered(registration("edge-2")))
    attempt = world.start("end-0", "edge-0")
    world.lines(attempt, COARSE, routed(EDGE, losses=(NO_CLOUD,)))
    for number in range(deaths):
        world.kill(f"edge-{number}")
        if number + 1 < deaths:
            world.again("end-0", f"edge-{number + 1}")
    if not deaths:
        world.give_up_at_the_deadline()
    assert world.answers[-1] == (0, "final", kind)


def test_giving_up_leaves_the_coarse_answer_or_an_error():
    world = World(tasks=2)
    with_coarse, _ = world.start("end-0", "edge-0"), world.start("end-1", "edge-0")
    world.lines(with_coarse, COARSE)
    world.give_up_at_the_deadline()
    assert world.answers[1:] == [(0, "final", "fallback"), (1, "final", "failed")]
    assert world.outcomes == ["deadline", "deadline"]
    assert world.sent == []


def test_the_last_attempt_that_a_task_may_fail_gives_it_up():
    world = World()
    world.end(world.start("end-0"), CLOSED)
    world.end(world.again("end-1"), CLOSED)
    world.end(world.again("end-0"), CLOSED)
    assert world.kinds == ["failed"]
    assert world.outcomes == ["unreachable"] * 3


def test_with_recovery_none_a_failed_attempt_ends_the_job():
    world = World(recovery=Recovery.NONE)
    effects = world.end(world.start(), WRONG)
    assert [effect.state for effect in effects if isinstance(effect, events.JobEnds)] == ["failed"]


def test_a_coarse_answer_with_nonsense_behind_it_is_taken_back_with_all_that_relies_on_it():
    world = World()
    liar = world.start("end-0", "edge-0")
    world.lines(liar, COARSE)
    beside = world.start("end-1", "edge-0", task=0)
    world.end(liar, NONSENSE)
    assert world.answers == []
    assert beside.phase is Phase.ENDED
    assert world.job.open[0].coarse is None
    assert world.queued == [0]


def wrong_answers(world: World) -> dict[str, int]:
    """Wrong answers in a row that count against each node."""
    counts = {view.device.node_id: view.device.wrong.count for view in world.ledger.view(world.now)}
    return {node_id: count for node_id, count in counts.items() if count}


def test_the_first_node_to_answer_wrongly_is_blamed_and_the_second_shares_the_blame_with_the_task():
    world = World()
    world.end(world.start("end-0"), WRONG)
    assert wrong_answers(world) == {"end-0": 1}
    world.end(world.again("end-1"), WRONG)
    assert wrong_answers(world) == {}
    assert world.job.open[0].blame.wrong == {"end-0": FIRST, "end-1": FIRST}


def test_what_a_device_says_of_upper_nodes_counts_for_those_alone_that_it_was_to_ask():
    world = World()
    attempt = world.start("end-0", "edge-0")
    wrong = tuple(WrongAnswer(node_id=name, detail="nonsense") for name in ("edge-0", "edge-1"))
    world.lines(attempt, COARSE, replace(LOST, wrong=wrong))
    assert wrong_answers(world) == {"edge-0": 1}


def test_a_task_that_three_nodes_died_with_is_quarantined():
    world = World()
    world.feed(events.Registered(registration("end-2")))
    world.start("end-0")
    world.kill("end-0")
    world.again("end-1")
    world.kill("end-1")
    world.again("end-2")
    assert world.kinds == []
    world.kill("end-2")
    assert (world.kinds, world.queued, world.outcomes) == (["failed"], [], ["lost"] * 3)


@pytest.mark.parametrize(("dies", "deaths"), [(True, {"end-0"}), (False, set())])
def test_a_broken_connection_counts_as_death_once_the_node_is_known_to_be_dead(dies, deaths):
    world = World()
    world.end(world.start("end-0"), BROKEN)
    if not dies:
        beat = Heartbeat(incarnation=FIRST, in_flight=0, queued_images=0, images_done=0)
        world.feed(events.Beat("end-0", beat))  # it is alive
    world.kill("end-0")
    assert world.job.open[0].blame.deaths == deaths


def test_a_node_that_was_taken_off_the_list_has_not_died():
    world = World()
    attempt = world.start("end-0")
    world.feed(events.Forgotten("end-0"))
    assert attempt.task.blame.deaths == set()
    assert world.queued == [0]


@pytest.mark.parametrize("node_id", ["end-0", "edge-0"])
def test_what_was_sent_to_a_node_is_lost_when_it_moves_to_another_address(node_id):
    world, _ = at(Phase.FINE)
    world.feed(events.Registered(registration(node_id, url="http://elsewhere:1")))
    assert world.outcomes == ["lost" if node_id == "end-0" else "rerouted"]
    assert world.job.open[0].blame.deaths == set(), "to move is not to die"
    assert world.queued == [0]


def test_a_node_that_registers_again_still_owes_its_answers():
    world, attempt = at(Phase.COARSE)
    world.feed(events.Registered(registration("end-0")))
    assert world.ledger.get("end-0").given == 1
    world.lines(attempt, COARSE)
    assert world.ledger.get("end-0").given == 0


def moved(world: World) -> JobPolicy:
    """Let the job belong to another release; returns the policy that it would have then."""
    policy = world.job.facts.policy.model_copy(update={"release": "flowers@7"})
    world.feed(events.JobMoved("j", policy))
    return policy


def test_a_job_without_answers_moves_to_another_release_and_its_attempts_go_on_being_numbered() -> None:
    world = World(tasks=2)
    for _ in range(2):
        world.end(world.start("end-0", "edge-0"), BROKEN)
    on_its_way = world.again("end-1", "edge-0")
    assert world.job.facts.rules.release == 0
    policy = moved(world)
    assert (world.job.facts.policy, world.job.facts.rules.release) == (policy, 7)
    assert on_its_way.phase is Phase.ENDED
    assert world.outcomes[-1] == "cancelled"
    assert sorted(world.queued) == [0, 1]
    again = world.again("end-1", "edge-0")
    made = {0: 1, 1: 1} | {on_its_way.facts.task: 2}
    assert again.facts.number == made[again.facts.task] + 1
    assert not again.task.blame.tried


@pytest.mark.parametrize("stage", ["coarse", "final"])
def test_two_releases_never_answer_one_job(stage: str) -> None:
    world = World(tasks=2)
    attempt = world.start("end-0", "edge-0")
    world.lines(attempt, COARSE, *([FINE] if stage == "final" else []))
    moved(world)
    assert world.job.facts.policy.release is None
    # Also where the scheduler before this one has the answers.
    later = World()
    later.feed(events.JobAdded(later.job.facts, [TaskFacts(index=0, first_image=0, images=1)], answered=True))
    later.job = later.state.jobs["j"]
    moved(later)
    assert later.job.facts.policy.release is None
