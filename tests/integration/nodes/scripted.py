"""A scheduler with releases that does as a test tells it, on a real socket."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from models.manifest import Manifest, load_manifest, merge_entry, save_manifest
from tests.model_sets import colour_network, colour_set
from tierkit.settings import ServiceSettings
from tierkit.testing import serve_app, wait_for
from tierkit.wire.messages import RELEASES_HEADER, DeviceRoute, Heartbeat, ModelOffer, Registration
from tierkit.wire.observations import Observation, Receipt, read_batch

__all__ = ["ScriptedScheduler", "released", "wild"]


@dataclass
class ScriptedScheduler:
    """Gives the releases in `sets`, and tells all nodes to hold `told`."""

    sets: dict[int, Path] = field(default_factory=dict)
    """Folders of model sets by release."""
    told: tuple[int, ...] = ()
    prunes: int = 0
    with_releases: bool = True
    """False: as a scheduler of an older Terrace."""
    refuse: int | None = None
    """Status with which registrations are refused."""
    damaged: set[str] = field(default_factory=set)
    """sha256 of files that it sends with a wrong byte."""
    away: bool = False
    """True: answers 503 to all requests for manifests and files."""
    before_file: Callable[[str], object] = lambda _: None
    """Called with the sha256 of each file that is asked for."""
    registrations: list[Registration] = field(default_factory=list)
    beats: list[Heartbeat] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """sha256 of the files that were sent."""
    observations: list[Observation] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Paths of requests for manifests and files."""

    def manifest(self, number: int) -> Manifest:
        return load_manifest(self.sets[number])

    def network(self, number: int, tier: str = "end") -> str:
        """sha256 of the network of a tier."""
        return self.manifest(number).default_for(tier).sha256

    def offers(self, node_id: str = "end-1") -> Sequence[ModelOffer]:
        """Those of the last registration of a node."""
        return next((each.models for each in reversed(self.registrations) if each.node_id == node_id), ())

    def last(self, node_id: str) -> Registration:
        """The last registration of a node."""
        return next(each for each in reversed(self.registrations) if each.node_id == node_id)

    async def offered(self, *numbers: int, tier: str = "end", node_id: str = "end-1") -> None:
        """Wait until a node offers the networks of these releases, in this order, and no others."""
        wanted = list(dict.fromkeys(self.network(number, tier) for number in numbers))

        def same() -> bool:
            return [offer.sha256 for offer in self.offers(node_id) if "." not in offer.name] == wanted

        await wait_for(same, what=f"the releases {numbers}")

    async def troubled(self, number: int, kind: str) -> str:
        """Wait for a heartbeat with this trouble; returns its detail."""

        def found() -> list[str]:
            troubles = self.beats[-1].troubles if self.beats else ()
            return [each.detail for each in troubles if (each.release, each.kind) == (number, kind)]

        await wait_for(lambda: bool(found()), what=f"the trouble {kind}")
        return found()[0]

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._in_force),
                Route("/v1/models/{name}/file", self._file),
                Route("/v1/releases/{number:int}/manifest", self._manifest),
                Route("/v1/devices", self._register, methods=["POST"]),
                Route("/v1/devices/{node_id}/heartbeat", self._beat, methods=["POST"]),
                Route("/v1/devices/{node_id}", self._leave, methods=["DELETE"]),
                Route("/v1/devices/{node_id}/route", self._route),
                Route("/v1/observations", self._observe, methods=["POST"]),
            ]
        )

    @property
    def _headers(self) -> dict[str, str]:
        if not self.with_releases:
            return {}
        return {RELEASES_HEADER: ",".join(map(str, self.told)) + (f";{self.prunes}" if self.prunes else "")}

    def _refusal(self, request: Request) -> Response | None:
        self.asked.append(request.url.path)
        return JSONResponse({"error": "not now"}, 503) if self.away else None

    async def _in_force(self, request: Request) -> Response:
        header = {RELEASES_HEADER: str(self.told[0])} if self.with_releases else {}
        return self._refusal(request) or self._content(request, self.manifest(self.told[0]), header)

    async def _manifest(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        number = request.path_params["number"]
        if number not in self.sets:
            return JSONResponse({"error": f"no release {number}"}, 404)
        return self._content(request, self.manifest(number), {})

    def _content(self, request: Request, manifest: Manifest, headers: dict[str, str]) -> Response:
        headers = {"ETag": f'"{manifest.digest}"', **headers}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(json.dumps(manifest.content()), media_type="application/json", headers=headers)

    async def _file(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        sha256, name = request.query_params["sha256"], request.path_params["name"]
        self.before_file(sha256)
        for number, folder in self.sets.items():
            manifest = self.manifest(number)
            if name in {entry.name for entry in manifest.models} or manifest.encoders:
                entry = manifest.weights(name)
                if entry.sha256 == sha256:
                    content = bytearray((folder / entry.file).read_bytes())
                    if sha256 in self.damaged:
                        content[100] ^= 255
                    self.files.append(sha256)
                    return Response(bytes(content))
        return JSONResponse({"error": "not here"}, 404)

    async def _register(self, request: Request) -> Response:
        if self.refuse is not None:
            return JSONResponse({"error": "refused"}, self.refuse)
        self.registrations.append(Registration.model_validate_json(await request.body()))
        return JSONResponse({"lease_s": 2.0, "heartbeat_s": 0.05}, headers=self._headers)

    async def _beat(self, request: Request) -> Response:
        if not any(each.node_id == request.path_params["node_id"] for each in self.registrations):
            return JSONResponse({"error": "no such device"}, 404)
        self.beats.append(Heartbeat.model_validate_json(await request.body()))
        return Response(status_code=204, headers=self._headers)

    async def _route(self, _request: Request) -> Response:
        route = DeviceRoute(version="0" * 16, upstreams=())
        return Response(route.model_dump_json(), media_type="application/json")

    async def _observe(self, request: Request) -> Response:
        batch = read_batch(gzip.decompress(await request.body()))
        self.observations += batch.observations
        receipt = Receipt(stored=len(batch.observations), known=0)
        return Response(msgspec.json.encode(receipt), media_type="application/json")

    async def _leave(self, _request: Request) -> Response:
        return Response(status_code=204)

    @asynccontextmanager
    async def served(self, port: int = 0) -> AsyncIterator[str]:
        """Its URL, while it listens."""
        async with serve_app(self.app(), ServiceSettings(port=port, drain_s=2.0)) as lifecycle:
            yield lifecycle.url


def released(place: Path, number: int, *, tiers: Sequence[str] = ("end",), size: int = 32) -> Path:
    """A model set of colour networks that differ from release to release, in their confidence only."""
    place.mkdir(parents=True, exist_ok=True)
    networks = {
        tier: colour_network(place / f"{tier}-{number}.onnx", factor=10.0 + number, size=size) for tier in tiers
    }
    return colour_set(place / f"set-{number}", networks)


def wild(folder: Path, *, above: float, tier: str = "end") -> Path:
    """Let a network of a model set give NaN for pictures in which red is stronger than green and blue together by more
    than this, in logits; returns the folder."""
    manifest = load_manifest(folder)
    entry = manifest.default_for(tier)
    model = onnx.load_model_from_string((folder / entry.file).read_bytes())
    graph, name = model.graph, model.graph.output[0].name
    for node in graph.node:
        for place, output in enumerate(node.output):
            if output == name:
                node.output[place] = "sane"
    constants = {"red": [[1.0], [-1.0], [-1.0]], "above": [above], "nothing": [0.0]}
    for constant, values in constants.items():
        graph.initializer.append(numpy_helper.from_array(np.array(values, np.float32), constant))
    graph.node.extend(
        [
            helper.make_node("MatMul", ["sane", "red"], ["redness"]),
            helper.make_node("Sub", ["above", "redness"], ["distance"]),
            helper.make_node("Sqrt", ["distance"], ["root"]),
            helper.make_node("Mul", ["root", "nothing"], ["nothing-or-nan"]),
            helper.make_node("Add", ["sane", "nothing-or-nan"], [name]),
        ]
    )
    path = folder / f"wild-{entry.file}"
    path.write_bytes(model.SerializeToString())
    changed = entry.with_file(path, precision=entry.precision)
    save_manifest(manifest.model_copy(update={"models": merge_entry(manifest.models, changed)}), folder)
    return folder
