"""A node fetches the weights that it lacks from the scheduler, once, and believes only their digest."""

import asyncio
import contextlib
import hashlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge_node.settings import EdgeSettings
from models.manifest import MANIFEST_NAME, ModelEntry, load_manifest, weights_folder
from models.serving import load_models, obtain_weights, open_store
from models.source import load_set, obtain_set
from tierkit.errors import SetupError, WeightsError
from tierkit.http.address import free_port
from tierkit.http.lifecycle import Lifecycle
from tierkit.testing import serve_app
from tierkit.types import Tier


class FileServer:
    """The scheduler's route for weights, and how often it was asked."""

    def __init__(self) -> None:
        self.answers: list[Response] = []
        """Given first, one to each request; after that the true file."""
        self.asked = 0
        entry = load_manifest().default_for("end")
        self.content = (weights_folder() / entry.file).read_bytes()
        self.name, self.sha256 = entry.name, entry.sha256

    async def file(self, request: Request) -> Response:
        self.asked += 1
        if self.answers:
            return self.answers.pop(0)
        assert request.path_params["name"] == self.name
        assert request.query_params["sha256"] == self.sha256
        return Response(self.content)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        async with serve_app(Starlette(routes=[Route("/v1/models/{name}/file", self.file)])) as lifecycle:
            yield lifecycle.url


@pytest.fixture
def server() -> FileServer:
    return FileServer()


@pytest.fixture
def entry() -> ModelEntry:
    return load_manifest().default_for("end")


@pytest.fixture
def bare(tmp_path: Path) -> EdgeSettings:
    """Settings of a node that has the manifest and no weights."""
    (tmp_path / "weights").mkdir()
    shutil.copy(weights_folder() / MANIFEST_NAME, tmp_path / "weights")
    return EdgeSettings(models=tmp_path / "weights", cache=tmp_path / "cache")


async def test_missing_weights_are_fetched_once(server: FileServer, bare: EdgeSettings, entry: ModelEntry) -> None:
    async with server.serve() as url:
        (model,) = await load_models(bare.model_copy(update={"scheduler": (url,)}), Tier.END, load_manifest())
        assert (model.name, model.sha256) == (entry.name, entry.sha256)
        assert model.labels["logits"][0] == load_manifest().hierarchy.coarse[0]
    # The scheduler has gone; the cache is enough.
    (model,) = await load_models(bare.model_copy(update={"scheduler": (url,)}), Tier.END, load_manifest())
    assert model.sha256 == entry.sha256
    assert server.asked == 1


async def test_a_scheduler_that_is_not_ready_is_asked_again(
    server: FileServer, bare: EdgeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers = [Response(status_code=503), Response(status_code=500)]
    async with server.serve() as url:
        await load_models(bare.model_copy(update={"scheduler": (url,)}), Tier.END, load_manifest())
    assert server.asked == 3
    assert sum("trying on" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("change", ["another byte", "too short", "too long"])
async def test_what_is_not_the_file_is_refused_and_not_kept(
    server: FileServer, bare: EdgeSettings, change: str
) -> None:
    right = server.content
    wrong = {"another byte": right[:-1] + bytes([right[-1] ^ 1]), "too short": right[:-1], "too long": right + b"x"}
    server.answers = [Response(wrong[change])]
    async with server.serve() as url:
        with pytest.raises(WeightsError, match="fetched weights"):
            await load_models(bare.model_copy(update={"scheduler": (url,)}), Tier.END, load_manifest())
    assert [path for path in bare.cache.rglob("*") if path.is_file()] == []


async def test_damaged_weights_in_the_given_folder_stop_the_node(
    server: FileServer, bare: EdgeSettings, entry: ModelEntry
) -> None:
    assert bare.models is not None
    damaged = bytearray(server.content)
    damaged[1000:1010] = bytes(byte ^ 255 for byte in damaged[1000:1010])
    (bare.models / entry.file).write_bytes(damaged)
    async with server.serve() as url:
        for scheduler in (None, (url,)):
            with pytest.raises(WeightsError, match=rf"{entry.file} is damaged.*sha256"):
                await load_models(bare.model_copy(update={"scheduler": scheduler}), Tier.END, load_manifest())
    assert server.asked == 0


@contextlib.asynccontextmanager
async def gives(cache: Path, *answers: Response) -> AsyncIterator[EdgeSettings]:
    """Settings of a node without a set, whose scheduler gives these answers for its own."""
    left = list(answers)

    async def listed(_request: Request) -> Response:
        return left.pop(0)

    async with serve_app(Starlette(routes=[Route("/v1/models", listed)])) as lifecycle:
        yield EdgeSettings(scheduler=(lifecycle.url,), cache=cache)


def renamed() -> dict[str, Any]:
    content = load_manifest().content()
    content["hierarchy"]["name"] = "another"
    return content


async def test_a_node_without_a_set_takes_the_scheduler_s(tmp_path: Path) -> None:
    portal = Response("<html>please sign in</html>")
    async with gives(tmp_path, JSONResponse(renamed()), Response(status_code=503), portal) as settings:
        assert (await obtain_set(settings)).manifest.hierarchy.name == "another"
        own = settings.model_copy(update={"models": weights_folder()})
        assert (await obtain_set(own)).manifest.hierarchy.name == "cifar-100"
        # One that is not ready, another server in its place, and none at all: what it gave last still holds.
        for _ in range(2):
            assert (await obtain_set(settings)).manifest.hierarchy.name == "another"
    assert (await obtain_set(settings)).manifest.hierarchy.name == "another"
    assert (await obtain_set(EdgeSettings())).manifest.hierarchy.name == "cifar-100"


@pytest.mark.parametrize("wrong", [b"{}", b"no JSON", b"twice", b"path"])
async def test_a_node_that_had_no_set_waits_for_one_that_is_whole(wrong: bytes, tmp_path: Path) -> None:
    content = renamed()
    if wrong == b"twice":
        content["models"] *= 2
        wrong = json.dumps(content).encode()
    if wrong == b"path":
        content["models"][0]["file"] = "../../outside.onnx"
        wrong = json.dumps(content).encode()
    wrong_one = Response(wrong, media_type="application/json")
    async with gives(tmp_path, wrong_one, JSONResponse(renamed())) as settings:
        assert (await obtain_set(settings)).manifest.hierarchy.name == "another"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, "<html>please sign in</html>"),
        (302, ""),
        (401, "portal"),
        (403, ""),
        (404, "portal"),
        (500, ""),
        (511, ""),
    ],
)
async def test_another_server_in_the_scheduler_s_place_is_not_believed(status: int, body: str, tmp_path: Path) -> None:
    def portal(*more: Response) -> list[Response]:
        return [*(Response(body, status, media_type="text/html") for _ in range(3)), *more]

    async with (
        gives(tmp_path / "one", *portal(JSONResponse(renamed()))) as settings,
        gives(tmp_path / "two", *portal()) as other,
    ):
        assert other.scheduler is not None
        assert settings.scheduler is not None
        # It waits, and asks the next address as well.
        both = settings.model_copy(update={"scheduler": (*other.scheduler, *settings.scheduler)})
        assert (await obtain_set(both)).manifest.hierarchy.name == "another"


async def test_a_node_whose_token_is_refused_serves_what_it_had(tmp_path: Path) -> None:
    refused = JSONResponse({"error": "this token is not known"}, 401)
    async with gives(tmp_path, refused, JSONResponse(renamed()), refused) as settings:
        with pytest.raises(SetupError, match="--token-file"):
            await obtain_set(settings)
        for _ in range(2):
            assert (await obtain_set(settings)).manifest.hierarchy.name == "another"


async def test_without_a_scheduler_and_a_copy_a_node_waits_and_never_serves_the_bundled_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = Response(status_code=503)
    async with gives(tmp_path, later, later, JSONResponse(renamed())) as settings:
        assert (await obtain_set(settings)).manifest.hierarchy.name == "another"
    assert sum("trying again" in message for message in caplog.messages) == 1


async def test_a_damaged_copy_is_no_set(tmp_path: Path) -> None:
    async with gives(tmp_path, JSONResponse(renamed()), Response(status_code=503), JSONResponse(renamed())) as settings:
        await obtain_set(settings)
        (copy,) = (tmp_path / "sets").iterdir()
        copy.write_bytes(copy.read_bytes()[:100])
        assert (await obtain_set(settings)).manifest.hierarchy.name == "another"


async def test_a_set_that_is_replaced_while_a_node_loads_is_asked_for_again(
    server: FileServer, tmp_path: Path, entry: ModelEntry
) -> None:
    """The first manifest names weights that are gone by the time they are fetched."""
    old = load_manifest().content()
    old["models"] = [{**entry.model_dump(mode="json"), "file": "old.onnx", "sha256": "0" * 64}]
    old["encoders"] = []
    answers = [JSONResponse(old), JSONResponse(load_manifest().content())]
    server.answers = [JSONResponse({"error": "not here"}, 404)]
    routes = [Route("/v1/models", lambda _: answers.pop(0)), Route("/v1/models/{name}/file", server.file)]
    async with serve_app(Starlette(routes=routes)) as lifecycle:
        settings = EdgeSettings(scheduler=(lifecycle.url,), cache=tmp_path)
        node = Lifecycle()
        (model,) = await load_set(settings, node, lambda given: load_models(settings, Tier.END, given.manifest))
        assert model.sha256 == entry.sha256
        answers.append(JSONResponse(load_manifest().content()))
        assert await node.is_current()
        answers.append(JSONResponse(renamed()))
        assert not await node.is_current()
        answers.append(JSONResponse(renamed()))
        named = settings.model_copy(update={"model": (entry.name,)})
        without = renamed()
        without["models"] = [one for one in without["models"] if one["name"] != entry.name]
        await load_set(named, node, lambda given: load_models(named, Tier.END, given.manifest))
        answers.append(JSONResponse(without))
        assert await node.is_current(), "a set without its network is no reason to start again"
    assert await node.is_current(), "while the scheduler is away, the node keeps what it has"


async def test_bundled_files_are_not_taken_for_those_of_another_set(
    server: FileServer, tmp_path: Path, entry: ModelEntry
) -> None:
    server.content = b"of another set"
    server.sha256 = hashlib.sha256(server.content).hexdigest()
    other = entry.model_copy(update={"sha256": server.sha256, "size_bytes": len(server.content)})
    assert (weights_folder() / other.file).is_file()
    async with server.serve() as url:
        settings = EdgeSettings(scheduler=(url,), cache=tmp_path)
        path = await obtain_weights(open_store(settings), other, settings)
    assert path.read_bytes() == server.content


async def test_nobody_has_the_weights(server: FileServer, bare: EdgeSettings) -> None:
    with pytest.raises(WeightsError, match="--scheduler"):
        await load_models(bare, Tier.END, load_manifest())
    server.answers = [JSONResponse({"error": "not here"}, 404)]
    async with server.serve() as url:
        with pytest.raises(WeightsError, match="neither this node nor the scheduler"):
            await load_models(bare.model_copy(update={"scheduler": (url,)}), Tier.END, load_manifest())


async def test_a_name_given_twice_is_one_model_and_an_unknown_one_is_an_error(entry: ModelEntry) -> None:
    models = await load_models(EdgeSettings(model=(entry.name, entry.name)), Tier.EDGE, load_manifest())
    assert [model.name for model in models] == [entry.name]
    with pytest.raises(SetupError, match="has no model 'xyz'; it has "):
        await load_models(EdgeSettings(model=("xyz",)), Tier.EDGE, load_manifest())


async def test_a_node_above_the_end_devices_refuses_a_scheduler_if_it_answers_only_superclasses() -> None:
    manifest = load_manifest()
    settings = EdgeSettings(model=("mobilenet-v1-0.5",), models=weights_folder())
    assert len(await load_models(settings, Tier.EDGE, manifest)) == 1
    with_scheduler = settings.model_copy(update={"scheduler": ("http://127.0.0.1:9",)})
    with pytest.raises(SetupError, match="asks the edge tier for classes: name a network with classes"):
        await load_models(with_scheduler, Tier.EDGE, manifest)
    both = with_scheduler.model_copy(update={"model": ("mobilenet-v1-0.5", "resnet-34")})
    assert len(await load_models(both, Tier.EDGE, manifest)) == 2


async def test_what_a_standby_does_not_give_the_scheduler_that_leads_gives(
    server: FileServer, tmp_path: Path, entry: ModelEntry, caplog: pytest.LogCaptureFixture
) -> None:
    leads, asked_too_early = asyncio.Event(), asyncio.Event()

    async def stand_by(_request: Request) -> Response:
        return JSONResponse({"error": "this scheduler is a standby" + " of another" * 100}, 421)

    async def listed(request: Request) -> Response:
        if leads.is_set():
            return JSONResponse(renamed())
        asked_too_early.set()
        return await stand_by(request)

    files = Route("/v1/models/{name}/file", server.file)
    gone = f"http://127.0.0.1:{free_port()}"
    async with (
        serve_app(Starlette(routes=[Route("/{path:path}", stand_by)])) as standby,
        serve_app(Starlette(routes=[Route("/v1/models", listed), files])) as leader,
    ):
        settings = EdgeSettings(scheduler=(gone, standby.url, leader.url), cache=tmp_path)
        obtaining = asyncio.create_task(obtain_set(settings))
        await asked_too_early.wait()
        assert not obtaining.done(), "while none leads the node waits; what it ships with may be another set"
        leads.set()
        assert (await obtaining).manifest.hierarchy.name == "another"
        other = entry.model_copy(update={"file": "elsewhere.onnx"})  # which is not bundled
        path = await obtain_weights(open_store(settings), other, settings)
    assert path.read_bytes() == server.content
    assert sum("no scheduler leads" in message for message in caplog.messages) == 1
