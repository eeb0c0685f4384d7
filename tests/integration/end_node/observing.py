"""A node with sources, and a scheduler that says what a test wants, both on real sockets."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from end_node.app import create_app
from end_node.observing import ObservingNode
from end_node.routes import source_routes
from end_node.settings import EndSettings
from models.manifest import Fit
from tests.integration.end_node.aids import HIERARCHY, PixelModel
from tierkit.http.lifecycle import Lifecycle
from tierkit.testing import serve_app
from tierkit.types import Tier
from tierkit.wire.learning import LabelNews, LabelOfPerson
from tierkit.wire.messages import DeviceRoute, Registration, Stage, Upstream
from tierkit.wire.observations import DeviceStatus, Gap, Observation, Receipt, read_batch

FIT = Fit(height=2, width=2, rule="squash", resize_to=None, resample="bicubic")


def png(label: int, shade: int = 0) -> bytes:
    """A picture whose class is `label`, for `PixelModel`."""
    picture = Image.new("RGB", (2, 2), (0, 0, shade))
    picture.putpixel((0, 0), (label, 0, 0))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


class SaidScheduler:
    """Keeps what nodes send it. A test replaces `receipt` or `route` to have it say something else."""

    def __init__(self) -> None:
        self.registrations: list[Registration] = []
        self.observations: dict[tuple[str, int], Observation] = {}
        self.arrived: list[tuple[str, int, int]] = []
        """Source, sequence number and revision, in the order of their arrival."""
        self.gaps: list[Gap] = []
        self.spools: list[str] = []
        self.devices: list[DeviceStatus] = []
        """The state of the device, from each batch."""
        self.empty = 0
        """Batches without observations and gaps."""
        self.pictures: dict[tuple[str, int], bytes] = {}
        self.route = DeviceRoute(version="0" * 16, upstreams=())
        self.labels: list[LabelOfPerson] = []
        self.known = False
        self.receipt: Callable[[Any], Response | None] = lambda batch: None
        self.put: Callable[[], Response] = lambda: Response(status_code=204)

    def routed(self, *upstreams: Upstream, below: float | None = 0.8, version: int = 1) -> None:
        """Route the node's pictures to these edge nodes; the margins of `PixelModel` are 0.4 with two classes."""
        stages = (Stage(tier=Tier.EDGE, below=below),)
        self.route = DeviceRoute(version=f"{version:016x}", upstreams=upstreams, stages=stages)

    @property
    def app(self) -> Starlette:
        node = "/v1/devices/{node_id}"
        return Starlette(
            routes=[
                Route("/v1/devices", self._register, methods=["POST"]),
                Route(f"{node}/heartbeat", self._beat, methods=["POST"]),
                Route(node, self._leave, methods=["DELETE"]),
                Route(f"{node}/route", self._route, methods=["GET"]),
                Route(f"{node}/labels", self._labels, methods=["GET"]),
                Route("/v1/observations", self._observe, methods=["POST"]),
                Route("/v1/observations/{node_id}/{source}/{sequence:int}/picture", self._picture, methods=["PUT"]),
            ]
        )

    async def _register(self, request: Request) -> Response:
        self.registrations.append(Registration.model_validate_json(await request.body()))
        self.known = True
        return JSONResponse({"lease_s": 1.0, "heartbeat_s": 0.05}, headers={"Terrace-Route": self.route.version})

    async def _beat(self, request: Request) -> Response:
        if not self.known:
            return JSONResponse({"error": "unknown"}, 404)
        headers = {"Terrace-Route": self.route.version}
        if self.labels:
            headers["Terrace-Labels"] = str(self.labels[-1].number)
        return Response(status_code=204, headers=headers)

    async def _leave(self, request: Request) -> Response:
        return Response(status_code=204)

    async def _route(self, request: Request) -> Response:
        return Response(self.route.model_dump_json(), media_type="application/json")

    async def _labels(self, request: Request) -> Response:
        after = int(request.query_params["after"])
        found = [each for each in self.labels if each.number > after]
        return Response(LabelNews(labels=tuple(found[:1]), more=len(found) > 1).model_dump_json())

    async def _observe(self, request: Request) -> Response:
        assert request.headers["content-encoding"] == "gzip"
        batch = read_batch(gzip.decompress(await request.body()))
        if not self.known:
            return JSONResponse({"error": "unknown"}, 404)
        if batch.device is not None:
            self.devices.append(batch.device)
        if not batch.observations and not batch.gaps:
            self.empty += 1
            return receipt(Receipt(stored=0, known=0))
        if (said := self.receipt(batch)) is not None:
            return said
        for each in batch.observations:
            self.observations[each.source, each.sequence] = each
            self.arrived.append((each.source, each.sequence, each.revision))
        self.gaps += batch.gaps
        self.spools.append(batch.spool)
        return receipt(Receipt(stored=len(batch.observations), known=0))

    async def _picture(self, request: Request) -> Response:
        answer = self.put()
        if answer.status_code == 204:
            where = request.path_params["source"], request.path_params["sequence"]
            self.pictures[where] = await request.body()
        return answer


def receipt(of: Receipt) -> Response:
    return Response(msgspec.json.encode(of), media_type="application/json")


class RunningNode:
    """A node with sources that is being served."""

    def __init__(self, lifecycle: Lifecycle, model: PixelModel, http: httpx.AsyncClient, node: ObservingNode) -> None:
        self.url = lifecycle.url
        self.model = model
        self.node = node
        self._http = http

    async def push(self, content: bytes, source: str = "gate") -> httpx.Response:
        return await self._http.post(f"{self.url}/v1/sources/{source}/pictures", content=content)

    async def sources(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self._http.get(f"{self.url}/v1/sources")).json()
        return found

    @asynccontextmanager
    async def events(self, **headers: str) -> AsyncIterator[AsyncIterator[tuple[str, int, dict[str, Any]]]]:
        """The stream of observations: kind, number and content of each event."""
        url = f"{self.url}/v1/observations/events"
        async with self._http.stream("GET", url, headers=headers) as response:
            assert response.status_code == 200, await response.aread()

            async def read() -> AsyncIterator[tuple[str, int, dict[str, Any]]]:
                event: dict[str, str] = {}
                async for line in response.aiter_lines():
                    if line and not line.startswith(":"):
                        name, _, value = line.partition(": ")
                        event[name] = value
                    elif event:
                        yield event["event"], int(event["id"]), json.loads(event["data"])
                        event = {}

            yield read()


@asynccontextmanager
async def observing(
    folder: Path, http: httpx.AsyncClient, scheduler: str | None = None, model: PixelModel | None = None, **values: Any
) -> AsyncIterator[RunningNode]:
    """A node whose spool is in `folder`, with the push source `gate` unless `source` says otherwise."""
    own = model or PixelModel("coarse", 2)
    nodes: list[ObservingNode] = []
    settings = EndSettings.model_validate(
        {
            "node_id": "end-1",
            "port": 0,
            "drain_s": 5.0,
            "scheduler": scheduler,
            "source": ["gate=push"],
            "spool": {"folder": folder},
            **values,
        }
    )

    def build(lifecycle: Lifecycle) -> Starlette:
        nodes.append(ObservingNode(settings, [own], lifecycle, HIERARCHY))
        nodes[0].fit = FIT
        return create_app(nodes[0], source_routes(nodes[0]))

    async with serve_app(build, settings) as lifecycle:
        try:
            yield RunningNode(lifecycle, own, http, nodes[0])
        finally:
            own.gate.set()


@asynccontextmanager
async def said_scheduler() -> AsyncIterator[tuple[SaidScheduler, str]]:
    """The scheduler, and its URL."""
    scheduler = SaidScheduler()
    async with serve_app(scheduler.app) as lifecycle:
        yield scheduler, lifecycle.url


async def first(events: AsyncIterator[Any], count: int) -> list[Any]:
    """The first events of a stream."""
    async with asyncio.timeout(30):
        return [await anext(events) for _ in range(count)]
