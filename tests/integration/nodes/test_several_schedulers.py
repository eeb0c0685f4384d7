"""A node with several schedulers: it registers with each, knows their requests by the key, and lets none flood it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.integration.nodes.conftest import PixelModel, RunningNode, StartNode
from tierkit.testing import serve_app, wait_for
from tierkit.wire.messages import Heartbeat, Registration
from tierkit.wire.oip import InferRequest, Tensor, encode_request


@dataclass
class Registry:
    """A scheduler that takes nodes."""

    refuses: bool = False
    registrations: list[Registration] = field(default_factory=list)
    beats: list[Heartbeat] = field(default_factory=list)
    left: int = 0
    url: str = ""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/devices", self.register, methods=["POST"]),
                Route("/v1/devices/{node_id}/heartbeat", self.beat, methods=["POST"]),
                Route("/v1/devices/{node_id}", self.leave, methods=["DELETE"]),
            ]
        )

    async def register(self, request: Request) -> Response:
        if self.refuses:
            return JSONResponse({"error": "pixel is not in the model set of this scheduler"}, 409)
        self.registrations.append(Registration.model_validate_json(await request.body()))
        return JSONResponse({"lease_s": 1.0, "heartbeat_s": 0.02})

    async def beat(self, request: Request) -> Response:
        self.beats.append(Heartbeat.model_validate_json(await request.body()))
        return Response(status_code=204)

    async def leave(self, _request: Request) -> Response:
        self.left += 1
        return Response(status_code=204)

    @property
    def key(self) -> str:
        return self.registrations[-1].key


@contextlib.asynccontextmanager
async def registries(count: int) -> AsyncIterator[list[Registry]]:
    async with contextlib.AsyncExitStack() as stack:
        made = [Registry() for _ in range(count)]
        for registry in made:
            registry.url = (await stack.enter_async_context(serve_app(registry.app()))).url
        yield made


async def ask(node: RunningNode, images: int, key: str = "") -> httpx.Response:
    chunks, headers = encode_request(InferRequest((Tensor("images", np.zeros((images, 4, 4, 3), np.uint8)),)))
    token = {"Authorization": f"Bearer {key}"} if key else {}
    return await node.http.post(node.infer_path, content=b"".join(chunks), headers={**headers, **token})


async def readiness(node: RunningNode) -> tuple[int, dict[str, str]]:
    answer = await node.http.get("/readyz")
    return answer.status_code, answer.json()["checks"]


async def test_each_scheduler_has_a_key_and_sees_its_own_queue(start_node: StartNode) -> None:
    async with registries(2) as (first, second):
        settings = {"scheduler": [first.url], "also": [{"scheduler": second.url, "name": "two"}]}
        async with start_node(PixelModel(), **settings) as node:
            await wait_for(lambda: bool(first.beats and second.beats))
            assert len({first.key, second.key, ""}) == 3
            assert (await ask(node, 1)).status_code == 200  # without tokens a key is not needed
            node.model.gate.clear()
            node.model.entered.clear()
            running = asyncio.create_task(ask(node, 1, first.key))
            await asyncio.to_thread(node.model.entered.wait)
            waiting = [asyncio.create_task(ask(node, 2, key)) for key in (first.key, second.key, second.key, "")]
            await wait_for(lambda: first.beats[-1].queued_images == 2 and second.beats[-1].queued_images == 4)
            done = first.beats[-1].images_done
            assert first.beats[-1].running_images == second.beats[-1].running_images == 1
            node.model.gate.set()
            await asyncio.gather(running, *waiting)
            # Progress is the node's: a scheduler that waits sees that the node works for another one.
            await wait_for(lambda: second.beats[-1].images_done >= done + 9)
            page = (await node.http.get("/metrics")).text
            for name, images in (("two", 4), (first.url.removeprefix("http://"), 3), ("others", 3)):
                assert f'terrace_share_images_total{{scheduler="{name}"}} {images}.0' in page
        assert (first.left, second.left) == (1, 1)


async def test_a_flood_of_one_does_not_make_the_node_refuse_another(start_node: StartNode) -> None:
    async with registries(2) as (first, second):
        bounds = {"max_queue_images": 30, "max_batch_size": 5, "threads": 1}
        settings = {"scheduler": [first.url], "also": [second.url], **bounds}
        async with start_node(PixelModel(), **settings) as node:
            await wait_for(lambda: bool(first.beats and second.beats))
            node.model.gate.clear()
            node.model.entered.clear()
            flood = [asyncio.create_task(ask(node, 5, second.key))]
            await asyncio.to_thread(node.model.entered.wait)
            flood += [asyncio.create_task(ask(node, 5, second.key)) for _ in range(19)]
            await wait_for(lambda: sum(task.done() for task in flood) == 13, what="one that runs, and six that wait")
            own = [asyncio.create_task(ask(node, 5, first.key)) for _ in range(2)]
            await wait_for(lambda: first.beats[-1].queued_images == 10)
            assert (await ask(node, 5, first.key)).status_code == 503
            node.model.gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*own)] == [200, 200]
            codes = [answer.status_code for answer in await asyncio.gather(*flood)]
            assert (codes.count(200), codes.count(503)) == (7, 13)


async def test_a_refusal_by_one_scheduler_shows_and_does_not_harm_the_first(start_node: StartNode) -> None:
    async with registries(2) as (first, second):
        second.refuses = True
        settings = {"scheduler": [first.url], "also": [{"scheduler": second.url, "name": "two"}]}
        async with start_node(PixelModel(), **settings) as node:

            async def shown() -> bool:
                return (await readiness(node))[1]["scheduler two"] != "ok"

            await wait_for(shown)
            status, checks = await readiness(node)
            assert (status, checks["scheduler"]) == (200, "ok")
            assert "the scheduler two refuses this node: pixel is not in the model set" in checks["scheduler two"]
            assert first.registrations
            second.refuses = False
            await wait_for(lambda: bool(second.beats), what="the second scheduler to take the node")
            assert (await readiness(node))[1]["scheduler two"] == "ok"


async def test_schedulers_that_are_away_delay_neither_the_others_nor_the_end(start_node: StartNode) -> None:
    async with registries(1) as (first,):
        async with serve_app(Registry().app()) as gone:
            away = gone.url
        settings = {"scheduler": [first.url], "also": [away]}
        async with start_node(PixelModel(), **settings) as node:
            await wait_for(lambda: len(first.beats) > 2)
            assert (await readiness(node))[0] == 200
        assert first.left == 1
