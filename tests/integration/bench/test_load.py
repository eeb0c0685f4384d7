"""Both loops against servers on real sockets: what is counted, what is sent when, and what a bad server costs."""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from experiments.bench.http import Origin, encode_http
from experiments.bench.load import (
    Closed,
    Level,
    Load,
    LoadPlan,
    Open,
    Record,
    loop_factory,
    measure,
    run_closed,
    run_open,
)
from experiments.bench.summary import Sample
from experiments.bench.targets import Target, judge_status
from tierkit.testing import listening, wait_for

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


class RawServer:
    """Answers each request with `answer`, once the gate is open; counts what it holds."""

    def __init__(self, answer: bytes = ANSWER) -> None:
        self.answer = answer
        self.gate = asyncio.Event()
        self.gate.set()
        self.received = 0
        self.held = 0
        self.most_held = 0
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while await reader.readuntil(b"\r\n\r\n"):
            self.received += 1
            self.held += 1
            self.most_held = max(self.most_held, self.held)
            await self.gate.wait()
            self.held -= 1
            writer.write(self.answer)


@asynccontextmanager
async def raw_target(server: RawServer) -> AsyncIterator[Target]:
    async with listening(server.handle) as url:
        origin = Origin.parse(url)
        yield Target(
            origin=origin, name="raw", requests=[encode_http("GET", origin, "/")], images=1, judge=judge_status
        )


QUICK = LoadPlan(window_s=0.3, warmup_s=0.05, timeout_s=5.0)

Loop = Callable[[Target, Record, asyncio.Event], Coroutine[None, None, None]]


async def measured(target: Target, load: Load, plan: LoadPlan) -> Level:
    level = await measure(target, load, plan, asyncio.Event())
    assert level is not None  # nobody stops it
    return level


@asynccontextmanager
async def under_load(server: RawServer, run: Loop) -> AsyncIterator[list[Sample]]:
    """What the load has recorded so far; at the end it halts, and waits for the answers."""
    samples: list[Sample] = []
    halt = asyncio.Event()
    async with raw_target(server) as target:
        load = asyncio.create_task(run(target, samples.append, halt))
        yield samples
        halt.set()
        await load


def open_loop(schedule: Iterator[float], connections: int) -> Loop:
    return lambda *given: run_open(given[0], schedule, *given[1:], timeout_s=5.0, max_connections=connections)


async def test_counts_of_the_load_and_of_the_server_agree() -> None:
    server = RawServer()
    async with raw_target(server) as target:
        level = await measured(replace(target, images=5), Closed(3), QUICK)
    assert {sample.outcome for sample in level.samples} == {"ok"}
    assert server.received == len(level.samples)
    assert level.summary.answered == sum(sample.done in level.window for sample in level.samples) > 0
    assert level.summary.images_per_s == pytest.approx(5 * level.summary.answered / level.window.length_s)


async def test_a_closed_loop_has_just_so_many_requests_under_way() -> None:
    server = RawServer()
    server.gate.clear()
    async with under_load(
        server, lambda target, record, halt: run_closed(target, 4, record, halt, timeout_s=5.0)
    ) as samples:
        await wait_for(lambda: server.held == 4)
        server.gate.set()
        await wait_for(lambda: len(samples) > 100)
    assert server.most_held == 4
    assert server.connections == 4
    assert len(samples) == server.received


async def test_an_open_loop_sends_when_requests_are_due_though_no_answer_comes() -> None:
    server = RawServer()
    server.gate.clear()
    start = time.perf_counter()
    schedule = iter([number * 0.01 for number in range(20)] + [1e9])
    async with under_load(server, open_loop(schedule, 64)) as samples:
        await wait_for(lambda: server.held == 20)
        assert samples == []
        server.gate.set()
    assert server.connections == 20
    due = sorted(sample.due for sample in samples)
    assert due[0] >= start
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    assert gaps == pytest.approx([0.01] * 19, abs=1e-9)  # due when the plan says, not when the loop had time
    assert all(sample.sent >= sample.due for sample in samples)


async def test_waiting_for_a_connection_is_part_of_the_latency() -> None:
    server = RawServer()
    server.gate.clear()
    async with under_load(server, open_loop(iter([0.0, 0.001, 0.002, 1e9]), 1)) as samples:
        await wait_for(lambda: server.held == 1)
        opened = time.perf_counter()
        server.gate.set()
        await wait_for(lambda: len(samples) == 3)
    assert server.connections == 1
    assert [sample.sent < opened for sample in samples] == [True, False, False]
    assert all(sample.done - sample.due > opened - sample.due > 0 for sample in samples)


async def test_a_poisson_load_offers_the_rate_that_was_asked_for() -> None:
    async with raw_target(RawServer()) as target:
        level = await measured(target, Open(200.0), LoadPlan(window_s=1.0, warmup_s=0.1))
    # Arrivals of 200/s +- 4 standard deviations of a Poisson count; on a busy machine the window is longer.
    expected = 200 * level.window.length_s
    assert abs(level.summary.requests - expected) < 4 * math.sqrt(expected)


async def test_refusals_are_errors_by_status_and_no_latency() -> None:
    async with raw_target(RawServer(BUSY)) as target:
        level = await measured(target, Closed(2), QUICK)
    assert level.summary.errors == {"503": level.summary.requests}
    assert level.summary.requests > 0
    assert level.summary.latency_ms["p50"] is None


async def test_a_server_that_hangs_up_is_counted_and_not_hammered() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER[:20])

    async with listening(hang_up) as url:
        origin = Origin.parse(url)
        target = Target(
            origin=origin, name="raw", requests=[encode_http("GET", origin, "/")], images=1, judge=judge_status
        )
        level = await measured(target, Closed(2), QUICK)
    assert set(level.summary.errors) == {"connection"}
    # Two clients with a pause of 50 ms each: some 14 tries in 0.35 s.
    assert 2 <= len(level.samples) <= 2 * (level.window.length_s + 0.1) / 0.05 + 2


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"])
async def test_what_is_no_http_is_a_broken_connection(answer: bytes) -> None:
    async with raw_target(RawServer(answer)) as target:
        level = await measured(target, Closed(1), QUICK)
    assert set(level.summary.errors) == {"connection"}


async def test_silence_ends_with_the_timeout_and_a_new_connection() -> None:
    server = RawServer()
    server.gate.clear()
    async with raw_target(server) as target:
        plan = LoadPlan(window_s=0.5, warmup_s=0.0, timeout_s=0.1)
        level = await measured(target, Closed(1), plan)
    assert set(level.summary.errors) == {"timeout"}
    assert server.connections == len(level.samples) >= 2
    assert all(sample.done - sample.due >= 0.09 for sample in level.samples)


@pytest.mark.parametrize("factory", [None, loop_factory()], ids=["asyncio", "the fastest"])
def test_a_connection_that_is_made_too_late_is_a_timeout(
    factory: Callable[[], asyncio.AbstractEventLoop] | None,
) -> None:
    outcomes: set[str] = set()

    async def run() -> None:
        async with raw_target(RawServer()) as target:
            # From too short for anything to long enough for the connection, but not for the answer.
            for step in range(50):
                halt = asyncio.Event()
                left = iter(range(10))

                def record(sample: Sample, halt: asyncio.Event = halt, left: Iterator[int] = left) -> None:
                    outcomes.add(sample.outcome)
                    if next(left, None) is None:
                        halt.set()

                await run_closed(target, 2, record, halt, timeout_s=step * 2e-5)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())
    assert {"timeout"} <= outcomes <= {"timeout", "ok"}


async def test_answers_on_a_connection_that_closes_each_time() -> None:
    async with raw_target(RawServer(ANSWER.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))) as target:
        level = await measured(target, Closed(1), QUICK)
    assert level.summary.errors == {}
    assert level.summary.answered > 1


async def test_stopping_keeps_what_was_measured() -> None:
    server = RawServer()
    stop = asyncio.Event()
    async with raw_target(server) as target:
        plan = LoadPlan(window_s=30.0, warmup_s=0.0)
        running = asyncio.create_task(measure(target, Closed(1), plan, stop))
        await wait_for(lambda: server.received > 20)
        stop.set()
        level = await running
    assert level is not None
    assert level.interrupted
    assert level.summary.answered >= 15
    assert level.window.length_s < 10.0


async def test_stopping_in_the_warm_up_leaves_nothing_to_report() -> None:
    server = RawServer()
    stop = asyncio.Event()
    async with raw_target(server) as target:
        running = asyncio.create_task(measure(target, Closed(1), LoadPlan(warmup_s=30.0), stop))
        await wait_for(lambda: server.received > 5)
        stop.set()
        assert await running is None
