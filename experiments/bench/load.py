"""The two ways to put load on a server.

A *closed loop* keeps a number of requests in progress: the next one is sent when one is answered, so a slow server
slows its clients. An *open loop* sends at given times, independent of the server, as independent users would. It counts
latency from the time at which a request was due. So a stall of a second counts for every request that waited, and not
only for the first one (coordinated omission).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass

from experiments.bench.http import Connection, ConnectionBroken
from experiments.bench.schedule import arrivals
from experiments.bench.summary import Sample, Summary, Window, summarise
from experiments.bench.targets import Target
from experiments.emulation.waiting import precise_timer

__all__ = [
    "CONNECTION",
    "MAX_CONCURRENCY",
    "MAX_RATE",
    "TIMEOUT",
    "Closed",
    "Level",
    "Load",
    "LoadPlan",
    "Open",
    "Record",
    "loop_factory",
    "measure",
    "run_closed",
    "run_open",
]

MAX_CONCURRENCY = 20_000
MAX_RATE = 100_000.0
"""Requests per second of an open loop, several times what one core can send. Those that are due wait in memory."""

Record = Callable[[Sample], None]
"""Called with each request that has ended."""

TIMEOUT = "timeout"
CONNECTION = "connection"
"""Outcomes of requests that were never answered."""

_RECONNECT_S = 0.05
"""Pause of a worker after a broken connection: a dead server must not turn the load into a busy loop."""
_DRAIN_SLACK_S = 1.0


@dataclass(frozen=True, slots=True)
class Closed:
    """A constant number of requests in flight."""

    concurrency: int

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True)
class Open:
    """A number of requests per second, each sent when it is due."""

    rate_per_s: float

    def __str__(self) -> str:
        return f"{self.rate_per_s:g} requests/s"


Load = Closed | Open


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Lengths and limits of the measurement of a level."""

    window_s: float = 5.0
    warmup_s: float = 0.5
    """Load before the window, which no figure counts."""
    timeout_s: float = 30.0
    """Budget of each request, from when it was due."""
    max_connections: int = 512
    """Connections of an open loop; beyond, requests wait in the load generator, which counts as latency."""
    deadline_s: float = math.inf
    """Answers within this time count as goodput."""
    seed: int = 0
    """Seed of the arrival times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Measurement of one level."""

    load: Load
    summary: Summary
    generator_cpu: float
    """Share of one core that the load generator used in the window; near 1, it measured itself."""
    interrupted: bool
    """Stopped before the window was over."""
    samples: Sequence[Sample]
    window: Window


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The fastest event loop of this system; None stands for asyncio's own."""
    try:
        import uvloop
    except ImportError:  # it does not exist for every system
        return None
    return uvloop.new_event_loop


async def measure(target: Target, load: Load, plan: LoadPlan, stop: asyncio.Event | None = None) -> Level | None:
    """Run one level: warm up, then measure a window.

    Setting `stop` ends the level early and keeps the samples so far. Return None if its window had not begun.
    """
    stop = stop or asyncio.Event()
    samples: list[Sample] = []
    halt = asyncio.Event()
    driver = _drive(target, load, plan, samples.append, halt)
    async with _background(driver) as wait:
        await wait(plan.warmup_s, stop)
        if stop.is_set():
            return None
        cpu_s, begin = time.process_time(), time.perf_counter()
        await wait(plan.window_s, stop)
        window = Window(begin, time.perf_counter())
        cpu_s = time.process_time() - cpu_s
        # Requests in flight are answered or time out: none is left out because it was slow, and the next level begins
        # with a quiet server.
        halt.set()
        await wait(plan.timeout_s + _DRAIN_SLACK_S, stop)
    open_loop = isinstance(load, Open)
    return Level(
        load=load,
        summary=summarise(samples, window, images=target.images, open_loop=open_loop, deadline_s=plan.deadline_s),
        generator_cpu=cpu_s / window.length_s,
        interrupted=stop.is_set(),
        samples=samples,
        window=window,
    )


def _drive(
    target: Target, load: Load, plan: LoadPlan, record: Record, halt: asyncio.Event
) -> Coroutine[None, None, None]:
    if isinstance(load, Closed):
        return run_closed(target, load.concurrency, record, halt, timeout_s=plan.timeout_s)
    due = arrivals(load.rate_per_s, seed=plan.seed)
    return run_open(target, due, record, halt, timeout_s=plan.timeout_s, max_connections=plan.max_connections)


@contextlib.asynccontextmanager
async def _background(work: Coroutine[None, None, None]) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Run `work` meanwhile, and cancel the rest of it at the end.

    Yields `wait(seconds, event)`, which returns when the time is over, the event is set or the work has ended, and
    raises the error of the work. The garbage collector is off: the objects of a request hold no cycles, and a pass over
    all samples would stop the load for milliseconds.
    """
    driver = asyncio.create_task(work, name="load")

    async def wait(seconds: float, event: asyncio.Event) -> None:
        end = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({driver, end}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
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


async def run_closed(
    target: Target, concurrency: int, record: Record, halt: asyncio.Event, *, timeout_s: float
) -> None:
    """Keep `concurrency` requests under way, one connection each, until `halt` is set; then wait for their answers."""
    requests = itertools.cycle(target.requests)

    async def work() -> None:
        async with Connection(target.origin) as connection:
            while not halt.is_set():
                due = time.perf_counter()
                sample = await _shoot(connection, target, next(requests), due, timeout_s)
                record(sample)
                if sample.outcome == CONNECTION:
                    await _pause(halt)

    async with asyncio.TaskGroup() as workers:
        for number in range(concurrency):
            workers.create_task(work(), name=f"client {number}")


async def run_open(
    target: Target,
    schedule: Iterator[float],
    record: Record,
    halt: asyncio.Event,
    *,
    timeout_s: float,
    max_connections: int,
) -> None:
    """Send a request at each time of `schedule` (seconds from now) until `halt` is set, then wait for those sent.

    Each request has `timeout_s` from when it was due, so at most rate x timeout are waiting at any time. When all
    `max_connections` are busy, requests wait here for the next free one; that time is part of their latency.
    """
    requests = itertools.cycle(target.requests)
    waiting: deque[float] = deque()
    idle: list[asyncio.Future[None]] = []
    workers = 0
    start = time.perf_counter()
    following = start + next(schedule)

    async def work() -> None:
        async with Connection(target.origin) as connection:
            while True:
                while waiting:
                    due = waiting.popleft()
                    left_s = max(0.0, due + timeout_s - time.perf_counter())
                    record(await _shoot(connection, target, next(requests), due, left_s))
                if halt.is_set():
                    return
                woken = asyncio.get_running_loop().create_future()
                idle.append(woken)
                await woken

    def engage() -> None:
        """Have a worker take the request that has just become due."""
        nonlocal workers
        while idle:
            # The last one to become idle: its connection is the least likely to have been closed by the server.
            if not (worker := idle.pop()).done():
                worker.set_result(None)
                return
        if workers < max_connections:
            workers += 1
            group.create_task(work(), name=f"client {workers}")

    def tick() -> None:
        nonlocal following
        now = time.perf_counter()
        while following <= now:
            waiting.append(following)
            following = start + next(schedule)
            engage()
        timer.arm(following)

    async with asyncio.TaskGroup() as group:
        with precise_timer(tick) as timer:
            timer.arm(following)
            await halt.wait()
        for worker in idle:
            if not worker.done():
                worker.set_result(None)


async def _shoot(connection: Connection, target: Target, request: bytes, due: float, timeout_s: float) -> Sample:
    first = 0.0
    sent = time.perf_counter()
    try:
        if not connection.connected:
            await connection.connect(timeout_s)
            sent = time.perf_counter()
        reply = await connection.request(request, timeout_s=timeout_s)
        first = reply.first_at
        outcome = target.judge(reply)
    except TimeoutError:
        outcome = TIMEOUT
    except ConnectionBroken:
        outcome = CONNECTION
    done = time.perf_counter()
    return Sample(due, sent, first or done, done, outcome)


async def _pause(halt: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_RECONNECT_S):
            await halt.wait()
