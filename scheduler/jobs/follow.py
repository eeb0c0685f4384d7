"""Following a job: its events as they come, and its cancellation, which waits for a durable end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from scheduler.core.job import JobRow
from scheduler.jobs.query import get_job
from scheduler.jobs.service import Scheduler
from scheduler.jobs.views import Renderer, grouped
from tierkit.errors import Conflict, Standby
from tierkit.types import JobState
from tierkit.wire.api import Job

__all__ = ["Events", "cancel", "events"]

_KEEP_ALIVE_S = 15.0
_WAITS_S = 2.0
"""Seconds without a change after which followers learn why a job waits."""
_EVENTS_AT_ONCE = 50

Events = AsyncGenerator[tuple[str, Job | dict[str, Any], int] | None, None]
"""Kind, data and number of each event; None after a while without events."""


async def events(scheduler: Scheduler, job_id: str, *, after: int, states_only: bool = False) -> Events:
    """The events of a job from the result number `after` on; ends with the final state.

    Args:
        states_only: leave the results out. The states then have the number 0, so that a reader who continues
            with the results misses none.

    Raises:
        NotFound: at once, before the first event.
    """
    job = await scheduler.store.get(job_id)
    if states_only:
        return _events(scheduler, job, 0, None)
    renderer = Renderer(scheduler.hierarchy(job), await scheduler.store.facts(job_id), job.policy, job.trace)
    return _events(scheduler, job, after, renderer)


async def _events(scheduler: Scheduler, job: JobRow, seq: int, renderer: Renderer | None) -> Events:
    job_id = job.id
    shown: JobState | None = None
    quiet_s, told = 0.0, ""
    while not scheduler.stopping:
        news = scheduler.news.of(job_id)
        # The state is read before the results: once it is final, no result can be missing below.
        state = await _state(scheduler, job_id)
        batch = [] if renderer is None else await scheduler.store.results_after(job, seq, limit=_EVENTS_AT_ONCE)
        if state is not shown and not (state.final and batch):
            view = await get_job(scheduler, job_id)
            # It may have ended while its results were read; then there are more of them to come first.
            if state.final or not view.state.final:
                shown = state
                quiet_s = 0.0
                yield "state", view, seq
        if state.final and not batch:
            return
        if renderer is not None and batch:
            coarse = await scheduler.store.coarse_of(job, [answer.task for _, answer in batch])
            for seq, answer in batch:
                first, last = (answer, None) if answer.stage == "coarse" else (coarse.get(answer.task), answer)
                rows = renderer.task(answer.first_image, answer.images, first, last)
                yield answer.kind, grouped(answer, rows), seq
            quiet_s = 0.0
            continue
        try:
            await asyncio.wait_for(news.wait(), _WAITS_S)
        except TimeoutError:
            quiet_s += _WAITS_S
            if (reason := scheduler.why_it_waits(job_id)) not in ("", told):
                told, quiet_s = reason, 0.0
                yield "state", await get_job(scheduler, job_id), seq
            elif quiet_s >= _KEEP_ALIVE_S:
                quiet_s = 0.0
                yield None


async def _state(scheduler: Scheduler, job_id: str) -> JobState:
    recipient = scheduler.recipients.get(job_id)
    return recipient.state if recipient is not None else (await scheduler.store.get(job_id)).state


async def cancel(scheduler: Scheduler, job_id: str) -> Job:
    """End a job; returns when that is durable. Raises NotFound, or Conflict when it has ended already."""
    job = await scheduler.store.get(job_id)
    recipient = scheduler.recipients.get(job_id)
    if recipient is None or not scheduler.dispatcher.cancel(job_id, "cancelled by the user"):
        raise Conflict(f"job {job_id} is {job.state if job.final else 'ending'} already")
    while job_id in scheduler.recipients:
        if not scheduler.leads:
            raise Standby("another scheduler leads now, and may have continued the job: ask it")
        await scheduler.news.of(job_id).wait()
    return await get_job(scheduler, job_id)
