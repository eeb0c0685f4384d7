"""Queries: jobs and their attempts, decisions, results and thumbnails."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncGenerator

from scheduler.core.job import AttemptReport, ImageFacts, JobRow
from scheduler.core.seeking import SoughtJobs
from scheduler.ingest.thumbnails import small_copy, thumbnail as thumbnail_of
from scheduler.jobs.service import Scheduler
from scheduler.jobs.views import Renderer, Rows, attempt, decision, job as view_of
from scheduler.store.jobs import is_job_id
from tierkit.errors import InvalidInput, NotFound
from tierkit.types import JobState
from tierkit.wire.api import AttemptPage, DamagedImage, Explanation, Job, JobPage

__all__ = [
    "as_job",
    "attempts",
    "check_owner",
    "explain",
    "get_job",
    "page",
    "results",
    "small",
    "thumbnail",
    "with_names",
]


async def get_job(scheduler: Scheduler, job_id: str) -> Job:
    """A job as it is now. Raises NotFound."""
    return await with_names(scheduler, as_job(scheduler, await _current(scheduler, await scheduler.store.get(job_id))))


async def with_names(scheduler: Scheduler, shown: Job) -> Job:
    """The job with the names of the images that cannot be read."""
    if shown.done or not shown.damaged:
        return shown
    named = await scheduler.store.named(shown.id, [image.model_dump() for image in shown.damaged])
    return shown.model_copy(update={"damaged": tuple(map(DamagedImage.model_validate, named))})


async def _current(scheduler: Scheduler, job: JobRow) -> JobRow:
    """The row, read again if the job has ended since it was read: then only the database has its figures."""
    return job if job.final or job.id in scheduler.recipients else await scheduler.store.get(job.id)


def as_job(scheduler: Scheduler, row: JobRow) -> Job:
    """A row as users see it, with the figures of now."""
    now, flat = scheduler.elapsed(), scheduler.hierarchy(row).is_flat
    recipient = scheduler.recipients.get(row.id)
    if recipient is None:
        figures = row.summary or {**scheduler.progress(row, ImageFacts()).summary(), "mapping": {}}
        return view_of(row, state=row.state, reason=row.reason, figures=figures, flat=flat, now=now)
    reason = scheduler.why_it_waits(row.id)
    return view_of(row, state=recipient.state, reason=reason, figures=recipient.figures, flat=flat, now=now)


async def check_owner(scheduler: Scheduler, job_id: str, owner: str) -> None:
    """Raise NotFound for a job of another owner: it does not exist for this caller."""
    if (await scheduler.store.get(job_id)).owner != owner:
        raise NotFound(f"no job {job_id[:64]!r}")


async def page(scheduler: Scheduler, sought: SoughtJobs, *, limit: int, cursor: str | None) -> JobPage:
    """Jobs, newest first. Raises InvalidInput for a cursor that no page has given."""
    if cursor is not None and not is_job_id(cursor):
        raise InvalidInput(f"cursor is the next_cursor of the page before, not {cursor[:32]!r}")
    rows = await scheduler.store.page(sought, limit=limit + 1, before=cursor)
    shown = [await _current(scheduler, row) for row in rows[:limit]]
    return JobPage(
        jobs=tuple(as_job(scheduler, row) for row in shown), next_cursor=shown[-1].id if len(rows) > limit else None
    )


async def attempts(
    scheduler: Scheduler, job_id: str, *, limit: int, cursor: str | None, task: int | None
) -> AttemptPage:
    """The attempts of a job, those under way included, by task and number.

    Raises:
        NotFound: no such job.
        InvalidInput: a cursor that no page has given.
    """
    job = await scheduler.store.get(job_id)
    shown, next_cursor = await _reports(scheduler, job_id, limit=limit, cursor=cursor, task=task)
    return AttemptPage(
        attempts=tuple(attempt(each, job) for each in shown),
        next_cursor=next_cursor,
    )


async def explain(
    scheduler: Scheduler, job_id: str, *, limit: int, cursor: str | None, task: int | None
) -> Explanation:
    """The reasons why tasks went to their nodes, by task and attempt.

    Raises:
        NotFound: no such job.
        InvalidInput: a cursor that no page has given.
    """
    job = await get_job(scheduler, job_id)
    shown, next_cursor = await _reports(scheduler, job_id, limit=limit, cursor=cursor, task=task)
    return Explanation(
        job=job.id,
        scheme=job.scheme,
        state=job.state,
        now=job.reason or scheduler.dispatcher.held_back(job_id),
        decisions=tuple(map(decision, shown)),
        next_cursor=next_cursor,
    )


async def _reports(
    scheduler: Scheduler, job_id: str, *, limit: int, cursor: str | None, task: int | None
) -> tuple[list[AttemptReport], str | None]:
    """A page of the attempts of a job, those under way included, and the cursor of the next one."""
    after = (-1, 0) if cursor is None else _attempt_cursor(cursor)
    # First those under way: one that ends in between is found in the database then, or comes with a later reading.
    running = [
        report
        for report in scheduler.dispatcher.attempts(job_id)
        if (report.task, report.number) > after and task in (None, report.task)
    ]
    ended = await scheduler.store.attempts_after(job_id, *after, limit=limit + 1, only_task=task)
    by_number = {(report.task, report.number): report for report in (*running, *ended)}
    found = [by_number[key] for key in sorted(by_number)]
    shown = found[:limit]
    return shown, f"{shown[-1].task}-{shown[-1].number}" if len(found) > limit else None


async def results(scheduler: Scheduler, job_id: str) -> tuple[JobState, AsyncGenerator[Rows, None]]:
    """The state of a job and its image results in index order, by task. While the job runs, those that there are;
    afterwards all. Raises NotFound."""
    job = await _current(scheduler, await scheduler.store.get(job_id))
    renderer = Renderer(scheduler.hierarchy(job), await scheduler.store.facts(job_id), job.policy, job.trace)
    unanswered = f"not answered: the job is {job.state} ({job.reason})" if job.final else None

    async def batches() -> AsyncGenerator[Rows, None]:
        async for index, answers in scheduler.store.answers_by_task(job):
            if answers or job.final:
                coarse, final = answers.get("coarse"), answers.get("final")
                yield renderer.task(*job.images_of(index), coarse, final, unanswered=unanswered)

    recipient = scheduler.recipients.get(job_id)
    return (job.state if recipient is None else recipient.state), batches()


async def thumbnail(scheduler: Scheduler, job_id: str, index: int, longest: int) -> tuple[bytes, str]:
    """A small copy of a picture of a job that has not ended, as a file and its media type.

    Raises:
        NotFound: no such job or picture, the job has ended, or the picture cannot be read.
    """
    job = await scheduler.store.get(job_id)
    active, recipient = scheduler.dispatcher.job(job_id), scheduler.recipients.get(job_id)
    if active is None or recipient is None:
        raise NotFound(f"job {job_id} has ended, and its pictures are gone")
    if index >= job.images:
        raise NotFound(f"job {job_id} has {job.images} images, numbered from 0")
    if index in recipient.progress.damaged:
        raise NotFound(f"image {index} cannot be read: {recipient.progress.damaged[index]}")
    stopped = threading.Event()
    try:
        async with scheduler.showing:
            return await scheduler.turns.run(
                thumbnail_of(active.images, index, longest, scheduler.settings, stopped), stopped
            )
    except InvalidInput as exc:
        raise NotFound(f"image {index} cannot be read: {str(exc).removeprefix(f'image {index}: ')}") from exc


async def small(scheduler: Scheduler, content: bytes, name: str, longest: int) -> tuple[bytes, str]:
    """A small copy of a picture file, as a file and its media type.

    Raises:
        NotFound: the picture cannot be read.
    """
    stopped = threading.Event()
    try:
        async with scheduler.showing:
            return await scheduler.turns.run(small_copy(content, name, longest, scheduler.settings, stopped), stopped)
    except InvalidInput as exc:
        raise NotFound(str(exc)) from exc


def _attempt_cursor(text: str) -> tuple[int, int]:
    if re.fullmatch("[0-9]{1,9}-[0-9]{1,9}", text, re.ASCII) is None:
        raise InvalidInput(f"cursor is the next_cursor of the page before, not {text[:32]!r}")
    task, _, number = text.partition("-")
    return int(task), int(number)
