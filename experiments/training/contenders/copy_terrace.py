# mypy: ignore-errors
# A script; what it imports without torch is Terrace's own.
"""Terrace: one machine of `terrace experiment data-copies`, the source or one that receives, as hosts and workers are,
but for the training. What a machine sends is paced: its answers share one link."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from experiments.emulation.links import LinkSpec
from experiments.emulation.schedule import transmitted_at
from tierkit.http.answering import install
from tierkit.http.client import open_client
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import running
from tierkit.settings import ServiceSettings
from training.data.copy import Copier
from training.data.manifest import Manifest, SegmentEntry, sha256_of
from training.data.serving import create_data_app, segment_route
from training.data.store import Store
from training.messages import DataReport
from training.worker.connection import HostConnection

_SIDE = 32
_CHUNK_BYTES = 256 * 1024
_LOOK_S = 0.005


class Uplink:
    """ASGI middleware: bodies leave one after the other, at the pace of one link."""

    def __init__(self, app, bytes_per_s: float) -> None:
        self._app, self._link = app, LinkSpec(bandwidth_bps=8 * bytes_per_s)
        self._free_at = 0.0

    async def __call__(self, scope, receive, send) -> None:
        async def paced(message) -> None:
            size = len(message.get("body", b""))
            if size:
                self._free_at = transmitted_at(self._link, size, now=time.monotonic(), free_at=self._free_at)
                await asyncio.sleep(self._free_at - time.monotonic())
            await send(message)

        await self._app(scope, receive, paced)


def tell(**figures) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def wait_for_sign(go: Path) -> None:
    while not go.exists():
        time.sleep(_LOOK_S)


def prepared(folder: Path, size: int) -> Manifest:
    """One segment of about this size, of images of nothing but chance."""
    count = size // (_SIDE * _SIDE * 3 + 17)
    draw = np.random.default_rng(0)
    content = save(
        {
            "index": np.arange(count),
            "images": draw.integers(0, 256, (count, _SIDE, _SIDE, 3), dtype=np.uint8),
            "fine": np.zeros(count, np.int64),
            "train": np.ones(count, np.uint8),
        }
    )
    chunks = tuple(sha256_of(content[at : at + _CHUNK_BYTES]) for at in range(0, len(content), _CHUNK_BYTES))
    entry = SegmentEntry(sha256=sha256_of(content), bytes=len(content), images=count, chunks=chunks)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / entry.sha256).write_bytes(content)
    return Manifest(
        data_sha256="0" * 64,
        chunk_bytes=_CHUNK_BYTES,
        shape=(_SIDE, _SIDE, 3),
        hierarchy={"fine": ["one"]},
        mean=0,
        std=1.0,
        steps_per_epoch=1,
        segments=(entry,),
    )


async def source(asked: argparse.Namespace) -> None:
    from training.host.sharing import Sharing

    manifest = prepared(asked.folder, asked.size)
    sharing = Sharing(manifest, asked.folder, batch=1, wait_s=10.0, clock=time.monotonic, deepest=max(1, asked.deepest))

    async def allow(request) -> None:
        pass

    async def report(request) -> JSONResponse:
        told = DataReport.model_validate_json(await request.body())
        sharing.told(told, 0)
        return JSONResponse((await sharing.answer(told, ended=lambda: False)).model_dump(mode="json"))

    async def view(request) -> JSONResponse:
        return JSONResponse([each.model_dump(mode="json") for each in sharing.view()])

    async def shown(request) -> JSONResponse:
        return JSONResponse(manifest.model_dump(mode="json"))

    def build(lifecycle: Lifecycle) -> Starlette:
        lifecycle.own(sharing.watch(), name="copies")
        app = Starlette(
            routes=[
                Route("/v1/segments", shown, methods=["GET"]),
                Route("/v1/data", report, methods=["POST"]),
                Route("/v1/data", view, methods=["GET"]),
                segment_route(sharing.read, allow),
            ]
        )
        install(app)
        app.add_middleware(Uplink, bytes_per_s=asked.rate)
        return app

    lifecycle = Lifecycle()
    async with running(build, ServiceSettings(), lifecycle=lifecycle):
        tell(ready=lifecycle.url)
        await asyncio.Event().wait()


async def machine(asked: argparse.Namespace) -> None:
    async with open_client() as http:
        host = HostConnection(asked.name, "0" * 16, http, url=asked.url)
        store = Store(asked.folder, await host.manifest())

        async def have(ask):
            return await ask()

        copier = Copier(host, store, have, keeps="all")

        def build(lifecycle: Lifecycle) -> Starlette:
            app = create_data_app(store.read, lambda: copier.key)
            app.add_middleware(Uplink, bytes_per_s=asked.rate)
            if asked.deepest:
                copier.url = lifecycle.url
            return app

        async with running(build, ServiceSettings(), lifecycle=Lifecycle()):
            tell(ready="")
            await asyncio.to_thread(wait_for_sign, asked.go)
            copying = asyncio.create_task(copier.run())
            waiting = asyncio.create_task(copier.ready())
            await asyncio.wait({copying, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                tell(done=time.monotonic())
            await copying


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--role", choices=["source", "machine"])
    flags.add_argument("--folder", type=Path)
    flags.add_argument("--go", type=Path)
    flags.add_argument("--name")
    flags.add_argument("--url", default="")
    flags.add_argument("--size", type=int)
    flags.add_argument("--rate", type=float)
    flags.add_argument("--deepest", type=int, help="0: nobody but the source sends")
    asked = flags.parse_args()
    asyncio.run(source(asked) if asked.role == "source" else machine(asked))


if __name__ == "__main__":
    main()
