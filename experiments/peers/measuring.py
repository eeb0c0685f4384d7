"""One start of one contender: cold start, right answers, every row between two runs of the bare loop, memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.http import Connection, ConnectionBroken, Origin, Reply
from experiments.bench.levels import Closed, Level, Plan, measure
from experiments.bench.report import error_text
from experiments.bench.sweep import loop_factory
from experiments.bench.targets import Target
from experiments.peers.bare import Bare, BareLoop
from experiments.peers.contenders import Contender
from experiments.peers.processes import ServerProcesses, on_core, running
from experiments.peers.requests import check_answer, make_target, random_images
from experiments.peers.rows import Measurement, Network, Row, RowFigures, Timing
from tierkit.errors import SetupError
from tierkit.http.address import free_port
from tierkit.inference.model import Array

__all__ = ["Cores", "Serving", "environment_of", "measure_once", "serving"]

_START_S = 90.0
_POLL_S = 0.02
_REQUEST_S = 20.0
_LOOPBACK = "127.0.0.1"
_FIRST_BATCH = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Which core serves and which one sends."""

    server: int
    load: int


def environment_of(network: Network, port: int) -> dict[str, str]:
    """What `servers/common.py` reads."""
    return {
        "PEER_MODEL": str(Path(network.folder, network.file)),
        "PEER_NAME": network.name,
        "PEER_SHAPE": ",".join(map(str, network.shape)),
        "PEER_PORT": str(port),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A contender that runs and gives right answers."""

    processes: ServerProcesses
    origin: Origin
    cold_start_s: float
    """From the start of its process to its first answer."""


@contextmanager
def serving(
    contender: Contender,
    python: Path,
    network: Network,
    *,
    cores: Cores,
    runner: asyncio.Runner,
    expected: Callable[[Array], Array],
) -> Iterator[Serving]:
    """Start a contender; on exit it is gone.

    Args:
        runner: to ask it with.
        expected: the bare session's logits for a batch.

    Raises:
        SetupError: it does not start, or gives no right answer.
    """
    port = free_port()
    origin = Origin(_LOOPBACK, port)
    fill = {"port": str(port), "model": network.name, "weights": network.folder}
    command = [str(python), *(word.format(**fill) for word in contender.command)]
    started = time.perf_counter()
    environment = {**environment_of(network, port), **contender.environment}
    with running(command, environment, core=cores.server) as processes:
        images = random_images(_FIRST_BATCH, network.shape)
        first = make_target(origin, contender.protocol, network.name, images)
        reply = runner.run(_first_answer(first, processes))
        cold_start_s = time.perf_counter() - started
        check_answer(contender.protocol, reply, expected(images[0]))
        yield Serving(processes=processes, origin=origin, cold_start_s=cold_start_s)


def measure_once(
    contender: Contender,
    python: Path,
    network: Network,
    rows: Sequence[Row],
    timing: Timing,
    *,
    cores: Cores,
    bare: BareLoop,
    expected: Callable[[Array], Array],
    announce: Callable[[str], None],
) -> Measurement:
    """Start the contender, measure its rows, stop it.

    Args:
        expected: the bare session's logits for a batch.
        announce: told what is being done.

    Raises:
        SetupError: it does not start, or gives no right answer.
    """
    with on_core(cores.load), asyncio.Runner(loop_factory=loop_factory()) as runner:
        announce("starts")
        with serving(contender, python, network, cores=cores, runner=runner, expected=expected) as served:
            server, origin = served.processes, served.origin
            result = Measurement(cold_start_s=served.cold_start_s)
            for row in rows:
                announce(f"{row.batch} images, concurrency {row.concurrency}")
                target = make_target(origin, contender.protocol, network.name, random_images(row.batch, network.shape))
                before = bare.measure(row.batch, timing.bare_s)
                cpu_s = server.cpu_s()
                level = runner.run(_measure(target, row, timing))
                cpu_s = server.cpu_s() - cpu_s
                after = bare.measure(row.batch, timing.bare_s)
                if level.summary.errors or not level.summary.answered:
                    result.failures[row.key] = f"not answered: {error_text(level.summary.errors) or 'nothing came'}"
                else:
                    result.rows[row.key] = _figures(level, cpu_s / (len(level.samples) * row.batch), before, after)
            result.peak_memory_bytes = server.peak_memory_bytes()
    return result


async def _first_answer(target: Target, server: ServerProcesses) -> Reply:
    """Ask until the server answers with success.

    Raises:
        SetupError: it has ended, or takes too long; the message holds what it wrote.
    """
    deadline = time.monotonic() + _START_S
    said = "nothing listens"
    while True:
        if not server.alive:
            raise SetupError(f"it ended while it started: {server.log_tail()}")
        if time.monotonic() > deadline:
            raise SetupError(f"no answer within {_START_S:g} s ({said}): {server.log_tail()}")
        async with Connection(target.origin) as connection:
            try:
                reply = await connection.request(target.requests[0], timeout_s=_REQUEST_S)
            except (ConnectionBroken, TimeoutError) as exc:
                said = str(exc) or "timeout"
            else:
                if reply.status == 200:
                    return reply
                said = f"{reply.status}: {reply.body[:200].decode(errors='replace')}"
        await asyncio.sleep(_POLL_S)


async def _measure(target: Target, row: Row, timing: Timing) -> Level:
    plan = Plan(window_s=timing.window_s, warmup_s=timing.warmup_s, timeout_s=_REQUEST_S)
    level = await measure(target, Closed(row.concurrency), plan, asyncio.Event())
    assert level is not None  # nobody sets the event that stops it
    return level


def _figures(level: Level, cpu_s_per_image: float, before: Bare, after: Bare) -> RowFigures:
    summary, server = level.summary, level.server
    p50_ms, p99_ms = summary.latency_ms["p50"], summary.latency_ms["p99"]
    assert p50_ms is not None  # only for rows with answers
    assert p99_ms is not None
    return RowFigures(
        images_per_s=summary.images_per_s,
        bare_images_per_s=(before.images_per_s + after.images_per_s) / 2,
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        bare_batch_ms=(before.batch_ms + after.batch_ms) / 2,
        compute_ms=server.compute_infer_ms if server else None,
        batch_images=server.batch_images if server else None,
        cpu_us_per_image=cpu_s_per_image * 1e6,
        generator_cpu=level.generator_cpu,
    )
