"""A clock that is set right while jobs wait and answers are kept: what has passed is what counts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from scheduler.store import elapsed
from tierkit.elapsed import since_boot
from tierkit.testing import wait_for

DAY = 86400.0
RUN = {
    "id": "0" * 32,
    "network": "n",
    "strategy": "s",
    "url": "http://127.0.0.1:9",
    "steps": 1,
    "incarnation": "1" * 16,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the wall clock this far off, of the scheduler as of everybody."""
    true = time.time

    def by(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: true() + seconds)

    return by


@pytest.mark.parametrize(("before", "after"), [(-21 * DAY, 0.0), (21 * DAY, 0.0), (0.0, 3 * 365 * DAY)])
async def test_a_clock_that_is_set_costs_no_job_and_no_answer(
    kit: Any, settings: Any, clock: Any, before: float, after: float
) -> None:
    clock(before)
    async with kit.scheduler(settings) as scheduler:
        async with kit.end(scheduler, "end-0"):
            done = await scheduler.submit(kit.images(5), scheme="end", deadline_s=3600)
            await scheduler.finished(done["id"])
        waits = await scheduler.submit(kit.images(7), scheme="end", deadline_s=3600)
        assert (await scheduler.http.post("/v1/runs", json=RUN)).status_code == 201
        clock(after)
        assert (await scheduler.job(done["id"]))["elapsed_s"] < 600
    async with kit.scheduler(settings) as scheduler:
        assert (await scheduler.job(waits["id"]))["state"] in ("queued", "running")
        assert (await scheduler.http.get(f"/v1/runs/{RUN['id']}")).json()["state"] == "running"
        found = await scheduler.job(done["id"])
        assert (found["state"], found["elapsed_s"] < 600) == ("completed", True)
        assert len(await scheduler.results(done["id"])) == 5
        async with kit.end(scheduler, "end-0"):
            assert (await scheduler.finished(waits["id"]))["answered_coarse"] == 7


async def test_time_that_has_passed_while_the_scheduler_was_away_counts(
    kit: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kit.scheduler(settings) as scheduler:
        async with kit.end(scheduler, "end-0"):
            done = await scheduler.submit(kit.images(5), scheme="end")
            await scheduler.finished(done["id"])
        waits = await scheduler.submit(kit.images(7), scheme="end", deadline_s=3600)
    true = since_boot
    later = settings.retention_s + 60
    monkeypatch.setattr(elapsed, "since_boot", lambda: true() + later)
    async with kit.scheduler(settings) as scheduler:
        assert (await scheduler.finished(waits["id"]))["state"] == "failed"

        async def purged() -> bool:
            return bool((await scheduler.http.get(f"/v1/jobs/{done['id']}")).status_code == 404)

        await wait_for(purged, what="the end of the retention")
