"""A cloud node in front of servers of other makes, good ones and bad ones, and of those that come and go."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
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

from cloud_node.engines import oip
from models.session import softmax
from tests.integration.engines.running import NETWORK, RunningCloud, agree, cloud, local, sample
from tierkit.access import TokenEntry, digest_of, new_token, write_book
from tierkit.errors import SetupError, UpstreamError, UpstreamTimeout, UpstreamUnavailable
from tierkit.http.address import free_port
from tierkit.settings import ServiceSettings
from tierkit.testing import serve_app, wait_for
from tierkit.wire.messages import BUDGET_HEADER
from tierkit.wire.oip import BINARY_HEADER, InferResponse, Limits, Tensor, encode_response, parse_header_length
from tierkit.wire.oip.datatypes import dtype_of
from tierkit.wire.oip.decode import decode_request


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oip, "_LOOK_S", 0.02)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


@dataclass
class OtherServer:
    """A server of the protocol that is no Terrace node; it computes with the network itself."""

    name: str = NETWORK
    binary: bool = False
    takes: dict[str, Any] = field(default_factory=lambda: tensor("input_1", "FP32", -1, 32, 32, 3))
    gives: dict[str, Any] = field(default_factory=lambda: tensor("dense", "FP32", -1, 100))
    about_it: dict[str, Any] = field(default_factory=dict)
    computes: str = "logits"
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is clear, requests wait behind it."""
    refusal: int = 0
    stuck: str = ""
    """The next request "hangs" for ever, or its answer "drips" byte by byte without an end."""
    requests: int = 0
    seen: set[str] = field(default_factory=set)
    """Datatypes in which images came."""

    def __post_init__(self) -> None:
        self.open.set()
        self._model = local()

    async def about(self, _request: Request) -> Response:
        return JSONResponse({"name": "other", "extensions": ["binary_tensor_data"] if self.binary else []})

    async def metadata(self, request: Request) -> Response:
        if request.path_params["model"] != self.name:
            return JSONResponse({"error": "unknown"}, 400)
        return JSONResponse(
            {"name": self.name, "inputs": [self.takes], "outputs": [self.gives], "parameters": self.about_it}
        )

    async def ready(self, _request: Request) -> Response:
        await self.open.wait()
        return Response(status_code=200)

    async def infer(self, request: Request) -> Response:
        self.requests += 1
        length = parse_header_length(request.headers.get(BINARY_HEADER))
        assert (length is not None) == self.binary
        asked = decode_request(await request.body(), length, limits=Limits(max_json_bytes=2**22))
        await self.open.wait()
        if self.refusal:
            return JSONResponse({"error": "not so"}, self.refusal)
        stuck, self.stuck = self.stuck, ""
        if stuck == "hangs":
            await asyncio.Event().wait()
        if stuck == "drips":
            return StreamingResponse(_drops())
        (given,) = asked.inputs
        self.seen.add(given.datatype)
        assert given.name == self.takes["name"]
        assert [output.name for output in asked.outputs] == [self.gives["name"]]
        computed = await asyncio.to_thread(self._model.run, {"images": given.data.astype(np.uint8)}, ["logits"])
        # As a server that knows no temperature has them.
        logits = computed["logits"]
        values = softmax(logits) if self.computes == "probabilities" else logits
        values = values.astype(dtype_of(self.gives["datatype"]))
        answer = InferResponse(self.name, "1", (Tensor(self.gives["name"], values),))
        chunks, headers = encode_response(answer, binary=self.binary)
        return Response(b"".join(chunks), headers=headers)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        model = "/v2/models/{model}"
        routes = [
            Route("/v2", self.about),
            Route(model, self.metadata),
            Route(f"{model}/ready", self.ready),
            Route(f"{model}/infer", self.infer, methods=["POST"]),
        ]
        async with serve_app(Starlette(routes=routes), ServiceSettings(port=port, drain_s=0.2)) as lifecycle:
            yield lifecycle.url


async def _drops() -> AsyncIterator[bytes]:
    while True:
        yield b" "
        await asyncio.sleep(0.02)


FORMS = [
    {},
    {"binary": True},
    {"binary": True, "takes": tensor("pixels", "UINT8", -1, -1, -1, 3), "gives": tensor("logits", "FP64", -1, -1)},
    {"takes": tensor("pixels", "INT32", -1, 32, 32, 3), "computes": "probabilities"},
    {"computes": "probabilities", "gives": tensor("probabilities", "FP32", -1, 100)},
    {"name": "resnet@prod"},
]


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
async def test_names_and_datatypes_are_mapped(form: dict[str, Any]) -> None:
    server = OtherServer(**form)
    images = sample(70)
    async with server.serving() as url:
        named = {"upstream_model": server.name} if "name" in form else {}
        async with cloud(engine="oip", upstream=url, max_batch_size=50, **named) as running:
            response = await running.infer(images)
    # Confidences mean the same, whatever the server gives.
    same = ["probabilities"] if server.computes == "probabilities" else ["logits", "probabilities"]
    agree(response, local().run({"images": images}, same))
    assert server.seen == {server.takes["datatype"]}


@pytest.mark.parametrize(
    ("form", "settings", "said"),
    [
        (
            {"takes": tensor("input", "FP32", -1, 3, 32, 32)},
            {},
            r"'input' FP32 \[-1, 3, 32, 32\].*UINT8 \[-1, 32, 32, 3\]",
        ),
        ({"gives": tensor("dense", "FP32", -1, 10)}, {}, r"'dense' FP32 \[-1, 10\].*\[-1, 100\]"),
        ({"refusal": 400}, {}, "refuses 50 images"),
        ({"refusal": 403}, {}, "--upstream-token-file"),
        ({}, {"only_features": True}, "no features to serve"),
        ({}, {"upstream_model": "x", "model": (NETWORK, "resnet-34")}, "serves several"),
        ({"about_it": {"sha256": "0" * 64}}, {}, "give both nodes the same model set"),
        (
            {"name": "resnet-34", "about_it": {"sha256": "0" * 64}},
            {"upstream_model": "resnet-34"},
            f"'resnet-34' on the upstream is not the network '{NETWORK}'.*--upstream-model",
        ),
    ],
)
async def test_what_does_not_fit_is_told_at_the_start(form: Any, settings: dict[str, Any], said: str) -> None:
    async with OtherServer(**form).serving() as url:
        with pytest.raises(SetupError, match=said):
            async with cloud(engine="oip", upstream=url, **settings):
                pass


async def test_the_upstream_asks_for_a_token(tmp_path: Path) -> None:
    token, book, secret = new_token(), tmp_path / "tokens.toml", tmp_path / "token"
    for path, content in (
        (book, write_book([TokenEntry(name="terrace", role="user", sha256=digest_of(token.encode()).hex())])),
        (secret, token),
    ):
        path.touch(mode=0o600)
        path.write_text(content)
    async with cloud(node_id="upstream", tokens=book) as upstream:
        with pytest.raises(SetupError, match="--upstream-token-file"):
            async with cloud(engine="oip", upstream=upstream.url):
                pass
        async with cloud(engine="oip", upstream=upstream.url, upstream_token_file=secret) as running:
            await running.infer(sample(1))


async def test_a_node_waits_for_its_upstream(unused_port: int) -> None:
    server, url, port = OtherServer(), f"http://127.0.0.1:{unused_port}", free_port()
    own = f"http://127.0.0.1:{port}"

    async def start() -> None:
        async with cloud(engine="oip", upstream=url, port=port) as running:
            await running.infer(sample(1))

    starting = asyncio.create_task(start())
    async with httpx.AsyncClient() as client:

        async def tells() -> bool:
            with contextlib.suppress(httpx.ConnectError):
                said = (await client.get(f"{own}/readyz")).json()
                return said["status"] == "starting" and url in said["checks"]["upstream"]
            return False

        await wait_for(tells)
    async with server.serving(unused_port):
        await starting


async def test_a_node_is_not_its_own_upstream() -> None:
    port = free_port()
    with pytest.raises(SetupError, match="this node itself"):
        async with cloud(engine="oip", upstream=f"http://localhost:{port}", port=port):
            pass


async def test_a_wrong_address_is_told_while_the_node_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def start(url: str) -> None:
        async with cloud(engine="oip", upstream=url):
            pass

    async with OtherServer().serving() as url:
        starting = [asyncio.create_task(start(wrong)) for wrong in (f"{url}/path", url.replace("http:", "https:"))]
        await wait_for(lambda: "not a server of the Open Inference Protocol" in caplog.text and "TLS" in caplog.text)
        for each in starting:
            each.cancel()
        await asyncio.gather(*starting, return_exceptions=True)


async def test_a_node_waits_until_its_upstream_has_loaded_the_network(caplog: pytest.LogCaptureFixture) -> None:
    server = OtherServer(name="not-yet")

    async def start(url: str) -> None:
        async with cloud(engine="oip", upstream=url) as running:
            await running.infer(sample(1))

    async with server.serving() as url:
        starting = asyncio.create_task(start(url))
        await wait_for(lambda: "--upstream-model" in caplog.text)
        server.name, server.refusal = NETWORK, 429  # that is a matter of time, too
        await wait_for(lambda: "answered 429" in caplog.text)
        server.refusal = 0
        await starting


async def away(running: RunningCloud) -> None:
    """The node says that it takes no tasks, in every place."""
    await wait_for(lambda: running.node.heartbeat().draining)
    health = await running.get("/readyz")
    assert health.status_code == 503
    assert "not ready" in health.json()["checks"]["upstream"]
    assert (await running.get(f"/v2/models/{NETWORK}/ready")).status_code == 503
    with pytest.raises(UpstreamUnavailable, match="is not served"):
        await running.infer(sample(1))


async def test_its_death_is_the_nodes_and_so_is_its_return(unused_port: int) -> None:
    server, url = OtherServer(), f"http://127.0.0.1:{unused_port}"
    async with AsyncExitStack() as stack:
        async with server.serving(unused_port):
            running = await stack.enter_async_context(cloud(engine="oip", upstream=url))
            assert not running.node.heartbeat().draining
            server.open.clear()
            before = server.requests
            asked = [asyncio.create_task(running.infer(sample(1))) for _ in range(3)]
            await wait_for(lambda: server.requests > before)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {UpstreamUnavailable}
        await away(running)
        server.open.set()
        async with OtherServer(takes=tensor("input", "FP32", -1, 8)).serving(unused_port):
            # Another network in its place is none.
            await wait_for(lambda: "takes" in running.node.default_runner.not_served)
            await away(running)
        async with server.serving(unused_port):
            await wait_for(running.ready)
            assert not running.node.heartbeat().draining
            await running.infer(sample(1))


async def test_one_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    server = OtherServer()
    async with server.serving() as url, cloud(engine="oip", upstream=url) as running:
        monkeypatch.setattr(oip, "_BATCH_BUDGET_S", 0.05)
        server.open.clear()
        with pytest.raises(UpstreamTimeout):
            await running.infer(sample(1))
        server.open.set()


async def test_a_hung_one_is_not_ready_although_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    server = OtherServer()
    async with server.serving() as url, cloud(engine="oip", upstream=url) as running:
        monkeypatch.setattr(oip, "_LOOK_BUDGET_S", 0.1)
        server.open.clear()
        asked = asyncio.create_task(running.infer(sample(1)))  # a batch is under way all the time
        await away(running)
        assert not asked.done()
        server.open.set()
        await asked
        await wait_for(running.ready)


@pytest.mark.parametrize("stuck", ["hangs", "drips"])
async def test_a_budget_bounds_the_wait_for_the_upstream(stuck: str) -> None:
    server = OtherServer()
    async with server.serving() as url, cloud(engine="oip", upstream=url) as running, asyncio.timeout(15):
        server.stuck = stuck
        with pytest.raises(UpstreamTimeout):  # it comes from the node: the client itself has no budget
            await running.infer(sample(1), budget_s=None, headers={BUDGET_HEADER: "200"})
        # The next batch does not wait for the one that nobody wants any more.
        agree(await running.infer(sample(1)), local().run({"images": sample(1)}, ["logits"]))


async def test_failures_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    server = OtherServer()
    caplog.set_level("INFO")
    async with server.serving() as url, cloud(engine="oip", upstream=url) as running:
        server.refusal = 500
        for _ in range(5):
            with pytest.raises(UpstreamError):
                await running.infer(sample(1))
        server.refusal = 0
        await running.infer(sample(1))
        await wait_for(lambda: "computes batches again" in caplog.text)
    assert len([line for line in caplog.messages if "answered 500" in line]) == 1


@pytest.mark.parametrize(
    ("refusal", "error"), [(503, UpstreamUnavailable), (504, UpstreamTimeout), (500, UpstreamError)]
)
async def test_refusals_keep_their_meaning(refusal: int, error: type[Exception]) -> None:
    server = OtherServer()
    async with server.serving() as url, cloud(engine="oip", upstream=url) as running:
        server.refusal = refusal
        with pytest.raises(error) as refused:
            await running.infer(sample(1))
        assert type(refused.value) is error
        server.refusal = 0
        await wait_for(running.ready)
        await running.infer(sample(1))


async def test_lies_are_not_believed() -> None:
    server = OtherServer(gives=tensor("probabilities", "FP32", -1, 100), computes="probabilities")
    async with server.serving() as url, cloud(engine="oip", upstream=url) as running:
        server.computes = "logits"
        with pytest.raises(UpstreamError) as refused:
            await running.infer(sample(1))
        assert refused.value.status_code == 502
