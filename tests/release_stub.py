"""A scheduler's release routes on a real socket, which do what a test has set and note what they were asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tierkit.errors import Conflict, InvalidInput, NotFound
from tierkit.http.answering import install
from tierkit.testing import serve_app
from tierkit.types import Tier
from tierkit.wire.releases import (
    GuardNow,
    NewRelease,
    Pruned,
    ReleaseList,
    ReleaseNetwork,
    ReleaseNow,
    ReleaseState,
    Rollout,
    RolloutState,
    StartRequest,
)

__all__ = ["GUARDS", "ReleaseStub", "a_release", "a_rollout", "stubbed"]

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
GUARDS = (
    GuardNow(name="agreement", limit=0.97, old=0.912, new=0.905, value=0.9923, low=0.981, high=1.003, samples=4200,
             old_samples=9000, needs=200, verdict="holds", detail="4,200 images agree in 90.5 %, before in 91.2 %"),
    GuardNow(name="p99", limit=1.3, old=1.2, new=1.9, value=1.583, samples=120, old_samples=600, needs=200),
    GuardNow(name="errors", limit=0.005, old=0.0, new=0.25, value=0.25, low=0.2, high=0.31, samples=400, needs=200,
             verdict="fails"),
)  # fmt: skip


def a_release(name: str, number: int, state: ReleaseState, **changes: Any) -> ReleaseNow:
    network = ReleaseNetwork(
        name="small", tier=Tier.END, sha256=f"{number}" * 64, target="coarse", size_bytes=4_200_000
    )
    facts = {"digest": f"{number:x}" * 64, "created_at": NOON, "classes": 3, "networks": (network,)}
    return ReleaseNow(release=f"{name}@{number}", name=name, number=number, state=state, **{**facts, **changes})


def a_rollout(release: str, state: RolloutState, **changes: Any) -> Rollout:
    facts = {"previous": "flowers@1", "kind": "canary", "share": 0.1, "canary": 0.1, "started_at": NOON}
    return Rollout(release=release, state=state, **{**facts, **changes})


class ReleaseStub:
    """State of the stub; tests change it."""

    def __init__(self) -> None:
        self.url = ""
        self.releases: dict[int, ReleaseNow] = {}
        self.manifests: dict[int, Any] = {}
        self.networks: dict[str, bytes] = {}
        self.rollouts: list[Rollout] = []
        """Changes under way in the next answers of `GET /v1/releases`; the last one stays, a final one is history."""
        self.asked: list[tuple[str, Any]] = []
        self.conflict = ""
        """Why a change is refused."""
        self.pruned = Pruned(releases=("flowers@1",), files=("a" * 64,), bytes=4_200_000, dry_run=True)

    def add(self, release: ReleaseNow, manifest: Any = None) -> ReleaseNow:
        self.releases[release.number] = release
        self.manifests[release.number] = manifest
        return release

    def found(self, ref: str) -> ReleaseNow:
        number = ref.rpartition("@")[2]
        release = self.releases.get(int(number)) if number.isdigit() else None
        if release is None or ref not in (number, release.release):
            raise NotFound(f"unknown release {ref!r}")
        return release

    async def list_all(self, _: Request) -> Response:
        newest = sorted(self.releases.values(), key=lambda each: -each.number)
        in_force = next((each.release for each in newest if each.state is ReleaseState.IN_FORCE), "")
        now = self.rollouts.pop(0) if len(self.rollouts) > 1 else next(iter(self.rollouts), None)
        ended = now is not None and now.state.final
        return _json(
            ReleaseList(
                in_force=in_force,
                rollout=None if ended else now,
                releases=tuple(newest),
                history=(now,) if now is not None and ended else (),
            )
        )

    async def show(self, request: Request) -> Response:
        return _json(self.found(request.path_params["ref"]))

    async def manifest(self, request: Request) -> Response:
        return JSONResponse(self.manifests[self.found(request.path_params["ref"]).number])

    async def create(self, request: Request) -> Response:
        wanted = NewRelease.model_validate_json(await request.body())
        self.asked.append(("create", wanted))
        manifest = wanted.manifest or {"models": []}
        missing = [each["name"] for each in manifest["models"] if each["sha256"] not in self.networks]
        if missing:
            raise Conflict(f"files are missing: {', '.join(missing)}")
        number = max(self.releases, default=0) + 1
        return _json(self.add(a_release(wanted.name, number, ReleaseState.READY), manifest), 201)

    async def network(self, request: Request) -> Response:
        sha256 = request.path_params["sha256"]
        content = self.networks.get(sha256)
        self.asked.append((request.method, sha256))
        if request.method == "PUT":
            sent = await request.body()
            if hashlib.sha256(sent).hexdigest() != sha256:
                raise InvalidInput("the content has another sha256")
            self.networks[sha256] = sent
            return JSONResponse({"sha256": sha256}, 201 if content is None else 200)
        if content is None:
            raise NotFound(f"no network with sha256 {sha256}")
        return Response(content[:1], 206)

    async def change(self, request: Request) -> Response:
        release, change = self.found(request.path_params["ref"]), request.path_params["change"]
        body = await request.body()
        wanted = StartRequest.model_validate_json(body) if change == "start" else None
        self.asked.append((change, wanted))
        if self.conflict:
            raise Conflict(self.conflict)
        state = {"start": RolloutState.CANARY, "stop": RolloutState.STOPPED}.get(change, RolloutState.ROLLING)
        limits = {} if wanted is None else wanted.guards
        guards = tuple(GuardNow(name=name, limit=limit) for name, limit in limits.items())
        length = 0.0 if wanted is None else wanted.for_s
        return _json(a_rollout(release.release, state, guards=guards, for_s=length))

    async def prune(self, request: Request) -> Response:
        dry_run = request.query_params["dry_run"] == "true"
        self.asked.append(("prune", dry_run))
        return _json(self.pruned.model_copy(update={"dry_run": dry_run}))


def _json(value: Any, status: int = 200) -> Response:
    return JSONResponse(json.loads(value.model_dump_json()), status)


@asynccontextmanager
async def stubbed() -> AsyncIterator[ReleaseStub]:
    """Serve a stub."""
    stub = ReleaseStub()
    routes = [
        Route("/v1/releases", stub.list_all),
        Route("/v1/releases", stub.create, methods=["POST"]),
        Route("/v1/releases", stub.prune, methods=["DELETE"]),
        Route("/v1/releases/{ref}", stub.show),
        Route("/v1/releases/{ref}/manifest", stub.manifest),
        Route("/v1/releases/{ref}/{change}", stub.change, methods=["POST"]),
        Route("/v1/networks/{sha256}", stub.network, methods=["GET", "PUT"]),
    ]
    app = Starlette(routes=routes)
    install(app)
    async with serve_app(app) as service:
        stub.url = service.url
        yield stub
