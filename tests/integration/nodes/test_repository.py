"""Operators unload and load the models of a node, with a stock client: what runs ends well, what comes is refused."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.integration.nodes.conftest import PixelModel
from tests.integration.nodes.test_infer_route import post
from tests.integration.nodes.test_triton_client import images_input, with_client
from tierkit.access import digest_of
from tierkit.errors import WeightsError
from tierkit.inference import repository
from tierkit.testing import wait_for


class Heavy(PixelModel):
    """Gives its memory back; `damaged`: and cannot take it again."""

    def __init__(self) -> None:
        super().__init__()
        self.in_memory = True
        self.damaged = False

    def load(self) -> None:
        if self.damaged:
            raise WeightsError("the file is gone")
        self.in_memory = True

    def unload(self) -> None:
        self.in_memory = False

    def run(self, *args: Any) -> Any:
        assert self.in_memory
        return super().run(*args)


def entry(state: str, reason: str = "") -> dict[str, str]:
    return {"name": "pixel", "version": PixelModel.sha256, "state": state, "reason": reason}


async def test_unload_and_load_with_the_blocking_client(start_node: Any) -> None:
    async with start_node(Heavy()) as running:
        array = running.model.images((1, 2, 3))

        def use(client: triton.InferenceServerClient) -> None:
            assert client.get_model_repository_index() == [entry("READY")]
            client.load_model("pixel")  # nothing to do
            client.unload_model("pixel")
            client.unload_model("pixel", unload_dependents=True)
            assert not running.model.in_memory
            (shown,) = client.get_model_repository_index()
            assert (shown["state"], bool(shown["reason"])) == ("UNAVAILABLE", True)
            assert not client.is_model_ready("pixel")
            assert not client.is_server_ready()
            assert client.is_server_live()
            assert client.get_model_metadata("pixel")["name"] == "pixel"
            with pytest.raises(InferenceServerException, match="unloaded") as refused:
                client.infer("pixel", [images_input(array)])
            assert refused.value.status() == "503"
            assert running.node.heartbeat().draining
            client.load_model("pixel")
            assert client.get_model_repository_index() == [entry("READY")]
            assert client.is_model_ready("pixel")
            assert client.is_server_ready()
            assert not running.node.heartbeat().draining
            assert client.infer("pixel", [images_input(array)]).as_numpy("logits").tolist() == [[1, 2, 3]]

        await with_client(running, use)


async def test_unload_and_load_with_the_asyncio_client(start_node: Any) -> None:
    async with (
        start_node(Heavy()) as running,
        triton_aio.InferenceServerClient(f"127.0.0.1:{running.port}") as client,
    ):
        await client.unload_model("pixel")
        assert [each["state"] for each in await client.get_model_repository_index()] == ["UNAVAILABLE"]
        assert (await running.http.get("/readyz")).status_code == 503
        await client.load_model("pixel")
        assert (await running.http.get("/readyz")).status_code == 200
        assert await client.get_model_repository_index() == [entry("READY")]


async def test_those_that_are_served_alone(running: Any) -> None:
    async def names(**asked: bool) -> list[str]:
        answer = await running.http.post("/v2/repository/index", json=asked)
        return [each["name"] for each in answer.json()]

    assert await names() == await names(ready=True) == await names(ready=False) == ["pixel"]
    await running.http.post("/v2/repository/models/pixel/unload")
    assert (await names(), await names(ready=True)) == (["pixel"], [])


async def test_requests_that_came_before_an_unload_are_answered(start_node: Any) -> None:
    async with start_node(Heavy(), max_batch_size=1) as running:
        running.model.gate.clear()
        runs = asyncio.create_task(post(running, running.model.images((1, 1, 1))))
        await wait_for(running.model.entered.is_set)
        waits = [asyncio.create_task(post(running, running.model.images((value, 1, 1)))) for value in (2, 3)]
        await wait_for(lambda: running.node.heartbeat().queued_images == 2)
        unload = asyncio.create_task(running.http.post("/v2/repository/models/pixel/unload"))
        await wait_for(lambda: running.node.heartbeat().draining)
        late = await post(running, running.model.images((4, 1, 1)))
        assert (late.status_code, "retry-after" in late.headers) == (503, True)
        assert not unload.done()
        assert running.model.in_memory
        running.model.gate.set()
        assert [(await answer).status_code for answer in (runs, *waits, unload)] == [200] * 4
        assert running.model.images_seen - 1 == 3  # and one that proves that they are done
        assert not running.model.in_memory


async def test_a_broken_model_can_be_unloaded(start_node: Any) -> None:
    async with start_node(Heavy()) as running:
        running.model.gate.clear()
        broken = asyncio.create_task(post(running, running.model.images((255, 255, 255))))
        await wait_for(running.model.entered.is_set)
        unload = asyncio.create_task(running.http.post("/v2/repository/models/pixel/unload"))
        await wait_for(lambda: running.node.heartbeat().draining)
        running.model.gate.set()
        assert ((await broken).status_code, (await unload).status_code) == (500, 200)


async def test_an_unload_does_not_wait_for_ever(start_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_node(Heavy()) as running:
        running.model.gate.clear()
        runs = asyncio.create_task(post(running, running.model.images((1, 1, 1))))
        await wait_for(running.model.entered.is_set)
        with monkeypatch.context() as patch:
            patch.setattr(repository, "_BUDGET_S", 0.0)
            assert (await running.http.post("/v2/repository/models/pixel/unload")).status_code == 503
        assert running.node.heartbeat().draining
        assert running.model.in_memory
        running.model.gate.set()
        assert (await running.http.post("/v2/repository/models/pixel/unload")).status_code == 200
        assert not running.model.in_memory
        assert (await runs).status_code == 200


async def test_a_model_that_cannot_be_loaded_says_why(start_node: Any) -> None:
    async with start_node(Heavy()) as running:
        await running.http.post("/v2/repository/models/pixel/unload")
        running.model.damaged = True
        refused = await running.http.post("/v2/repository/models/pixel/load")
        assert (refused.status_code, "the file is gone" in refused.json()["error"]) == (503, True)
        assert (await running.http.post("/v2/repository/index")).json() == [entry("UNAVAILABLE", "the file is gone")]
        running.model.damaged = False
        assert (await running.http.post("/v2/repository/models/pixel/load")).status_code == 200
        assert (await post(running, running.model.images((1, 2, 3)))).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("models/nobody/unload", b"", 404),
        ("models/nobody/load", b"", 404),
        ("models/pixel/load", b'{"parameters": {"config": "{}"}}', 400),
        ("models/pixel/load", b'{"parameters": {"file:1/model.onnx": "AAAA"}}', 400),
        ("models/pixel/unload", b'{"parameters": {"force": true}}', 400),
        ("models/pixel/unload", b'{"parameters": 7}', 400),
        ("models/pixel/unload", b"no JSON", 400),
        ("models/pixel/unload", b"\xff\xfe", 400),
        ("index", b'{"ready": "perhaps"}', 400),
        ("index", b'{"x": ' + b"[" * 60_000, 400),
        ("index", b" " * 100_000, 413),
    ],
)
async def test_what_changes_nothing(running: Any, path: str, body: bytes, status: int) -> None:
    answer = await running.http.post(f"/v2/repository/{path}", content=body)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert (await running.http.post("/v2/repository/index")).json() == [entry("READY")]


async def test_where_tokens_are_asked_for_only_operators_change_what_is_served(start_node: Any, tmp_path: Path) -> None:
    tokens, own = tmp_path / "tokens.toml", tmp_path / "token"
    tokens.write_text(
        "".join(
            f'[[token]]\nname = "{role}"\nrole = "{role}"\nsha256 = "{digest_of(secret.encode()).hex()}"\n'
            for role, secret in (("operator", "secret-of-olga"), ("user", "secret-of-alice"))
        )
    )
    own.write_text("secret-of-the-node")
    for file in (tokens, own):
        file.chmod(0o600)
    async with start_node(tokens=tokens, token_file=own, scheduler="http://127.0.0.1:9") as running:

        async def ask(path: str, token: str) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            answer: httpx.Response = await running.http.post(f"/v2/repository/{path}", headers=headers)
            return answer.status_code

        for change in ("models/pixel/unload", "models/pixel/load"):
            assert await ask(change, "unknown") == 401
            assert await ask(change, running.lifecycle.key) == 403
            assert await ask(change, "secret-of-alice") == 403
            assert await ask("index", running.lifecycle.key) == 200
            assert not running.node.heartbeat().draining
        assert await ask("models/pixel/unload", "secret-of-olga") == 200
        assert running.node.heartbeat().draining
