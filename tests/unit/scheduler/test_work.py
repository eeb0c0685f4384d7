"""A job under way: its queue, and how its end is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler.core import events
from scheduler.core.fleet import Ledger
from scheduler.core.limits import task_deadline
from scheduler.core.policy import JobPolicy
from scheduler.core.step import State, step
from scheduler.core.work import Coarse, JobFacts, OpenJob, OpenTask, TaskFacts
from scheduler.jobs.durable import DurableRecipient
from scheduler.jobs.progress import Progress
from scheduler.settings import SchedulerSettings
from tests.unit.scheduler.test_devices import POLICY, TIMES, attempt_on, registration
from tierkit.pacing import TokenBucket
from tierkit.types import Recovery, Scheme, UpstreamLoss


def job(tasks: int = 3, **policy: Any) -> OpenJob:
    settled = JobPolicy(**{"scheme": Scheme.MAPPING, "deadline_s": 100, "task_deadline_s": 10, **policy})
    facts = JobFacts(job_id="j", policy=settled, deadline=100.0)
    return OpenJob(facts, [TaskFacts(index=k, first_image=k, images=1) for k in range(tasks)], TokenBucket(1.0, 1.0))


def taken(active: OpenJob, now: float) -> OpenTask:
    """The next task, which is sent now."""
    task = active.next_task()
    assert task is not None
    active.take(task, now)
    return task


@pytest.mark.parametrize(("recovery", "order"), [(Recovery.MONITOR, [0, 1, 2]), (Recovery.REASSIGN, [1, 2, 0])])
def test_a_failed_task_comes_again_at_once_or_after_all_others(recovery, order):
    active = job(recovery=recovery)
    task = taken(active, 0.0)
    active.delay(task, 5.0)
    active.wake_delayed(4.9, has_upstream=True)
    assert [t.facts.index for t in active.ready] == [1, 2]
    active.wake_delayed(5.0, has_upstream=True)
    assert [t.facts.index for t in active.ready] == order
    assert active.sent == 1


def test_a_job_starts_with_the_first_task_that_is_sent_and_once():
    state = State(limits=SchedulerSettings().task_limits, ledger=Ledger(TIMES))
    tasks = [TaskFacts(index=index, first_image=index, images=1) for index in range(2)]
    sent = [replace(attempt_on("end-0", now=0.0), task=index) for index in range(2)]
    happened: list[events.What] = [
        events.Registered(registration()),
        events.JobAdded(JobFacts(job_id="j", policy=POLICY, deadline=100.0), tasks),
        *map(events.AttemptBegun, sent),
    ]
    started = [
        sum(isinstance(effect, events.JobStarted) for effect in step(state, events.Event(what, 0.0, 0.5)))
        for what in happened
    ]
    assert started == [0, 0, 1, 0]


def test_a_task_that_waits_for_an_upper_node_stays_until_there_is_one():
    active = job(tasks=2, on_upstream_loss=UpstreamLoss.WAIT)
    waiting, failed = taken(active, 0.0), taken(active, 0.0)
    waiting.coarse = Coarse(None, frozenset())
    active.delay(waiting, 1.0)
    active.delay(failed, 1.0)
    assert active.wake_delayed(2.0, has_upstream=False) == [waiting]
    assert (list(active.ready), active.held, active.waiting) == ([failed], [waiting], 2)
    assert active.waits_for_upstream
    active.wake_delayed(2.0, has_upstream=True)
    assert list(active.ready) == [waiting, failed]


def test_suspects_go_one_at_a_time():
    active = job(tasks=3)
    first, second, innocent = (taken(active, 0.0) for _ in range(3))
    for task in (first, second):
        task.blame.deaths.update({"end-0", "end-1"})
    for task in (first, second, innocent):
        active.delay(task, 1.0)
    active.wake_delayed(1.0, has_upstream=True)
    assert set(active.ready) == {first, innocent}
    for _ in range(2):
        taken(active, 1.0)
    active.delay(first, 2.0)  # it killed nobody, but failed
    active.wake_delayed(2.0, has_upstream=True)
    assert list(active.ready) == [second]
    taken(active, 2.0)
    active.wake_delayed(3.0, has_upstream=True)
    assert list(active.ready) == []
    second.blame.deaths.clear()  # it has been answered
    active.wake_delayed(3.0, has_upstream=True)
    assert list(active.ready) == [first]


def test_a_tasks_deadline_counts_from_its_first_dispatch_and_ends_with_the_job():
    active = job()
    task = taken(active, 3.0)
    assert task_deadline(active.facts, task.started, 8.0) == 13.0
    active.delay(task, 9.0)
    active.wake_delayed(9.0, has_upstream=True)
    task = taken(active, 9.0)
    assert task_deadline(active.facts, task.started, 9.0) == 13.0
    task = taken(active, 95.0)
    assert task_deadline(active.facts, task.started, 95.0) == 100.0


class Written:
    """A store and its writer, which is done with nothing before it is asked to flush."""

    def __init__(self) -> None:
        self.commit = self
        self.queued: list[tuple[str, str, int]] = []
        self.durable: list[tuple[str, str, int]] = []

    def finished(self, job_id, *, state, reason, at, elapsed, summary) -> None:
        self.queued.append((state, reason, summary["failed_images"]))

    async def named(self, job_id, images):
        return [{**image, "name": f"{image['index']}.png"} for image in images]

    async def flush(self) -> None:
        self.durable = list(self.queued)


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
async def test_the_end_of_a_job_is_told_when_it_is_durable(coarse, failed, state, reason, expected):
    ended: list[str] = []
    progress = Progress(None, np.zeros(1, np.int32))
    progress.answered_coarse, progress.failed_images = coarse, failed
    store = Written()
    recipient = DurableRecipient(Row, progress, store=store, elapsed=lambda: 0.0, on_end=lambda: ended.append("j"))  # type: ignore[arg-type]
    await recipient.ended(state, reason)
    assert store.durable == [expected]
    assert ended == ["j"]
    assert recipient.state == expected[0]


def test_a_task_that_waits_for_another_device_lets_the_next_one_go_first():
    active = job(tasks=4)
    first, second, third, fourth = active.ready
    assert active.next_tasks() == [first]
    first.blame.tried.add("end-0")
    second.blame.tried.add("end-0")
    assert active.next_tasks() == [first, third]
    active.take(third, 0.0)
    assert list(active.ready) == [first, second, fourth]
    active.close(fourth)
    assert active.next_tasks() == [first]
    active.close(first)
    assert active.next_tasks() == [second]
