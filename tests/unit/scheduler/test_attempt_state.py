"""What becomes of attempts and their tasks: every step of the state machine, and what holds in any order of events."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st
from msgspec.structs import replace

from scheduler.core.fleet import DeviceList
from scheduler.core.health import DetectorTimes
from scheduler.core.policy import JobPolicy
from scheduler.core.work import ActiveJob, ActiveTask, Attempt, Phase
from scheduler.dispatch import events
from scheduler.dispatch.attempt_state import AttemptStates
from tierkit.errors import InvalidAnswer, Overloaded, UpstreamError, UpstreamUnavailable
from tierkit.pacing import TokenBucket
from tierkit.types import Recovery, Scheme, Tier, UpstreamLoss
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent, RoutedEvent, StageAnswer, StageLoss, WrongAnswer
from tierkit.wire.messages import ModelOffer, Registration, Upstream

TIMES = DetectorTimes(heartbeat_s=0.2, suspect_s=0.5, probe_s=0.2, lease_s=1.0, stall_s=5.0, set_aside_s=1.0)
RULES: Any = SimpleNamespace(max_attempts=3, coarse_timeout_s=5.0, task_deadline_s=30.0, acknowledge_s=1.0)

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


def routed(*answers: StageAnswer, losses: tuple[StageLoss, ...] = ()) -> RoutedEvent:
    return RoutedEvent(task_id="j-0", answers=answers, losses=losses)


class World:
    """A job, its attempts, and the books that must balance."""

    def __init__(self, tasks: int = 1, *, more_above: bool = True, **policy: Any) -> None:
        self.now = 1.0
        self.devices = DeviceList(TIMES)
        for node_id, tier in (("end-0", Tier.END), ("end-1", Tier.END), ("edge-0", Tier.EDGE), ("edge-1", Tier.EDGE)):
            self.register(node_id, tier)
        self.states = AttemptStates(
            settings=RULES, devices=self.devices, more_above=lambda *_: more_above, chance=random.Random(0)
        )
        settled = JobPolicy(**{"scheme": Scheme.END_EDGE, "deadline_s": 100, "task_deadline_s": 10, **policy})
        self.job = ActiveJob(
            job_id="j",
            policy=settled,
            images=np.zeros((tasks, 32, 32, 3), np.uint8),
            content="",
            tasks=[ActiveTask(index=k, first_image=k, images=1) for k in range(tasks)],
            recipient=SimpleNamespace(started=lambda: None),
            deadline=100.0,
        )
        self.job.retries = TokenBucket(100.0, 100)
        self.answers: list[tuple[int, str, str]] = []
        self.outcomes: list[str] = []
        self.owed: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()
        self.said: list[str] = []
        """Names of all effects."""

    def register(self, node_id: str, tier: Tier, incarnation: str = "a" * 16) -> None:
        offer = ModelOffer(name="m", sha256="0" * 64, ms_per_image=1.0)
        place = Registration(
            node_id=node_id,
            tier=tier,
            incarnation=incarnation,
            url=f"http://{node_id}:1",
            models=(offer,),
            version="1",
        )
        self.devices.register(place, self.now)

    def start(self, end: str = "end-0", *uppers: str, task: ActiveTask | None = None, **given: Any) -> Attempt:
        """Send the next task, or once more the one that is given."""
        task = task or self.job.begin(self.now)
        nodes = tuple(
            Upstream(node_id=name, tier=Tier.EDGE, url=f"http://{name}", model="m", sha256="0" * 64, encoding=None)
            for name in uppers
        )
        attempt = Attempt(
            job=self.job,
            task=task,
            device=self.devices.get(end),
            upstreams=nodes,
            incarnations={name: self.devices.get(name).incarnation for name in uppers},
            fine_only=task.has_coarse,
            started=self.now,
            started_at=0.0,
            deadline=self.states.deadline_of(self.job, task, self.now),
            **given,
        )
        self.states.start(attempt)
        self.owed[end] += attempt.owed
        self.under_way[end] += 1
        return attempt

    def feed(self, event: events.Event) -> list[str]:
        """Returns the names of the effects."""
        effects = self.states.handle(event)
        for effect in effects:
            match effect:
                case events.Released(attempt):
                    self.owed[attempt.node_id] -= 1
                case events.Finished(attempt):
                    self.under_way[attempt.node_id] -= 1
                case events.Deliver(_, answer):
                    self.answers.append((answer.task, answer.stage, answer.kind))
                case events.TakeBack(_, answer):
                    self.answers.remove((answer.task, answer.stage, answer.kind))
                case events.Report(_, outcome):
                    self.outcomes.append(outcome)
        names = [type(effect).__name__ for effect in effects]
        self.said += names
        return names

    def lines(self, attempt: Attempt, *said: Any) -> None:
        for event in said:
            self.feed(events.LineCame(attempt, event, "line", self.now))

    def end(self, attempt: Attempt, error: Exception | None = None) -> list[str]:
        return self.feed(events.Ended(attempt, error, self.now))

    def lose(self, node_id: str) -> list[str]:
        """A node is struck off the list."""
        self.devices.forget(node_id)
        return self.feed(events.NodeChanged(node_id, self.now))

    def kill(self, node_id: str) -> list[str]:
        """A node is given up as dead, and stays on the list."""
        self.devices.give_up(node_id, self.devices.get(node_id).incarnation, RuntimeError("killed"), self.now)
        return self.feed(events.NodeChanged(node_id, self.now))

    @property
    def kinds(self) -> list[str]:
        return [kind for _, _, kind in self.answers]

    @property
    def queued(self) -> list[int]:
        """Tasks that wait to be sent, again or for the first time."""
        return [task.index for task in (*self.job.ready, *self.job.delayed, *self.job.held) if not task.closed]


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


def event_for(name: str, world: World, attempt: Attempt) -> events.Event:
    """An event of this name that is about the attempt."""
    now = world.now
    if name.endswith("gone"):
        world.devices.forget("edge-0" if name == "upper gone" else "end-0")
        return events.NodeChanged("edge-0" if name == "upper gone" else "end-0", now)
    made: dict[str, events.Event] = {
        "acknowledged": events.Acknowledged(attempt, now),
        "coarse": events.LineCame(attempt, COARSE, "line", now),
        "fine": events.LineCame(attempt, FINE, "line", now),
        "fallback": events.LineCame(attempt, LOST, "line", now),
        "broken": events.Ended(attempt, UpstreamUnavailable("broke"), now),
        "nonsense": events.Ended(attempt, InvalidAnswer("nonsense"), now),
        "not now": events.Ended(attempt, Overloaded("busy", retry_after_s=1.0), now),
        "over": events.Ended(attempt, None, now),
        "time up": events.TimeUp(attempt, now),
        "move": events.Move(attempt, "slow", now),
        "job ended": events.JobEnded(attempt.job, now),
        "give up": events.GiveUp(attempt.job, attempt.task, "quarantined", "it kills", now),
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
    happened = event_for(event, world, attempt)
    if event == "time up":
        world.now = attempt.until
    world.feed(happened._replace(now=world.now))
    assert attempt.phase is to
    assert world.outcomes == ([] if outcome is None else [outcome])
    assert world.queued == ([0] if queued else [])
    assert world.under_way["end-0"] == (to is not E)
    assert world.owed["end-0"] == attempt.owed == (to in (A, C))


def test_a_fine_answer_closes_the_task_and_drops_the_attempt_beside_it():
    world = World()
    first = world.start("end-0", "edge-0")
    second = world.start("end-1", "edge-0", task=first.task, hedge=True)
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
    world.feed(events.TimeUp(attempt, coarse_until))
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


@pytest.mark.parametrize(("attempts", "more_above"), [(2, True), (0, False)])
def test_the_coarse_answer_stands_when_upper_nodes_have_failed_too_often_or_none_is_left(attempts, more_above):
    world = World(more_above=more_above)
    task = world.job.ready[0]
    task.failed_attempts = attempts
    attempt = world.start("end-0", "edge-0")
    world.lines(attempt, COARSE, LOST)
    world.end(attempt)
    assert (world.kinds, world.outcomes) == (["coarse", "fallback"], ["fallback"])


@pytest.mark.parametrize("status", [400, 401, 403, 413, 431, 500])
@pytest.mark.parametrize("loss", list(UpstreamLoss))
def test_a_route_that_end_devices_refuse_does_not_cost_the_coarse_answer(status: int, loss: UpstreamLoss):
    world = World(on_upstream_loss=loss)
    task = world.job.begin(world.now)
    for _ in range(RULES.max_attempts):
        world.end(world.start("end-0", "edge-0", task=task), UpstreamError("no", status_code=status))
        assert world.kinds == []
    assert task.refused
    attempt = world.start("end-0", task=task)  # without upstream nodes: `refused` says so
    world.lines(attempt, COARSE)
    world.end(attempt)
    assert world.kinds == (["coarse"] if loss is UpstreamLoss.WAIT else ["coarse", "fallback"])


@pytest.mark.parametrize("error", [UpstreamError("no", status_code=403), UpstreamUnavailable("gone")])
def test_a_task_that_is_refused_without_upper_nodes_as_well_has_failed(error: Exception):
    world = World()
    task = world.job.begin(world.now)
    for _ in range(RULES.max_attempts):
        world.end(world.start("end-0", "edge-0", task=task), UpstreamError("no", status_code=403))
    world.end(world.start("end-0", task=task), error)
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


@pytest.mark.parametrize(("reason", "kind"), [("deadline", "fine"), ("quarantined", "fallback")])
def test_what_there_is_of_the_finer_answers_stands_when_no_more_comes(reason, kind):
    world = World()
    attempt = world.start("end-0", "edge-0")
    world.lines(attempt, COARSE, routed(EDGE, losses=(NO_CLOUD,)))
    world.feed(events.GiveUp(world.job, attempt.task, reason, "it is over", 2.0))
    assert world.answers[-1] == (0, "final", kind)


def test_giving_up_leaves_the_coarse_answer_or_an_error():
    world = World(tasks=2)
    with_coarse, without = world.start("end-0", "edge-0"), world.start("end-1", "edge-0")
    world.lines(with_coarse, COARSE)
    for attempt in (with_coarse, without):
        world.feed(events.GiveUp(world.job, attempt.task, "deadline", "late", 2.0))
    assert world.answers[1:] == [(0, "final", "fallback"), (1, "final", "failed")]


def test_the_last_attempt_that_a_task_may_fail_gives_it_up():
    world = World()
    for number in range(3):
        attempt = world.start(f"end-{number % 2}", task=world.job.open[0] if number else None)
        world.end(attempt, UpstreamUnavailable("refused"))
    assert world.kinds == ["failed"]
    assert world.outcomes == ["unreachable"] * 3


def test_with_recovery_none_a_failed_attempt_ends_the_job():
    world = World(recovery=Recovery.NONE)
    assert "FailJob" in world.end(world.start(), UpstreamError("broken"))


def test_a_coarse_answer_with_nonsense_behind_it_is_taken_back_with_all_that_relies_on_it():
    world = World()
    liar = world.start("end-0", "edge-0")
    world.lines(liar, COARSE)
    beside = world.start("end-1", "edge-0", task=liar.task, hedge=True)
    world.end(liar, InvalidAnswer("nonsense"))
    assert world.answers == []
    assert beside.phase is Phase.ENDED
    assert not liar.task.has_coarse
    assert world.queued == [0]


def test_the_first_node_to_answer_wrongly_is_blamed_and_the_second_shares_the_blame_with_the_task():
    world = World()
    first = world.start("end-0")
    assert "AnsweredWrongly" in world.end(first, UpstreamError("nonsense"))
    second = world.start("end-1", task=first.task)
    assert "Pardoned" in world.end(second, UpstreamError("nonsense"))
    assert first.task.wrong.keys() == {"end-0", "end-1"}


def test_what_a_device_says_of_upper_nodes_counts_for_those_alone_that_it_was_to_ask():
    world = World()
    attempt = world.start("end-0", "edge-0")
    world.lines(attempt, COARSE)
    wrong = tuple(WrongAnswer(node_id=name, detail="nonsense") for name in ("edge-0", "edge-1"))
    effects = world.states.handle(events.LineCame(attempt, replace(LOST, wrong=wrong), "line", 1.0))
    assert [effect.node_id for effect in effects if isinstance(effect, events.AnsweredWrongly)] == ["edge-0"]


def test_a_task_that_three_nodes_died_with_is_quarantined():
    world = World()
    task = world.job.ready[0]
    task.deaths |= {"gone-1", "gone-2"}
    world.start("end-0")
    world.kill("end-0")
    assert (world.kinds, world.queued, world.outcomes) == (["failed"], [], ["lost"])


@pytest.mark.parametrize(("dies", "deaths"), [(True, {"end-0"}), (False, set())])
def test_a_broken_connection_counts_as_death_once_the_node_is_known_to_be_dead(dies, deaths):
    world = World()
    attempt = world.start("end-0")
    world.end(attempt, UpstreamUnavailable("broke"))
    if dies:
        world.kill("end-0")
    else:
        world.feed(events.NodeChanged("end-0", world.now))  # it is alive
        world.kill("end-0")
    assert attempt.task.deaths == deaths


def test_a_node_that_was_taken_off_the_list_has_not_died():
    world = World()
    attempt = world.start("end-0")
    world.lose("end-0")
    assert attempt.task.deaths == set()
    assert world.queued == [0]


ENDS, UPPERS = ("end-0", "end-1"), ("edge-0", "edge-1")
STEPS = """send send hedge hedge acknowledged coarse coarse fine fallback late routed over broken nonsense busy
    time move kill remove return give_up no_upper end_job"""
STEP = st.tuples(st.sampled_from(STEPS.split()), st.integers(0, 7))


@hypothesis_settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(STEP, min_size=15, max_size=60),
    recovery=st.sampled_from(Recovery),
    loss=st.sampled_from(UpstreamLoss),
    scheme=st.sampled_from((Scheme.END, Scheme.END_EDGE, Scheme.ADAPTIVE)),
)
def test_in_any_order_of_events_nothing_is_lost_or_answered_twice(steps, recovery, loss, scheme):
    world = World(tasks=2, recovery=recovery, on_upstream_loss=loss, scheme=scheme)
    job = world.job
    attempts: list[Attempt] = []
    for number, (step, pick) in enumerate(steps):
        world.now += 0.5
        _take_step(world, attempts, step, pick, number)
        check(world, attempts)
    world.feed(events.JobEnded(job, world.now)) if not job.ending else None
    job.ending = True
    for attempt in attempts:
        world.end(attempt)
    check(world, attempts)
    assert all(attempt.phase is Phase.ENDED for attempt in attempts)
    assert not any(world.under_way.values())
    assert not any(world.owed.values())
    assert len(world.outcomes) == len(attempts), "one row for each attempt"
    assert not world.states.busy


def _take_step(world: World, attempts: list[Attempt], step: str, pick: int, number: int) -> None:
    job = world.job
    task: ActiveTask | None
    uppers = [name for name in UPPERS if world.devices.find(name)] if job.policy.scheme is not Scheme.END else []
    ends = [name for name in ENDS if world.devices.find(name)]
    if step in ("send", "hedge"):
        for task in job.wake_delayed(world.now, has_upstream=bool(uppers)):
            world.feed(events.NoUpstream(job, task, world.now))
        task = job.next_task() if step == "send" else next((a.task for a in attempts if len(a.task.running) == 1), None)
        if task is None or not ends or task.closed or job.ending:
            return
        if step == "send":
            job.begin(world.now, task)
        if task.has_coarse and not uppers:
            job.delay(task, world.now) if step == "send" else None
            return
        attempts.append(world.start(ends[pick % len(ends)], *uppers, task=task, hedge=step == "hedge"))
    elif step in ("kill", "remove"):
        nodes = [*ends, *uppers]
        if nodes:
            (world.kill if step == "kill" else world.lose)(nodes[pick % len(nodes)])
    elif step == "return":
        name = (*ENDS, *UPPERS)[pick % 4]
        if world.devices.find(name) is None:
            world.register(name, Tier.END if name in ENDS else Tier.EDGE, f"{number:016x}")
    elif step in ("give_up", "no_upper"):
        task = next(iter(job.open.values()), None)
        if task is not None and step == "give_up":
            world.feed(events.GiveUp(job, task, "deadline", "late", world.now))
        elif task is not None and task.has_coarse and not task.running:
            world.feed(events.NoUpstream(job, task, world.now))
    elif step == "end_job":
        if pick == 0 and not job.ending:
            job.ending = True
            world.feed(events.JobEnded(job, world.now))
    elif attempts:
        # Mostly those under way, now and then one that is over.
        under_way = [attempt for attempt in attempts if attempt.phase is not Phase.ENDED]
        among = under_way if under_way and pick < 6 else attempts
        attempt = among[pick % len(among)]
        if step in ("coarse", "fine", "fallback", "late", "routed"):
            # As `transport` lets them through.
            known = attempt.phase in (Phase.FINE, Phase.ANSWERED)
            if attempt.phase is Phase.ACKNOWLEDGING or (step == "coarse") == known:
                return
            said: Any = {"coarse": COARSE, "fine": FINE, "fallback": LOST, "late": LATE, "routed": routed(EDGE)}[step]
            if attempt.phase is not Phase.ANSWERED and (step == "coarse" or attempt.upstreams):
                world.feed(events.LineCame(attempt, said, "line", world.now))
        elif step == "time":
            world.now = max(world.now, attempt.until)
            world.feed(events.TimeUp(attempt, world.now))
        elif step == "move":
            if attempt in world.states.movable(job):
                world.feed(events.Move(attempt, "slow", world.now))
        elif step == "acknowledged":
            world.feed(events.Acknowledged(attempt, world.now))
        elif step != "over" or attempt.phase is Phase.ANSWERED:
            errors = {
                "broken": UpstreamUnavailable("broke"),
                "nonsense": InvalidAnswer("nonsense"),
                "busy": Overloaded("busy", retry_after_s=1.0),
            }
            world.end(attempt, errors.get(step))


def check(world: World, attempts: list[Attempt]) -> None:
    """What holds between any two events."""
    job = world.job
    given = Counter((task, stage) for task, stage, _ in world.answers)
    assert max(given.values(), default=0) <= 1, "a stage has two answers"
    running = {attempt for attempt in attempts if attempt.phase is not Phase.ENDED}
    assert running == set(world.states.running)
    assert {name for attempt in running for name in attempt.nodes} == world.states.busy
    for name in ENDS:
        assert world.under_way[name] == sum(attempt.node_id == name for attempt in running)
        assert world.owed[name] == sum(attempt.owed for attempt in running if attempt.node_id == name)
    if job.ending or "FailJob" in world.said:
        return
    queued = Counter(world.queued)
    for task in (task for task in job.open.values()):
        assert queued[task.index] == (not task.running), "a task that is open is under way or queued, and not both"
    finals = {task for task, stage, kind in world.answers if stage == "final" or job.policy.scheme is Scheme.END}
    assert finals == {0, 1} - job.open.keys()
