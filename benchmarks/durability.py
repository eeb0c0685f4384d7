"""Cost of durability to the scheduler: tasks per second with and without it, on nodes that answer at once.

With `--database` a second scheduler takes its turns too, which keeps its results there.

The scheduler runs in this process, with its real parts: uploads, input files, dispatch over HTTP, checks of the
answers, group commit into SQLite (WAL, every commit synced to the disk). The nodes are null nodes: sockets in a second
process that read a task of 50 images and answer with ready-made lines, so all that is measured is the scheduler. A run
with durability counts from the stored submission to the durable final state; one without sends the same tasks and keeps
nothing of the answers but their number. The two take turns, since the speed of a machine drifts.

Processor time counts this process with all its threads; a second process on a busy machine does not change it much.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

from experiments.bench.load import loop_factory
from experiments.harness import MOST_RUNS, MOST_TASKS, Experiment, Options, Record, Run, Table, grouped, option
from experiments.record import ranged
from models.manifest import load_manifest
from scheduler.core import events
from scheduler.core.job import Answer, AttemptReport
from scheduler.core.policy import JobPolicy
from scheduler.core.work import JobFacts, TaskFacts
from scheduler.dispatch.active_job import ActiveJob
from scheduler.ingest.upload import Incoming
from scheduler.jobs.query import get_job
from scheduler.jobs.service import Scheduler
from scheduler.jobs.submit import submit
from scheduler.runtime.leadership import leading
from scheduler.settings import SchedulerSettings
from tierkit.errors import ServiceFailed
from tierkit.http.lifecycle import Lifecycle
from tierkit.types import Scheme, Tier
from tierkit.wire.events import CoarseEvent, FineEvent, written
from tierkit.wire.messages import UPSTREAM_HEADER, Heartbeat, ModelOffer, Registration
from tierkit.wire.oip import InferRequest, Tensor, encode_request

__all__ = ["DURABILITY", "IDLE", "null_node"]

BATCH = 50
_SCHEMES = (Scheme.END, Scheme.END_EDGE)
_DEADLINE_S = 600.0
_POLL_S = 0.002
_TASK = re.compile(rb"^POST /v1/tasks/(\S+) ")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_UPSTREAM = UPSTREAM_HEADER.lower().encode()


# --- null nodes -----------------------------------------------------------------------------------------------------


def _null_nodes(pipe: Connection, count: int) -> None:
    """The second process: the servers, whose ports go through the pipe."""

    async def run() -> None:
        servers = [await asyncio.start_server(_Null(number).serve, "127.0.0.1", 0) for number in range(count)]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.Event().wait()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


IDLE = Heartbeat(incarnation="12345678", in_flight=0, queued_images=0, images_done=0)


def null_node(node_id: str, tier: Tier, port: int) -> Registration:
    """A node as it registers: with a network of the bundled set, which it never runs."""
    network = load_manifest().default_for(tier)
    offer = ModelOffer(name=network.name, sha256=network.sha256, ms_per_image=0.001)
    url = f"http://127.0.0.1:{port}"
    return Registration(node_id=node_id, incarnation=IDLE.incarnation, tier=tier, url=url, models=(offer,), version="0")


class _Null:
    """An end node that answers a task with class 0 for all images."""

    def __init__(self, number: int) -> None:
        zeros, sure = (0,) * BATCH, (0.123456789,) * BATCH
        end, edge = (load_manifest().default_for(tier) for tier in (Tier.END, Tier.EDGE))
        coarse = CoarseEvent(
            task_id="TASK",
            node_id=f"end-{number}",
            model=end.name,
            sha256=end.sha256,
            labels=zeros,
            confidences=sure,
            queue_ms=0.0,
            compute_ms=0.0,
        )
        fine = FineEvent(
            task_id="TASK",
            node_id="edge-0",
            tier=Tier.EDGE,
            model=edge.name,
            sha256=edge.sha256,
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
                body, status = b"", b"200 OK"
                if b"/infer " in head:
                    status = b"404 Not Found"  # it has no network that could answer probe pictures
                if (task := _TASK.match(head)) is not None:
                    body = self._coarse + (self._fine if _UPSTREAM in head.lower() else b"")
                    body = body.replace(b"TASK", task[1])
                writer.write(
                    b"HTTP/1.1 %b\r\ncontent-type: application/x-ndjson\r\ncontent-length: %d\r\n\r\n%b"
                    % (status, len(body), body)
                )
                await writer.drain()
        writer.close()


# --- the scheduler --------------------------------------------------------------------------------------------------


class _Counting:
    """A recipient that keeps nothing."""

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
        scheduler.dispatcher.handle(events.Registered(null_node(node_id, tier, port)))

    async def beat() -> None:
        while True:
            for node_id, _, _ in nodes:
                scheduler.dispatcher.handle(events.Beat(node_id, IDLE))
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
    job, _ = await submit(scheduler, Incoming(headers=small, query=[("scheme", scheme)], stream=body()))
    taken = await _taken(scheduler, job.id)
    view = await get_job(scheduler, job.id)
    if view.answered_coarse != len(pixels) or view.fallback or view.failed_images:
        raise ServiceFailed(
            f"the job is {view.state} with {view.answered_coarse} of {len(pixels)} images: {view.reason}"
        )
    return taken


async def _volatile(scheduler: Scheduler, scheme: Scheme, pixels: Any) -> tuple[float, float]:
    """Measure the same without a database: answers are checked, counted and forgotten."""
    recipient = _Counting()
    facts = JobFacts(
        job_id="volatile",
        policy=JobPolicy(scheme=scheme, deadline_s=_DEADLINE_S, task_deadline_s=_DEADLINE_S),
        deadline=time.monotonic() + _DEADLINE_S,
    )
    firsts = enumerate(range(0, len(pixels), BATCH))
    tasks = [TaskFacts(index=index, first_image=first, images=BATCH) for index, first in firsts]
    scheduler.dispatcher.add(ActiveJob(facts, tasks=tasks, images=pixels, recipient=recipient))
    taken = await _taken(scheduler, facts.job_id)
    expected = len(pixels) // BATCH * (1 if scheme is Scheme.END else 2)
    if recipient.answers != expected:
        raise ServiceFailed(f"{recipient.answers} answers instead of {expected}")
    return taken


async def _taken(scheduler: Scheduler, job_id: str) -> tuple[float, float]:
    """Seconds and processor seconds until a job is over."""
    began, cpu_began = time.perf_counter(), time.process_time()
    while scheduler.dispatcher.job(job_id) is not None:  # noqa: ASYNC110  # being told would cost the scheduler more
        await asyncio.sleep(_POLL_S)
    return time.perf_counter() - began, time.process_time() - cpu_began


class Chosen(Options):
    """Tasks, repeats and nodes of a run."""

    tasks: int = option(1000, "Tasks of each run, 50 images each.", quick=200, min=1, max=MOST_TASKS)
    repeats: int = option(5, "Runs of each kind.", quick=2, min=1, max=MOST_RUNS)
    nodes: int = option(8, "Null end nodes.", min=1, max=1000)
    database: str | None = option(None, "A database to compare with, as the setting of the scheduler; an empty one.")


@asynccontextmanager
async def _null_fleet(nodes: int) -> AsyncIterator[list[int]]:
    """The ports of null nodes in a second process."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_null_nodes, args=(theirs, nodes), daemon=True)
    process.start()
    theirs.close()
    try:
        yield await asyncio.to_thread(ours.recv)
    finally:
        process.terminate()
        process.join()


@asynccontextmanager
async def _scheduler(settings: SchedulerSettings) -> AsyncIterator[Scheduler]:
    """One that leads."""
    led: list[Scheduler] = []
    async with leading(settings, Lifecycle(), led.append):
        yield led[0]


def _name_of(url: str) -> str:
    """Name of a database for people."""
    return "PostgreSQL" if url.startswith("postgresql") else "the other database"


class Durability(Experiment):
    """Tasks per second that the scheduler dispatches, with and without durability."""

    name = "durability"
    options = Chosen
    repeats = ("n", "runs")
    quick = "{tasks_per_run} tasks each"
    ignores = frozenset({"seed", "data"})
    profile = None

    async def measure(self, run: Run, chosen: Chosen) -> None:
        tasks = chosen.tasks
        run.config |= {"tasks_per_run": tasks, "nodes": chosen.nodes, "batch": BATCH}
        databases = (
            {"SQLite": None}
            if chosen.database is None
            else {"SQLite": None, _name_of(chosen.database): chosen.database}
        )
        pixels = np.zeros((tasks * BATCH, *load_manifest().models[0].input_shape), np.uint8)
        # The first of each opens connections and compiles statements, and does not count.
        turns = list(product(range(chosen.repeats + 1), _SCHEMES, [*databases, None]))
        run.expect(len(turns))
        async with AsyncExitStack() as stack:
            ports = await stack.enter_async_context(_null_fleet(chosen.nodes))
            schedulers = {}
            for name, database in databases.items():
                settings = SchedulerSettings(state=run.folder / name, n_map=1, database=database)
                schedulers[name] = await stack.enter_async_context(_scheduler(settings))
                await stack.enter_async_context(_fleet(schedulers[name], ports))
            for repeat, scheme, kept_in in turns:
                with run.step(f"{scheme}, {'results not kept' if kept_in is None else f'results in {kept_in}'}"):
                    if kept_in is None:
                        seconds, cpu_s = await _volatile(schedulers["SQLite"], scheme, pixels)
                    else:
                        seconds, cpu_s = await _durable(schedulers[kept_in], scheme, pixels)
                if repeat:
                    speed = {"tasks_per_s": tasks / seconds, "cpu_ms_per_task": 1000 * cpu_s / tasks}
                    run.add(scheme=scheme, kept_in=kept_in, **speed)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [
            {
                "scheme": scheme,
                "kept_in": kept_in,
                "n": len(points),
                **ranged("tasks_per_s", [point["tasks_per_s"] for point in points], 1),
                "cpu_ms_per_task": round(median(point["cpu_ms_per_task"] for point in points), 3),
            }
            for (scheme, kept_in), points in grouped(record["points"], "scheme", "kept_in").items()
        ]

    def table(self, record: Record) -> Table:
        return Table(
            headings="scheme | results | tasks/s, median | range | ms of processor per task",
            rows=[
                [
                    row["scheme"],
                    f"in {row['kept_in']}" if row["kept_in"] else "not kept",
                    f"{row['tasks_per_s']:,.0f}",
                    f"{row['min_tasks_per_s']:,.0f} to {row['max_tasks_per_s']:,.0f}",
                    f"{row['cpu_ms_per_task']:.2f}",
                ]
                for row in self.rows(record)
            ],
        )


DURABILITY = Durability()
