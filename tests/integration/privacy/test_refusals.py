"""What an upstream node answers to features that are not its own, and a scheduler to jobs that none can encode for."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cloud_node.settings import CloudSettings
from edge_node import relay
from edge_node.app import EdgeNode, create_app as edge_app
from edge_node.settings import EdgeSettings
from encryption.features import Features, features_tensor
from encryption.heads import Encoders
from encryption.loading import load_heads, load_served
from end_node.app import create_app as end_app
from end_node.node import EndNode
from end_node.settings import EndSettings
from models.manifest import load_manifest
from models.serving import load_models
from scheduler.api.app import create_app as scheduler_app
from scheduler.settings import SchedulerSettings
from tests.integration.end_node.test_hostile_upper_nodes import http as hostile_http, saying
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.node import InferenceNode, node_app
from tierkit.testing import listening, serve_app, talking
from tierkit.types import Tier
from tierkit.wire.events import CoarseEvent, FallbackEvent, read_event
from tierkit.wire.messages import UPSTREAM_HEADER, UPSTREAMS, Encoding, Upstream
from tierkit.wire.oip import InferRequest, Tensor, encode_request

NETWORK, TAIL = "wrn-16-4", "wrn-16-4.conv1"
IMAGES = np.zeros((2, 32, 32, 3), np.uint8)


@asynccontextmanager
async def cloud(*, only_features: bool) -> AsyncIterator[httpx.AsyncClient]:
    settings = CloudSettings(node_id="cloud-0", threads=1, only_features=only_features, drain_s=1.0)

    async def build(lifecycle: Lifecycle) -> Any:
        return node_app(InferenceNode(settings, await load_served(settings, Tier.CLOUD, load_manifest()), lifecycle))

    async with (
        serve_app(build, settings) as service,
        httpx.AsyncClient(base_url=service.url, timeout=30, trust_env=False) as http,
    ):
        yield http


async def post(http: httpx.AsyncClient, path: str, tensor: Tensor, **headers: str) -> httpx.Response:
    chunks, own = encode_request(InferRequest(inputs=(tensor,)))
    body = b"".join(bytes(chunk) for chunk in chunks)
    return await http.post(path, content=body, headers={**own, **headers})


async def ask(http: httpx.AsyncClient, model: str, tensor: Tensor, **headers: str) -> httpx.Response:
    return await post(http, f"/v2/models/{model}/infer", tensor, **headers)


@asynccontextmanager
async def upper_node() -> AsyncIterator[tuple[str, list[bytes]]]:
    """An address where an untrusted node might be, and the first bytes of each connection to it."""
    came: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.read(1 << 16))
        writer.close()

    async with listening(handle) as url:
        yield url, came


async def test_a_tail_answers_to_its_own_features_alone():
    encoder = load_manifest().encoder(TAIL)
    values = np.random.default_rng(1).integers(0, 256, (2, *encoder.feature_shape), np.uint8)
    good = await features_tensor(Features(encoder=encoder, values=values))
    floats = await features_tensor(Features(encoder=encoder, values=values.astype(np.float32)))
    nan, half = values.astype(np.float32), values.astype(np.float16)
    nan[1, 2, 3, 4], half[0, 1, 2, 3] = np.nan, np.inf
    async with cloud(only_features=False) as http:
        assert (await ask(http, TAIL, good)).status_code == 200
        assert (await ask(http, TAIL, floats)).status_code == 200
        cases = [
            (TAIL, Tensor("images", IMAGES), 400, r"takes the inputs \['features'\]"),
            (NETWORK, good, 400, r"takes the inputs \['images'\]"),
            (TAIL, Tensor("features", values[:, :, :16], good.parameters), 400, "UINT8 or FP16 or FP32"),
            (TAIL, Tensor("features", values.astype(np.int64), good.parameters), 400, "not INT64"),
            (TAIL, Tensor("features", values), 400, "needs the parameters"),
            (TAIL, Tensor("features", values, {**good.parameters, "scale": 9.0}), 409, "of scale 9.0"),
            (TAIL, Tensor("features", values, {**good.parameters, "zero_point": 7}), 409, "of zero_point 7"),
            (TAIL, Tensor("features", values, {**good.parameters, "head": "0" * 64}), 409, "of head 000"),
            (TAIL, Tensor("features", values, {**good.parameters, "tail": "0" * 64}), 409, "of tail 000"),
            (TAIL, Tensor("features", floats.data, {**floats.parameters, "scale": 9.0}), 409, "of scale 9.0"),
            (TAIL, Tensor("features", values + 1, good.parameters), 400, "not those that were sent"),
        ]
        for bad in (nan, half):
            tensor = await features_tensor(Features(encoder=encoder, values=bad))
            cases.append((TAIL, tensor, 400, "holds NaN or infinity"))
        for model, tensor, status, words in cases:
            answer = await ask(http, model, tensor)
            assert (answer.status_code, bool(re.search(words, answer.text))) == (status, True), answer.text
        assert (await ask(http, TAIL, good, **{"Content-Encoding": "zstd"})).status_code == 400
        assert (await ask(http, TAIL, good, **{"Content-Encoding": "br"})).status_code == 415


async def test_a_node_that_may_not_see_pixels_has_no_model_for_them():
    async with cloud(only_features=True) as http:
        answer = await ask(http, NETWORK, Tensor("images", IMAGES))
        assert (answer.status_code, TAIL in answer.text) == (404, True)


def route(url: str, tier: Tier, **encoding: str) -> dict[str, str]:
    """The header that names an upstream node and the encoder whose features it gets, changed as `encoding` says."""
    encoder = load_manifest().encoder(TAIL)
    wanted = {"name": TAIL, "head": encoder.head.sha256, "tail": encoder.tail.sha256, **encoding}
    upstream = Upstream(
        node_id="away",
        url=url,
        tier=tier,
        model=wanted["name"],
        sha256=encoder.tail.sha256,
        encoding=Encoding.model_validate(wanted),
    )
    return {UPSTREAM_HEADER: UPSTREAMS.dump_json((upstream,)).decode()}


MISSING: list[tuple[dict[str, str], int, str]] = [
    ({"name": "wrn-16-4.other"}, 404, "no encoder 'wrn-16-4.other', and sends no pixels in its place"),
    ({"head": "0" * 64}, 409, "is of another version than the one asked for"),
    ({"tail": "0" * 64}, 409, "is of another version than the one asked for"),
]


async def test_an_end_node_that_lacks_the_encoder_sends_nothing_in_its_place():
    settings = EndSettings(node_id="end-0", threads=1, drain_s=1.0)

    async def build(lifecycle: Lifecycle) -> Any:
        encoders = Encoders(await load_heads(settings, load_manifest()), settings)
        models = await load_models(settings, Tier.END, load_manifest())
        return end_app(EndNode(settings, models, lifecycle, load_manifest().hierarchy, encoders))

    async with (
        upper_node() as (url, came),
        serve_app(build, settings) as service,
        httpx.AsyncClient(base_url=service.url, timeout=30, trust_env=False) as http,
    ):
        for change, _, words in MISSING:
            answer = await post(http, "/v1/tasks/a", Tensor("images", IMAGES), **route(url, Tier.CLOUD, **change))
            coarse, last = map(read_event, answer.text.splitlines())
            assert isinstance(coarse, CoarseEvent)
            assert isinstance(last, FallbackEvent)
            assert last.reason == "upstream_unavailable"
            assert "nothing was sent" in last.detail
            assert words in last.detail
        assert came == []
        await post(http, "/v1/tasks/a", Tensor("images", IMAGES), **route(url, Tier.CLOUD))
        assert came[0].startswith(b"POST /v2/models/wrn-16-4.conv1/versions/")


async def test_an_edge_node_that_cannot_encode_passes_nothing_on():
    settings = EdgeSettings(node_id="edge-0", threads=1, model=(NETWORK,), drain_s=1.0)

    async def build(lifecycle: Lifecycle) -> Any:
        encoders = Encoders(await load_heads(settings, load_manifest()), settings)
        return edge_app(
            EdgeNode(settings, await load_served(settings, Tier.EDGE, load_manifest()), lifecycle, encoders)
        )

    encoder = load_manifest().encoder(TAIL)
    features = Tensor("features", np.zeros((2, *encoder.feature_shape), np.uint8))
    async with (
        upper_node() as (url, came),
        serve_app(build, settings) as service,
        httpx.AsyncClient(base_url=service.url, timeout=30, trust_env=False) as http,
    ):
        cases: list[tuple[dict[str, str], Tensor, int, str]] = [
            (route(url, Tier.CLOUD, **change), Tensor("images", IMAGES), status, words)
            for change, status, words in MISSING
        ]
        plain = Upstream(node_id="away", url=url, tier=Tier.CLOUD, model=TAIL, sha256="0" * 64, encoding=None)
        cases += [
            (route(url, Tier.CLOUD), features, 400, "takes one tensor, 'images'"),
            (route(url, Tier.CLOUD), Tensor("images", IMAGES[:, :16]), 400, "is UINT8 [-1, 32, 32, 3], not"),
            ({}, Tensor("images", IMAGES), 400, "must name one node"),
            ({UPSTREAM_HEADER: UPSTREAMS.dump_json((plain,)).decode()}, Tensor("images", IMAGES), 400, "the encoding"),
        ]
        for headers, tensor, status, words in cases:
            model = headers and UPSTREAMS.validate_json(headers[UPSTREAM_HEADER])[0].model
            answer = await post(http, f"/v1/relay/{model or TAIL}/infer", tensor, **headers)
            assert (answer.status_code, words in answer.text) == (status, True), answer.text
        assert came == []


async def test_an_edge_node_does_not_trust_the_answers_that_it_passes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relay, "_BUDGET_S", 0.3)
    settings = EdgeSettings(node_id="edge-0", threads=1, model=(NETWORK,), drain_s=1.0)

    async def build(lifecycle: Lifecycle) -> Any:
        encoders = Encoders(await load_heads(settings, load_manifest()), settings)
        return edge_app(
            EdgeNode(settings, await load_served(settings, Tier.EDGE, load_manifest()), lifecycle, encoders)
        )

    def said(extra: bytes = b"", **changes: Any) -> bytes:
        return hostile_http(extra=extra, model=TAIL, sha256=load_manifest().encoder(TAIL).tail.sha256, **changes)

    good = b'Server-Timing: queue;dur=1.000, infer;dur=2.500;desc="2"\r\n'
    cases: list[tuple[bytes, int, str]] = [
        (said(good), 200, 'queue;dur=1.000, infer;dur=2.500;desc="2"'),
        (said(b"Server-Timing: " + b"x" * 6_000 + b"\r\n"), 200, ""),
        (
            said(parameters={"binary_data_size": 32, "x": "12345"}).replace(b'"12345"', b"1e99999"),
            502,
            "cannot be read",
        ),
        (said().replace(b"200 OK", b"200 OK\r\nContent-Length: 1"), 503, "no HTTP"),
        (hostile_http(), 502, "answered with 'fine'"),
        (b"HTTP/1.1 200 OK\r\n", 504, "did not answer within its budget"),
    ]
    async with (
        serve_app(build, settings) as service,
        httpx.AsyncClient(base_url=service.url, timeout=30, trust_env=False) as http,
    ):
        for raw, status, words in cases:
            async with talking(saying(raw)) as cloud:
                headers = route(cloud.url, Tier.CLOUD)
                answer = await post(http, f"/v1/relay/{TAIL}/infer", Tensor("images", IMAGES), **headers)
            assert answer.status_code == status, answer.text
            if status == 200:
                assert answer.headers.get("server-timing", "") == words
            else:
                assert words in answer.text


async def register(http: httpx.AsyncClient, node_id: str, models: list[str], **more: Any) -> None:
    manifest = load_manifest()
    known = {entry.name: entry.sha256 for entry in manifest.models} | {TAIL: manifest.encoder(TAIL).tail.sha256}
    registration = {
        "node_id": node_id,
        "incarnation": "0123456789",
        "tier": node_id.partition("-")[0],
        "url": "http://127.0.0.1:9",
        "models": [{"name": name, "sha256": known[name], "ms_per_image": 1.0} for name in models],
        "version": "0",
        **more,
    }
    response = await http.post("/v1/devices", json=registration)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("encoders", "cloud_models", "policy", "status", "words"),
    [
        ("its own", [TAIL], {}, 202, ""),
        ("its own", [TAIL], {"privacy": "conv1"}, 202, ""),
        ("its own", ["wrn-16-4", TAIL], {}, 202, ""),
        ("none", [TAIL], {}, 409, "nothing can go from end-0 to cloud-0: .* no encoder .*end-0 lacks the head"),
        ("another", [TAIL], {}, 409, "nothing can go from end-0 to cloud-0"),
        ("its own", ["wrn-16-4"], {}, 403, "would send pixels to cloud-0"),
        ("its own", [TAIL], {"privacy": "none"}, 403, "would send pixels to cloud-0"),
        (
            "its own",
            [TAIL],
            {"privacy": "bottleneck"},
            409,
            "privacy 'bottleneck' needs that encoder.*cloud-0 lacks the tail",
        ),
        ("its own", [TAIL], {"encode_on": "edge"}, 409, "no trusted edge node beside cloud-0"),
        ("its own", [TAIL], {"encode_on": "auto"}, 202, ""),
        ("none", [TAIL], {"encode_on": "auto"}, 409, "end-0 lacks the head"),
        ("its own", [TAIL], {"encode_on": "auto", "privacy": "none"}, 403, "would send pixels to cloud-0"),
        ("its own", [TAIL], {"encode_on": "cloud"}, 400, "encode_on"),
        ("its own", [TAIL], {"privacy": "conv2"}, 400, "privacy"),
    ],
)
async def test_a_job_that_lacks_an_encoder_is_refused(
    tmp_path: Path, encoders: str, cloud_models: list[str], policy: dict[str, str], status: int, words: str
):
    settings = SchedulerSettings(port=0, state=tmp_path, trusted=("end", "edge"), drain_s=1.0)
    async with (
        serve_app(lambda lifecycle: scheduler_app(settings, lifecycle), settings) as service,
        httpx.AsyncClient(base_url=service.url, timeout=30, trust_env=False) as http,
    ):
        encoder = load_manifest().encoder(TAIL)
        held = {"name": TAIL, "head": encoder.head.sha256, "tail": encoder.tail.sha256}
        offers = {"its own": [held], "another": [{**held, "head": "0" * 64}], "none": []}[encoders]
        await register(http, "end-0", ["mobilenet-v1-0.5"], encoders=offers)
        await register(http, "cloud-0", cloud_models)
        chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", IMAGES),)))
        body = b"".join(bytes(chunk) for chunk in chunks)
        params = {"scheme": "end-cloud", **policy}
        answer = await http.post("/v1/jobs", content=body, headers=headers, params=params)
        assert answer.status_code == status, answer.text
        assert re.search(words, answer.text)
