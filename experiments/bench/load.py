"""The two ways to put load on a server.

A *closed loop* keeps a number of requests under way: the next one is sent when one is answered, so a slow server slows
its clients. An *open loop* sends at given times, independent of the server, as independent users would, and counts
latency from the time at which a request was due: a server that stalls for a second is then charged for every request
that waited, and not only for the one that saw it (coordinated omission).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

from experiments.bench.http import Connection, ConnectionBroken
from experiments.bench.summary import Sample
from experiments.bench.targets import Target
from experiments.emulation.waiting import precise_timer

__all__ = ["CONNECTION", "TIMEOUT", "Record", "run_closed", "run_open"]

Record = Callable[[Sample], None]
"""Called with each request that has ended."""

TIMEOUT = "timeout"
CONNECTION = "connection"
"""Outcomes of requests that were never answered."""

_RECONNECT_S = 0.05
"""Pause of a worker after a broken connection: a dead server must not turn the load into a busy loop."""


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
