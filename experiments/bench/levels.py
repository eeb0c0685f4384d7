"""One level of load: warm up, measure a window, look at the server's own counters before and after."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

from experiments.bench.http import Connection, ConnectionBroken, encode_http
from experiments.bench.load import Record, run_closed, run_open
from experiments.bench.schedule import Distribution, arrivals
from experiments.bench.server_stats import Counters, ServerTimes, read_counters, server_times
from experiments.bench.summary import Sample, Summary, Window, summarise
from experiments.bench.targets import Target

__all__ = ["MAX_CONNECTIONS", "MAX_RATE", "Closed", "Level", "Load", "Open", "Plan", "measure"]

MAX_CONNECTIONS = 20_000
MAX_RATE = 100_000.0
"""Requests a second of an open loop, several times what one core can send. Those that are due wait in memory."""

_STATS_S = 2.0
_DRAIN_SLACK_S = 1.0


@dataclass(frozen=True, slots=True)
class Closed:
    """So many requests under way at any time."""

    concurrency: int

    @property
    def number(self) -> float:
        return self.concurrency

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True)
class Open:
    """So many requests a second, sent when they are due."""

    rate_per_s: float
    distribution: Distribution = "poisson"

    @property
    def number(self) -> float:
        return self.rate_per_s

    def __str__(self) -> str:
        return f"{self.rate_per_s:g} requests/s"


Load = Closed | Open


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How each level is measured."""

    window_s: float = 5.0
    warmup_s: float = 0.5
    """Load before the window that no figure counts."""
    max_requests: int | None = None
    """Ends the window early, when this many requests have finished in it."""
    timeout_s: float = 30.0
    """For each request, from when it was due."""
    max_connections: int = 512
    """Of an open loop; beyond, requests wait in the load generator, and that counts as latency."""
    deadline_s: float = math.inf
    """What goodput counts as in time."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What was measured at one level."""

    load: Load
    summary: Summary
    server: ServerTimes | None
    """None where the server keeps no statistics."""
    generator_cpu: float
    """Share of one core that the load generator used in the window; near 1, it measured itself."""
    interrupted: bool
    """Stopped before the window was over."""
    samples: Sequence[Sample]
    window: Window


async def measure(target: Target, load: Load, plan: Plan, stop: asyncio.Event) -> Level | None:
    """Run one level. Setting `stop` ends it early with what there is; None if that was before its window began."""
    samples: list[Sample] = []
    halt, enough = asyncio.Event(), asyncio.Event()
    limit = math.inf

    def record(sample: Sample) -> None:
        samples.append(sample)
        if len(samples) >= limit:
            enough.set()

    async with _background(_drive(target, load, plan, record, halt)) as wait:
        await wait(plan.warmup_s, stop)
        if stop.is_set():
            return None
        before = await _counters(target)
        if plan.max_requests is not None:
            limit = len(samples) + plan.max_requests
        cpu_s, begin = time.process_time(), time.perf_counter()
        await wait(plan.window_s, stop, enough)
        window = Window(begin, time.perf_counter())
        cpu_s = time.process_time() - cpu_s
        after = await _counters(target)
        # What is under way is answered, or times out: no request of the window is left out because it was slow, and
        # the next level begins with a quiet server.
        halt.set()
        await wait(plan.timeout_s + _DRAIN_SLACK_S, stop)
    summary = summarise(
        samples,
        window,
        images=target.images,
        open_loop=isinstance(load, Open),
        deadline_s=plan.deadline_s,
    )
    return Level(
        load=load,
        summary=summary,
        server=server_times(before, after) if before and after else None,
        generator_cpu=cpu_s / window.length_s,
        interrupted=stop.is_set(),
        samples=samples,
        window=window,
    )


def _drive(target: Target, load: Load, plan: Plan, record: Record, halt: asyncio.Event) -> Coroutine[None, None, None]:
    if isinstance(load, Closed):
        return run_closed(target, load.concurrency, record, halt, timeout_s=plan.timeout_s)
    return run_open(
        target,
        arrivals(load.rate_per_s, load.distribution, seed=plan.seed),
        record,
        halt,
        timeout_s=plan.timeout_s,
        max_connections=plan.max_connections,
    )


@contextlib.asynccontextmanager
async def _background(work: Coroutine[None, None, None]) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Run `work` meanwhile, and cancel what is left of it. Yields `wait(seconds, *events)`, which returns when the
    time is over, an event is set or the work has ended, and raises what the work ended with.

    The garbage collector is off in here: the objects of a request hold no cycles, and looking through all the samples
    for some would stop the load for milliseconds.
    """
    driver = asyncio.create_task(work, name="load")

    async def wait(seconds: float, *events: asyncio.Event) -> None:
        ends = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait({driver, *ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        if driver.done():
            await driver

    gc.disable()
    try:
        yield wait
    finally:
        gc.enable()
        driver.cancel()
        await asyncio.gather(driver, return_exceptions=True)


async def _counters(target: Target) -> Counters | None:
    if target.stats_path is None:
        return None
    async with Connection(target.origin) as connection:
        try:
            reply = await connection.request(encode_http("GET", target.origin, target.stats_path), timeout_s=_STATS_S)
        except (TimeoutError, ConnectionBroken):
            return None  # of no matter for what the clients see
    return read_counters(reply.body) if reply.status == 200 else None
