"""A manifest without weights, a scheduler on a real socket, and end nodes that answer as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from models.hierarchy import bundled_hierarchy
from scheduler.api.app import create_app
from scheduler.settings import SchedulerSettings
from tierkit.testing import serve_app
from tierkit.wire.messages import (
    ESCALATION,
    ESCALATION_HEADER,
    PRIORITY_HEADER,
    STAGE_HEADER,
    UPSTREAM_HEADER,
    UPSTREAMS,
    Stage,
    Upstream,
)
from tierkit.wire.oip import BINARY_HEADER, InferRequest, Tensor, decode_request, encode_request, parse_header_length
from tierkit.wire.trace import Trace, read_trace

SHAPE = (32, 32, 3)


NETWORKS = {name: digit * 64 for name, digit in (("small", "0"), ("middle", "1"), ("large", "2"))}
"""Name and sha256 of the networks of the model set."""


def model_entry(name: str, tier: str, target: str) -> dict[str, Any]:
    return {
        "name": name,
        "tier": tier,
        "file": f"{name}.onnx",
        "sha256": NETWORKS[name],
        "size_bytes": 10,
        "target": target,
        "classes": 20 if target == "coarse" else 100,
        "input_shape": list(SHAPE),
        "precision": "int8",
        "parameters": 1000,
        "temperature": 1.0,
        "coarse_accuracy": 0.5,
        "fine_accuracy": None if target == "coarse" else 0.6,
        "test_images": 10000,
        "ece_before": 0.1,
        "ece_after": 0.01,
        "feature_shape": [8, 32, 32],
        "head_parameters": 10,
        "training": {
            "record": "r.json",
            "config": "c",
            "epochs": 1,
            "minutes": 1.0,
            "total_epochs": 1,
            "total_minutes": 1.0,
            "hardware": "none",
            "data": "none",
        },
    }


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a manifest of the three tiers, and no weights."""
    folder = tmp_path_factory.mktemp("weights")
    manifest = {
        "format": 1,
        "hierarchy": bundled_hierarchy().content(),
        "data_source": "none",
        "models": [
            model_entry("small", "end", "coarse"),
            model_entry("middle", "edge", "fine"),
            model_entry("large", "cloud", "fine"),
        ],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@dataclass
class FakeEnd:
    """An end node that speaks the task protocol and classifies by the first bytes of an image.

    The fine class of an image is its first byte modulo 100, the coarse one the superclass of that. `script` may change
    any answer: it gets (task id, upstreams, lines) and returns the lines to send, or a response of its own. Coarse
    lines are left out where the fine stage alone is asked for.
    """

    node_id: str
    url: str = ""
    tasks: list[str] = field(default_factory=list)
    routes: list[tuple[str, ...]] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    """"all" or "fine", by task."""
    priorities: list[str | None] = field(default_factory=list)
    traces: list[Trace | None] = field(default_factory=list)
    escalations: list[tuple[Stage, ...]] = field(default_factory=list)
    script: Callable[[FakeEnd, str, tuple[Upstream, ...], list[dict[str, Any]]], Awaitable[Any]] | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Answers wait for it; open unless a test closes it."""
    fine_gate: asyncio.Event = field(default_factory=asyncio.Event)
    ports: set[int] = field(default_factory=set)
    """Of the connections that tasks came through."""
    waiting: int = 0
    most_waiting: int = 0
    beats: asyncio.Task[None] | None = None
    """Its heartbeats; cancel them to let it fall silent."""
    incarnation: str = ""

    def __post_init__(self) -> None:
        self.gate.set()
        self.fine_gate.set()

    async def answer(self, request: Request) -> Response:
        task_id = request.path_params["task_id"]
        body = await request.body()
        images = decode_request(body, parse_header_length(request.headers[BINARY_HEADER])).inputs[0].data
        upstreams = UPSTREAMS.validate_json(request.headers.get(UPSTREAM_HEADER, "[]"))
        stage = request.headers.get(STAGE_HEADER, "all")
        self.tasks.append(task_id)
        self.stages.append(stage)
        self.priorities.append(request.headers.get(PRIORITY_HEADER))
        self.traces.append(read_trace(request.headers.raw))
        self.escalations.append(ESCALATION.validate_json(request.headers.get(ESCALATION_HEADER, "[]")))
        assert request.client is not None
        self.ports.add(request.client.port)
        self.routes.append(tuple(upstream.node_id for upstream in upstreams))
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1
        lines = self.lines(task_id, images, upstreams)
        if self.script is not None:
            made = await self.script(self, task_id, upstreams, lines)
            if isinstance(made, Response):
                return made
            lines = made
        if stage == "fine":
            lines = [line for line in lines if isinstance(line, str) or line["event"] != "coarse"]

        async def stream() -> AsyncIterator[bytes]:
            for number, line in enumerate(lines):
                if number or stage == "fine":
                    await self.fine_gate.wait()
                yield (line if isinstance(line, str) else json.dumps(line)).encode() + b"\n"

        return StreamingResponse(stream(), media_type="application/x-ndjson")

    def lines(self, task_id: str, images: Any, upstreams: tuple[Upstream, ...]) -> list[dict[str, Any]]:
        hierarchy = bundled_hierarchy()
        fine = [int(image[0, 0, 0]) % 100 for image in images]
        coarse = [hierarchy.parent[label] for label in fine]
        sure = [0.5] * len(fine)
        lines: list[dict[str, Any]] = [
            {
                "event": "coarse",
                "task_id": task_id,
                "node_id": self.node_id,
                "model": "small",
                "sha256": NETWORKS["small"],
                "labels": coarse,
                "confidences": sure,
                "queue_ms": 0.1,
                "compute_ms": 1.0,
            }
        ]
        if upstreams:
            lines.append(
                {
                    "event": "fine",
                    "task_id": task_id,
                    "node_id": upstreams[0].node_id,
                    "tier": upstreams[0].tier,
                    "model": upstreams[0].model,
                    "sha256": upstreams[0].sha256,
                    "labels": fine,
                    "confidences": sure,
                    "coarse_labels": coarse,
                    "coarse_confidences": sure,
                    "round_trip_ms": 2.0,
                }
            )
        return lines


def registration(
    node_id: str, tier: str = "end", *, url: str = "http://127.0.0.1:9", ms: float = 1.0
) -> dict[str, Any]:
    """What a node says when it asks for its place; the incarnation is fresh."""
    model = {"end": "small", "edge": "middle", "cloud": "large"}[tier]
    return {
        "node_id": node_id,
        "incarnation": secrets.token_hex(8),
        "tier": tier,
        "url": url,
        "models": [{"name": model, "sha256": NETWORKS[model], "ms_per_image": ms}],
        "version": "0",
    }


@dataclass
class Running:
    """A scheduler under test and its client."""

    url: str
    http: httpx.AsyncClient
    settings: SchedulerSettings
    sites: dict[str, str] = field(default_factory=dict)
    """Sites that nodes name when they register."""

    async def register(self, node_id: str, tier: str, *, url: str = "http://127.0.0.1:9", ms: float = 1.0) -> str:
        """Put a node on the device list; returns its incarnation."""
        place = {**registration(node_id, tier, url=url, ms=ms), "site": self.sites.get(node_id)}
        response = await self.http.post("/v1/devices", json=place)
        assert response.status_code == 200, response.text
        return str(place["incarnation"])

    async def keep_alive(self, node_id: str, tier: str, incarnation: str, *, url: str = "http://127.0.0.1:9") -> None:
        """Heartbeats, and a new registration whenever the scheduler has forgotten the node, until cancelled."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await self.beat(node_id, incarnation)).status_code == 404:
                    incarnation = await self.register(node_id, tier, url=url)
            await asyncio.sleep(self.settings.heartbeat_s)

    async def beat(self, node_id: str, incarnation: str, **changes: Any) -> httpx.Response:
        load = {"incarnation": incarnation, "in_flight": 0, "queued_images": 0, "images_done": 0, **changes}
        return await self.http.post(f"/v1/devices/{node_id}/heartbeat", json=load)

    async def submit(self, images: Any, *, labels: Any = None, **policy: Any) -> dict[str, Any]:
        response = await self.try_submit(images, labels=labels, **policy)
        assert response.status_code == 202, response.text
        return dict(response.json())

    async def try_submit(
        self, images: Any, *, labels: Any = None, headers: dict[str, str] | None = None, **policy: Any
    ) -> httpx.Response:
        body, own = tensor_body(images, labels)
        return await self.http.post("/v1/jobs", content=body, headers={**own, **(headers or {})}, params=policy)

    async def job(self, job_id: str) -> dict[str, Any]:
        return dict((await self.http.get(f"/v1/jobs/{job_id}")).json())

    async def results(self, job_id: str) -> list[dict[str, Any]]:
        response = await self.http.get(f"/v1/jobs/{job_id}/results")
        return [json.loads(line) for line in response.text.splitlines()]

    async def events(self, job_id: str, *, after: int | None = None) -> list[tuple[str, int, dict[str, Any]]]:
        """All events of a job until its end."""
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        async with self.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
            assert response.status_code == 200
            return [event async for event in read_events(response)]

    async def finished(self, job_id: str) -> dict[str, Any]:
        """The job once it has ended."""
        return (await self.events(job_id))[-1][2]


async def read_events(response: httpx.Response) -> AsyncGenerator[tuple[str, int, dict[str, Any]], None]:
    event: dict[str, str] = {}
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name:
            event[name] = value
        elif "event" in event:
            yield event["event"], int(event["id"]), json.loads(event["data"])
            event = {}


def tensor_body(images: Any, labels: Any = None) -> tuple[bytes, dict[str, str]]:
    tensors = [Tensor("images", np.asarray(images, np.uint8))]
    if labels is not None:
        tensors.append(Tensor("labels", np.asarray(labels, np.int64)))
    chunks, headers = encode_request(InferRequest(inputs=tuple(tensors)))
    return b"".join(bytes(chunk) for chunk in chunks), dict(headers)


def make_images(count: int) -> Any:
    """Images whose fine class, to a `FakeEnd`, is their number modulo 100."""
    images = np.zeros((count, *SHAPE), np.uint8)
    images[:, 0, 0, 0] = np.arange(count) % 100
    images[:, 0, 0, 1] = np.arange(count) // 100 % 256
    return images


@asynccontextmanager
async def _scheduler(settings: SchedulerSettings) -> AsyncIterator[Running]:
    async with (
        serve_app(lambda lifecycle: create_app(settings, lifecycle), settings) as lifecycle,
        httpx.AsyncClient(base_url=lifecycle.url, timeout=30, trust_env=False) as http,
    ):
        yield Running(lifecycle.url, http, settings)


@asynccontextmanager
async def _end(running: Running, node_id: str, *, script: Any = None, beating: bool = True) -> AsyncIterator[FakeEnd]:
    """A fake end node on the device list, beating until the end of the block."""
    end = FakeEnd(node_id, script=script)
    app = Starlette(routes=[Route("/v1/tasks/{task_id}", end.answer, methods=["POST"])])
    async with serve_app(app) as lifecycle:
        end.url = lifecycle.url
        end.incarnation = await running.register(node_id, "end", url=end.url, ms=1.0)
        end.beats = None
        if beating:
            end.beats = asyncio.create_task(running.keep_alive(node_id, "end", end.incarnation, url=end.url))
        try:
            yield end
        finally:
            end.gate.set()
            end.fine_gate.set()
            if end.beats is not None:
                end.beats.cancel()
                await asyncio.gather(end.beats, return_exceptions=True)


@asynccontextmanager
async def _uppers(running: Running, *nodes: str) -> AsyncIterator[None]:
    """Upstream nodes on the device list ("edge-0", "cloud-0"), beating; fake end nodes answer in their name."""
    beats = []
    for node_id in nodes:
        tier = node_id.split("-")[0]
        incarnation = await running.register(node_id, tier)
        beats.append(asyncio.create_task(running.keep_alive(node_id, tier, incarnation)))
    try:
        yield
    finally:
        for beat in beats:
            beat.cancel()
        await asyncio.gather(*beats, return_exceptions=True)


@asynccontextmanager
async def _serving(end: FakeEnd, shown: list[str | None]) -> AsyncIterator[str]:
    """The URL of a fake end node that nobody has registered; `shown` gets what tasks show for a token."""

    async def answer(request: Request) -> Response:
        shown.append(request.headers.get("authorization"))
        return await end.answer(request)

    app = Starlette(routes=[Route("/v1/tasks/{task_id}", answer, methods=["POST"])])
    async with serve_app(app) as lifecycle:
        yield lifecycle.url


def make_settings(folder: Path, weights: Path) -> SchedulerSettings:
    """Return the settings of a scheduler that notices silent nodes quickly."""
    return SchedulerSettings(
        port=0,
        state=folder / "state",
        models=weights,
        n_map=1,
        trusted=("end", "edge", "cloud"),
        heartbeat_s=0.1,
        suspect_s=0.5,
        lease_s=1.0,
        set_aside_s=0.05,
        drain_s=2.0,
    )


class Kit:
    """What the tests here work with, as one fixture."""

    running = Running
    registration = staticmethod(registration)
    settings = staticmethod(make_settings)
    scheduler = staticmethod(_scheduler)
    end = staticmethod(_end)
    fake_end = FakeEnd
    serving = staticmethod(_serving)
    uppers = staticmethod(_uppers)
    images = staticmethod(make_images)
    tensor_body = staticmethod(tensor_body)
    read_events = staticmethod(read_events)
    json_response = JSONResponse


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
def settings(tmp_path: Path, weights: Path) -> SchedulerSettings:
    return make_settings(tmp_path, weights)


@pytest.fixture
async def scheduler(settings: SchedulerSettings) -> AsyncIterator[Running]:
    async with _scheduler(settings) as running:
        yield running
