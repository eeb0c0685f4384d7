"""What /metrics says of the queue."""

from __future__ import annotations

import re

from tierkit.testing import wait_for


async def measured(scheduler, metric: str) -> float:
    page = (await scheduler.http.get("/metrics")).text
    (value,) = re.findall(rf"^{metric} (\S+)$", page, re.MULTILINE)
    return float(value)


async def test_the_depth_of_the_queue_is_measured(kit, scheduler):
    async def queue() -> tuple[float, float]:
        names = ("terrace_scheduler_unfinished_jobs", "terrace_scheduler_waiting_tasks")
        return (await measured(scheduler, names[0]), await measured(scheduler, names[1]))

    async def becomes(*wanted: float) -> None:
        async def there() -> bool:
            return await queue() == wanted

        await wait_for(there, what=f"the queue of {wanted}")

    jobs = [await scheduler.submit(kit.images(250), scheme="end") for _ in range(2)]
    await becomes(2, 10)
    async with kit.end(scheduler, "end-0") as end:
        end.gate.clear()
        await becomes(2, 7)  # three are outstanding
        end.gate.set()
        for job in jobs:
            await scheduler.finished(job["id"])
        await becomes(0, 0)


async def test_counters_begin_at_zero_so_that_their_first_increase_is_seen(scheduler):
    page = (await scheduler.http.get("/metrics")).text
    for metric, values in (
        ('tasks_total{outcome="%s"}', "fine coarse fallback failed"),
        ('jobs_total{state="%s"}', "completed failed cancelled"),
        ('attempts_total{outcome="%s"}', "ok error lost unreachable refused rerouted fallback deadline cancelled late"),
    ):
        for value in values.split():
            assert f"terrace_scheduler_{metric % value} " in page
