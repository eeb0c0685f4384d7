"""What durability costs the scheduler: tasks per second with and without it, on nodes that answer at once.

    terrace experiment durability --tasks 1000 --repeats 5 --out runs

The scheduler runs in this process, with its real parts: uploads, input files, dispatch over HTTP, checks of the
answers, group commit into SQLite (WAL, every commit synced to the disk). The nodes are null nodes: sockets in a second
process that read a task of 50 images and answer with ready-made lines, so all that is measured is the scheduler. A run
with durability counts from the stored submission to the durable final state; one without sends the same tasks and keeps
nothing of the answers but their number. The two take turns, since the speed of a machine drifts.

Processor time is that of this process with all its threads; a second process on a busy machine does not change it much.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import uvicorn

from experiments.record import RunRecord, made_folder, spread
from models.manifest import load_manifest
from scheduler.dispatch.work import ActiveJob, ActiveTask, Answer, AttemptReport
from scheduler.jobs.policy import JobPolicy
from scheduler.jobs.service import Scheduler
from scheduler.runtime import open_scheduler
from scheduler.settings import SchedulerSettings
from tierkit.commandline import Json
from tierkit.errors import ServiceFailed
from tierkit.http.lifecycle import Lifecycle
from tierkit.types import Scheme, Tier
from tierkit.wire.events import CoarseEvent, FineEvent, written
from tierkit.wire.messages import UPSTREAM_HEADER, Heartbeat, ModelOffer, Registration
from tierkit.wire.oip import InferRequest, Tensor, encode_request

__all__ = ["Speed", "measure", "run"]

BATCH = 50
_DEADLINE_S = 600.0
_POLL_S = 0.002
_TASK = re.compile(rb"^POST /v1/tasks/(\S+) ")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_UPSTREAM = UPSTREAM_HEADER.lower().encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One run."""

    scheme: Scheme
    durable: bool
    tasks_per_s: float
    cpu_ms_per_task: float


# --- null nodes -----------------------------------------------------------------------------------------------------


def _null_nodes(pipe: Connection, count: int) -> None:
    """The second process: so many servers; their ports go through the pipe, whose end is theirs."""

    async def run() -> None:
        servers = [await asyncio.start_server(_Null(number).serve, "127.0.0.1", 0) for number in range(count)]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(pipe.recv)

    with _runner() as runner:
        runner.run(run())


class _Null:
    """An end node that answers a task with class 0 for all images."""

    def __init__(self, number: int) -> None:
        zeros, sure = (0,) * BATCH, (0.123456789,) * BATCH
        coarse = CoarseEvent(
            task_id="TASK",
            node_id=f"end-{number}",
            model="null",
            labels=zeros,
            confidences=sure,
            queue_ms=0.0,
            compute_ms=0.0,
        )
        fine = FineEvent(
            task_id="TASK",
            node_id="edge-0",
            tier=Tier.EDGE,
            model="null",
            labels=zeros,
            confidences=sure,
            coarse_labels=zeros,
            coarse_confidences=sure,
            round_trip_ms=0.0,
        )
        self._coarse, self._fine = (written(event) + b"\n" for event in (coarse, fine))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if (length := _LENGTH.search(head)) is not None:
                    await reader.readexactly(int(length[1]))
                body = b""
                if (task := _TASK.match(head)) is not None:
                    body = self._coarse + (self._fine if _UPSTREAM in head.lower() else b"")
                    body = body.replace(b"TASK", task[1])
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(body), body)
                )
                await writer.drain()
        writer.close()


# --- the scheduler --------------------------------------------------------------------------------------------------


class _Counting:
    """A sink that keeps nothing."""

    def __init__(self) -> None:
        self.answers = 0

    def started(self) -> None:
        pass

    def answer(self, answer: Answer) -> None:
        self.answers += 1

    def withdrawn(self, answer: Answer) -> None:
        pass

    def attempted(self, report: AttemptReport) -> None:
        pass

    async def ended(self, state: str | None, reason: str) -> None:
        pass


@asynccontextmanager
async def _fleet(scheduler: Scheduler, ports: list[int]) -> AsyncIterator[None]:
    """Null end nodes, and an edge node in whose name they answer, alive until the end of the block."""
    nodes = [(f"end-{number}", Tier.END, port) for number, port in enumerate(ports)]
    nodes.append(("edge-0", Tier.EDGE, ports[0]))
    for node_id, tier, port in nodes:
        offer = ModelOffer(name="null", sha256="0" * 64, ms_per_image=0.001)
        registration = Registration(
            node_id=node_id,
            incarnation="12345678",
            tier=tier,
            url=f"http://127.0.0.1:{port}",
            models=(offer,),
            version="0",
        )
        scheduler.devices.register(registration, time.monotonic())

    async def beat() -> None:
        load = Heartbeat(incarnation="12345678", in_flight=0, queued_images=0, images_done=0)
        while True:
            for node_id, _, _ in nodes:
                scheduler.devices.heartbeat(node_id, load, time.monotonic())
            await asyncio.sleep(scheduler.settings.heartbeat_s)

    beating = asyncio.create_task(beat(), name="heartbeats")
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _durable(scheduler: Scheduler, scheme: Scheme, pixels: Any) -> tuple[float, float]:
    """Seconds and processor seconds from the stored submission of a job to its durable end."""
    chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", pixels),)))

    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield bytes(chunk)

    small = {name.lower(): value for name, value in headers.items()}
    job, _ = await scheduler.submit(
        small, [("scheme", scheme)], body(), until_gone=contextlib.nullcontext(), idempotency_key=None
    )
    taken = await _taken(scheduler, job.id)
    view = await scheduler.view(job.id)
    if view.answered_coarse != len(pixels) or view.fallback or view.failed_images:
        raise ServiceFailed(
            f"the job is {view.state} with {view.answered_coarse} of {len(pixels)} images: {view.reason}"
        )
    return taken


async def _volatile(scheduler: Scheduler, scheme: Scheme, pixels: Any) -> tuple[float, float]:
    """The same without a database: answers are checked, counted and forgotten."""
    sink = _Counting()
    job = ActiveJob(
        job_id="volatile",
        policy=JobPolicy(scheme=scheme, deadline_s=_DEADLINE_S, task_deadline_s=_DEADLINE_S),
        pixels=pixels,
        content="",
        tasks=[
            ActiveTask(index=index, first_image=first, images=BATCH)
            for index, first in enumerate(range(0, len(pixels), BATCH))
        ],
        sink=sink,
        deadline=time.monotonic() + _DEADLINE_S,
    )
    scheduler.dispatcher.add(job)
    taken = await _taken(scheduler, job.job_id)
    expected = len(pixels) // BATCH * (1 if scheme is Scheme.END else 2)
    if sink.answers != expected:
        raise ServiceFailed(f"{sink.answers} answers instead of {expected}")
    return taken


async def _taken(scheduler: Scheduler, job_id: str) -> tuple[float, float]:
    """Seconds and processor seconds until a job is over."""
    began, cpu_began = time.perf_counter(), time.process_time()
    while scheduler.dispatcher.job(job_id) is not None:  # noqa: ASYNC110  # being told would cost the scheduler more
        await asyncio.sleep(_POLL_S)
    return time.perf_counter() - began, time.process_time() - cpu_began


async def _measure(ports: list[int], tasks: int, repeats: int, schemes: list[Scheme], folder: Path) -> list[Speed]:
    speeds: list[Speed] = []
    settings = SchedulerSettings(state=folder, n_map=1)
    shape = load_manifest().models[0].input_shape
    pixels = np.zeros((tasks * BATCH, *shape), np.uint8)
    async with open_scheduler(settings, Lifecycle()) as scheduler, _fleet(scheduler, ports):
        for repeat, scheme, durable in product(range(repeats + 1), schemes, (True, False)):
            seconds, cpu_s = await (_durable if durable else _volatile)(scheduler, scheme, pixels)
            if repeat == 0:
                continue  # the first of each opens connections and compiles statements
            speeds.append(
                Speed(scheme=scheme, durable=durable, tasks_per_s=tasks / seconds, cpu_ms_per_task=1000 * cpu_s / tasks)
            )
    return speeds


def _runner() -> asyncio.Runner:
    """An event loop as the services have it."""
    return asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory())


def measure(*, tasks: int, repeats: int, nodes: int, schemes: list[Scheme]) -> list[Speed]:
    """Each run, after one of each kind that does not count."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_null_nodes, args=(theirs, nodes), daemon=True)
    process.start()
    theirs.close()
    try:
        ports = ours.recv()
        with tempfile.TemporaryDirectory(prefix="terrace-durability-") as folder, _runner() as runner:
            return runner.run(_measure(ports, tasks, repeats, schemes, Path(folder)))
    finally:
        ours.close()
        process.join()


def run(
    tasks: Annotated[int, typer.Option(min=1, max=10_000, help="Tasks of each run, 50 images each.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each kind.")] = 5,
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="Null end nodes.")] = 8,
    out: Annotated[Path, typer.Option(help="Folder for the record.", file_okay=False)] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Measure how many tasks per second the scheduler dispatches, with and without durability."""
    made_folder(out)
    schemes = [Scheme.END, Scheme.END_EDGE]
    speeds = measure(tasks=tasks, repeats=repeats, nodes=nodes, schemes=schemes)
    samples: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    for scheme, durable in product(schemes, (True, False)):
        runs = [speed for speed in speeds if (speed.scheme, speed.durable) == (scheme, durable)]
        name = f"{scheme}_{'durable' if durable else 'volatile'}"
        samples[f"{name}_tasks_per_s"] = [speed.tasks_per_s for speed in runs]
        samples[f"{name}_cpu_ms_per_task"] = [speed.cpu_ms_per_task for speed in runs]
        speed, cpu = spread(samples[f"{name}_tasks_per_s"]), spread(samples[f"{name}_cpu_ms_per_task"])
        rows.append(
            {
                "scheme": scheme,
                "durable": durable,
                "n": len(runs),
                "tasks_per_s": round(speed.median, 1),
                "min_tasks_per_s": round(speed.minimum, 1),
                "max_tasks_per_s": round(speed.maximum, 1),
                "cpu_ms_per_task": round(cpu.median, 3),
            }
        )
        if not as_json:
            typer.echo(json.dumps(rows[-1]))
    record = RunRecord(
        experiment="durability",
        config={"tasks": tasks, "repeats": repeats, "nodes": nodes, "batch": BATCH, "load_average": os.getloadavg()},
        samples=samples,
        results={"rows": rows},
    )
    path = record.write(out)
    typer.echo(json.dumps(rows, indent=2) if as_json else f"record: {path}")
