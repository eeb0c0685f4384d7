"""Questions to the database and its few changes besides results (those go through `GroupCommit`)."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import case, delete, func, insert, select, tuple_, update
from sqlalchemy.engine import Row, RowMapping
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from scheduler.dispatch.work import FAILED_OUTCOMES, Answer, AttemptReport
from scheduler.jobs.policy import JobPolicy
from scheduler.store.commit import Attempted, GroupCommit
from scheduler.store.database import plain_reason
from scheduler.store.tables import attempts, jobs, results, tasks
from tierkit.errors import Conflict, NotFound, Unavailable
from tierkit.types import JobState, Tier
from tierkit.wire.events import read_event

__all__ = [
    "ImageFacts",
    "JobRow",
    "JobStore",
    "NewJob",
    "StoredResult",
    "TaskRow",
    "is_job_id",
    "new_job_id",
]

_UNFINISHED = [state for state in JobState if not state.final]

_MOST_READING = 8
"""Queries at a time, each with a connection of its own; later ones wait for their turn."""

_RESULTS = select(results, tasks.c.first_image, tasks.c.images).join(
    tasks, (tasks.c.job_id == results.c.job_id) & (tasks.c.task == results.c.task)
)

_LIGHT = [column for column in jobs.c if column.name not in ("labels", "names", "resized")]
"""What a job's status needs; the others grow with the number of images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What is known of a job's images besides their pixels."""

    labels: NDArray[np.int32] | None = None
    """True fine class per image, -1 where unknown."""
    names: Sequence[str | None] | None = None
    resized: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job as it is submitted, all of it checked."""

    policy: JobPolicy
    images: int
    input_sha256: str
    facts: ImageFacts
    idempotency_key: str | None
    fingerprint: str
    created_at: float
    deadline_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job as the database has it, without what grows with the number of images."""

    id: str
    name: str | None
    state: JobState
    reason: str
    policy: JobPolicy
    images: int
    tasks: int
    input_sha256: str
    resized_images: int
    fingerprint: str
    created_at: float
    deadline_at: float
    started_at: float | None
    finished_at: float | None
    summary: dict[str, Any] | None

    @property
    def final(self) -> bool:
        return self.state.final


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    task: int
    first_image: int
    images: int
    attempts: int = 0
    """Rows of it; each failed one with a number of its own."""
    failed_attempts: int = 0
    errors: int = 0
    """Those of the failed ones whose outcome was `error`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResult:
    """A durable answer, with its place in the order of commitment."""

    seq: int
    answer: Answer


def new_job_id(now: float) -> str:
    """Twenty hex digits: milliseconds since 1970, then chance; ids sort by the time of submission."""
    return f"{int(now * 1000):012x}{secrets.token_hex(4)}"


def is_job_id(text: str) -> bool:
    """Whether `new_job_id` may have made it."""
    return re.fullmatch("[0-9a-f]{20}", text) is not None


class JobStore:
    """All statements on jobs, tasks and results. Reads use connections of their own, and raise Unavailable when the
    database does not answer; writes go through `commit`."""

    def __init__(self, engine: AsyncEngine, commit: GroupCommit) -> None:
        self._engine = engine
        self._commit = commit
        self._slots = asyncio.Semaphore(_MOST_READING)
        self._reading: set[asyncio.Task[Any]] = set()

    async def add(self, job: NewJob) -> JobRow:
        """Store a job and its tasks.

        Raises:
            Conflict: a job with the same idempotency key has been stored meanwhile.
            Unavailable: the database does not accept it; nothing was stored.
        """
        size, facts = job.policy.batch_size, job.facts
        starts = range(0, job.images, size)
        row = {
            "id": new_job_id(job.created_at),
            "name": job.policy.name,
            "state": JobState.QUEUED,
            "reason": "waiting for its first task to be sent",
            "policy": job.policy.model_dump_json(),
            "images": job.images,
            "tasks": len(starts),
            "input_sha256": job.input_sha256,
            "labels": None if facts.labels is None else facts.labels.astype("<i4").tobytes(),
            "names": None if facts.names is None else json.dumps(list(facts.names), ensure_ascii=False),
            "resized": json.dumps(facts.resized) if facts.resized else None,
            "resized_images": len(facts.resized),
            "idempotency_key": job.idempotency_key,
            "fingerprint": job.fingerprint,
            "created_at": job.created_at,
            "deadline_at": job.deadline_at,
            "started_at": None,
            "finished_at": None,
            "summary": None,
        }
        task_rows = [
            {
                "job_id": row["id"],
                "task": index,
                "first_image": start,
                "images": min(size, job.images - start),
            }
            for index, start in enumerate(starts)
        ]

        async def write(connection: AsyncConnection) -> None:
            await connection.execute(insert(jobs).values(row))
            await connection.execute(insert(tasks), task_rows)

        try:
            await self._commit.execute(write)
        except IntegrityError as exc:
            raise Conflict(f"a job with the idempotency key {job.idempotency_key!r} exists already") from exc
        return await self.get(str(row["id"]))

    async def get(self, job_id: str) -> JobRow:
        """Raises NotFound."""
        row = await self._one(jobs.c.id == job_id)
        if row is None:
            raise NotFound(f"no job {job_id[:64]!r}")
        return row

    async def by_idempotency_key(self, key: str) -> JobRow | None:
        return await self._one(jobs.c.idempotency_key == key)

    async def page(self, *, limit: int, before: str | None, state: JobState | None) -> list[JobRow]:
        """Up to `limit` jobs, newest first, those older than the job id `before`."""
        query = select(*_LIGHT).order_by(jobs.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(jobs.c.id < before)
        if state is not None:
            query = query.where(jobs.c.state == state)
        return [_job(row._mapping) for row in await self._rows(query)]

    async def unfinished(self) -> list[JobRow]:
        """Jobs that a scheduler before this one has left, oldest first."""
        query = select(*_LIGHT).where(jobs.c.state.in_(_UNFINISHED)).order_by(jobs.c.id)
        return [_job(row._mapping) for row in await self._rows(query)]

    async def facts(self, job_id: str) -> ImageFacts:
        query = select(jobs.c.labels, jobs.c.names, jobs.c.resized).where(jobs.c.id == job_id)
        row = next(iter(await self._rows(query)), None)
        if row is None:
            return ImageFacts()
        return ImageFacts(
            labels=None if row.labels is None else np.frombuffer(row.labels, "<i4").astype(np.int32),
            names=None if row.names is None else json.loads(row.names),
            resized={int(image): (size[0], size[1]) for image, size in json.loads(row.resized or "{}").items()},
        )

    async def tasks_of(self, job_id: str) -> list[TaskRow]:
        """The tasks of a job in order, with what their attempts add up to."""
        made = (
            select(
                attempts.c.task,
                func.max(attempts.c.number).label("attempts"),
                func.sum(case((attempts.c.outcome.in_(FAILED_OUTCOMES), 1), else_=0)).label("failed_attempts"),
                func.sum(case((attempts.c.outcome == "error", 1), else_=0)).label("errors"),
            )
            .where(attempts.c.job_id == job_id)
            .group_by(attempts.c.task)
        )
        counts = {row.task: row for row in await self._rows(made)}
        rows = await self._rows(select(tasks).where(tasks.c.job_id == job_id).order_by(tasks.c.task))
        return [
            TaskRow(
                task=row.task,
                first_image=row.first_image,
                images=row.images,
                attempts=count.attempts if (count := counts.get(row.task)) else 0,
                failed_attempts=count.failed_attempts if count else 0,
                errors=count.errors if count else 0,
            )
            for row in rows
        ]

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
        return [_attempt(row._mapping) for row in await self._rows(query)]

    async def results_after(self, job_id: str, seq: int, *, limit: int) -> list[StoredResult]:
        """Up to `limit` results of a job with numbers above `seq`, in the order in which they were committed."""
        query = _RESULTS.where(results.c.job_id == job_id, results.c.seq > seq).order_by(results.c.seq).limit(limit)
        return await self._results(query)

    async def coarse_of(self, job_id: str, wanted: Sequence[int]) -> dict[int, Answer]:
        """The coarse answers of these tasks, by task."""
        query = _RESULTS.where(results.c.job_id == job_id, results.c.stage == "coarse", results.c.task.in_(wanted))
        return {result.answer.task: result.answer for result in await self._results(query)}

    async def answers_by_task(
        self, job: JobRow, *, tasks_at_once: int = 100
    ) -> AsyncIterator[tuple[int, dict[str, Answer]]]:
        """Each task of a job in order, with its answers by stage; read piece by piece."""
        for first in range(0, job.tasks, tasks_at_once):
            last = min(first + tasks_at_once, job.tasks)
            query = _RESULTS.where(results.c.job_id == job.id, results.c.task >= first, results.c.task < last)
            by_task: dict[int, dict[str, Answer]] = {task: {} for task in range(first, last)}
            for result in await self._results(query):
                by_task[result.answer.task][result.answer.stage] = result.answer
            for task, answers in by_task.items():
                yield task, answers

    def started(self, job_id: str, at: float) -> None:
        """The first task of a job is on its way; written with the next group of results."""
        # A job that goes on after a restart keeps the time of its first beginning.
        changed = {"state": JobState.RUNNING, "reason": "", "started_at": func.coalesce(jobs.c.started_at, at)}
        self._commit.put(update(jobs).where(jobs.c.id == job_id).values(changed))

    def attempted(self, job_id: str, report: AttemptReport) -> None:
        """An attempt has ended; written with the next group of results."""
        self._commit.put(Attempted(job_id=job_id, report=report))

    async def finished(
        self, job_id: str, *, state: JobState, reason: str, at: float, summary: Mapping[str, Any]
    ) -> None:
        """The final state, once and for all. Raises Unavailable."""
        text = json.dumps(summary, allow_nan=False)
        change = update(jobs).where(jobs.c.id == job_id)
        change = change.values(state=state, reason=reason, finished_at=at, summary=text)
        await self._commit.execute(lambda connection: connection.execute(change))

    async def purge(self, finished_before: float) -> int:
        """Delete jobs that finished before this moment, with their results; returns how many."""
        query = select(jobs.c.id).where(jobs.c.finished_at < finished_before)
        old = [row.id for row in await self._rows(query)]

        for job_id in old:

            async def write(connection: AsyncConnection, job_id: str = job_id) -> None:
                await connection.execute(delete(attempts).where(attempts.c.job_id == job_id))
                await connection.execute(delete(results).where(results.c.job_id == job_id))
                await connection.execute(delete(tasks).where(tasks.c.job_id == job_id))
                await connection.execute(delete(jobs).where(jobs.c.id == job_id))

            await self._commit.execute(write)
        return len(old)

    async def finish_reading(self) -> None:
        """Wait for the queries under way, before the database is closed."""
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def _rows(self, query: Any) -> Sequence[Row[Any]]:
        """What a query finds. The caller may be cancelled when its client hangs up; a query that has begun is completed
        all the same: the driver would leave its connection open, and its thread waiting."""
        await self._slots.acquire()
        reading = asyncio.create_task(self._read(query), name="reading")
        self._reading.add(reading)
        reading.add_done_callback(self._done_reading)
        return await asyncio.shield(reading)

    async def _read(self, query: Any) -> Sequence[Row[Any]]:
        try:
            async with self._engine.connect() as connection:
                return (await connection.execute(query)).all()
        except SQLAlchemyError as exc:
            raise Unavailable(f"the database does not answer now: {plain_reason(exc)}") from exc

    def _done_reading(self, reading: asyncio.Task[Any]) -> None:
        self._reading.discard(reading)
        self._slots.release()

    async def _one(self, condition: Any) -> JobRow | None:
        row = next(iter(await self._rows(select(*_LIGHT).where(condition))), None)
        return None if row is None else _job(row._mapping)

    async def _results(self, query: Any) -> list[StoredResult]:
        return [
            StoredResult(
                seq=row.seq,
                answer=Answer(
                    task=row.task,
                    first_image=row.first_image,
                    images=row.images,
                    stage=row.stage,
                    kind=row.kind,
                    ms=row.ms,
                    request_id=row.request_id,
                    event=read_event(row.payload),
                    line=row.payload,
                ),
            )
            for row in await self._rows(query)
        ]


def _attempt(row: RowMapping) -> AttemptReport:
    values = {name: value for name, value in row.items() if name != "job_id"}
    return AttemptReport(**{**values, "tier": Tier(row["tier"])})


def _job(row: RowMapping) -> JobRow:
    return JobRow(
        id=row["id"],
        name=row["name"],
        state=JobState(row["state"]),
        reason=row["reason"],
        policy=JobPolicy.model_validate_json(row["policy"]),
        images=row["images"],
        tasks=row["tasks"],
        input_sha256=row["input_sha256"],
        resized_images=row["resized_images"],
        fingerprint=row["fingerprint"],
        created_at=row["created_at"],
        deadline_at=row["deadline_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        summary=None if row["summary"] is None else json.loads(row["summary"]),
    )
