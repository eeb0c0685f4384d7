"""A host that answers whatever it is told to."""

from __future__ import annotations

import json
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from models.data import ImageSet
from models.dataset import Dataset
from models.hierarchy import Hierarchy
from models.training.config import TrainConfig
from tests.integration.training.conftest import CONFIG
from training.messages import LEASE_HEADER, RunSpec
from training.payloads import pack
from training.strategies.finding import find_hosted

__all__ = ["HIDDEN", "LEASE", "STATUS", "VALUES", "Answer", "Played", "Told", "answer", "played", "told"]

Answer = tuple[int, Mapping[str, str], bytes]

HIDDEN = 100
VALUES = 3072 * HIDDEN + HIDDEN + HIDDEN * 3 + 3
LEASE = {"number": 1, "version": 0, "first": 0, "push": 1}

_COUNTS = ("done", "steps", "version", "seconds", "updates", "bytes_sent", "bytes_received", "faults")
STATUS = {
    **dict.fromkeys(_COUNTS, 0),
    **dict.fromkeys(("loss", "accuracy", "result")),
    **{"id": "a" * 32, "network": "net", "strategy": "sgd", "state": "running", "times": {}, "workers": []},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What an honest host would say of a run, as JSON, and its images."""

    spec: dict[str, Any]
    images: ImageSet
    hierarchy: Hierarchy


def told(shapes: Path, *, strategy: str = "sgd") -> Told:
    """Of a network of one hidden layer on these images."""
    dataset = Dataset.open(str(shapes), None)
    images = dataset.read("train")
    network = TrainConfig.model_validate(tomllib.loads(CONFIG.format(epochs=20).replace("[8]", f"[{HIDDEN}]")))
    spec = RunSpec(
        id="a" * 32,
        network=network,
        choice=strategy,
        strategy=find_hosted(strategy),
        workers=1,
        wire="fp32",
        values=VALUES,
        buffers=0,
        data_sha256=images.digest(),
        lease_s=30.0,
    )
    return Told(spec=spec.model_dump(mode="json"), images=images, hierarchy=dataset.hierarchy)


def answer(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """As JSON, unless it is bytes."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return status, headers or {}, body


@dataclass(slots=True, kw_only=True)
class Played:
    """Grants one lease, and says then that the run has ended. What is in `instead` is said once in place of that."""

    told: Told
    instead: dict[str, Answer] = field(default_factory=dict)
    """By method and path."""
    url: str = ""
    seen: list[str] = field(default_factory=list)
    leases: int = 1

    def usual(self, route: str) -> Answer:
        """What an honest host says."""
        if route == "GET /v1/run":
            return answer({"spec": self.told.spec, "status": STATUS})
        if route == "POST /v1/leases":
            if self.seen.count(route) > self.leases:
                return answer({"finished": True}, 202)
            weights = pack(np.full(VALUES, 0.01, np.float32), np.zeros(0, np.float32), "fp32")
            return answer(weights, 200, {LEASE_HEADER: json.dumps(LEASE)})
        if route == "POST /v1/updates":
            return answer({"verdict": "taken", "version": 1, "finished": False})
        return answer({"name": "w"})

    async def handle(self, request: web.Request) -> web.Response:
        """Any request."""
        await request.read()
        route = f"{request.method} {request.path}"
        self.seen.append(route)
        status, headers, body = self.instead.pop(route) if route in self.instead else self.usual(route)
        return web.Response(status=status, headers=headers, body=body)


@asynccontextmanager
async def played(run: Told) -> AsyncIterator[Played]:
    """Such a host on a socket."""
    host = Played(told=run)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{tail:.*}", host.handle)
    runner = web.AppRunner(app, auto_decompress=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host.url = site.name
    try:
        yield host
    finally:
        await runner.cleanup()
