"""The database: jobs and answers, group commit, refusals, schema versions."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from msgspec.structs import replace
from sqlalchemy import Connection, event, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from models.hierarchy import Hierarchy
from scheduler.core.job import Answer, AttemptReport, ImageFacts, JobRow
from scheduler.core.policy import JobPolicy
from scheduler.core.seeking import SoughtJobs
from scheduler.store import migrations
from scheduler.store.commit import GroupCommit, Withdrawn
from scheduler.store.database import last_seq, open_database, plain_reason
from scheduler.store.jobs import JobStore, new_job_id
from scheduler.store.lease import Lease
from scheduler.store.reading import Reader
from scheduler.store.tables import SCHEMA, VERSION_TABLE, metadata, observations, properties
from tests.postgres import PostgresServer
from tierkit.elapsed import continued
from tierkit.errors import DatabaseUnavailable, NotFound, SetupError, Standby, Unavailable
from tierkit.testing import wait_for
from tierkit.types import JobState, Scheme, Tier
from tierkit.wire.events import CoarseEvent, written


class Store:
    """A database with its writer running."""

    def __init__(self, engine: AsyncEngine, commit: GroupCommit) -> None:
        self.engine = engine
        self.commit = commit
        self.jobs = JobStore(Reader(engine), commit)
        self.announced: list[list[int]] = []
        commit.on_commit = lambda group: self.announced.append([seq for seq, _ in group])


@asynccontextmanager
async def opened(url: str | Path) -> AsyncIterator[Store]:
    engine = await open_database(f"sqlite+aiosqlite:///{url}" if isinstance(url, Path) else url)
    lease = Lease(engine, url="http://a", lease_s=60.0, alone=True)
    await lease.acquire()
    commit = GroupCommit(engine, lease, next_seq=await last_seq(engine) + 1)
    writer = asyncio.create_task(commit.run())
    try:
        yield Store(engine, commit)
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        await engine.dispose()


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    async with opened(database_url) as store:
        yield store


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[Store]:
    """For what is special to SQLite."""
    async with opened(tmp_path / "jobs.db") as store:
        yield store


def modes_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


async def test_the_database_is_its_owners_alone(tmp_path: Path):
    async with opened(tmp_path / "new.db") as store:
        await store.commit.flush()
        modes = modes_in(tmp_path)
    assert set(modes.values()) == {0o600}, modes
    assert "new.db-wal" in modes


async def add(jobs: JobStore, *, images: int = 120, key: str | None = None, facts: ImageFacts | None = None) -> JobRow:
    facts, now = facts or ImageFacts(), time.time()
    job = JobRow(
        id=new_job_id(now),
        policy=JobPolicy(scheme=Scheme.END, deadline_s=10, task_deadline_s=5, name="a job"),
        images=images,
        input_sha256="0" * 64,
        resized_images=len(facts.resized),
        fingerprint="f",
        created_at=now,
        deadline_elapsed=now + 10,
    )
    return await jobs.add(job, facts, key)


def answer(job: JobRow, task: int, stage: str = "coarse") -> Answer:
    coarse = CoarseEvent(
        task_id=f"t-{task}", node_id="end-0", model="m", labels=(1,), confidences=(0.5,), queue_ms=0, compute_ms=1
    )
    line = written(coarse).decode()
    return Answer(
        job_id=job.id,
        task=task,
        first_image=50 * task,
        images=50,
        stage=stage,
        kind="coarse",
        ms=1.5,
        request_id="r",
        event=coarse,
        line=line,
    )


async def test_a_job_comes_back_as_it_was_stored(store):
    facts = ImageFacts(
        labels=np.array([3, -1] * 60, np.int32),
        names=["ü.png", None] * 60,
        resized={7: (40, 50), 8: (1, 2)},
        damaged={3: "an empty file"},
        mended={5: "a hole"},
    )
    job = await add(store.jobs, facts=facts)
    assert await store.jobs.get(job.id) == job
    assert (job.state, job.tasks, job.resized_images, job.policy.name) == ("queued", 3, 2, "a job")
    found = await store.jobs.facts(job.id)
    assert np.array_equal(found.labels, facts.labels)  # type: ignore[arg-type]
    assert (found.names, found.resized) == (facts.names, facts.resized)
    assert (found.damaged, found.mended) == (facts.damaged, facts.mended)
    assert [job.images_of(task) for task in range(3)] == [(0, 50), (50, 50), (100, 20)]
    with pytest.raises(NotFound):
        await store.jobs.get("none")


async def test_answers_are_durable_numbered_and_then_announced(store):
    job = await add(store.jobs)
    for task in (2, 0, 1):
        store.commit.put(answer(job, task))
    await store.commit.flush()
    assert [seq for group in store.announced for seq in group] == [1, 2, 3]
    assert [answer.task for _, answer in await store.jobs.results_after(job, 0, limit=10)] == [2, 0, 1]
    assert [seq for seq, _ in await store.jobs.results_after(job, 1, limit=1)] == [2]
    assert [task async for task, answers in store.jobs.answers_by_task(job) if "coarse" in answers] == [0, 1, 2]
    assert (await store.jobs.coarse_of(job, [1]))[1].event == answer(job, 1).event


async def test_what_queues_during_a_commit_shares_the_next_one(store):
    job = await add(store.jobs, images=50 * 300)
    for task in range(300):
        store.commit.put(answer(job, task))
    await store.commit.flush()
    assert sum(len(group) for group in store.announced) == 300
    assert len(store.announced) <= 2


async def test_an_answer_and_the_attempt_that_brought_it_share_a_commit(store):
    """Wherever among many the commit would have ended."""
    job = await add(store.jobs, images=50 * 501)
    report = AttemptReport(
        job_id=job.id,
        task=0,
        number=1,
        node_id="end-0",
        incarnation="i",
        tier=Tier.END,
        upstream=None,
        stage="all",
        hedge=False,
        outcome="ok",
        reason="",
        why="",
        started_at=1.0,
        ended_at=2.0,
    )
    inserted: dict[str, list[int]] = {"results": [], "attempts": []}

    def count(connection, cursor, statement, parameters, context, many):
        for name, sizes in inserted.items():
            if statement.startswith(f"INSERT INTO terrace_{name}"):
                sizes.append(len(parameters) if many else 1)

    event.listen(store.engine.sync_engine, "before_cursor_execute", count)
    store.commit.put(report)
    for task in range(1, 501):
        store.commit.put(answer(job, task))
        store.commit.put(replace(report, task=task))
    await store.commit.flush()
    first, *others = inserted["results"]
    assert others, "one commit took all"
    assert inserted["attempts"] == [first + 1, *others]


async def test_numbers_go_on_after_a_restart(database_url):
    async with opened(database_url) as store:
        job = await add(store.jobs)
        store.commit.put(answer(job, 0))
        await store.commit.flush()
    async with opened(database_url) as store:
        store.commit.put(answer(job, 1))
        await store.commit.flush()
        assert store.announced == [[2]]


async def test_the_database_itself_refuses_a_second_answer(database_url):
    engine = await open_database(database_url)
    lease = Lease(engine, url="http://a", lease_s=60.0)
    await lease.acquire()
    commit = GroupCommit(engine, lease, next_seq=1)
    store = JobStore(Reader(engine), commit)
    job = await add(store)
    commit.put(answer(job, 0))
    commit.put(answer(job, 0))
    # The loop ends with the error, which stops the service: this can only be a bug.
    with pytest.raises(IntegrityError):
        await commit.run()
    assert await store.results_after(job, 0, limit=10) == []
    await engine.dispose()


async def test_a_commit_waits_for_more_answers_only_while_some_are_expected(store, monkeypatch):
    job = await add(store.jobs)
    monkeypatch.setattr("scheduler.store.commit._LINGER_S", 3600.0)
    store.commit.put(answer(job, 0))
    await store.commit.flush()
    store.commit.expects_more = lambda: True
    store.commit.put(answer(job, 1))
    early = asyncio.create_task(store.commit.flush())
    await store.jobs.get(job.id)
    assert (store.announced, early.done()) == ([[1]], False)
    store.commit.expects_more = lambda: False
    store.commit.put(answer(job, 2))
    await store.commit.flush()
    assert early.done()
    assert store.announced == [[1], [2, 3]]


async def test_a_refused_commit_is_tried_again_and_nothing_is_announced_before(file):
    job = await add(file.jobs)
    refusals = 3

    def refuse(connection, cursor, statement, parameters, context, many):
        nonlocal refusals
        if statement.startswith("INSERT INTO terrace_results") and refusals:
            refusals -= 1
            assert file.announced == []
            raise sqlite3.OperationalError("disk full")

    event.listen(file.engine.sync_engine, "before_cursor_execute", refuse)
    file.commit.put(answer(job, 0))
    await file.commit.flush()
    assert refusals == 0
    assert file.announced == [[1]]
    assert file.commit.refused is None


async def test_a_database_that_is_locked_for_a_while_only_delays(file, tmp_path):
    job = await add(file.jobs)
    other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    file.commit.put(answer(job, 0))
    flushed = asyncio.create_task(file.commit.flush())
    # Reading goes on meanwhile.
    assert (await file.jobs.get(job.id)).state == "queued"
    assert not flushed.done()
    other.execute("COMMIT")
    other.close()
    await flushed
    assert file.announced == [[1]]


@pytest.mark.parametrize(
    ("worse", "better", "said"),
    [
        # SQLite's own words: its pages are counted, or it may not write.
        ("max_page_count = 30", "max_page_count = 1000000", "database or disk is full"),
        ("query_only = ON", "query_only = OFF", "attempt to write a readonly database"),
    ],
    ids=["full", "read-only"],
)
async def test_a_full_or_read_only_disk_delays_answers_until_they_can_be_written(file, worse, better, said):
    job = await add(file.jobs, images=50 * 400)
    long = [replace(answer(job, task), line=answer(job, task).line + " " * 2000) for task in range(400)]

    becomes = worse

    def set_disk(connection, record, proxy):
        connection.cursor().execute(f"PRAGMA {becomes}")

    event.listen(file.engine.sync_engine, "checkout", set_disk)
    for each in long:
        file.commit.put(each)
    await wait_for(lambda: file.commit.refused == said, what="the refusal")
    assert file.announced == []
    with pytest.raises(Unavailable, match=said):
        await add(file.jobs, facts=ImageFacts(names=["x" * 1000] * 120))
    becomes = better
    await file.commit.flush()
    assert [seq for group in file.announced for seq in group] == list(range(1, 401))


@pytest.mark.parametrize("how", ["moved", "replaced"])
async def test_answers_wait_while_the_database_file_is_gone(file, tmp_path, how):
    job = await add(file.jobs)
    path, aside = tmp_path / "jobs.db", tmp_path / "aside.db"
    path.rename(aside)
    if how == "replaced":
        path.write_bytes(b"")
    file.commit.put(answer(job, 0))
    await wait_for(lambda: file.commit.refused is not None, what="the refusal")
    assert "jobs.db is gone or another one; put it back" in file.commit.refused
    with pytest.raises(Unavailable, match="is gone or another one"):
        await add(file.jobs)
    assert file.announced == []
    assert path.exists() == (how == "replaced")
    aside.rename(path)
    await file.commit.flush()
    assert file.announced == [[1]]
    assert [seq for seq, _ in await file.jobs.results_after(job, 0, limit=5)] == [1]


async def test_a_refused_submission_is_unavailable_and_leaves_nothing(file):
    def refuse(connection, cursor, statement, parameters, context, many):
        if statement.startswith("INSERT INTO terrace_jobs"):
            raise sqlite3.OperationalError("disk full")

    event.listen(file.engine.sync_engine, "before_cursor_execute", refuse)
    with pytest.raises(Unavailable, match="does not accept writes now: disk full"):
        await add(file.jobs)
    assert await file.jobs.page(SoughtJobs(), limit=10, before=None) == []


async def test_an_idempotency_key_is_unique(store):
    job = await add(store.jobs, key="k")
    assert await add(store.jobs, key="k") == job
    with pytest.raises(IntegrityError):
        await store.jobs.add(job, ImageFacts(), None)
    assert (await store.jobs.by_idempotency_key("k")).id == job.id
    assert await store.jobs.by_idempotency_key("other") is None


async def test_a_job_begins_once(store):
    job = await add(store.jobs)
    store.jobs.started(job, 5.0, 25.0)
    store.jobs.started(job, 9.0, 29.0)
    await store.commit.flush()
    found = await store.jobs.get(job.id)
    assert (found.state, found.started_at, found.started_elapsed) == ("running", 5.0, 25.0)


def attempt(job: JobRow, task: int, number: int, outcome: str) -> AttemptReport:
    return AttemptReport(
        job_id=job.id,
        task=task,
        number=number,
        node_id="end-0",
        incarnation="12345678",
        tier=Tier.END,
        upstream=None if task else "edge-0",
        stage="all",
        hedge=number == 2,
        outcome=outcome,
        reason="" if outcome == "ok" else "it broke",
        why="earliest finish",
        started_at=1.5,
        ended_at=2.5,
    )


async def test_attempts_are_rows_and_add_up_to_what_a_task_has_failed(store):
    job = await add(store.jobs)
    made = [
        attempt(job, 0, 1, "error"),
        attempt(job, 0, 2, "refused"),
        attempt(job, 0, 3, "lost"),
        attempt(job, 2, 1, "ok"),
    ]
    for report in reversed(made):
        store.commit.put(report)
    await store.commit.flush()
    assert await store.jobs.attempts_made(job.id) == {0: (3, 2, 1), 2: (1, 0, 0)}
    assert await store.jobs.attempts_after(job.id, 0, 0, limit=10) == made
    assert await store.jobs.attempts_after(job.id, 0, 2, limit=1) == made[2:3]
    assert await store.jobs.attempts_after(job.id, 0, 0, limit=10, only_task=2) == made[3:]


WITHOUT_OBSERVATIONS = tuple(
    f"DROP TABLE {name}"
    for name in sorted(metadata.tables)
    if name.startswith(("terrace_observation", "terrace_source"))
)

WITHOUT_LEARNING = (
    "DROP TABLE terrace_sinks",
    "DROP TABLE terrace_outbox",
    "DROP TABLE terrace_dead_letters",
    "DROP TABLE terrace_labels",
    "DROP TABLE terrace_improvements",
    "DROP INDEX terrace_observations_audited",
    "ALTER TABLE terrace_observations DROP COLUMN agrees",
    "DROP INDEX terrace_observation_pictures_by_use",
    "ALTER TABLE terrace_observation_pictures DROP COLUMN useful",
)
WITHOUT_SITES = (
    "DROP TABLE terrace_releases",
    "DROP TABLE terrace_rollouts",
    "DROP TABLE terrace_networks",
    "DROP TABLE terrace_sites",
    "DROP INDEX terrace_observations_by_site",
    *(f"ALTER TABLE terrace_{name} DROP COLUMN site" for name in ("jobs", "results", "observations")),
)
WITHOUT_ELAPSED = (
    "ALTER TABLE terrace_jobs RENAME COLUMN deadline_elapsed TO deadline_at",
    "ALTER TABLE terrace_jobs DROP COLUMN started_elapsed",
    "ALTER TABLE terrace_jobs DROP COLUMN finished_elapsed",
)
"""As the jobs were before elapsed time was counted."""


async def downgrade(engine: AsyncEngine) -> None:
    """To the last form before Alembic."""
    async with engine.begin() as connection:
        for statement in (
            "DROP TABLE terrace_lease",
            "DROP TABLE terrace_inputs",
            "DROP TABLE terrace_runs",
            *WITHOUT_LEARNING,
            *WITHOUT_SITES,
            *WITHOUT_OBSERVATIONS,
            *WITHOUT_ELAPSED,
            f"DROP TABLE {VERSION_TABLE}",
            "INSERT INTO terrace_properties VALUES ('schema_version', '6')",
        ):
            await connection.execute(text(statement))


async def test_a_database_from_before_the_lease_is_brought_up_to_date(database_url):
    async with opened(database_url) as store:
        job = await add(store.jobs)
        await downgrade(store.engine)
    for _ in range(2):
        async with opened(database_url) as store:
            assert await store.jobs.get(job.id) == job
            await add(store.jobs)


async def test_jobs_of_an_older_terrace_go_on_with_their_deadlines_and_retention(database_url):
    async with opened(database_url) as store:
        waits, ended = await add(store.jobs), await add(store.jobs)
        store.jobs.started(ended, 100.0, 0.0)
        store.jobs.finished(ended, state=JobState.COMPLETED, reason="", at=160.0, elapsed=0.0, summary={})
        await store.commit.flush()
        await downgrade(store.engine)
    async with opened(database_url) as store:
        # Elapsed time begins with the wall clock, as it does in a database that has none yet.
        assert continued(None, boot="b", since_boot=7.0, wall=1234.5) == 1234.5
        assert (await store.jobs.get(waits.id)).deadline_elapsed == waits.deadline_elapsed
        found = await store.jobs.get(ended.id)
        assert (found.started_elapsed, found.finished_elapsed) == (100.0, 160.0)


async def test_a_migration_is_done_as_a_whole_or_not_at_all(database_url, monkeypatch):
    async with opened(database_url) as store:
        job = await add(store.jobs)
        await downgrade(store.engine)
    with monkeypatch.context() as patch:
        upgrade = command.upgrade

        def upgrade_and_fail(*given: Any) -> None:
            upgrade(*given)
            raise OperationalError("", {}, Exception("the disk is full"))

        patch.setattr(command, "upgrade", upgrade_and_fail)
        with pytest.raises(SetupError):
            await open_database(database_url)
    async with opened(database_url) as store:
        assert await store.jobs.get(job.id) == job


async def test_a_migration_ends_the_lease_of_an_older_scheduler(database_url):
    async with opened(database_url) as store:
        await add(store.jobs)
        async with store.engine.begin() as connection:
            await connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0001'"))
            await connection.execute(text("DROP TABLE terrace_inputs"))
            await connection.execute(text("DROP TABLE terrace_runs"))
            for statement in (*WITHOUT_LEARNING, *WITHOUT_SITES, *WITHOUT_OBSERVATIONS, *WITHOUT_ELAPSED):
                await connection.execute(text(statement))
            await connection.execute(text("ALTER TABLE terrace_lease RENAME TO aside"))
        newer = await open_database(database_url)
        await newer.dispose()
        with pytest.raises(Standby):
            await add(store.jobs)


OLD_OBSERVATION = (
    "INSERT INTO terrace_observations (node_id, source, sequence, revision, received, taken_at, labelled, "
    "stored_elapsed, hierarchy, label, confidence, tier, unsure, waits, content) VALUES "
    "('end-0', 'gate', :number, 0, :number, 1.8e9, :no, 1.0, 'd', :label, 0.5, :tier, :no, :no, :content)"
)


async def test_observations_of_an_older_terrace_are_found_by_their_classes(database_url):
    local = {"model": "small", "sha256": "0" * 64, "label": 3, "confidence": 0.5}
    finer = {**local, "node_id": "c", "tier": "cloud", "label": 7, "coarse_label": 4, "coarse_confidence": 0.9}
    rows: tuple[tuple[dict[str, Any], int | None, str | None], ...] = (
        ({"local": local}, 3, "end"),
        ({"local": local, "finer": finer}, 7, "cloud"),
        ({"reason": "damaged"}, None, None),
    )
    async with opened(database_url) as store, store.engine.begin() as connection:
        for statement in (
            "ALTER TABLE terrace_runs DROP COLUMN missing",
            *WITHOUT_LEARNING,
            *WITHOUT_SITES,
            *(f"DROP INDEX terrace_observations_by_{name}" for name in ("time", "source", "coarse", "fine")),
            "ALTER TABLE terrace_observations DROP COLUMN coarse_label",
            "ALTER TABLE terrace_observations RENAME COLUMN fine_label TO label",
            "DROP TABLE terrace_source_rights",
            f"UPDATE {VERSION_TABLE} SET version_num = '0006'",
        ):
            await connection.execute(text(statement))
        for number, (answers, label, tier) in enumerate(rows, 1):
            content = json.dumps({"source": "gate", "sequence": number, "age_s": 1.0, **answers})
            values = {"number": number, "label": label, "tier": tier, "content": content, "no": False}
            await connection.execute(text(OLD_OBSERVATION), values)
    async with opened(database_url) as store, store.engine.connect() as connection:
        columns = (observations.c.sequence, observations.c.coarse_label, observations.c.fine_label)
        found = (await connection.execute(select(*columns).order_by(observations.c.sequence))).all()
        assert [tuple(row) for row in found] == [(1, 3, None), (2, 4, 7), (3, None, None)]


async def test_the_migrations_make_the_tables_that_the_code_knows(database_url):
    engine = await open_database(database_url)

    def differences(connection: Connection) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        return list(compare_metadata(context, metadata))

    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await engine.dispose()
    assert {path.stem[:4] for path in (Path(migrations.__file__).parent / "versions").glob("*.py")} >= {SCHEMA}
    assert max(path.stem[:4] for path in (Path(migrations.__file__).parent / "versions").glob("*.py")) == SCHEMA


async def test_what_no_database_holds_is_left_out(store):
    job = await add(store.jobs, facts=ImageFacts(names=["a\0b", "\ud800"] + [None] * 118))
    assert (await store.jobs.facts(job.id)).names[:2] == ["a\0b", "?"]
    bad = replace(attempt(job, 0, 1, "error"), reason="a\0b\ud800")
    store.commit.put(bad)
    await store.commit.flush()
    assert (await store.jobs.attempts_after(job.id, 0, 0, limit=1))[0].reason == "a\ufffdb?"


async def test_each_job_keeps_its_classes_and_classes_without_jobs_go(store):
    first, second = (Hierarchy.flat(name, ["a", "b", name]) for name in ("first", "second"))
    old = await add(store.jobs)
    assert await store.jobs.hierarchies(first) == {first.digest: first}
    assert (await store.jobs.get(old.id)).hierarchy == first.digest
    for served in (second, second, first, second):
        assert await store.jobs.hierarchies(served) == {first.digest: first, served.digest: served}
    assert (await store.jobs.get(old.id)).hierarchy == first.digest
    store.jobs.finished(old, state=JobState.COMPLETED, reason="", at=9.0, elapsed=1.0, summary={})
    await store.commit.flush()
    await store.jobs.purge(2.0)
    assert await store.jobs.hierarchies(second) == {second.digest: second}


async def test_only_unfinished_jobs_are_taken_up_and_only_old_ones_purged(store):
    jobs = [await add(store.jobs) for _ in range(3)]
    store.commit.put(answer(jobs[0], 0))
    await store.commit.flush()
    store.jobs.finished(
        jobs[0], state=JobState.COMPLETED, reason="", at=900.0, elapsed=100.0, summary={"answered_coarse": 50}
    )
    store.jobs.finished(jobs[1], state=JobState.FAILED, reason="why", at=0.0, elapsed=200.0, summary={})
    await store.commit.flush()
    assert [job.id for job in await store.jobs.unfinished()] == [jobs[2].id]
    assert (await store.jobs.get(jobs[0].id)).summary == {"answered_coarse": 50}
    assert await store.jobs.purge(150.0) == 1
    left = [job.id for job in await store.jobs.page(SoughtJobs(), limit=10, before=None)]
    assert left == [jobs[2].id, jobs[1].id]
    assert await store.jobs.results_after(jobs[0], 0, limit=10) == []


def test_job_ids_sort_by_time():
    ids = [new_job_id(now) for now in (1.0, 1.5, 1_700_000_000.0, 1_700_000_000.002)]
    assert ids == sorted(ids)
    assert {len(job_id) for job_id in ids} == {20}


@pytest.mark.parametrize("found", ["0099", "", "x" * 32])
async def test_a_database_of_a_newer_terrace_is_refused(database_url, found):
    async with opened(database_url) as store, store.engine.begin() as connection:
        await connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{found}'"))
    with pytest.raises(SetupError, match=rf"this one knows {SCHEMA}\): update Terrace or use another --state folder"):
        await open_database(database_url)


@pytest.mark.parametrize("found", ["5", "-1", "abc", ""])
async def test_a_database_with_an_odd_schema_version_is_refused(database_url, found):
    async with opened(database_url) as store:
        await downgrade(store.engine)
        async with store.engine.begin() as connection:
            await connection.execute(update(properties).values(value=found))
    with pytest.raises(SetupError, match="another --state folder"):
        await open_database(database_url)


@pytest.mark.parametrize(
    ("content", "message"), [(b"this is no database" * 100, "not a database"), (b"SQLite format 3\0" + bytes(50), "")]
)
async def test_a_damaged_database_is_refused_in_one_sentence(tmp_path, content, message):
    (tmp_path / "x.db").write_bytes(content)
    with pytest.raises(SetupError, match=f"cannot be opened for writing: .*{message}"):
        await open_database(f"sqlite+aiosqlite:///{tmp_path / 'x.db'}")


async def test_a_read_only_database_is_refused_at_start(tmp_path):
    async with opened(tmp_path / "x.db"):
        pass
    with pytest.raises(SetupError, match="cannot be opened for writing"):
        await open_database(f"sqlite+aiosqlite:///file:{tmp_path / 'x.db'}?mode=ro&uri=true")


@pytest.mark.parametrize("url", ["nonsense", "sqlite+nothing:///x", "sqlite+aiosqlite:////no/such/folder/x.db"])
async def test_a_database_that_cannot_be_opened_is_a_setup_error(url):
    with pytest.raises(SetupError):
        await open_database(url)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("postgresql+asyncpg://u:geheim@h:x1/x", "the database URL is not a URL"),
        ("geheim", "the database URL is not a URL"),
        ("postgresql+asyncpg://u:s3@geheim@127.0.0.1:1/x", "%40"),
        ("sqlite:///x.db", r"the database URL sqlite:///x\.db has no driver"),
        ("postgresql://u:geheim@127.0.0.1/x", r"the database URL postgresql://u:\*\*\*@127\.0\.0\.1/x has no driver"),
        ("oracle+none://u:geheim@127.0.0.1/x", r"oracle\+none://u:\*\*\*@127\.0\.0\.1/x has no driver"),
        (
            "postgresql+asyncpg://u:geheim@127.0.0.1:1/x",
            r"the database postgresql\+asyncpg://u:\*\*\*@127\.0\.0\.1:1/x",
        ),
        (
            "postgresql+asyncpg://u@127.0.0.1:1/x?password=geheim",
            r"the database postgresql\+asyncpg://u@127\.0\.0\.1:1/x",
        ),
    ],
)
async def test_a_wrong_database_url_is_one_sentence_without_its_password(url, sentence):
    with pytest.raises(SetupError, match=sentence) as caught:
        await open_database(url)
    said = str(caught.value)
    assert "geheim" not in said
    assert "\n" not in said
    if "127.0.0.1:1" not in url:
        assert "sqlite+aiosqlite:///FILE and postgresql+asyncpg://" in said


async def test_an_option_that_the_driver_does_not_know_is_one_sentence_without_the_password():
    with pytest.raises(SetupError, match=r"for TLS it is ssl=require") as caught:
        await open_database("postgresql+asyncpg://u:geheim@127.0.0.1:1/x?sslmode=require")
    assert "geheim" not in str(caught.value)


async def test_a_server_without_tls_that_shall_have_it_is_no_server_to_wait_for(postgres: PostgresServer):
    with pytest.raises(SetupError, match="SSL") as caught:
        await open_database(f"{postgres.database()}?ssl=require")
    assert not isinstance(caught.value, DatabaseUnavailable)


async def test_sqlite_keeps_a_write_ahead_log_and_full_durability(file):
    async with file.engine.connect() as connection:
        assert await connection.scalar(select(1)) == 1
        raw = await connection.get_raw_connection()
        cursor = await raw.driver_connection.execute("PRAGMA journal_mode")
        assert (await cursor.fetchone())[0] == "wal"
        cursor = await raw.driver_connection.execute("PRAGMA synchronous")
        assert (await cursor.fetchone())[0] == 2


def test_a_foreign_error_is_told_without_its_statement():
    error = OperationalError("SELECT secret", {}, sqlite3.OperationalError("disk I/O error\nmore"))
    assert plain_reason(error) == "disk I/O error"


async def test_an_answer_that_was_withdrawn_makes_room_for_another_one(store):
    job = await add(store.jobs)
    told: list[int] = []
    store.commit.on_withdrawal = lambda answer: told.append(answer.task)
    # All at once, so that they could come into one group.
    store.commit.put(answer(job, 0))
    store.commit.put(answer(job, 1))
    store.commit.put(Withdrawn(answer(job, 0)))
    store.commit.put(answer(job, 0))
    store.commit.put(Withdrawn(answer(job, 1)))
    await store.commit.flush()
    found = await store.jobs.results_after(job, 0, limit=10)
    assert [(seq, answer.task) for seq, answer in found] == [(3, 0)]
    assert (told, store.announced) == ([0, 1], [[1, 2], [3]])


def open_to_others(folder: Path) -> dict[str, bool]:
    """For each file, True if others than its user may do something with it."""
    return {path.name: bool(path.stat().st_mode & 0o077) for path in folder.iterdir()}


async def test_nobody_else_can_read_a_new_database(tmp_path: Path) -> None:
    async with opened(tmp_path / "jobs.db"):
        found = await asyncio.to_thread(open_to_others, tmp_path)
    assert found.keys() >= {"jobs.db", "jobs.db-wal"}
    assert not any(found.values()), found
