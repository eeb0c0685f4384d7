"""Recovery after a restart or a change of leader: only what has no durable answer is dispatched again."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from msgspec.structs import replace

from scheduler.core.job import JobRow
from scheduler.core.work import TaskFacts
from scheduler.jobs.durable import DurableRecipient
from scheduler.jobs.service import Scheduler
from scheduler.jobs.submit import task_of
from tierkit.errors import DataError
from tierkit.types import JobState, Scheme
from tierkit.wire.events import CoarseEvent

__all__ = ["recover"]

_log = logging.getLogger(__name__)


async def recover(scheduler: Scheduler) -> None:
    """Resume the jobs that the scheduler before this one has left unfinished."""
    scheduler.hierarchies = await scheduler.store.hierarchies(scheduler.manifest.hierarchy)
    await scheduler.observations.load(scheduler.hierarchies)
    await scheduler.learning.load()
    unfinished = await scheduler.store.unfinished()
    for job in unfinished:
        scheduler.inputs.hold(job.input_sha256)
    scheduler.inputs.remove_strays()
    if scheduler.copies is not None:
        await scheduler.copies.keep_only({job.input_sha256 for job in unfinished})
    for job in unfinished:
        await _resume(scheduler, job)


async def _resume(scheduler: Scheduler, job: JobRow) -> None:
    store = scheduler.store
    progress = scheduler.progress(job, await store.facts(job.id))
    open_tasks: list[TaskFacts] = []
    made = await store.attempts_made(job.id)
    async for index, answers in store.answers_by_task(job):
        for answer in answers.values():
            progress.add(answer)
        last_stage = "coarse" if job.policy.scheme is Scheme.END and "coarse" in answers else "final"
        if last_stage not in answers:
            attempts, failed_attempts, errors = made.get(index, (0, 0, 0))
            coarse = answers["coarse"].event if "coarse" in answers else None
            assert coarse is None or isinstance(coarse, CoarseEvent)
            open_tasks.append(
                replace(
                    task_of(job, index),
                    attempts=attempts,
                    failed_attempts=failed_attempts,
                    errors=errors,
                    coarse=coarse,
                )
            )
    try:
        if job.hierarchy != scheduler.served:
            raise DataError(
                "the scheduler was started again with a model set of other classes than this job's; submit it again"
            )
        if job.policy.release is None:  # of an older Terrace
            job = dataclasses.replace(
                job, policy=job.policy.model_copy(update={"release": scheduler.releases.current.ref})
            )
        elif job.policy.release_number not in scheduler.releases.rows:
            raise DataError(f"the release {job.policy.release}, to which it belongs, is gone; submit it again")
        path = scheduler.inputs.path(job.input_sha256)
        if scheduler.copies is not None and not path.exists():
            await scheduler.copies.fetch(job.input_sha256, path)
        images = await asyncio.to_thread(scheduler.inputs.open, job.input_sha256, job.images)
    except DataError as exc:
        recipient = DurableRecipient(job, progress, store=store, elapsed=scheduler.elapsed, on_end=lambda: None)
        await recipient.ended(JobState.FAILED, str(exc))
        scheduler.release(job.input_sha256)
        return
    _log.info("job taken up again", extra={"job": job.id, "tasks_left": len(open_tasks), "tasks": job.tasks})
    scheduler.activate(job, images, open_tasks, progress)
