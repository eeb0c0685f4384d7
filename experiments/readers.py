"""What people who look at the page cost the scheduler: its processor time per task, with readers and without.

Each reader loads a page with all that it shows, and follows the events of the fleet from then on, as the page does. In
each round the same job runs once with all readers and once with none; the order of the two alternates. The loading of
the pages is over before a job begins, and is measured by itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np

from experiments.harness import (
    MOST_RUNS,
    SPREAD_HEADINGS,
    Experiment,
    Options,
    Record,
    Run,
    Table,
    option,
    spread_row,
)
from experiments.peers.processes import cpu_s
from experiments.record import spread
from models.data import read_sample
from tierkit.client import AsyncClient
from tierkit.errors import ServiceFailed
from tierkit.fleet import SCHEDULER, TERRACE, local_plan
from tierkit.types import JobState, Tier

__all__ = ["READERS"]

_TARGET = 0.02
"""More processor time of the scheduler per task, at most, in the median of the rounds."""
_BATCH = 50
_JOB_BUDGET_S = 600.0
_PAGES = ("", "/try", "/jobs", "/timeline", "/privacy")


async def _load_page(http: httpx.AsyncClient, page: str) -> None:
    """What a browser with an empty cache asks for; modules of modules are not followed."""
    shell = await http.get(f"/ui{page}")
    files = re.findall(r'(?:src|href)="(/ui/files/[^"]+)"', shell.text)
    for path in (*files, "/v1/whoami", "/v1/fleet", "/v1/history"):
        (await http.get(path)).raise_for_status()


@asynccontextmanager
async def _reading(url: str, readers: int) -> AsyncIterator[list[int]]:
    """Readers of the events; yields how many events each has read so far."""
    seen = [0] * readers
    open_ = asyncio.Barrier(readers + 1)

    async def read(number: int, http: httpx.AsyncClient) -> None:
        async with http.stream("GET", "/v1/fleet/events") as response:
            await open_.wait()
            async for line in response.aiter_lines():
                seen[number] += line.startswith("event: ")

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as http:
        tasks = [asyncio.create_task(read(number, http)) for number in range(readers)]
        try:
            async with asyncio.timeout(60):
                await open_.wait()
            yield seen
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Chosen(Options):
    """How many look, and for how long."""

    readers: int = option(20, "Readers of the events, each with a page of its own.", quick=20, min=1, max=200)
    images: int = option(20_000, "Images of a job, in tasks of 50.", quick=2000, min=50, max=100_000)
    rounds: int = option(8, "Pairs of jobs.", quick=1, min=1, max=MOST_RUNS)


class Readers(Experiment):
    """What readers of the page and its events cost the scheduler, per task."""

    name = "readers"
    options = Chosen
    quick = "{images} images, {rounds} rounds"
    repeats = ("rounds", "rounds")
    ignores = frozenset({"tasks", "data", "seed"})
    profile = None
    one_row = True

    async def measure(self, run: Run, chosen: Chosen) -> None:
        sample = read_sample().images
        images = np.concatenate([sample] * -(-chosen.images // len(sample)))[: chosen.images]
        tasks = -(-chosen.images // _BATCH)
        run.config |= {"readers": chosen.readers, "images": chosen.images, "rounds": chosen.rounds}
        run.expect(2 * chosen.rounds)
        folder = run.folder / "fleet"
        folder.mkdir()
        counts = {Tier.END: 2, Tier.EDGE: 1, Tier.CLOUD: 1}
        plan = local_plan(counts, scheduler={"port": 0, "state": str(folder / "state"), "trusted": "end,edge,cloud"})
        async with (
            run.launched(plan, folder, command=TERRACE) as fleet,
            AsyncClient(fleet.scheduler_url, timeout_s=_JOB_BUDGET_S) as client,
            httpx.AsyncClient(base_url=fleet.scheduler_url, timeout=60, trust_env=False) as http,
        ):
            pid = next(service.process.pid for service in fleet.alive if service.name == SCHEDULER)

            async def task_ms() -> float:
                """Processor time of the scheduler for a job, per task."""
                submitted = await client.submit(images, batch_size=_BATCH)
                begun = cpu_s(pid)
                job = await client.wait(submitted, budget_s=_JOB_BUDGET_S)
                if job.state is not JobState.COMPLETED:
                    raise ServiceFailed(f"the job is {job.state}: {job.reason}")
                return 1000 * (cpu_s(pid) - begun) / tasks

            await task_ms()
            for number in range(chosen.rounds):
                point: dict[str, Any] = {}
                for readers in (0, chosen.readers) if number % 2 else (chosen.readers, 0):
                    with run.step(f"round {number + 1}: {readers} readers"):
                        if not readers:
                            point["alone_ms"] = await task_ms()
                            continue
                        begun = cpu_s(pid)
                        for reader in range(readers):
                            await _load_page(http, _PAGES[reader % len(_PAGES)])
                        point["page_ms"] = 1000 * (cpu_s(pid) - begun) / readers
                        async with _reading(fleet.scheduler_url, readers) as seen:
                            point["read_ms"] = await task_ms()
                            point["events"] = list(seen)
                run.add(**point)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """One row: median and range of the rounds."""
        points = record["points"]
        more = spread([point["read_ms"] / point["alone_ms"] - 1 for point in points])
        return [
            {
                "readers": record["config"]["readers"],
                "rounds": len(points),
                **{
                    name: asdict(spread([point[name] for point in points]))
                    for name in ("alone_ms", "read_ms", "page_ms")
                },
                "more": asdict(more),
                "events": min(min(point["events"]) for point in points),
                "missed": [] if more.median <= _TARGET else [f"{more.median:.1%} more > {_TARGET:.0%}"],
            }
        ]

    def table(self, record: Record) -> Table:
        (row,) = self.rows(record)
        figures = {
            "alone_ms": ("scheduler, ms per task, no reader", ".3f"),
            "read_ms": (f"the same, {row['readers']} readers", ".3f"),
            "more": ("more", ".1%"),
            "page_ms": ("to load a page, ms", ".1f"),
        }
        return Table(
            headings=SPREAD_HEADINGS,
            rows=[spread_row(words, row[name], form) for name, (words, form) in figures.items()],
        )


READERS = Readers()
