"""`python -m benchmarks cascade`: an end and an edge node, and a naive cascade, in windows that take turns.

Both compute the same ONNX files on the same images, coarse answer first. All services run at once, idle while others
are measured, and may use all cores. The naive cascade runs twice, with one thread per session and with one per core;
each load counts the better of the two.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.peers.measuring import loaded
from experiments.bench.http import Connection, Origin, encode_http
from experiments.bench.load import Closed, LoadPlan
from experiments.bench.report import error_text
from experiments.bench.targets import Target, judge_lines
from experiments.harness import Experiment, Options, Point, Record, Run, Table, cell, grouped, option
from experiments.processes import running, serving
from experiments.record import spread
from models.data import read_sample
from models.manifest import load_manifest, weights_folder
from models.session import load_model, verify_file
from tierkit.errors import SetupError, UpstreamError
from tierkit.http.address import free_port
from tierkit.tensors import Array
from tierkit.types import Tier
from tierkit.wire.messages import UPSTREAM_HEADER
from tierkit.wire.oip import BINARY_HEADER

__all__ = ["CASCADE"]

TERRACE = "terrace"
LOADS = ((1, 1), (1, 16), (1, 64), (50, 1), (50, 4))
"""Images of a request, and clients."""
_SCRIPT = Path(__file__).with_name("naive.py")
_PAYLOADS = 16
_CHECKED = 50
_AGREE = 0.98
"""Share of images on which a cascade must name the labels of the bare session: batches may round differently."""
_START_S, _REQUEST_S, _POLL_S = 60.0, 60.0, 0.05


Route = tuple[str, str, dict[str, str]]
"""URL of a service, path of its route, and headers of a request."""


class Chosen(Options):
    """Options of the comparison."""

    rounds: int = option(10, "Windows of each cascade under each load.", quick=2, min=1, max=100)
    window_s: float = option(2.0, "Length of a window, s.", quick=0.5, min=0.1, max=60)


class Networks:
    """The networks of the end and the edge tier, and their labels for images."""

    def __init__(self) -> None:
        folder, manifest = weights_folder(), load_manifest()
        self.entries = [manifest.default_for(tier) for tier in (Tier.END, Tier.EDGE)]
        self.files = [str(folder.resolve() / verify_file(entry, folder).name) for entry in self.entries]

    def labels(self, images: Array) -> list[list[int]]:
        """Labels of the bare sessions, coarse and fine."""
        models = [load_model(entry, weights_folder()) for entry in self.entries]
        return [model.run({"images": images}, ["logits"])["logits"].argmax(axis=1).tolist() for model in models]


@contextmanager
def _terrace(networks: Networks) -> Iterator[Route]:
    """An end node, with an edge node upstream."""
    end, edge = networks.entries
    with serving(["edge_node", "--model", edge.name], core=None) as (edge_url, _):
        upstream = {"node_id": "edge-1", "url": edge_url, "tier": "edge", "model": edge.name, "encoding": None}
        with serving(["end_node", "--model", end.name], core=None) as (url, _):
            yield url, "/v1/tasks/cascade", {BINARY_HEADER: "0", UPSTREAM_HEADER: json.dumps([upstream])}


@asynccontextmanager
async def _naive(networks: Networks, threads: int) -> AsyncIterator[Route]:
    """Two plain services."""
    next_url: list[str] = []
    async with AsyncExitStack() as stack:
        for file in reversed(networks.files):
            port = free_port()
            command = [sys.executable, str(_SCRIPT), str(port), file, str(threads), *next_url]
            service = stack.enter_context(running(command, {}, core=None))
            next_url = [f"http://127.0.0.1:{port}"]
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=next_url[0], trust_env=False))
            deadline = time.monotonic() + _START_S
            while not await _is_ready(client):
                if not service.alive or time.monotonic() > deadline:
                    raise SetupError(f"the naive cascade did not become ready: {service.log_tail()}")
                await asyncio.sleep(_POLL_S)
        yield next_url[0], "/answer", {}


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).is_success
    except httpx.TransportError:
        return False


def _target(route: Route, images: Array, batch: int) -> Target:
    """Requests of `batch` images each."""
    url, path, headers = route
    origin = Origin.parse(url)
    starts = [number * batch % (len(images) - batch + 1) for number in range(_PAYLOADS)]
    bodies = [np.ascontiguousarray(images[start : start + batch]).tobytes() for start in starts]
    requests = [encode_http("POST", origin, path, headers, body) for body in bodies]
    return Target(origin=origin, name=url, requests=requests, images=batch, judge=judge_lines)


async def _check(target: Target, expected: Sequence[Sequence[int]]) -> None:
    """Compare the first answer with the bare sessions.

    Raises:
        UpstreamError: The answer differs or is missing.
    """
    async with Connection(target.origin) as connection:
        reply = await connection.request(target.requests[0], timeout_s=_REQUEST_S)
    found = {event["event"]: event for event in map(json.loads, reply.body.splitlines())}
    for stage, labels in zip(("coarse", "fine"), expected, strict=True):
        given = found.get(stage, {}).get("labels")
        if given is None or len(given) != len(labels) or np.mean(np.equal(given, labels)) < _AGREE:
            raise UpstreamError(f"{target.name}: the {stage} answer differs from the bare session")


# --- from the record ------------------------------------------------------------------------------------------------


def _row(points: Sequence[Point]) -> dict[str, Any]:
    """Medians of one load, and ratios of throughput within each round to the better naive cascade."""
    by_server = {server: found for (server,), found in grouped(points, "server").items()}
    rates = {server: statistics.median(point["images_per_s"] for point in found) for server, found in by_server.items()}
    naive = max((server for server in rates if server != TERRACE), key=lambda server: rates[server], default=None)
    row: dict[str, Any] = {"naive": naive, "rounds": 0, "ratio": None}
    for side, server in (("terrace", TERRACE), ("naive", naive)):
        for figure in ("images_per_s", "first_p50_ms", "last_p50_ms", "last_p99_ms"):
            values = [point[figure] for point in by_server.get(server or "", ())]
            row[f"{side}_{figure}"] = statistics.median(values) if values else None
    pairs = [{point["server"]: point["images_per_s"] for point in found} for found in grouped(points, "round").values()]
    ratios = [pair[TERRACE] / pair[naive] for pair in pairs if naive is not None and {TERRACE, naive} <= pair.keys()]
    if ratios:
        ratio = spread(ratios)
        row |= {"rounds": ratio.n, "ratio": ratio.median, "min_ratio": ratio.minimum, "max_ratio": ratio.maximum}
    return row


class Cascade(Experiment):
    """An end and an edge node against a naive cascade of two FastAPI services."""

    name = "cascade"
    options = Chosen
    repeats = ("rounds", "windows of each cascade")
    quick = "{rounds} rounds"
    ignores = frozenset({"seed", "tasks", "data"})
    profile = None

    async def measure(self, run: Run, chosen: Chosen) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        networks, images = Networks(), read_sample().images
        run.config |= {
            "networks": [{"name": entry.name, "sha256": entry.sha256} for entry in networks.entries],
            "rounds": chosen.rounds,
            "window_s": chosen.window_s,
        }
        plan = LoadPlan(window_s=chosen.window_s, warmup_s=0.3, timeout_s=_REQUEST_S)
        run.expect(1 + chosen.rounds * len(LOADS))
        async with AsyncExitStack() as stack:
            with run.step("starting the services"):
                routes: dict[str, Route] = {TERRACE: stack.enter_context(_terrace(networks))}
                for threads in sorted({1, cores}):
                    routes[f"naive, threads: {threads}"] = await stack.enter_async_context(_naive(networks, threads))
                expected = networks.labels(images[:_CHECKED])
                for route in routes.values():
                    await _check(_target(route, images, _CHECKED), expected)
            for batch, clients in LOADS:
                targets = {server: _target(route, images, batch) for server, route in routes.items()}
                for number in range(chosen.rounds):
                    with run.step(f"{batch} images, {clients} clients"):
                        for server in list(targets)[:: 1 if number % 2 == 0 else -1]:
                            level = await loaded(targets[server], Closed(clients), plan)
                            summary = level.summary
                            if summary.errors or summary.fallbacks:
                                why = error_text(summary.errors) or f"{summary.fallbacks} coarse answers only"
                                raise UpstreamError(f"{server}: not answered: {why}")
                            if not summary.answered:
                                run.note(f"left out: a window of {server} without an answer")
                                continue
                            run.add(
                                batch=batch,
                                clients=clients,
                                round=number,
                                server=server,
                                images_per_s=summary.images_per_s,
                                first_p50_ms=summary.first_ms["p50"],
                                last_p50_ms=summary.latency_ms["p50"],
                                last_p99_ms=summary.latency_ms["p99"],
                                generator_cpu=level.generator_cpu,
                            )

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [
            {"images_per_request": batch, "clients": clients, **_row(points)}
            for (batch, clients), points in grouped(record["points"], "batch", "clients").items()
        ]

    def table(self, record: Record) -> Table:
        return Table(
            headings="images | clients | Terrace, images/s | naive, images/s | better with | ratio (range) | "
            "Terrace, first ms | naive, first ms | Terrace, last ms | naive, last ms | rounds",
            rows=[
                [
                    str(row["images_per_request"]),
                    str(row["clients"]),
                    cell(row["terrace_images_per_s"], ",.0f"),
                    cell(row["naive_images_per_s"], ",.0f"),
                    (row["naive"] or "-").removeprefix("naive, "),
                    "-" if row["ratio"] is None else "{ratio:.2f} ({min_ratio:.2f} to {max_ratio:.2f})".format(**row),
                    *(
                        cell(row[f"{side}_{figure}_p50_ms"], ".2f")
                        for figure in ("first", "last")
                        for side in ("terrace", "naive")
                    ),
                    str(row["rounds"]),
                ]
                for row in self.rows(record)
            ],
        )


CASCADE = Cascade()
