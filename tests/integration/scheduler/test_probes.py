"""Probe pictures: a node whose network answers otherwise than it should gets no work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from models.manifest import load_manifest, weights_folder
from models.session import load_model
from scheduler.releases.computing import probe_pictures
from scheduler.releases.files import NetworkFiles
from scheduler.releases.probes import compute_answers, known_answers
from tests.model_sets import colour_network, colour_set
from tierkit.tensors import Array
from tierkit.testing import serve_app, wait_for
from tierkit.wire.oip import BINARY_HEADER, InferResponse, Tensor, decode_request, encode_response, parse_header_length


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probed")
    return colour_set(folder / "set", {"end": colour_network(folder / "end.onnx")})


@dataclass
class ClaimingNode:
    """An end node that claims to hold the network of a set, and answers with `turn` applied to its probabilities."""

    models: Path
    wrong: bool = False
    status: int = 200
    asked: int = 0
    tasks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        manifest = load_manifest(self.models)
        self.entry = manifest.default_for("end")
        self._model = load_model(self.entry, self.models, labels=manifest.labels(self.entry))

    async def infer(self, request: Request) -> Response:
        self.asked += 1
        if self.status != 200:
            return JSONResponse({"error": "not now"}, self.status)
        images = (
            decode_request(await request.body(), parse_header_length(request.headers[BINARY_HEADER])).inputs[0].data
        )
        found: Array = self._model.run({"images": images}, ["probabilities"])["probabilities"]
        if self.wrong:
            found = np.ascontiguousarray(found[:, ::-1])
        response = InferResponse(self.entry.name, self.entry.sha256, (Tensor("probabilities", found),), "")
        chunks, headers = encode_response(response)
        return Response(b"".join(bytes(chunk) for chunk in chunks), headers=headers)

    async def task(self, request: Request) -> Response:
        self.tasks.append(request.path_params["task_id"])
        return JSONResponse({"error": "it only counts them"}, 500)


@asynccontextmanager
async def claiming(running, node_id: str, node: ClaimingNode) -> AsyncIterator[None]:
    routes = [
        Route("/v2/models/{name}/versions/{sha256}/infer", node.infer, methods=["POST"]),
        Route("/v1/tasks/{task_id}", node.task, methods=["POST"]),
    ]
    async with serve_app(Starlette(routes=routes)) as lifecycle:
        place = {
            "node_id": node_id,
            "incarnation": f"{node_id}-0123",
            "tier": "end",
            "url": lifecycle.url,
            "models": [{"name": node.entry.name, "sha256": node.entry.sha256, "ms_per_image": 1.0}],
            "version": "0",
        }
        assert (await running.http.post("/v1/devices", json=place)).status_code == 200

        async def beat() -> None:
            while True:
                await running.beat(node_id, f"{node_id}-0123")
                await asyncio.sleep(running.settings.heartbeat_s)

        beats = asyncio.create_task(beat())
        try:
            yield
        finally:
            beats.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beats


async def troubles(running) -> dict[str, str]:
    (release,) = (await running.http.get("/v1/releases")).json()["releases"]
    return {each["node_id"]: each["kind"] for each in release["troubles"]}


async def test_a_node_that_answers_otherwise_gets_no_work_until_it_answers_rightly(kit, settings, models) -> None:
    good, bad = ClaimingNode(models), ClaimingNode(models, wrong=True)
    async with (
        kit.scheduler(settings.model_copy(update={"models": models})) as running,
        claiming(running, "end-1", good),
        claiming(running, "end-2", bad),
    ):

        async def found() -> bool:
            return await troubles(running) == {"end-2": "differs"} and good.asked > 0

        await wait_for(found, what="the wrong answers")
        await running.submit(np.zeros((8, 32, 32, 3), np.uint8), batch_size=1, scheme="end")
        await wait_for(lambda: len(good.tasks) >= 4, what="tasks")
        assert not bad.tasks
        bad.wrong = False

        async def mended() -> bool:
            return await troubles(running) == {}

        await wait_for(mended, what="the next question")
        await wait_for(lambda: bool(bad.tasks), what="work for it")


async def test_a_node_gets_no_work_before_it_has_answered_unless_it_cannot_be_asked(kit, settings, models) -> None:
    silent, old = ClaimingNode(models, status=503), ClaimingNode(models, status=404)
    async with kit.scheduler(settings.model_copy(update={"models": models})) as running, AsyncExitStack() as stack:

        async def known() -> bool:
            (release,) = (await running.http.get("/v1/releases")).json()["releases"]
            return bool(release["probes"] == 1)

        await wait_for(known, what="the right answers")
        await stack.enter_async_context(claiming(running, "end-1", silent))
        await stack.enter_async_context(claiming(running, "end-2", old))
        await wait_for(lambda: silent.asked > 0 and old.asked > 0, what="the questions")
        await running.submit(np.zeros((8, 32, 32, 3), np.uint8), batch_size=1, scheme="end")
        await wait_for(lambda: len(old.tasks) >= 4, what="tasks")
        assert not silent.tasks
        silent.status = 200
        await wait_for(lambda: bool(silent.tasks), what="work for it")


async def test_nodes_keep_their_work_while_the_right_answers_become_known(kit, settings, models, monkeypatch) -> None:
    """Were all of them to wait for the probe at once, tasks would lose their finer answers."""
    node, computed = ClaimingNode(models, status=503), asyncio.Event()

    async def later(manifest, files):
        await computed.wait()
        return await known_answers(manifest, files)

    monkeypatch.setattr("scheduler.releases.service.known_answers", later)
    async with (
        kit.scheduler(settings.model_copy(update={"models": models})) as running,
        claiming(running, "end-1", node),
    ):
        computed.set()
        await wait_for(lambda: node.asked > 0, what="the question")
        await running.submit(np.zeros((8, 32, 32, 3), np.uint8), batch_size=1, scheme="end")
        await wait_for(lambda: bool(node.tasks), what="work for it")


async def test_the_answers_that_ship_are_those_of_the_bundled_networks(tmp_path: Path) -> None:
    manifest, files = load_manifest(), NetworkFiles(tmp_path / "files", [weights_folder()], None)
    shipped, now = await known_answers(manifest, files), await compute_answers(manifest, files)
    assert shipped.keys() == now.keys() == {entry.sha256 for entry in manifest.models}
    for sha256, answers in shipped.items():
        assert np.abs(np.array(answers) - np.array(now[sha256])).sum(axis=1).max() < 0.2


def test_probe_pictures_are_the_same_everywhere() -> None:
    pictures = probe_pictures(32, 48)
    assert pictures.shape == (6, 32, 48, 3)
    assert pictures[:, 0, 0].tolist() == probe_pictures(8, 8)[:, 0, 0].tolist()
    assert len({picture.tobytes() for picture in pictures}) == 6
