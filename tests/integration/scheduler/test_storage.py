"""What becomes of jobs when the disk or the database does not do its part."""

from __future__ import annotations

import contextlib
import errno
import sqlite3

import pytest

from scheduler.ingest.inputs import PixelWriter
from tests.integration.scheduler.test_dispatching import counts
from tests.integration.scheduler.test_measures import measured
from tierkit.testing import wait_for


async def ready(scheduler) -> str:
    return str((await scheduler.http.get("/readyz")).json()["checks"]["database"])


async def accepts(scheduler, wanted: int) -> bool:
    return await measured(scheduler, "terrace_scheduler_database_accepts_results") == wanted


async def test_a_database_that_is_gone_for_a_while_in_the_middle_of_a_job(kit, scheduler, settings):
    path = settings.state / "scheduler.db"
    async with kit.end(scheduler, "end-0") as end, kit.uppers(scheduler, "edge-0"):
        end.gate.clear()
        job = await scheduler.submit(kit.images(300))
        await wait_for(lambda: end.waiting == 3, what="the first tasks")
        path.rename(settings.state / "aside.db")
        end.gate.set()

        async def said() -> bool:
            return "is gone or another one; put it back" in await ready(scheduler)

        await wait_for(said, what="the check to say why")
        await wait_for(lambda: accepts(scheduler, 0), what="the gauge to say so")
        refused = await scheduler.try_submit(kit.images(10))
        assert refused.status_code == 503
        assert "is gone or another one" in refused.json()["error"]
        (settings.state / "aside.db").rename(path)
        events = await scheduler.events(job["id"])
    assert counts(events[-1][2]) == ("completed", 300, 300, 0, 0)
    for stage in ("coarse", "fine"):
        indices = [result["index"] for kind, _, data in events if kind == stage for result in data["results"]]
        assert sorted(indices) == list(range(300))
    assert await ready(scheduler) == "ok"
    await wait_for(lambda: accepts(scheduler, 1), what="the gauge to say that it is over")


async def test_a_database_that_is_gone_while_nothing_is_to_do(kit, scheduler, settings, caplog):
    path = settings.state / "scheduler.db"
    path.rename(settings.state / "aside.db")
    for _ in range(2):
        answer = await scheduler.http.get("/readyz")
        assert answer.status_code == 503
        assert "is gone or another one; put it back" in answer.json()["checks"]["database"]
    assert sum("fails its check" in record.message for record in caplog.records) == 1
    assert (await scheduler.try_submit(kit.images(1))).status_code == 503
    assert "does not accept a write: the file" in caplog.text
    (settings.state / "aside.db").rename(path)
    assert (await scheduler.http.get("/readyz")).status_code == 200
    assert (await scheduler.try_submit(kit.images(1))).status_code == 202


async def test_a_database_that_is_locked_in_the_middle_of_a_job_only_delays_it(kit, scheduler, settings):
    async with kit.end(scheduler, "end-0") as end:
        end.gate.clear()
        job = await scheduler.submit(kit.images(300), scheme="end")
        await wait_for(lambda: end.waiting == 3, what="the first tasks")
        # It asks without waiting: while it waited here, the scheduler in this event loop could not end its own writing.
        database = sqlite3.connect(settings.state / "scheduler.db", isolation_level=None, timeout=0)
        with contextlib.closing(database) as other:

            def lock() -> bool:
                with contextlib.suppress(sqlite3.OperationalError):
                    other.execute("BEGIN IMMEDIATE")
                return other.in_transaction

            await wait_for(lock, what="the lock")
            end.gate.set()
            await wait_for(lambda: len(end.tasks) == 6, what="all tasks: answers wait, work goes on")
            assert (await scheduler.job(job["id"]))["answered_coarse"] == 0  # none is told before it is durable
            other.execute("COMMIT")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 300, 0, 0, 0)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/classify"])
async def test_a_full_disk_refuses_an_upload_for_now(kit, scheduler, settings, monkeypatch, path):
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PixelWriter, "append", full)
    body, headers = kit.tensor_body(kit.images(3))
    refused = await scheduler.http.post(path, content=body, headers=headers)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert refused.json() == {"error": "the upload cannot be stored now: No space left on device"}
    assert list((settings.state / "inputs").iterdir()) == []
