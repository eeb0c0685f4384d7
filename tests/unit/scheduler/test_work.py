"""A job under way: its queue, and which answers count."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from scheduler.dispatch.work import ActiveJob, ActiveTask, Answer, AttemptReport
from scheduler.jobs.policy import JobPolicy
from scheduler.jobs.progress import Progress
from scheduler.jobs.sinks import DurableSink
from tierkit.errors import Unavailable
from tierkit.types import Recovery, Scheme, Tier, UpstreamLoss
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent, RoutedEvent, StageAnswer, StageLoss


class Told:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, str, str]] = []
        self.starts = 0

    def started(self) -> None:
        self.starts += 1

    def answer(self, answer: Answer) -> None:
        self.answers.append((answer.task, answer.stage, answer.kind))

    def withdrawn(self, answer: Answer) -> None:
        self.answers.remove((answer.task, answer.stage, answer.kind))

    def attempted(self, report: AttemptReport) -> None:
        raise AssertionError("not here")

    async def ended(self, state: str | None, reason: str) -> None:
        raise AssertionError("not here")


def job(tasks: int = 3, **policy) -> tuple[ActiveJob, Told]:
    told = Told()
    settled = JobPolicy(**{"scheme": Scheme.MAPPING, "deadline_s": 100, "task_deadline_s": 10, **policy})
    active = ActiveJob(
        job_id="j",
        policy=settled,
        pixels=np.zeros((tasks, 32, 32, 3), np.uint8),
        content="",
        tasks=[ActiveTask(index=k, first_image=k, images=1) for k in range(tasks)],
        sink=told,
        deadline=100.0,
    )
    return active, told


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
LOST = FallbackEvent(task_id="j-0", reason="upstream_unavailable", detail="refused", tried=())
LATE = FallbackEvent(task_id="j-0", reason="deadline", detail="late", tried=())


def take(active: ActiveJob, task: ActiveTask, *events, asked_upper: bool = True) -> list[bool]:
    return [active.take(task, event, "line", 1.0, asked_upper=asked_upper) for event in events]


def test_a_second_attempt_changes_no_answer_that_is_there():
    active, told = job()
    task = active.begin(0.0)
    take(active, task, COARSE)
    take(active, task, COARSE, FINE)
    assert told.answers == [(0, "coarse", "coarse"), (0, "final", "fine")]
    take(active, task, COARSE, FINE, LOST)
    active.give_up(task, "deadline", "late", 2.0)
    assert told.answers == [(0, "coarse", "coarse"), (0, "final", "fine")]
    assert sorted(active.open) == [1, 2]


def test_an_ending_job_takes_nothing_more():
    active, told = job()
    task = active.begin(0.0)
    active.ending = True
    take(active, task, COARSE, FINE)
    assert told.answers == []
    assert active.next_task() is None


def test_scheme_end_is_closed_by_the_coarse_answer():
    active, told = job(scheme=Scheme.END)
    take(active, active.begin(0.0), COARSE, asked_upper=False)
    assert told.answers == [(0, "coarse", "coarse")]
    assert sorted(active.open) == [1, 2]


@pytest.mark.parametrize(
    ("loss", "events", "asked_upper", "done", "kinds"),
    [
        (UpstreamLoss.FALLBACK, (COARSE,), False, [True], ["coarse", "fallback"]),
        (UpstreamLoss.FALLBACK, (COARSE, LOST), True, [True, False], ["coarse"]),
        (UpstreamLoss.FALLBACK, (COARSE, LATE), True, [True, True], ["coarse", "fallback"]),
        (UpstreamLoss.WAIT, (COARSE,), False, [False], ["coarse"]),
        (UpstreamLoss.WAIT, (COARSE, LOST), True, [True, False], ["coarse"]),
        (UpstreamLoss.WAIT, (COARSE, LATE), True, [True, True], ["coarse", "fallback"]),
    ],
)
def test_a_lost_upper_node(loss, events, asked_upper, done, kinds):
    active, told = job(on_upstream_loss=loss)
    assert take(active, active.begin(0.0), *events, asked_upper=asked_upper) == done
    assert [kind for _, _, kind in told.answers] == kinds


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


@pytest.mark.parametrize(
    ("event", "recovery", "done", "kind"),
    [
        (routed(EDGE), Recovery.MONITOR, True, "fine"),
        (routed(), Recovery.MONITOR, True, "fine"),  # the coarse answer was sure: no fallback
        (routed(EDGE, losses=(NO_CLOUD,)), Recovery.MONITOR, False, None),
        (routed(EDGE, losses=(NO_CLOUD,)), Recovery.NONE, True, "fine"),
        (routed(EDGE, losses=(NO_TIME,)), Recovery.MONITOR, True, "fine"),
        (routed(losses=(NO_EDGE,)), Recovery.MONITOR, False, None),
        (routed(losses=(NO_EDGE,)), Recovery.NONE, True, "fallback"),
        (routed(replace(EDGE, tier=Tier.CLOUD), losses=(NO_EDGE,)), Recovery.MONITOR, True, "fine"),
    ],
)
def test_images_that_went_up_one_by_one(event: RoutedEvent, recovery: Recovery, done: bool, kind: str | None):
    active, told = job(recovery=recovery)
    assert take(active, active.begin(0.0), COARSE, event) == [True, done]
    assert [said for _, stage, said in told.answers if stage == "final"] == ([] if kind is None else [kind])


@pytest.mark.parametrize(("reason", "kind"), [("deadline", "fine"), ("quarantined", "fallback")])
def test_what_there_is_of_the_finer_answers_stands_when_no_more_comes(reason, kind):
    active, told = job()
    task = active.begin(0.0)
    take(active, task, COARSE, routed(EDGE, losses=(NO_CLOUD,)))
    active.give_up(task, reason, "it is over", 2.0)
    assert told.answers[-1] == (0, "final", kind)


def test_giving_up_leaves_the_coarse_answer_or_an_error():
    active, told = job()
    with_coarse, without = active.begin(0.0), active.begin(0.0)
    take(active, with_coarse, COARSE)
    active.give_up(with_coarse, "deadline", "late", 2.0)
    active.give_up(without, "deadline", "late", 2.0)
    assert told.answers[1:] == [(0, "final", "fallback"), (1, "final", "failed")]


@pytest.mark.parametrize(("recovery", "order"), [(Recovery.MONITOR, [0, 1, 2]), (Recovery.REASSIGN, [1, 2, 0])])
def test_a_failed_task_comes_again_at_once_or_after_all_others(recovery, order):
    active, told = job(recovery=recovery)
    task = active.begin(0.0)
    active.delay(task, 5.0)
    active.wake_delayed(4.9, has_upstream=True)
    assert [t.index for t in active.ready] == [1, 2]
    active.wake_delayed(5.0, has_upstream=True)
    assert [t.index for t in active.ready] == order
    assert told.starts == 1


def test_a_task_that_waits_for_an_upper_node_stays_until_there_is_one():
    active, _ = job(tasks=2, on_upstream_loss=UpstreamLoss.WAIT)
    waiting, failed = active.begin(0.0), active.begin(0.0)
    take(active, waiting, COARSE, asked_upper=False)
    active.delay(waiting, 1.0)
    active.delay(failed, 1.0)
    active.wake_delayed(2.0, has_upstream=False)
    assert (list(active.ready), active.held, active.waiting) == ([failed], [waiting], 2)
    assert active.waits_for_upstream
    active.wake_delayed(2.0, has_upstream=True)
    assert list(active.ready) == [waiting, failed]


def test_without_an_upper_node_a_task_that_is_tried_again_is_closed_by_its_coarse_answer():
    active, told = job(tasks=1)
    task = active.begin(0.0)
    take(active, task, COARSE, LOST)
    active.delay(task, 1.0)
    active.wake_delayed(2.0, has_upstream=False)
    assert told.answers == [(0, "coarse", "coarse"), (0, "final", "fallback")]
    assert (active.waiting, active.open) == (0, {})


def test_with_recovery_none_the_first_failure_of_the_upper_nodes_counts():
    active, told = job(tasks=1, recovery=Recovery.NONE)
    assert take(active, active.begin(0.0), COARSE, LOST) == [True, True]
    assert told.answers[-1] == (0, "final", "fallback")


def test_suspects_go_one_at_a_time():
    active, _ = job(tasks=3)
    first, second, innocent = (active.begin(0.0) for _ in range(3))
    for task in (first, second):
        task.deaths.update({"end-0", "end-1"})
    for task in (first, second, innocent):
        active.delay(task, 1.0)
    active.wake_delayed(1.0, has_upstream=True)
    assert set(active.ready) == {first, innocent}
    for _ in range(2):
        active.begin(1.0)
    active.delay(first, 2.0)  # it killed nobody, but failed
    active.wake_delayed(2.0, has_upstream=True)
    assert list(active.ready) == [second]
    active.begin(2.0)
    active.wake_delayed(3.0, has_upstream=True)
    assert list(active.ready) == []
    take(active, second, COARSE)  # whoever answers has not died of it
    active.wake_delayed(3.0, has_upstream=True)
    assert list(active.ready) == [first]


def test_a_tasks_deadline_counts_from_its_first_dispatch_and_ends_with_the_job():
    active, _ = job()
    task = active.begin(3.0)
    assert active.deadline_of(task, 8.0) == 13.0
    active.delay(task, 9.0)
    active.wake_delayed(9.0, has_upstream=True)
    assert active.deadline_of(active.begin(9.0), 9.0) == 13.0
    assert active.deadline_of(active.begin(95.0), 95.0) == 100.0


class Flaky:
    """A store that refuses the first time, and a writer with nothing to write."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []

    async def finished(self, job_id, *, state, reason, at, summary) -> None:
        self.calls.append((state, reason, summary["failed_images"]))
        if len(self.calls) == 1:
            raise Unavailable("disk full")

    async def flush(self) -> None:
        pass


class Row:
    id = "j"
    state = "running"
    images = 10


@pytest.mark.parametrize(
    ("coarse", "failed", "state", "reason", "expected"),
    [
        (10, 0, None, "", ("completed", "", 0)),
        (7, 3, None, "", ("completed", "3 of 10 images have no answer; their results say why", 3)),
        (0, 10, None, "late", ("failed", "late; 10 of 10 images have no answer; their results say why", 10)),
        (4, 0, "failed", "it broke", ("failed", "it broke", 6)),
        (4, 0, "cancelled", "by the user", ("cancelled", "by the user", 6)),
    ],
)
async def test_the_end_of_a_job_is_written_until_it_is(coarse, failed, state, reason, expected):
    ended: list[DurableSink] = []
    progress = Progress(None, np.zeros(1, np.int32))
    progress.answered_coarse, progress.failed_images = coarse, failed
    flaky = Flaky()
    sink = DurableSink(Row, progress, store=flaky, commit=flaky, on_end=ended.append)  # type: ignore[arg-type]
    await sink.ended(state, reason)
    assert flaky.calls == [expected, expected]
    assert ended == [sink]
    assert sink.state == expected[0]


def test_a_task_that_waits_for_another_device_lets_the_next_one_go_first():
    active, _ = job(tasks=4)
    first, second, third, fourth = active.ready
    assert active.next_tasks() == [first]
    first.tried.add("end-0")
    second.tried.add("end-0")
    assert active.next_tasks() == [first, third]
    assert active.begin(0.0, third) is third
    assert list(active.ready) == [first, second, fourth]
    active.give_up(fourth, "quarantined", "it kills", 0.0)
    assert active.next_tasks() == [first]
    active.give_up(first, "quarantined", "it kills", 0.0)
    assert active.next_tasks() == [second]
