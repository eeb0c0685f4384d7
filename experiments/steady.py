"""False deaths: a fleet works under full load of the processor for a while, without faults.

Jobs run without a pause, two at a time, beside one process per core that does nothing but compute. Every node that the
scheduler's log calls dead has been given up for no reason; every suspect one was left out of the dispatch for a moment.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from experiments.harness import Experiment, Options, Record, Run, Table, option
from experiments.testbed import BATCH
from tierkit.client import AsyncClient
from tierkit.fleet import SCHEDULER
from tierkit.types import Scheme

__all__ = ["STEADY"]

_NODES = {"end": 4, "edge": 2, "cloud": 1}
_JOBS_AT_ONCE = 2
_JOB_BUDGET_S = 600.0
_HEALTH = re.compile(r" (\S+) is (dead|suspect): (.*)$")
_BURN = "while True: pass"


@asynccontextmanager
async def _busy_cores() -> AsyncIterator[None]:
    """A process per core that only computes."""
    burners = [await asyncio.create_subprocess_exec(sys.executable, "-c", _BURN) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            await burner.wait()


class Chosen(Options):
    """How long it takes."""

    minutes: float = option(30.0, "Minutes under load.", quick=2.0, min=0.01, max=10_000)


async def _job(run: Run, client: AsyncClient) -> int:
    """One job; returns how many images have their fine answer."""
    job = await client.submit(run.images.images, scheme=Scheme.MAPPING, batch_size=BATCH)
    return (await client.wait(job, budget_s=_JOB_BUDGET_S)).answered_fine


class Steady(Experiment):
    """Nodes given up for no reason, under full load of the processor."""

    name = "steady"
    options = Chosen
    quick = "{minutes:g} minutes"
    profile = "native"
    one_row = True

    async def measure(self, run: Run, chosen: Chosen) -> None:
        minutes = chosen.minutes
        profile = run.profile.with_nodes(**_NODES)
        run.config |= {"minutes": minutes, "nodes": _NODES, "jobs_at_once": _JOBS_AT_ONCE}
        run.expect(1)
        heard: list[dict[str, Any]] = []
        listening = False

        def watch(name: str, line: str) -> None:
            if listening and name == SCHEDULER and (found := _HEALTH.search(line)):
                heard.append({"node": found[1], "health": found[2], "reason": found[3]})

        networks = await run.networks(profile)
        async with run.fleet(profile, networks, watch=watch) as (_, client), _busy_cores():
            images = 0
            listening, began = True, time.monotonic()

            async def work() -> None:
                nonlocal images
                while time.monotonic() < began + minutes * 60:
                    images += await _job(run, client)

            with run.step(f"load for {minutes:g} minutes"):
                try:
                    async with asyncio.TaskGroup() as group:
                        for number in range(_JOBS_AT_ONCE):
                            group.create_task(work(), name=f"jobs {number}")
                finally:
                    # Not at the end: a node that is told to stop closes its socket, and may be found dead by that.
                    listening = False
                    for one in heard:
                        run.add(what="health", **one)
                    run.add(what="load", minutes=round((time.monotonic() - began) / 60, 2), images=images)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        loads = [point for point in record["points"] if point["what"] == "load"]
        health = [point["health"] for point in record["points"] if point["what"] == "health"]
        return [
            {
                "minutes": sum(load["minutes"] for load in loads),
                "images": sum(load["images"] for load in loads),
                "nodes": sum(record["config"]["nodes"].values()),
                "false_deaths": health.count("dead"),
                "suspicions": health.count("suspect"),
            }
        ]

    def table(self, record: Record) -> Table:
        (row,) = self.rows(record)
        return Table(
            headings="minutes | nodes | images | false deaths | suspicions",
            rows=[
                [
                    f"{row['minutes']:.1f}",
                    str(row["nodes"]),
                    f"{row['images']:,}",
                    str(row["false_deaths"]),
                    str(row["suspicions"]),
                ]
            ],
        )


STEADY = Steady()
