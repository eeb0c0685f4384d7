"""The jobs that this scheduler leads, and what the use cases share: its parts and the jobs under way."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from models.escalation import Tuning
from models.hierarchy import Hierarchy
from models.manifest import Manifest
from scheduler.core import events
from scheduler.core.fleet import Ledger
from scheduler.core.job import Answer, ImageFacts, JobImages, JobRow
from scheduler.core.policy import JobPolicy, JobRules, PolicyRequest, settle
from scheduler.core.release import Release
from scheduler.core.site import NO_SITE
from scheduler.core.work import JobFacts, TaskFacts
from scheduler.devices.operators import Operators
from scheduler.devices.sources import RemoteSources
from scheduler.dispatch.active_job import ActiveJob
from scheduler.dispatch.loop import Dispatcher
from scheduler.ingest.inputs import ImageWriter, InputFiles
from scheduler.ingest.staging import StagedUpload
from scheduler.ingest.turns import Turns, at_once
from scheduler.ingest.upload import Incoming, Upload, build_input
from scheduler.jobs.durable import DurableRecipient
from scheduler.jobs.progress import Progress, labels_of
from scheduler.keyed_events import KeyedEvents
from scheduler.metrics import ClassCounts
from scheduler.observations.learning import Learning
from scheduler.observations.service import Observations
from scheduler.placement.own_pictures import learning, route_of_sources
from scheduler.placement.routes import Placement
from scheduler.releases.service import Releases
from scheduler.releases.spreading import Spreading
from scheduler.runs.service import Runs
from scheduler.settings import SchedulerSettings
from scheduler.sinks.service import Sinks
from scheduler.store.copies import FileCopies
from scheduler.store.jobs import JobStore
from tierkit.access import Allowance
from tierkit.errors import Forbidden, InvalidInput, Overloaded, TerraceError
from tierkit.types import JobState
from tierkit.wire.messages import DeviceRoute
from tierkit.wire.trace import Trace

__all__ = ["UNLIMITED", "Scheduler"]

_log = logging.getLogger(__name__)

UNLIMITED = Allowance("everybody")
_MOST_NAMED = 20
"""Sites in a sentence."""
_MOST_POLICIES = 1024
"""Policies that are remembered: most requests ask for the same."""


@dataclass(eq=False, kw_only=True)
class Scheduler:
    """The parts of a scheduler that leads, and its jobs under way. Each use case is a module next to this one:
    `submit`, `recover`, `query`, `follow` and `classify`. `scheduler.runtime` puts the parts together and runs the
    loops."""

    settings: SchedulerSettings
    releases: Releases
    spreading: Spreading
    devices: Ledger
    operators: Operators
    placement: Placement
    dispatcher: Dispatcher
    store: JobStore
    runs: Runs
    observations: Observations
    learning: Learning
    sinks: Sinks
    remote_sources: RemoteSources
    inputs: InputFiles
    copies: FileCopies | None
    """Copies of the input files for other schedulers; None if no other scheduler shares the database."""
    elapsed: Callable[[], float]
    """Seconds of elapsed time, by which deadlines and retention count. See `tierkit.elapsed`."""
    stopping: bool = False
    """Set when the service drains or no longer leads: endless streams end then."""
    leads: bool = True

    def __post_init__(self) -> None:
        self.recipients: dict[str, DurableRecipient] = {}
        """Jobs under way, by id."""
        self.class_counts = ClassCounts(self.manifest.hierarchy)
        self.news = KeyedEvents()
        """Changes of jobs, by job id."""
        self.turns = Turns(self.settings.decoders)
        self.served = self.manifest.hierarchy.digest
        self.hierarchies = {self.served: self.manifest.hierarchy}
        """Class hierarchies by digest; after recovery also the hierarchies of stored jobs."""
        self.showing = asyncio.Semaphore(self.settings.decoders)
        """Bounds the thumbnails made at a time, so that uploads do not wait behind a page of them."""
        self._settled = lru_cache(_MOST_POLICIES)(self._settle)
        self._submissions = 0
        """Uploads under way that will be jobs."""

    @property
    def manifest(self) -> Manifest:
        """Networks and classes of the release in force."""
        return self.releases.current.manifest

    @property
    def tuning(self) -> Tuning | TerraceError:
        """The thresholds of the release in force, or the reason why it has none."""
        return self.releases.tuning(self.releases.in_force)

    def _settle(self, request: PolicyRequest, release: int) -> JobPolicy:
        settings = self.settings
        policy = settle(
            request,
            scheme=settings.scheme,
            deadline_s=settings.deadline_s,
            task_deadline_s=settings.task_deadline_s,
            tuning=self.releases.tuning(release),
        )
        return policy.model_copy(update={"release": self.releases.rows[release].ref})

    # --- admission control ------------------------------------------------------------------------------------------

    @contextmanager
    def admitted(self, owner: str | None, allowance: Allowance, *, check: bool = True) -> Iterator[None]:
        """Admission control: count an upload that will be a job.

        Args:
            check: refuse it when there is no room; False for a repeated submission, which adds no job.

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
        """The number of one owner's jobs that wait or run and of its training runs under way."""
        return sum(each.job.owner == owner for each in self.recipients.values()) + self.runs.under_way_of(owner)

    def settle(self, request: PolicyRequest, sites: Sequence[str] = ()) -> JobPolicy:
        """Fill in what a request leaves open.

        Args:
            sites: those to which the caller is limited; none: all.

        Raises:
            InvalidInput: the policy contradicts itself, there are no thresholds for it, or its site or its release is
                unknown.
            Forbidden: it would send pixels to an untrusted node, or its site is not the caller's.
            Conflict: an encoder that it needs is missing.
        """
        if request.site is None and sites:
            if len(sites) > 1:
                raise InvalidInput(f"site: name one of yours: {', '.join(sites[:_MOST_NAMED])}")
            request = request.model_copy(update={"site": sites[0]})
        if request.site is not None:
            self.check_site(request.site, sites)
        release = self.releases.for_work(request.release, request.site, request.scheme or self.settings.scheme)
        policy = self._settled(request, release.number)
        self.placement.check_trust(policy.scheme, JobRules.of(policy), time.monotonic(), policy.site)
        return policy

    def check_site(self, site: str, sites: Sequence[str] = ()) -> None:
        """Refuse a site of which no node is known.

        Args:
            sites: those to which the caller is limited; none: all.

        Raises:
            Forbidden: the site is not one of these.
            InvalidInput: no node on the device list belongs to it; with the sites that there are.
        """
        if sites and site not in sites:
            raise Forbidden(f"your token is not for the site {site!r}; it is for {', '.join(sites[:_MOST_NAMED])}")
        known = [each for each in self.devices.sites if each != NO_SITE]
        if site in known:
            return
        seen = [each for each in known if not sites or each in sites]
        more = f" and {len(seen) - _MOST_NAMED:,} more" if len(seen) > _MOST_NAMED else ""
        there = f"known are {', '.join(seen[:_MOST_NAMED])}{more}" if seen else "no node has registered for one"
        raise InvalidInput(f"unknown site {site[:64]!r}: {there}")

    def route_of_sources(self, node_id: str) -> DeviceRoute:
        """The route of a device's own pictures. Raises NotFound."""
        device = self.devices.get(node_id)
        release = self.releases.first_of(device)
        scheme, tuning = self.settings.scheme, self.releases.tuning(release)
        now = time.monotonic()
        route = route_of_sources(self.placement, device, scheme=scheme, tuning=tuning, release=release, now=now)
        return learning(route) if self.settings.learn else route

    def move_jobs(self, number: int, to: Release) -> None:
        """Let the jobs of a release that have no answers belong to another one."""
        for job_id, policy in self.dispatcher.policies():
            if policy.release_number != number:
                continue
            given = policy.model_dump(include=set(PolicyRequest.model_fields))
            try:
                moved = self._settled(PolicyRequest.model_validate(given | {"release": None}), to.number)
            except InvalidInput as exc:
                _log.warning("the job %s stays with its release: %s", job_id, exc)
                continue
            self.dispatcher.handle(events.JobMoved(job_id, moved))

    def on_move(self, facts: JobFacts) -> None:
        """A job belongs to another release now."""
        if (recipient := self.recipients.get(facts.job_id)) is not None:
            recipient.job = dataclasses.replace(recipient.job, policy=facts.policy)
            self.store.moved(facts.job_id, facts.policy)
            self.news.wake(facts.job_id)

    async def read(self, incoming: Incoming, upload: Upload, staging: StagedUpload, writer: ImageWriter) -> ImageFacts:
        """Decode the pictures of an upload into an input file, in turn with other uploads."""
        stopped = threading.Event()
        steps = build_input(upload, staging, writer, self.settings, self.manifest.hierarchy.fine, stopped)
        if upload.header_length is not None and not staging.blocks:
            return at_once(steps)  # a small tensor: handing it to a thread takes longer
        with incoming.until_gone:
            return await self.turns.run(steps, stopped)

    def release(self, sha256: str) -> None:
        """Let go of an input file; the last job that holds it removes it."""
        if self.inputs.release(sha256) and self.copies is not None:
            self.copies.remove(sha256)

    # --- jobs under way ---------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """The number of jobs that wait or run."""
        return len(self.recipients)

    def running(self, most: int, owner: str | None = None, site: str | None = None) -> list[DurableRecipient]:
        """The newest unfinished jobs, the newest first.

        Args:
            owner: only this owner's; None for all.
            site: only those that may run there; None for all.
        """
        wanted = (
            each
            for each in reversed(self.recipients.values())
            if owner in (None, each.job.owner) and (site is None or each.job.policy.site in (None, site))
        )
        return list(itertools.islice(wanted, most))

    def activate(
        self,
        job: JobRow,
        images: JobImages,
        tasks: Sequence[TaskFacts],
        progress: Progress,
        trace: Trace | None = None,
    ) -> None:
        """Hand a stored job to the dispatcher.

        Args:
            trace: of the submission, with the state that the row does not hold; default: the trace of the row.
        """

        def on_end() -> None:
            del self.recipients[job.id]
            self.dispatcher.record.ended(job.id, _in_short(job, recipient.state), time.monotonic())
            self.release(job.input_sha256)
            self.news.wake(job.id)

        recipient = DurableRecipient(job, progress, store=self.store, elapsed=self.elapsed, on_end=on_end)
        self.recipients[job.id] = recipient
        facts = JobFacts(
            job_id=job.id,
            policy=job.policy,
            content=job.input_sha256,
            deadline=time.monotonic() + job.deadline_elapsed - self.elapsed(),
        )
        active = ActiveJob(
            facts,
            tasks=tasks,
            images=images,
            recipient=recipient,
            answered=progress.answered_coarse > 0,
            trace=trace or job.trace,
            created_at=job.created_at,
        )
        text = _in_short(job, recipient.state)
        self.dispatcher.record.began(job.id, text, time.monotonic(), job.owner, job.policy.site)
        self.dispatcher.add(active)

    def hierarchy(self, job: JobRow) -> Hierarchy:
        """The classes of the model set that a job was submitted to."""
        return self.hierarchies.get(job.hierarchy or self.served, self.manifest.hierarchy)

    def progress(self, job: JobRow, facts: ImageFacts) -> Progress:
        """Figures of a job without answers yet."""
        parents = np.asarray(self.hierarchy(job).parent, np.int32)
        return Progress(facts.labels, parents, facts.damaged, mended=len(facts.mended))

    def why_it_waits(self, job_id: str) -> str:
        """Return why nothing of a job can be sent now; "" when all goes well, and after its end."""
        active, recipient = self.dispatcher.job(job_id), self.recipients.get(job_id)
        queued = recipient is not None and recipient.state is JobState.QUEUED
        return (active.reason if active is not None else "") or ("waiting for its turn" if queued else "")

    # --- announcements ----------------------------------------------------------------------------------------------

    def on_commit(self, group: Sequence[tuple[int, Answer]]) -> None:
        """Count results that have become durable, and wake their followers."""
        for _, answer in group:
            progress = self.recipients[answer.job_id].progress
            progress.add(answer)
            self.class_counts.add(labels_of(answer.event, progress.readable(answer)))
        for job_id in {answer.job_id for _, answer in group}:
            self.news.wake(job_id)
        self.dispatcher.wake()

    def on_withdrawal(self, answer: Answer) -> None:
        """Uncount an answer that has left the database."""
        self.recipients[answer.job_id].progress.take_back(answer)

    async def step_down(self) -> None:
        """End what clients wait for here: another scheduler leads and has the jobs."""
        self.leads = False
        self.stop_streams()
        await self.dispatcher.end_interactive("another scheduler leads now: ask it")

    def stop_streams(self) -> None:
        """End all event streams."""
        self.stopping = True
        self.dispatcher.record.tell()
        self.news.wake_all()
        self.runs.stop_streams()
        self.observations.stop_streams()

    async def purge(self) -> int:
        """Delete jobs and training runs whose retention is over; returns the number of jobs."""
        before = self.elapsed() - self.settings.retention_s
        await self.runs.purge(before)
        return await self.store.purge(before)

    async def purge_observations(self) -> None:
        """Delete observations whose retention is over, or that are too many."""
        await self.observations.purge(self.elapsed() - self.settings.retention_s, self.settings.max_observations)
        await self.learning.purged()


def _in_short(job: JobRow, state: JobState) -> str:
    name = f" {job.policy.name!r}" if job.policy.name else ""
    return f"{state}{name}: {job.images} images, {job.policy.scheme}"
