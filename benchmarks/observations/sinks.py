"""Events to a good and a slow receiver, measured: the lag of the good one, and the scheduler's memory.

Devices send observations, and each is an event for two webhooks. The slow receiver takes a second for each answer, so
it falls behind from the first second on. The lag counts from the event's time, before its transaction, to its arrival.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx

from benchmarks.observations.devices import SendingPlan, device_fleet
from benchmarks.observations.receivers import receivers
from experiments.bench.summary import percentile
from experiments.harness import MOST_RUNS, Experiment, Options, Record, Run, Table, option
from experiments.processes import cpu_s, resident_bytes
from tierkit.client import AsyncClient, SinkFilter
from tierkit.errors import ServiceFailed
from tierkit.testing import service_process

__all__ = ["SINKS"]

_LIMIT_S, _POLL_S = 60.0, 0.5
_SLOW_S = 1.0
_WARM_S = 5.0
"""Memory before that is the start's."""


class SinkLoad(Options):
    """Events and their duration."""

    devices: int = option(50, "Devices with a source each.", min=1, max=10_000)
    rate: float = option(20.0, "Pictures a second of each device.", quick=4.0, min=0.01, max=1000)
    interval_s: float = option(0.5, "Seconds between two batches of a device.", min=0.05, max=900)
    seconds: float = option(120.0, "Duration in seconds.", quick=10.0, min=1, max=86_400)
    repeats: int = option(1, "How often it is measured.", min=1, max=MOST_RUNS)


class SinksBenchmark(Experiment):
    """A good receiver of events next to a slow one."""

    name = "sinks"
    options = SinkLoad
    quick = "200 events a second for 10 s"
    ignores = frozenset({"seed", "share", "data", "tasks"})
    profile = None

    async def measure(self, run: Run, chosen: SinkLoad) -> None:
        run.config |= chosen.model_dump()
        run.expect(chosen.repeats)
        for repeat in range(chosen.repeats):
            with run.step("events"):
                await self._once(run, chosen, repeat)

    async def _once(self, run: Run, chosen: SinkLoad, repeat: int) -> None:
        folder = run.folder / f"run-{repeat}"
        await asyncio.to_thread(folder.mkdir, parents=True)
        command = ["-m", "terrace", "scheduler", "--port=0", f"--state={folder / 'state'}", "--sink-allow-private"]
        async with (
            receivers(0.0, _SLOW_S) as both,
            device_fleet() as fleet,
            service_process(command, ready_file=folder / "ready", timeout_s=60.0) as process,
            AsyncClient(process.url) as client,
        ):
            for name, url in zip(("good", "slow"), both.urls, strict=True):
                await client.add_sink(name, "webhook", {"url": url}, filter=SinkFilter(events=("observation.*",)))
            at, pid = httpx.URL(process.url), process.process.pid
            plan = SendingPlan(
                host=at.host,
                port=at.port or 80,
                count=chosen.devices,
                rate=chosen.rate,
                interval_s=chosen.interval_s,
                seconds=chosen.seconds,
            )
            await fleet.join(plan)
            memory: list[int] = []
            watching = asyncio.create_task(_watch(pid, memory))
            cpu_before, began = cpu_s(pid), time.perf_counter()
            try:
                sent = await fleet.send(plan)
                seconds, used_s = time.perf_counter() - began, cpu_s(pid) - cpu_before
                good, slow = await both.received()
                deadline = time.monotonic() + _LIMIT_S
                while len(good.numbers) < sent.stored:
                    if time.monotonic() > deadline:
                        raise ServiceFailed(f"the good receiver has {len(good.numbers)} of {sent.stored} events")
                    await asyncio.sleep(_POLL_S)
                    good, slow = await both.received()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        ordered = sorted(good.lag_s)
        warm = memory[int(_WARM_S) :] or memory
        run.add(
            what="events",
            events=sent.stored,
            seconds=seconds,
            good=len(good.numbers),
            repeated=good.repeated,
            slow=len(slow.numbers),
            lag_p50_s=percentile(ordered, 50),
            lag_p99_s=percentile(ordered, 99),
            lag_max_s=ordered[-1],
            cores=used_s / seconds,
            warm_bytes=warm[0],
            last_bytes=warm[-1],
            most_bytes=max(warm),
        )

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """One row for each run."""
        return [{name: value for name, value in point.items() if name != "what"} for point in record["points"]]

    def table(self, record: Record) -> Table:
        headings = (
            "events/s | seconds | good receiver: lag p50 | p99 | most | slow receiver: took | cores | "
            "memory at 5 s | at the end | most"
        )
        return Table(
            headings=headings,
            rows=[
                [
                    f"{row['events'] / row['seconds']:,.0f}",
                    f"{row['seconds']:.0f}",
                    *(f"{1000 * row[f'lag_{name}_s']:,.0f} ms" for name in ("p50", "p99", "max")),
                    f"{row['slow']:,} of {row['events']:,}",
                    f"{row['cores']:.2f}",
                    *(f"{row[f'{name}_bytes'] / 1e6:.0f} MB" for name in ("warm", "last", "most")),
                ]
                for row in self.rows(record)
            ],
        )


async def _watch(pid: int, memory: list[int]) -> None:
    while True:
        memory.append(resident_bytes(pid))
        await asyncio.sleep(1.0)


SINKS = SinksBenchmark()
