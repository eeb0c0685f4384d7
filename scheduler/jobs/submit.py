"""Submission: an upload becomes a durable job, once for each idempotency key, or leaves nothing behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.core.job import ImageFacts, JobRow
from scheduler.core.policy import JobPolicy
from scheduler.core.work import TaskFacts
from scheduler.ingest.staging import staged
from scheduler.ingest.upload import Incoming, receive_upload
from scheduler.jobs.query import as_job, with_names
from scheduler.jobs.service import UNLIMITED, Scheduler
from scheduler.store.jobs import new_job_id
from tierkit.access import Allowance
from tierkit.errors import Conflict, InvalidInput
from tierkit.logs import current_trace
from tierkit.wire.api import Job
from tierkit.wire.trace import Trace, new_trace

__all__ = ["Submitter", "submit", "task_of"]

_log = logging.getLogger(__name__)

_MAX_KEY = 255


@dataclass(frozen=True, slots=True)
class Submitter:
    """The caller who submits a job."""

    owner: str | None = None
    """Name of the token."""
    allowance: Allowance = field(default_factory=lambda: UNLIMITED)
    sites: Sequence[str] = ()
    """Sites to which the token is limited; empty for all."""


ANYBODY = Submitter()


async def submit(
    scheduler: Scheduler,
    incoming: Incoming,
    *,
    idempotency_key: str | None = None,
    submitter: Submitter = ANYBODY,
) -> tuple[Job, bool]:
    """Receive an upload and store it as a job.

    Args:
        idempotency_key: names this submission; the same key and content return the job that is there.

    Returns:
        The job, and whether it is new.

    Raises:
        InvalidInput and its kin: wrong upload or policy.
        Forbidden: the policy would send pixels to an untrusted node.
        Conflict: the idempotency key belongs to other content.
        LimitReached: the caller's own limit.
        Unavailable: too many unfinished jobs, or the database does not accept it.
    """
    owner = submitter.owner
    if idempotency_key is not None and not 0 < len(idempotency_key) <= _MAX_KEY:
        raise InvalidInput(f"an Idempotency-Key has 1 to {_MAX_KEY} characters")
    if idempotency_key is not None and owner is not None:
        # Keys of different owners are independent.
        idempotency_key = hashlib.sha256(f"{owner}\n{idempotency_key}".encode()).hexdigest()
    adds_a_job = idempotency_key is None or await scheduler.store.by_idempotency_key(idempotency_key) is None
    with staged(scheduler.settings.state) as staging, scheduler.admitted(owner, submitter.allowance, check=adds_a_job):
        upload = await receive_upload(incoming, staging, scheduler.settings)
        policy = scheduler.settle(upload.policy, submitter.sites)
        with scheduler.inputs.create(max_images=scheduler.settings.max_images) as writer:
            facts = await scheduler.read(incoming, upload, staging, writer)
            sha256 = await asyncio.to_thread(scheduler.inputs.keep, writer)
        await _copy(scheduler, sha256)
        policy = policy.model_copy(update={"batch_size": min(policy.batch_size, writer.images_per_task)})
        now, trace = time.time(), current_trace() or new_trace()
        row = JobRow(
            id=new_job_id(now),
            owner=owner,
            policy=policy,
            images=writer.images,
            input_sha256=sha256,
            hierarchy=scheduler.served,
            resized_images=len(facts.resized),
            fingerprint=await asyncio.to_thread(_fingerprint, policy, upload.policy.release, sha256, facts),
            traceparent=trace.traceparent,
            created_at=now,
            deadline_elapsed=scheduler.elapsed() + policy.deadline_s,
        )
        job, is_new = await _store(scheduler, row, facts, idempotency_key, trace)
        return job.model_copy(update={"left_out": facts.left_out}), is_new


async def _copy(scheduler: Scheduler, sha256: str) -> None:
    """Copy an input file for the other schedulers, or let go of it."""
    if scheduler.copies is None:
        return
    try:
        await scheduler.copies.save(sha256, scheduler.inputs.path(sha256))
    except BaseException:
        scheduler.release(sha256)
        raise


async def _store(
    scheduler: Scheduler, row: JobRow, facts: ImageFacts, key: str | None, trace: Trace
) -> tuple[Job, bool]:
    try:
        stored = await scheduler.store.add(row, facts, key)
    except Exception:
        # Not on cancellation, because the job may be stored by then. The next start removes a file that no job holds.
        scheduler.release(row.input_sha256)
        raise
    if stored.id != row.id:
        scheduler.release(row.input_sha256)
        if stored.fingerprint != row.fingerprint:
            raise Conflict(
                f"this Idempotency-Key belongs to job {stored.id} with another content or policy; use a fresh key"
            )
        return as_job(scheduler, stored), False
    images = scheduler.inputs.open(row.input_sha256, row.images)
    tasks = [task_of(row, index) for index in range(row.tasks)]
    scheduler.activate(row, images, tasks, scheduler.progress(row, facts), trace)
    _log.info("job accepted", extra={"job": row.id, "images": row.images, "scheme": row.policy.scheme})
    return await with_names(scheduler, as_job(scheduler, row)), True


def task_of(job: JobRow, index: int) -> TaskFacts:
    """A task of a job that has no answer yet."""
    first_image, images = job.images_of(index)
    return TaskFacts(index=index, first_image=first_image, images=images)


def _fingerprint(policy: JobPolicy, release: str | None, sha256: str, facts: ImageFacts) -> str:
    """A digest of images, labels, names and policy: equal for equal submissions, whatever release is in force.

    Args:
        release: that the request names; None if it names none.
    """
    policy = policy.model_copy(update={"release": release, "gates": ()})
    digest = hashlib.sha256(sha256.encode())
    digest.update(policy.model_dump_json().encode())
    digest.update(b"" if facts.labels is None else facts.labels.tobytes())
    digest.update(json.dumps([facts.names, sorted(facts.resized.items()), sorted(facts.damaged.items())]).encode())
    digest.update(json.dumps(sorted(facts.mended.items())).encode() if facts.mended else b"")
    return digest.hexdigest()
