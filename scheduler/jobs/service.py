"""The scheduler's behaviour behind the HTTP API: submission, recovery after a restart, streams, cancellation."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import json
import logging
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from models.escalation import Tuning
from models.hierarchy import Hierarchy
from models.manifest import Manifest
from scheduler.core.fleet import DeviceList
from scheduler.core.job import Answer, AttemptReport, ImageFacts, JobImages, JobRow
from scheduler.core.policy import JobPolicy, PolicyRequest, PrivacyRules, settle
from scheduler.core.work import ActiveJob, ActiveTask
from scheduler.devices.operators import Operators
from scheduler.dispatch.loop import Dispatcher
from scheduler.ingest.inputs import ImageWriter, InputFiles, images_in
from scheduler.ingest.staging import StagedUpload, staged
from scheduler.ingest.thumbnails import thumbnail
from scheduler.ingest.turns import Turns
from scheduler.ingest.upload import Upload, build_input, receive_upload
from scheduler.jobs.durable import DurableRecipient
from scheduler.jobs.live import answer_live
from scheduler.jobs.progress import Progress, labels_of
from scheduler.jobs.views import Renderer, Rows, attempt, decision, grouped, job as view_of
from scheduler.keyed_events import News
from scheduler.metrics import ClassCounts
from scheduler.placement.routes import Fleet
from scheduler.runs.service import Runs
from scheduler.settings import SchedulerSettings
from scheduler.store.inputs import InputCopies
from scheduler.store.jobs import JobStore, is_job_id, new_job_id
from tierkit.access import Allowance
from tierkit.errors import (
    Conflict,
    DataError,
    InvalidInput,
    NoNodeAvailable,
    NotFound,
    Overloaded,
    Standby,
    TerraceError,
    TooLarge,
)
from tierkit.logs import current_trace
from tierkit.types import Health, JobState, Scheme, Tier
from tierkit.wire.api import AttemptPage, DamagedImage, Explanation, Job, JobPage
from tierkit.wire.events import CoarseEvent
from tierkit.wire.trace import Trace, new_trace

__all__ = ["CLASSIFY_MAX_IMAGES", "UNLIMITED", "Events", "Scheduler"]

_log = logging.getLogger(__name__)

CLASSIFY_MAX_IMAGES = 64
_CLASSIFY_DEADLINE_S = 60.0
_KEEP_ALIVE_S = 15.0
_WAITS_S = 2.0
"""How long nothing happens to a job before its followers hear why."""
_EVENTS_AT_ONCE = 50
_MAX_KEY = 255
UNLIMITED = Allowance("everybody")


Events = AsyncGenerator[tuple[str, Job | dict[str, Any], int] | None, None]
"""Kind, data and number of each event; None where nothing has happened for a while."""


class Scheduler:
    """Everything that the API does to jobs. `scheduler.runtime` puts the parts together and runs the loops."""

    def __init__(
        self,
        *,
        settings: SchedulerSettings,
        manifest: Manifest,
        devices: DeviceList,
        operators: Operators,
        fleet: Fleet,
        dispatcher: Dispatcher,
        store: JobStore,
        runs: Runs,
        inputs: InputFiles,
        copies: InputCopies | None,
        tuning: Tuning | TerraceError,
        elapsed: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.manifest = manifest
        self.tuning = tuning
        """The thresholds of escalation, or why there are none."""
        self.devices = devices
        self.operators = operators
        self.fleet = fleet
        self.dispatcher = dispatcher
        self.runs = runs
        self.stopping = False
        """Set when the service drains, or leads no longer: endless streams end themselves then."""
        self._leads = True
        self._elapsed = elapsed
        """By which deadlines and retention count: see `scheduler.store.elapsed`."""
        self._store = store
        self._inputs = inputs
        self._copies = copies
        """Of the input files, for other schedulers; None where no other one shares the database."""
        self._recipients: dict[str, DurableRecipient] = {}
        self.class_counts = ClassCounts(manifest.hierarchy)
        self._news = News()
        """By job id."""
        self._submissions = 0
        """Uploads under way that will be jobs."""
        self._turns = Turns(settings.decoders)
        self._served = manifest.hierarchy.digest
        self._hierarchies = {self._served: manifest.hierarchy}
        """By digest: those of the jobs in the database as well, once they are recovered."""
        self._showing = asyncio.Semaphore(settings.decoders)
        """Thumbnails that are made at a time: uploads do not wait behind a whole page of them."""

    # --- submission -----------------------------------------------------------------------------------------------

    async def submit(
        self,
        headers: Mapping[str, str],
        query: Sequence[tuple[str, str]],
        stream: AsyncIterable[bytes],
        *,
        until_gone: AbstractContextManager[None],
        idempotency_key: str | None,
        owner: str | None = None,
        allowance: Allowance = UNLIMITED,
    ) -> tuple[Job, bool]:
        """Receive an upload and make it a job. A failure before the job is stored leaves nothing behind.

        Args:
            until_gone: cancels what runs inside when the client has gone.
            owner: whose job it is.
            allowance: the limits of the caller.

        Returns:
            The job, and whether it is new: it was there already with the same idempotency key and content.

        Raises:
            InvalidInput and its kin: wrong upload or policy.
            Forbidden: the policy would send pixels where they must not go.
            Conflict: the idempotency key belongs to another content.
            LimitReached: the caller's own limit.
            Unavailable: too many unfinished jobs, or the database does not accept it.
        """
        if idempotency_key is not None and not 0 < len(idempotency_key) <= _MAX_KEY:
            raise InvalidInput(f"an Idempotency-Key has 1 to {_MAX_KEY} characters")
        if idempotency_key is not None and owner is not None:
            idempotency_key = hashlib.sha256(f"{owner}\n{idempotency_key}".encode()).hexdigest()  # a key is one's own
        # A repeated submission is no further job.
        further = idempotency_key is None or await self._store.by_idempotency_key(idempotency_key) is None
        with staged(self.settings.state) as staging, self._counted(owner, allowance, check=further):
            upload = await receive_upload(headers, query, stream, staging, self.settings)
            policy = self._settle(upload.policy)
            with self._inputs.create(max_images=self.settings.max_images) as writer:
                facts = await self._read(upload, staging, writer, until_gone)
                sha256 = await asyncio.to_thread(self._inputs.keep, writer)
            await self._copy(sha256)
            policy = policy.model_copy(update={"batch_size": min(policy.batch_size, writer.images_per_task)})
            job, is_new = await self._store_job(policy, sha256, writer.images, facts, idempotency_key, owner)
            return job.model_copy(update={"left_out": facts.left_out}), is_new

    async def _copy(self, sha256: str) -> None:
        """Copy a file of input for the other schedulers, or let go of it."""
        if self._copies is None:
            return
        try:
            await self._copies.save(sha256, self._inputs.path(sha256))
        except BaseException:
            self._release(sha256)
            raise

    def _release(self, sha256: str) -> None:
        if self._inputs.release(sha256) and self._copies is not None:
            self._copies.remove(sha256)

    @contextmanager
    def _counted(self, owner: str | None, allowance: Allowance, *, check: bool) -> Iterator[None]:
        """Count an upload that will be a job.

        Raises:
            Overloaded: there are too many unfinished jobs.
            LimitReached: the caller has too many.
        """
        if check:
            taken = self.dispatcher.unfinished + self._submissions
            if taken >= self.settings.max_unfinished_jobs:
                raise Overloaded(f"{taken} jobs are unfinished or being submitted; try again later", retry_after_s=5)
        with allowance.submits(self.unfinished_of(owner), check=check):
            self._submissions += 1
            try:
                yield
            finally:
                self._submissions -= 1

    def unfinished_of(self, owner: str | None) -> int:
        """Jobs of one owner that wait or run, and training runs under way."""
        return sum(recipient.job.owner == owner for recipient in self._recipients.values()) + self.runs.under_way_of(
            owner
        )

    def _settle(self, request: PolicyRequest) -> JobPolicy:
        settings = self.settings
        policy = settle(
            request,
            scheme=settings.scheme,
            deadline_s=settings.deadline_s,
            task_deadline_s=settings.task_deadline_s,
            tuning=self.tuning,
        )
        self.fleet.check_trust(policy.scheme, PrivacyRules.of(policy), time.monotonic())
        return policy

    async def _read(
        self, upload: Upload, staging: StagedUpload, writer: ImageWriter, until_gone: AbstractContextManager[None]
    ) -> ImageFacts:
        stopped = threading.Event()
        steps = build_input(upload, staging, writer, self.settings, self.manifest.hierarchy.fine, stopped)
        with until_gone:
            return await self._turns.run(steps, stopped)

    async def _store_job(
        self,
        policy: JobPolicy,
        sha256: str,
        images: int,
        facts: ImageFacts,
        key: str | None,
        owner: str | None,
    ) -> tuple[Job, bool]:
        now, trace = time.time(), current_trace() or new_trace()
        fingerprint = await asyncio.to_thread(_fingerprint, policy, sha256, facts)
        job = JobRow(
            id=new_job_id(now),
            owner=owner,
            policy=policy,
            images=images,
            input_sha256=sha256,
            hierarchy=self._served,
            resized_images=len(facts.resized),
            fingerprint=fingerprint,
            traceparent=trace.traceparent,
            created_at=now,
            deadline_elapsed=self._elapsed() + policy.deadline_s,
        )
        try:
            stored = await self._store.add(job, facts, key)
        except Exception:
            # Not on cancellation: the job may be stored by then. A file too many goes with the next start.
            self._release(sha256)
            raise
        if stored.id != job.id:
            self._release(sha256)
            if stored.fingerprint != fingerprint:
                raise Conflict(
                    f"this Idempotency-Key belongs to job {stored.id} with another content or policy; use a fresh key"
                )
            return self._shown(stored), False
        tasks = [_task(job, index) for index in range(job.tasks)]
        progress = self._progress(job, facts)
        self._activate(job, self._inputs.open(sha256, images), tasks, progress, trace)
        _log.info("job accepted", extra={"job": job.id, "images": images, "scheme": policy.scheme})
        return await self._named(self._shown(job)), True

    def _activate(
        self,
        job: JobRow,
        images: JobImages,
        tasks: Sequence[ActiveTask],
        progress: Progress,
        trace: Trace | None = None,
    ) -> None:
        def on_end() -> None:
            del self._recipients[job.id]
            self.dispatcher.record.ended(job.id, _in_short(job, recipient.state), time.monotonic())
            self._release(job.input_sha256)
            self._news.tell(job.id)

        recipient = DurableRecipient(job, progress, store=self._store, elapsed=self._elapsed, on_end=on_end)
        self._recipients[job.id] = recipient
        active = ActiveJob(
            job_id=job.id,
            policy=job.policy,
            images=images,
            content=job.input_sha256,
            tasks=tasks,
            recipient=recipient,
            deadline=time.monotonic() + job.deadline_elapsed - self._elapsed(),
            trace=trace or job.trace,
            created_at=job.created_at,
        )
        recipient.mapping = active.mapping
        self.dispatcher.record.began(job.id, _in_short(job, recipient.state), time.monotonic(), job.owner)
        self.dispatcher.add(active)

    # --- after a restart ------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Take up the jobs that the scheduler before this one has left: only what has no durable answer is sent."""
        self._hierarchies = await self._store.hierarchies(self.manifest.hierarchy)
        unfinished = await self._store.unfinished()
        for job in unfinished:
            self._inputs.hold(job.input_sha256)
        self._inputs.remove_strays()
        if self._copies is not None:
            await self._copies.keep_only({job.input_sha256 for job in unfinished})
        for job in unfinished:
            await self._recover(job)

    async def _recover(self, job: JobRow) -> None:
        facts = await self._store.facts(job.id)
        progress = self._progress(job, facts)
        open_tasks: list[ActiveTask] = []
        made = await self._store.attempts_made(job.id)
        async for index, answers in self._store.answers_by_task(job):
            for answer in answers.values():
                progress.add(answer)
            last_stage = "coarse" if job.policy.scheme is Scheme.END and "coarse" in answers else "final"
            if last_stage not in answers:
                task = _task(job, index)
                task.attempts, task.failed_attempts, task.errors = made.get(index, (0, 0, 0))
                if coarse := answers.get("coarse"):
                    assert isinstance(coarse.event, CoarseEvent)
                    task.knows(coarse.event)
                open_tasks.append(task)
        try:
            if job.hierarchy != self._served:
                raise DataError(
                    "the scheduler was started again with a model set of other classes than this job's; submit it again"
                )
            path = self._inputs.path(job.input_sha256)
            if self._copies is not None and not path.exists():
                await self._copies.fetch(job.input_sha256, path)
            images = await asyncio.to_thread(self._inputs.open, job.input_sha256, job.images)
        except DataError as exc:
            recipient = DurableRecipient(job, progress, store=self._store, elapsed=self._elapsed, on_end=lambda: None)
            await recipient.ended(JobState.FAILED, str(exc))
            self._release(job.input_sha256)
            return
        _log.info("job taken up again", extra={"job": job.id, "tasks_left": len(open_tasks), "tasks": job.tasks})
        self._activate(job, images, open_tasks, progress)

    # --- what there is --------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run."""
        return len(self._recipients)

    def running(self, most: int, owner: str | None = None) -> list[DurableRecipient]:
        """The newest unfinished jobs, the newest first.

        Args:
            owner: only theirs; None for all.
        """
        wanted = (
            recipient for recipient in reversed(self._recipients.values()) if owner in (None, recipient.job.owner)
        )
        return list(itertools.islice(wanted, most))

    async def view(self, job_id: str) -> Job:
        """A job as it is now. Raises NotFound."""
        return await self._named(self._shown(await self._current(await self._store.get(job_id))))

    async def _named(self, shown: Job) -> Job:
        """With the names of the images that cannot be read."""
        if shown.done or not shown.damaged:
            return shown
        named = await self._store.named(shown.id, [image.model_dump() for image in shown.damaged])
        return shown.model_copy(update={"damaged": tuple(map(DamagedImage.model_validate, named))})

    async def _current(self, job: JobRow) -> JobRow:
        """The row, read again if the job has ended since it was read: then its figures are in the database alone."""
        return job if job.final or job.id in self._recipients else await self._store.get(job.id)

    def _shown(self, row: JobRow) -> Job:
        now, flat = self._elapsed(), self._hierarchy(row).is_flat
        recipient = self._recipients.get(row.id)
        if recipient is None:
            figures = row.summary or {**self._progress(row, ImageFacts()).summary(), "mapping": {}}
            return view_of(row, state=row.state, reason=row.reason, figures=figures, flat=flat, now=now)
        reason = self._why_it_waits(row.id)
        return view_of(row, state=recipient.state, reason=reason, figures=recipient.figures, flat=flat, now=now)

    def _why_it_waits(self, job_id: str) -> str:
        """Why nothing of a job can be sent now; "" when all goes well, and after its end."""
        active, recipient = self.dispatcher.job(job_id), self._recipients.get(job_id)
        reason = active.reason if active is not None else ""
        return reason or (
            "waiting for its turn" if recipient is not None and recipient.state is JobState.QUEUED else ""
        )

    def _hierarchy(self, job: JobRow) -> Hierarchy:
        """The classes of a job: those of the model set that it was submitted to."""
        return self._hierarchies.get(job.hierarchy or self._served, self.manifest.hierarchy)

    def _progress(self, job: JobRow, facts: ImageFacts) -> Progress:
        parents = np.asarray(self._hierarchy(job).parent, np.int32)
        return Progress(facts.labels, parents, facts.damaged, mended=len(facts.mended))

    async def _state(self, job_id: str) -> JobState:
        recipient = self._recipients.get(job_id)
        return recipient.state if recipient is not None else (await self._store.get(job_id)).state

    async def check_owner(self, job_id: str, owner: str) -> None:
        """Raises NotFound for the jobs of others: they are not there for this caller."""
        if (await self._store.get(job_id)).owner != owner:
            raise NotFound(f"no job {job_id[:64]!r}")

    async def page(
        self, *, limit: int, cursor: str | None, state: JobState | None, owner: str | None = None
    ) -> JobPage:
        """Jobs, newest first. Raises InvalidInput for a cursor that no page has given.

        Args:
            owner: only theirs; None for all.
        """
        if cursor is not None and not is_job_id(cursor):
            raise InvalidInput(f"cursor is the next_cursor of the page before, not {cursor[:32]!r}")
        rows = await self._store.page(limit=limit + 1, before=cursor, state=state, owner=owner)
        shown = [await self._current(row) for row in rows[:limit]]
        return JobPage(jobs=tuple(map(self._shown, shown)), next_cursor=shown[-1].id if len(rows) > limit else None)

    async def attempts(self, job_id: str, *, limit: int, cursor: str | None, task: int | None) -> AttemptPage:
        """The attempts of a job, those under way included, by task and number.

        Raises:
            NotFound: no such job.
            InvalidInput: a cursor that no page has given.
        """
        job = await self._store.get(job_id)
        shown, next_cursor = await self._reports(job_id, limit=limit, cursor=cursor, task=task)
        return AttemptPage(
            attempts=tuple(attempt(each, job) for each in shown),
            next_cursor=next_cursor,
        )

    async def explain(self, job_id: str, *, limit: int, cursor: str | None, task: int | None) -> Explanation:
        """Why the tasks of a job went where they went, by task and attempt.

        Raises:
            NotFound: no such job.
            InvalidInput: a cursor that no page has given.
        """
        job = await self.view(job_id)
        shown, next_cursor = await self._reports(job_id, limit=limit, cursor=cursor, task=task)
        active = self.dispatcher.job(job_id)
        return Explanation(
            job=job.id,
            scheme=job.scheme,
            state=job.state,
            now=job.reason or (active.held_back if active is not None else ""),
            decisions=tuple(map(decision, shown)),
            next_cursor=next_cursor,
        )

    async def _reports(
        self, job_id: str, *, limit: int, cursor: str | None, task: int | None
    ) -> tuple[list[AttemptReport], str | None]:
        """A page of the attempts of a job, those under way included, and the cursor of the next one."""
        after = (-1, 0) if cursor is None else _attempt_cursor(cursor)
        # First those under way: one that ends in between is found in the database then, or comes with a later reading.
        running = [
            report
            for report in self.dispatcher.attempts(job_id)
            if (report.task, report.number) > after and task in (None, report.task)
        ]
        ended = await self._store.attempts_after(job_id, *after, limit=limit + 1, only_task=task)
        by_number = {(report.task, report.number): report for report in (*running, *ended)}
        found = [by_number[key] for key in sorted(by_number)]
        shown = found[:limit]
        return shown, f"{shown[-1].task}-{shown[-1].number}" if len(found) > limit else None

    async def cancel(self, job_id: str) -> Job:
        """End a job; returns when that is durable. Raises NotFound, or Conflict when it has ended already."""
        job = await self._store.get(job_id)
        recipient = self._recipients.get(job_id)
        if recipient is None or not self.dispatcher.cancel(job_id, "cancelled by the user"):
            raise Conflict(f"job {job_id} is {job.state if job.final else 'ending'} already")
        while job_id in self._recipients:
            if not self._leads:
                raise Standby("another scheduler leads now, and may have gone on with the job: ask it")
            await self._news.of(job_id).wait()
        return await self.view(job_id)

    async def results(self, job_id: str) -> tuple[JobState, AsyncGenerator[Rows, None]]:
        """The state of a job and its image results in index order, by task. While the job runs, those that there are;
        afterwards all. Raises NotFound."""
        job = await self._current(await self._store.get(job_id))
        renderer = Renderer(self._hierarchy(job), await self._store.facts(job_id), job.policy, job.trace)
        unanswered = f"not answered: the job is {job.state} ({job.reason})" if job.final else None

        async def batches() -> AsyncGenerator[Rows, None]:
            async for index, answers in self._store.answers_by_task(job):
                if answers or job.final:
                    coarse, final = answers.get("coarse"), answers.get("final")
                    yield renderer.task(*job.images_of(index), coarse, final, unanswered=unanswered)

        recipient = self._recipients.get(job_id)
        return (job.state if recipient is None else recipient.state), batches()

    async def thumbnail(self, job_id: str, index: int, longest: int) -> tuple[bytes, str]:
        """A small copy of a picture of a job that has not ended, as a file and its media type.

        Raises:
            NotFound: no such job or picture, the job has ended, or the picture cannot be read.
        """
        job = await self._store.get(job_id)
        active, recipient = self.dispatcher.job(job_id), self._recipients.get(job_id)
        if active is None or recipient is None:
            raise NotFound(f"job {job_id} has ended, and its pictures are gone")
        if index >= job.images:
            raise NotFound(f"job {job_id} has {job.images} images, numbered from 0")
        if index in recipient.progress.damaged:
            raise NotFound(f"image {index} cannot be read: {recipient.progress.damaged[index]}")
        stopped = threading.Event()
        try:
            async with self._showing:
                return await self._turns.run(thumbnail(active.images, index, longest, self.settings, stopped), stopped)
        except InvalidInput as exc:
            raise NotFound(f"image {index} cannot be read: {str(exc).removeprefix(f'image {index}: ')}") from exc

    async def events(self, job_id: str, *, after: int, states_only: bool = False) -> Events:
        """The events of a job from the result number `after` on; ends with the final state.

        Args:
            states_only: leave the results out. The states then have the number 0, so that a reader who goes on with
                the results misses none.

        Raises:
            NotFound: at once, before the first event.
        """
        job = await self._store.get(job_id)
        if states_only:
            return self._events(job, 0, None)
        renderer = Renderer(self._hierarchy(job), await self._store.facts(job_id), job.policy, job.trace)
        return self._events(job, after, renderer)

    async def _events(self, job: JobRow, seq: int, renderer: Renderer | None) -> Events:
        job_id = job.id
        shown: JobState | None = None
        quiet_s, told = 0.0, ""
        while not self.stopping:
            news = self._news.of(job_id)
            # The state is read before the results: once it is final, no result can be missing below.
            state = await self._state(job_id)
            batch = [] if renderer is None else await self._store.results_after(job, seq, limit=_EVENTS_AT_ONCE)
            if state is not shown and not (state.final and batch):
                view = await self.view(job_id)
                # It may have ended while its results were read; then there are more of them to come first.
                if state.final or not view.state.final:
                    shown = state
                    quiet_s = 0.0
                    yield "state", view, seq
            if state.final and not batch:
                return
            if renderer is not None and batch:
                coarse = await self._store.coarse_of(job, [answer.task for _, answer in batch])
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
                if (reason := self._why_it_waits(job_id)) not in ("", told):
                    told, quiet_s = reason, 0.0
                    yield "state", await self.view(job_id), seq
                elif quiet_s >= _KEEP_ALIVE_S:
                    quiet_s = 0.0
                    yield None

    # --- interactive requests -------------------------------------------------------------------------------------

    async def classify(
        self,
        headers: Mapping[str, str],
        query: Sequence[tuple[str, str]],
        stream: AsyncIterable[bytes],
        *,
        until_gone: AbstractContextManager[None],
        request_id: str,
    ) -> AsyncGenerator[Rows, None]:
        """Answer a few images at once, in one task that goes before all jobs; nothing is stored.

        Returns:
            Events: coarse, then fine, fallback or failed; then done, or error.

        Raises:
            As `submit`, before the first event.
        """
        with staged(self.settings.state) as staging:
            upload = await receive_upload(headers, query, stream, staging, self.settings)
            given = upload.policy.model_copy(update={"batch_size": CLASSIFY_MAX_IMAGES})
            if given.deadline_s is None:
                given = given.model_copy(update={"deadline_s": _CLASSIFY_DEADLINE_S})
            policy = self._settle(given)
            self._check_ends()
            held = io.BytesIO()
            what = "one request; submit a job (POST /v1/jobs)"
            writer = self._inputs.writer(held, CLASSIFY_MAX_IMAGES, what)
            facts = await self._read(upload, staging, writer, until_gone)
            writer.finish()
            if writer.images > writer.images_per_task:
                raise TooLarge(f"{writer.images} files of up to {writer.largest} bytes are too much for {what}")
        images = images_in(np.frombuffer(held.getbuffer(), np.uint8), writer.images, self._inputs.fit)
        trace = current_trace()
        renderer = Renderer(self.manifest.hierarchy, facts, policy, trace)
        return answer_live(
            self.dispatcher,
            renderer,
            policy,
            images,
            self.class_counts,
            content=writer.sha256,
            request_id=request_id,
            trace=trace,
        )

    def _check_ends(self) -> None:
        """Refuse an interactive request at once where all end devices are about to leave, or have left.

        Raises:
            NoNodeAvailable: with the state of each.
        """
        now = time.monotonic()
        ends = [view for view in self.devices.present(now) if view.device.tier is Tier.END]
        known = "" if any(view.health is not Health.DRAINING for view in ends) else self.devices.why_none(Tier.END, now)
        if known:
            raise NoNodeAvailable(f"no end device takes work now ({known})", retry_after_s=5)

    # --- announcements --------------------------------------------------------------------------------------------

    def on_commit(self, group: Sequence[tuple[int, Answer]]) -> None:
        """Results have become durable: count them, and tell the followers."""
        for _, answer in group:
            progress = self._recipients[answer.job_id].progress
            progress.add(answer)
            self.class_counts.add(labels_of(answer.event, progress.readable(answer)))
        for job_id in {answer.job_id for _, answer in group}:
            self._news.tell(job_id)
        self.dispatcher.wake()

    def on_withdrawal(self, answer: Answer) -> None:
        """An answer has left the database."""
        self._recipients[answer.job_id].progress.take_back(answer)

    async def step_down(self) -> None:
        """Another scheduler leads, and has the jobs: whoever waits for something here is told so."""
        self._leads = False
        self.stop_streams()
        await self.dispatcher.end_interactive("another scheduler leads now: ask it")

    def stop_streams(self) -> None:
        """End all event streams."""
        self.stopping = True
        self.dispatcher.record.tell()
        self._news.tell_all()
        self.runs.stop_streams()

    async def purge(self) -> int:
        """Forget jobs and training runs whose retention is over; returns how many jobs."""
        before = self._elapsed() - self.settings.retention_s
        await self.runs.purge(before)
        return await self._store.purge(before)


def _task(job: JobRow, index: int) -> ActiveTask:
    first_image, images = job.images_of(index)
    return ActiveTask(index=index, first_image=first_image, images=images)


def _in_short(job: JobRow, state: JobState) -> str:
    name = f" {job.policy.name!r}" if job.policy.name else ""
    return f"{state}{name}: {job.images} images, {job.policy.scheme}"


def _attempt_cursor(text: str) -> tuple[int, int]:
    if re.fullmatch("[0-9]{1,9}-[0-9]{1,9}", text, re.ASCII) is None:
        raise InvalidInput(f"cursor is the next_cursor of the page before, not {text[:32]!r}")
    task, _, number = text.partition("-")
    return int(task), int(number)


def _fingerprint(policy: JobPolicy, sha256: str, facts: ImageFacts) -> str:
    """Same images, labels, names and policy: same submission."""
    digest = hashlib.sha256(sha256.encode())
    digest.update(policy.model_dump_json().encode())
    digest.update(b"" if facts.labels is None else facts.labels.tobytes())
    digest.update(json.dumps([facts.names, sorted(facts.resized.items()), sorted(facts.damaged.items())]).encode())
    digest.update(json.dumps(sorted(facts.mended.items())).encode() if facts.mended else b"")
    return digest.hexdigest()
