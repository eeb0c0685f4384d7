"""Statements on jobs, tasks and results; results themselves are written by `GroupCommit`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from sqlalchemy import and_, case, delete, exists, func, insert, not_, or_, select, tuple_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from models.hierarchy import Hierarchy
from scheduler.core.job import FAILED_OUTCOMES, Answer, AttemptReport, ImageFacts, JobRow
from scheduler.core.outbox import job_event
from scheduler.core.policy import JobPolicy
from scheduler.core.seeking import SoughtJobs
from scheduler.store.commit import GroupCommit
from scheduler.store.reading import Reader
from scheduler.store.tables import attempts, hierarchies, jobs, observations, outbox, results
from tierkit.errors import NotFound
from tierkit.types import JobState, Tier
from tierkit.wire.events import read_event

__all__ = [
    "JobStore",
]

_MENDED = "answered although"
_UNFINISHED = [state for state in JobState if not state.final]


_JOBS = select(*(jobs.c[field.name] for field in fields(JobRow)))


def new_job_id(now: float) -> str:
    """Twenty hex digits: milliseconds since 1970, then chance; ids sort by the time of submission."""
    return f"{int(now * 1000):012x}{secrets.token_hex(4)}"


def is_job_id(text: str) -> bool:
    """True if `new_job_id` may have made it."""
    return re.fullmatch("[0-9a-f]{20}", text) is not None


class JobStore:
    """All statements on jobs, tasks and results. Reads raise Unavailable when the database does not answer; writes go
    through `commit`."""

    def __init__(self, reader: Reader, commit: GroupCommit) -> None:
        self._reader = reader
        self.commit = commit

    async def add(self, job: JobRow, facts: ImageFacts, idempotency_key: str | None = None) -> JobRow:
        """Store a job; returns it, or the earlier job with this idempotency key.

        Raises:
            Unavailable: the database does not accept it; nothing was stored.
        """
        row = asdict(job) | {
            "policy": job.policy.model_dump_json(),
            "name": job.policy.name,
            "site": job.policy.site,
            "tasks": job.tasks,
            "labels": None if facts.labels is None else facts.labels.astype("<i4").tobytes(),
            "names": None if facts.names is None else json.dumps(list(facts.names), ensure_ascii=False),
            "resized": json.dumps(facts.resized) if facts.resized else None,
            "damaged": json.dumps(_damage_of(facts)) if facts.damaged or facts.mended else None,
            "idempotency_key": idempotency_key,
        }
        submitted = job_event(job, job.state, reason=job.reason)
        try:
            undo = (delete(jobs).where(jobs.c.id == job.id), delete(outbox).where(outbox.c.key == submitted.key))

            async def write(connection: AsyncConnection) -> None:
                await connection.execute(insert(jobs).values(row))
                await self.commit.outbox.write(connection, [submitted])

            await self.commit.execute(write, undo=undo)
        except IntegrityError:
            if idempotency_key is None or (found := await self.by_idempotency_key(idempotency_key)) is None:
                raise
            return found
        return job

    async def hierarchies(self, served: Hierarchy) -> dict[str, Hierarchy]:
        """The classes of all jobs and observations by digest, with those that are served now. Jobs of an older Terrace,
        which did not note theirs, count as of these.

        Raises:
            Unavailable: the database does not answer.
        """
        digest, content = served.digest, json.dumps(served.content())

        async def write(connection: AsyncConnection) -> None:
            used = select(jobs.c.hierarchy).where(jobs.c.hierarchy.is_not(None))
            seen = exists().where(observations.c.hierarchy == hierarchies.c.sha256)
            unused = and_(hierarchies.c.sha256.not_in(used), not_(seen))
            gone = or_(hierarchies.c.sha256 == digest, unused)
            await connection.execute(delete(hierarchies).where(gone))
            await connection.execute(insert(hierarchies).values(sha256=digest, content=content))
            await connection.execute(update(jobs).where(jobs.c.hierarchy.is_(None)).values(hierarchy=digest))

        await self.commit.execute(write)
        rows = await self._reader.rows(select(hierarchies))
        return {row.sha256: Hierarchy.parse(json.loads(row.content), source="the database") for row in rows}

    async def get(self, job_id: str) -> JobRow:
        """Raises NotFound."""
        for job in await self._jobs(_JOBS.where(jobs.c.id == job_id)):
            return job
        raise NotFound(f"no job {job_id[:64]!r}")

    async def by_idempotency_key(self, key: str) -> JobRow | None:
        return next(iter(await self._jobs(_JOBS.where(jobs.c.idempotency_key == key))), None)

    async def page(self, sought: SoughtJobs, *, limit: int, before: str | None) -> list[JobRow]:
        """Up to `limit` jobs, newest first, those older than the job id `before`."""
        query = _JOBS.order_by(jobs.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(jobs.c.id < before)
        for name in ("state", "owner", "site"):
            if (value := getattr(sought, name)) is not None:
                query = query.where(jobs.c[name] == value)
        return await self._jobs(query)

    async def unfinished(self) -> list[JobRow]:
        """Jobs that a scheduler before this one has left, oldest first."""
        return await self._jobs(_JOBS.where(jobs.c.state.in_(_UNFINISHED)).order_by(jobs.c.id))

    async def facts(self, job_id: str) -> ImageFacts:
        query = select(jobs.c.labels, jobs.c.names, jobs.c.resized, jobs.c.damaged).where(jobs.c.id == job_id)
        row = next(iter(await self._reader.rows(query)), None)
        if row is None:
            return ImageFacts()
        damage = json.loads(row.damaged or "{}").items()
        return ImageFacts(
            labels=None if row.labels is None else np.frombuffer(row.labels, "<i4").astype(np.int32),
            names=None if row.names is None else json.loads(row.names),
            resized={int(image): (size[0], size[1]) for image, size in json.loads(row.resized or "{}").items()},
            damaged={int(image): said for image, said in damage if isinstance(said, str)},
            mended={int(image): said[_MENDED] for image, said in damage if not isinstance(said, str)},
        )

    async def named(self, job_id: str, images: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return entries about images, each with its `index`, together with the names of the images."""
        names = (await self.facts(job_id)).names if images else None
        return [{**image, "name": None if names is None else names[image["index"]]} for image in images]

    async def attempts_made(self, job_id: str) -> dict[int, tuple[int, int, int]]:
        """Return, by task, the numbers of its attempts, of failed ones, and of errors of the device among these."""
        query = select(
            attempts.c.task,
            func.max(attempts.c.number).label("made"),
            func.sum(case((attempts.c.outcome.in_(FAILED_OUTCOMES), 1), else_=0)).label("failed"),
            func.sum(case((attempts.c.outcome == "error", 1), else_=0)).label("errors"),
        )
        rows = await self._reader.rows(query.where(attempts.c.job_id == job_id).group_by(attempts.c.task))
        return {row.task: (row.made, row.failed, row.errors) for row in rows}

    async def attempts_after(
        self, job_id: str, task: int, number: int, *, limit: int, only_task: int | None = None
    ) -> list[AttemptReport]:
        """Up to `limit` attempts of a job that have ended, by task and number, from the one after (`task`, `number`)
        on."""
        query = select(attempts).where(
            attempts.c.job_id == job_id, tuple_(attempts.c.task, attempts.c.number) > tuple_(task, number)
        )
        if only_task is not None:
            query = query.where(attempts.c.task == only_task)
        query = query.order_by(attempts.c.task, attempts.c.number).limit(limit)
        return [AttemptReport(**{**row._mapping, "tier": Tier(row.tier)}) for row in await self._reader.rows(query)]

    async def results_after(self, job: JobRow, seq: int, *, limit: int) -> list[tuple[int, Answer]]:
        """Up to `limit` answers of a job with numbers above `seq`, in the order in which they were committed, each with
        its number."""
        return await self._results(job, select(results).where(results.c.seq > seq).order_by(results.c.seq).limit(limit))

    async def coarse_of(self, job: JobRow, wanted: Collection[int]) -> dict[int, Answer]:
        """The coarse answers of these tasks, by task."""
        query = select(results).where(results.c.stage == "coarse", results.c.task.in_(wanted))
        return {answer.task: answer for _, answer in await self._results(job, query)}

    async def answers_by_task(
        self, job: JobRow, *, tasks_at_once: int = 100
    ) -> AsyncIterator[tuple[int, dict[str, Answer]]]:
        """Each task of a job in order, with its answers by stage; read piece by piece."""
        for first in range(0, job.tasks, tasks_at_once):
            last = min(first + tasks_at_once, job.tasks)
            by_task: dict[int, dict[str, Answer]] = {task: {} for task in range(first, last)}
            query = select(results).where(results.c.task >= first, results.c.task < last)
            for _, answer in await self._results(job, query):
                by_task[answer.task][answer.stage] = answer
            for task, answers in by_task.items():
                yield task, answers

    def started(self, job: JobRow, at: float, elapsed: float) -> None:
        """The first task of a job is on its way; written with the next group of results.

        Args:
            at: wall clock.
            elapsed: the same moment in elapsed time.
        """
        # A job that goes on after a restart keeps the time of its first beginning.
        changed = {
            "state": JobState.RUNNING,
            "reason": "",
            "started_at": func.coalesce(jobs.c.started_at, at),
            "started_elapsed": func.coalesce(jobs.c.started_elapsed, elapsed),
        }
        self._change(job, changed)

    def moved(self, job_id: str, policy: JobPolicy) -> None:
        """A job without answers has another policy now; written with the next group of results."""
        self.commit.put(update(jobs).where(jobs.c.id == job_id).values(policy=policy.model_dump_json()))

    def finished(
        self, job: JobRow, *, state: JobState, reason: str, at: float, elapsed: float, summary: Mapping[str, Any]
    ) -> None:
        """The final state, once and for all; written with the next group of results. Times as for `started`."""
        text = json.dumps(summary, allow_nan=False)
        times = {"finished_at": at, "finished_elapsed": elapsed}
        changed = {"state": state, "reason": reason, "summary": text, **times}
        self._change(job, changed, summary)

    def _change(self, job: JobRow, changed: Mapping[str, Any], summary: Mapping[str, Any] | None = None) -> None:
        statement = update(jobs).where(jobs.c.id == job.id).values(changed)
        state = changed["state"]
        # One that is taken up again after a restart has started before.
        events = [] if state is job.state else [job_event(job, state, reason=changed["reason"], summary=summary)]
        self.commit.put((statement, *self.commit.outbox.rows(events)))

    async def purge(self, finished_before: float) -> int:
        """Delete jobs that finished before this moment of elapsed time, with their results; returns their number."""
        query = select(jobs.c.id).where(jobs.c.finished_elapsed < finished_before)
        old = [row.id for row in await self._reader.rows(query)]

        for job_id in old:

            async def write(connection: AsyncConnection, job_id: str = job_id) -> None:
                await connection.execute(delete(attempts).where(attempts.c.job_id == job_id))
                await connection.execute(delete(results).where(results.c.job_id == job_id))
                await connection.execute(delete(jobs).where(jobs.c.id == job_id))

            await self.commit.execute(write)
        return len(old)

    async def _jobs(self, query: Any) -> list[JobRow]:
        return [
            JobRow(
                **{
                    **row._mapping,
                    "state": JobState(row.state),
                    "policy": JobPolicy.model_validate_json(row.policy),
                    "summary": None if row.summary is None else json.loads(row.summary),
                }
            )
            for row in await self._reader.rows(query)
        ]

    async def _results(self, job: JobRow, query: Any) -> list[tuple[int, Answer]]:
        found = []
        for row in await self._reader.rows(query.where(results.c.job_id == job.id)):
            first_image, images = job.images_of(row.task)
            answer = Answer(
                job_id=job.id,
                task=row.task,
                first_image=first_image,
                images=images,
                stage=row.stage,
                kind=row.kind,
                ms=row.ms,
                request_id=row.request_id,
                event=read_event(row.payload),
                line=row.payload,
                site=row.site,
            )
            found.append((row.seq, answer))
        return found


def _damage_of(facts: ImageFacts) -> dict[int, Any]:
    """Return the entries of a job's row about its damaged images: a sentence, or an object with one if the image is
    answered."""
    return {**facts.damaged, **{image: {_MENDED: said} for image, said in facts.mended.items()}}
