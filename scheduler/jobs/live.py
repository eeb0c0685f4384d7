"""Interactive requests: one task, nothing stored, the answers go straight to the client that waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from scheduler.core.job import Answer, AttemptReport, JobImages
from scheduler.core.policy import JobPolicy
from scheduler.core.work import ActiveJob, ActiveTask
from scheduler.dispatch.loop import Dispatcher
from scheduler.jobs.progress import labels_of
from scheduler.jobs.views import Renderer, Rows, grouped
from scheduler.metrics import ClassCounts
from scheduler.store.jobs import new_job_id
from tierkit.types import JobState
from tierkit.wire.trace import Trace

__all__ = ["answer_live"]


class LiveRecipient:
    """Keeps the answers in memory for the one who asked."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Answer | tuple[str, str] | None] = asyncio.Queue()
        """Answers as they come; None where the coarse one is withdrawn; (state, reason) at the end."""

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


async def answer_live(
    dispatcher: Dispatcher,
    renderer: Renderer,
    policy: JobPolicy,
    images: JobImages,
    class_counts: ClassCounts,
    *,
    content: str,
    request_id: str,
    trace: Trace | None,
) -> AsyncGenerator[Rows, None]:
    """The events of a request, as they come: coarse, then fine, fallback or failed; then done, or error.

    Args:
        content: digest of the images.
    """
    begun, recipient, coarse = time.monotonic(), LiveRecipient(), None
    job = ActiveJob(
        job_id=f"live-{new_job_id(time.time())}",
        policy=policy,
        images=images,
        content=content,
        tasks=[ActiveTask(index=0, first_image=0, images=len(images))],
        recipient=recipient,
        deadline=begun + policy.deadline_s,
        interactive=True,
        request_id=request_id,
        trace=trace,
    )
    dispatcher.add(job)
    try:
        while not isinstance(item := await recipient.items.get(), tuple):
            if item is None or item.stage == "coarse":
                coarse = item
            if item is not None:
                class_counts.add(labels_of(item.event, renderer.readable(coarse, len(images))))
                rows = renderer.task(0, len(images), coarse, item if item.stage == "final" else None)
                yield [{"event": item.kind, **grouped(item, rows)}]
        state, reason = item
        if state == JobState.COMPLETED:
            elapsed_ms = round((time.monotonic() - begun) * 1000, 3)
            ids = {"request_id": request_id, "trace_id": job.trace_id}
            yield [{"event": "done", "images": len(images), "elapsed_ms": elapsed_ms, **ids}]
        else:
            yield [{"event": "error", "error": reason}]
    finally:
        # The client may have hung up.
        dispatcher.cancel(job.job_id, "the client has gone")
