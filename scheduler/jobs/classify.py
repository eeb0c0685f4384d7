"""Interactive requests: one task that goes before all jobs; nothing is stored, and the client waits for the answers."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncGenerator, Sequence

import numpy as np

from scheduler.core.job import Answer, AttemptReport
from scheduler.core.work import JobFacts, TaskFacts
from scheduler.dispatch.active_job import ActiveJob
from scheduler.ingest.inputs import images_in
from scheduler.ingest.staging import staged
from scheduler.ingest.upload import Incoming, receive_upload
from scheduler.jobs.progress import labels_of
from scheduler.jobs.service import Scheduler
from scheduler.jobs.views import Renderer, Rows, grouped
from scheduler.store.jobs import new_job_id
from tierkit.errors import NoNodeAvailable, TooLarge
from tierkit.logs import current_trace
from tierkit.types import Health, JobState, Tier

__all__ = ["CLASSIFY_MAX_IMAGES", "classify"]

CLASSIFY_MAX_IMAGES = 64
_DEADLINE_S = 60.0


async def classify(
    scheduler: Scheduler, incoming: Incoming, *, request_id: str, sites: Sequence[str] = ()
) -> AsyncGenerator[Rows, None]:
    """Answer a few images at once.

    Args:
        sites: those to which the caller is limited; none: all.

    Returns:
        Events: coarse, then fine, fallback or failed; then done, or error.

    Raises:
        InvalidInput, Forbidden, Conflict, Unavailable: see `submit`; raised before the first event.
        NoNodeAvailable: no end device takes work.
    """
    with staged(scheduler.settings.state, in_memory=incoming.small) as staging:
        upload = await receive_upload(incoming, staging, scheduler.settings)
        given = upload.policy.model_copy(update={"batch_size": CLASSIFY_MAX_IMAGES})
        if given.deadline_s is None:
            given = given.model_copy(update={"deadline_s": _DEADLINE_S})
        policy = scheduler.settle(given, sites)
        _check_ends(scheduler, policy.site)
        held = io.BytesIO()
        what = "one request; submit a job (POST /v1/jobs)"
        writer = scheduler.inputs.writer(held, CLASSIFY_MAX_IMAGES, what)
        facts = await scheduler.read(incoming, upload, staging, writer)
        writer.finish()
        if writer.images > writer.images_per_task:
            raise TooLarge(f"{writer.images} files of up to {writer.largest} bytes are too much for {what}")
    images = images_in(np.frombuffer(held.getbuffer(), np.uint8), writer.images, scheduler.inputs.fit)
    trace, now = current_trace(), time.monotonic()
    recipient = LiveRecipient()
    live = JobFacts(
        job_id=f"live-{new_job_id(time.time())}",
        policy=policy,
        content=writer.sha256,
        deadline=now + policy.deadline_s,
        interactive=True,
        request_id=request_id,
    )
    task = TaskFacts(index=0, first_image=0, images=len(images))
    job = ActiveJob(live, tasks=[task], images=images, recipient=recipient, trace=trace)
    return _answers(scheduler, job, recipient, Renderer(scheduler.manifest.hierarchy, facts, policy, trace))


def _check_ends(scheduler: Scheduler, site: str | None) -> None:
    """Refuse an interactive request at once if all end devices, or all of its site, are draining or gone.

    Raises:
        NoNodeAvailable: with the state of each.
    """
    devices, now = scheduler.devices, time.monotonic()
    if devices.alive(Tier.END, now, site):
        return
    there = [view for view in devices.present(now) if site in (None, view.device.site)]
    ends = [view for view in there if view.device.tier is Tier.END and view.device.takes_tasks]
    known = "" if any(view.health is not Health.DRAINING for view in ends) else devices.why_none(Tier.END, now, site)
    if known:
        where = "" if site is None else f" of the site {site}"
        raise NoNodeAvailable(f"no end device{where} takes work now ({known})", retry_after_s=5)


class LiveRecipient:
    """Queue of the answers for the waiting client."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Answer | tuple[str, str] | None] = asyncio.Queue()
        """Answers as they come; None if the coarse one is withdrawn; (state, reason) at the end."""

    def started(self) -> None:
        """Nothing to tell: the client sees answers only."""

    def answer(self, answer: Answer) -> None:
        self.items.put_nowait(answer)

    def withdrawn(self, answer: Answer) -> None:
        self.items.put_nowait(None)

    def attempted(self, report: AttemptReport) -> None:
        """Nothing is stored; the client gets the answer of the next attempt."""

    async def ended(self, state: str | None, reason: str) -> None:
        self.items.put_nowait((state or JobState.COMPLETED, reason))


async def _answers(
    scheduler: Scheduler, job: ActiveJob, recipient: LiveRecipient, renderer: Renderer
) -> AsyncGenerator[Rows, None]:
    """The events of a request, as they come."""
    begun, coarse = time.monotonic(), None
    images, request_id = len(job.images), job.facts.request_id_of(0)
    scheduler.dispatcher.add(job)
    try:
        while not isinstance(item := await recipient.items.get(), tuple):
            if item is None or item.stage == "coarse":
                coarse = item
            if item is not None:
                scheduler.class_counts.add(labels_of(item.event, renderer.readable(coarse, images)))
                rows = renderer.task(0, images, coarse, item if item.stage == "final" else None)
                yield [{"event": item.kind, **grouped(item, rows)}]
        state, reason = item
        if state == JobState.COMPLETED:
            elapsed_ms = round((time.monotonic() - begun) * 1000, 3)
            ids = {"request_id": request_id, "trace_id": job.trace_id, "release": job.facts.policy.release}
            yield [{"event": "done", "images": images, "elapsed_ms": elapsed_ms, **ids}]
        else:
            yield [{"event": "error", "error": reason}]
    finally:
        # The client may have hung up.
        scheduler.dispatcher.cancel(job.facts.job_id, "the client has gone")
