"""The recipient that writes the answers of a job into the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from scheduler.core.job import Answer, AttemptReport, JobRow
from scheduler.jobs.progress import Progress
from scheduler.metrics import JOBS
from scheduler.store.commit import Withdrawn
from scheduler.store.jobs import JobStore
from tierkit.types import JobState, OnBadInput

__all__ = ["DurableRecipient"]

_log = logging.getLogger(__name__)


class DurableRecipient:
    """A recipient that writes a job's answers into the database; its figures count only durable answers.

    Args:
        job: as stored.
        progress: of the results that are in the database already.
        on_end: called once the final state is durable.
    """

    def __init__(
        self,
        job: JobRow,
        progress: Progress,
        *,
        store: JobStore,
        elapsed: Callable[[], float],
        on_end: Callable[[], None],
    ) -> None:
        self.job = job
        self.progress = progress
        self.state = job.state
        self.mapping: dict[str, str] = {}
        """Upstream node by end device, as last used."""
        self._store = store
        self._commit = store.commit
        self._elapsed = elapsed
        self._on_end = on_end

    @property
    def figures(self) -> dict[str, Any]:
        return {**self.progress.summary(), "mapping": dict(self.mapping)}

    def started(self) -> None:
        self.state = JobState.RUNNING
        self._store.started(self.job, time.time(), self._elapsed())

    def answer(self, answer: Answer) -> None:
        self._commit.put(answer)

    def withdrawn(self, answer: Answer) -> None:
        self._commit.put(Withdrawn(answer))

    def attempted(self, report: AttemptReport) -> None:
        if report.upstream is not None:
            self.mapping[report.node_id] = report.upstream
        self._commit.put(report)

    async def ended(self, state: str | None, reason: str) -> None:
        await self._commit.flush()
        figures = self.figures | {"failed_images": self.job.images - self.progress.answered_coarse}
        figures["damaged"] = await self._store.named(self.job.id, figures["damaged"])
        final, why = self._conclude(state, reason)
        times = {"at": time.time(), "elapsed": self._elapsed()}
        self._store.finished(self.job, state=final, reason=why, summary=figures, **times)
        await self._commit.flush()
        self.state = final
        JOBS.labels(state=final).inc()
        _log.info("job ended", extra={"job": self.job.id, "state": final, **({"why": why} if why else {})})
        self._on_end()

    def _conclude(self, state: str | None, reason: str) -> tuple[JobState, str]:
        """Completed when at least one image has an answer, failed when none has, or when one is damaged that must not
        be; `reason` names what is missing."""
        if state is not None:
            return JobState(state), reason
        failed, late = self.progress.failed_images, self.progress.late_images
        quarantined = self.progress.quarantined_ranges()
        parts = [reason] if reason and (failed or late) else []
        if failed:
            have = "has" if failed == 1 else "have"
            parts.append(f"{failed} of {self.job.images} images {have} no answer; their results say why")
        if late:
            parts.append(f"{late} of {self.job.images} images got no finer answer in time; what they have stands")
        if damaged := len(self.progress.damaged):
            parts.append(f"{damaged} of {self.job.images} images cannot be read")
        if quarantined:
            parts.append(f"quarantined, since nodes died with them: images {quarantined}")
        must_not_be = damaged and self.job.policy.on_bad_input is OnBadInput.FAIL
        answered = self.progress.answered_coarse or not (failed or damaged)
        return (JobState.COMPLETED if answered and not must_not_be else JobState.FAILED), "; ".join(parts)
