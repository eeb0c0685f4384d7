"""`python -m benchmarks road`: microseconds of a request by part, at the end node, the node above and the scheduler.

A scheduler, an end and an edge node run on this machine, with one client and one image in each request. Windows without
a profiler give latency and processor time. A window with `sampling` inside the service that is asked divides the time
among the parts: each sample of the event loop's thread counts for the innermost frame that belongs to one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.measuring import loaded
from experiments.bench.http import Origin, encode_http
from experiments.bench.load import Closed, LoadPlan
from experiments.bench.report import error_text
from experiments.bench.targets import RequestPlan, Target, classify_target, judge_lines, judge_status
from experiments.harness import Experiment, Options, Point, Record, Run, Table, cell, grouped, option
from experiments.processes import ServerProcesses, serving
from models.data import read_sample
from models.manifest import load_manifest
from tierkit.errors import SetupError, UpstreamError
from tierkit.types import Tier
from tierkit.wire.messages import BUDGET_HEADER, REQUEST_ID_HEADER, UPSTREAM_HEADER
from tierkit.wire.oip import InferRequest, RequestedOutput, Tensor, encode_request

__all__ = ["ROAD", "part_of"]

ROADS = {"tasks": "end", "infer": "edge", "classify": "scheduler"}
"""The service that is asked on each road."""
_PARTS: Sequence[tuple[str, Sequence[str]]] = (
    ("inference", ("onnxruntime/", "models/session.py", "_run_model")),
    ("tokens", ("tierkit/access/",)),
    ("traces", ("tierkit/wire/trace.py", "tierkit/spans.py")),
    ("logs", ("tierkit/logs.py", "/logging/")),
    (
        "metrics",
        ("prometheus_client/", "inference/metrics.py", "inference/statistics.py", "scheduler/metrics.py", "/history/"),
    ),
    ("hand-over to the thread", ("inference/thread.py", "concurrent/futures/", "asyncio/threads.py")),
    ("settings and limits", ("_admit", "_check_admission", "check_room", "BodyRoom", "core/policy.py", "callers.py")),
    ("queue", ("inference/runner.py",)),
    ("writing", ("_HttpProtocol.write", "Exchange.send", "Exchange._head", "http/exchange.py:head_bytes")),
    (
        "the upstream call",
        ("aiohttp/", "oip_client.py", "encryption/sending.py", "http/client.py", "dispatch/transport.py", "yarl/"),
    ),
    (
        "encoding",
        (
            "oip/encode.py",
            "wire/events.py",
            "end_node/answers.py",
            "models/hierarchy.py",
            "jobs/views.py",
            "streams.py",
        ),
    ),
    ("decisions", ("scheduler/core/", "scheduler/dispatch/", "scheduler/placement/")),
    (
        "parsing",
        ("http/protocol.py", "http/head.py", "http/exchange.py", "oip/", "endpoints/request.py", "scheduler/ingest/"),
    ),
    ("routes and layers", ("starlette/", "fastapi/", "tierkit/", "end_node/", "edge_node/", "scheduler/")),
)
"""Parts of a request, and what names of files or functions begin or contain; the first that matches counts."""
_WAITING = "waiting"
_REST = "event loop and libraries"
_START_S = 60.0
_POLL_S = 0.05
_REQUEST_S = 20.0
_PAYLOADS = 16
_BUDGET_MS = "29999"


class RoadOptions(Options):
    """Length of the measurement."""

    rounds: int = option(5, "Windows without a profiler on each road.", quick=1, min=1, max=100)
    window_s: float = option(3.0, "Length of a window, s.", quick=1.0, min=0.1, max=60)


def part_of(frames: Sequence[str]) -> str:
    """The part of a request that a stack belongs to, innermost frame first."""
    if frames and frames[0].endswith(":Runner.run"):
        return _WAITING
    for frame in frames:
        for part, marks in _PARTS:
            if any(mark in frame for mark in marks):
                return part
    return _REST


@dataclass(frozen=True, slots=True, kw_only=True)
class _Service:
    url: str
    processes: ServerProcesses
    samples: Path

    @asynccontextmanager
    async def sampled(self) -> AsyncIterator[dict[str, Any]]:
        """Samples of what runs inside; they are there on exit."""
        found: dict[str, Any] = {}
        os.kill(self.processes.process.pid, signal.SIGUSR1)
        yield found
        os.kill(self.processes.process.pid, signal.SIGUSR1)
        async with asyncio.timeout(_START_S):
            while not self.samples.exists():  # noqa: ASYNC110  # another process writes it
                await asyncio.sleep(_POLL_S)
        found |= json.loads(self.samples.read_text())
        self.samples.unlink()


@contextmanager
def _services(folder: Path, models: Mapping[Tier, str]) -> Iterator[dict[str, _Service]]:
    """A scheduler, an edge and an end node; each has the profiler inside, which sleeps."""
    with ExitStack() as stack:

        def start(name: str, *command: str) -> _Service:
            samples = folder / f"{name}.json"
            wrapped = ["benchmarks.road.sampling", str(samples), *command]
            url, processes = stack.enter_context(serving(wrapped, core=None))
            return _Service(url=url, processes=processes, samples=samples)

        scheduler = start("scheduler", "scheduler", "--state", str(folder / "state"))
        join = ("--scheduler", scheduler.url)
        edge = start("edge", "edge_node", "--model", models[Tier.EDGE], "--node-id", "edge-1", *join)
        end = start("end", "end_node", "--model", models[Tier.END], "--node-id", "end-1", *join)
        yield {"scheduler": scheduler, "edge": edge, "end": end}


async def _targets(services: Mapping[str, _Service], models: Mapping[Tier, str]) -> dict[str, Target]:
    """The requests of each road, as the services send them to each other."""
    images = read_sample().images
    edge, end = services["edge"], services["end"]
    upstream = {
        "node_id": "edge-1",
        "url": edge.url,
        "tier": "edge",
        "model": models[Tier.EDGE],
        "encoding": None,
    }
    common = {BUDGET_HEADER: _BUDGET_MS, REQUEST_ID_HEADER: "0123456789abcdef"}
    ways = {
        "tasks": (end.url, "/v1/tasks/road", (), {**common, UPSTREAM_HEADER: json.dumps([upstream])}),
        "infer": (
            edge.url,
            f"/v2/models/{models[Tier.EDGE]}/infer",
            (RequestedOutput("probabilities"),),
            common,
        ),
    }
    targets = {}
    for road, (url, path, outputs, headers) in ways.items():
        origin, requests = Origin.parse(url), []
        for number in range(_PAYLOADS):
            pixels = np.ascontiguousarray(images[number : number + 1])
            chunks, own = encode_request(InferRequest(inputs=(Tensor("images", pixels),), outputs=outputs))
            requests.append(encode_http("POST", origin, path, {**own, **headers}, b"".join(chunks)))
        judge = judge_lines if road == "tasks" else judge_status
        targets[road] = Target(origin=origin, name=url, requests=requests, images=1, judge=judge)
    async with asyncio.timeout(_START_S):
        while True:
            try:
                targets["classify"] = await classify_target(services["scheduler"].url, RequestPlan())
            except UpstreamError:  # the nodes have not registered yet
                await asyncio.sleep(_POLL_S)
            else:
                return targets


class Road(Experiment):
    """Microseconds of a single request by part, at each of the three services that it passes."""

    name = "road"
    options = RoadOptions
    repeats = ("rounds", "windows without a profiler")
    quick = "{rounds} rounds"
    ignores = frozenset({"seed", "tasks", "data"})
    profile = None

    async def measure(self, run: Run, chosen: RoadOptions) -> None:
        manifest = load_manifest()
        models = {tier: manifest.default_for(tier).name for tier in (Tier.END, Tier.EDGE)}
        run.config |= {"networks": models, "rounds": chosen.rounds, "window_s": chosen.window_s}
        run.expect(1 + len(ROADS) * (chosen.rounds + 1))
        plan = LoadPlan(window_s=chosen.window_s, warmup_s=0.3, timeout_s=_REQUEST_S)
        with tempfile.TemporaryDirectory(prefix="road-") as folder, ExitStack() as stack:
            with run.step("starting the services"):
                services = stack.enter_context(_services(Path(folder), models))
                targets = await _targets(services, models)
            for number in range(chosen.rounds):
                for road in ROADS:
                    with run.step(f"{road}, without a profiler"):
                        run.add(what="window", road=road, round=number, **await _window(services, targets[road], plan))
            for road, service in ROADS.items():
                with run.step(f"{road}, with a profiler"):
                    async with services[service].sampled() as found:
                        figures = await _window(services, targets[road], plan)
                    for part, share in _shares(found["stacks"]).items():
                        us = share * found["wall_s"] / figures["requests"] * 1e6
                        run.add(what="part", road=road, part=part, us=us)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        windows = [point for point in record["points"] if point["what"] == "window"]
        parts = [point for point in record["points"] if point["what"] == "part"]
        return [
            {
                "road": road,
                "asks": ROADS[road],
                "rounds": len(found),
                **{name: _median(found, name) for name in ("first_ms", "last_ms", *_CPU)},
                "us": {point["part"]: point["us"] for point in parts if point["road"] == road},
            }
            for (road,), found in grouped(windows, "road").items()
        ]

    def table(self, record: Record) -> Table:
        rows = self.rows(record)
        names = [*(part for part, _ in _PARTS), _REST, _WAITING]
        figures = {
            "first answer, ms": "first_ms",
            "last answer, ms": "last_ms",
            **{f"processor time of the {name}, ms": f"{name}_cpu_ms" for name in ("end", "edge", "scheduler")},
        }
        return Table(
            headings=" | ".join(["", *(f"{row['road']} ({row['asks']})" for row in rows)]),
            rows=[
                *([words, *(cell(row[name], ".2f") for row in rows)] for words, name in figures.items()),
                *([f"{name}, us", *(cell(row["us"].get(name), ",.0f") for row in rows)] for name in names),
            ],
        )


_CPU = ("end_cpu_ms", "edge_cpu_ms", "scheduler_cpu_ms")


def _median(points: Sequence[Point], name: str) -> float:
    found: float = statistics.median(point[name] for point in points)
    return found


async def _window(services: Mapping[str, _Service], target: Target, plan: LoadPlan) -> dict[str, Any]:
    """Latencies, and the processor time that each service takes for a request."""
    before = {name: service.processes.cpu_s() for name, service in services.items()}
    level = await loaded(target, Closed(1), plan)
    after = {name: service.processes.cpu_s() for name, service in services.items()}
    summary = level.summary
    if summary.errors or summary.fallbacks or not summary.answered:
        why = error_text(summary.errors) or f"{summary.fallbacks} coarse answers only"
        raise SetupError(f"{target.name}: not answered: {why}")
    # With those of the warm-up.
    requests = summary.images_per_s * (plan.warmup_s + plan.window_s)
    return {
        "requests": requests,
        "first_ms": summary.first_ms["p50"],
        "last_ms": summary.latency_ms["p50"],
        **{f"{name}_cpu_ms": (after[name] - before[name]) / requests * 1000 for name in services},
    }


def _shares(stacks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for stack in stacks:
        counts[part_of(stack["frames"])] += stack["count"]
    return {part: count / counts.total() for part, count in counts.items()}


ROAD = Road()
