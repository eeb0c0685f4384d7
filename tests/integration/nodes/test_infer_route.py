"""POST .../infer over a real socket: forms of a request, bounds, cancelling, refusals."""

import asyncio
import json
import random
import re
from collections import Counter
from typing import Any

import httpx
import numpy as np
import pytest

from tierkit.testing import MadeModel, connected, wait_for
from tierkit.wire.messages import BUDGET_HEADER, REQUEST_ID_HEADER
from tierkit.wire.oip import (
    BINARY_HEADER,
    InferRequest,
    InferResponse,
    RequestedOutput,
    Tensor,
    decode_response,
    encode_request,
    parse_header_length,
)
from tierkit.wire.oip.compression import compress


def message(images: np.ndarray, **fields: Any) -> tuple[bytes, dict[str, str]]:
    chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", images),), **fields))
    return b"".join(chunks), headers


def read(answer: httpx.Response) -> InferResponse:
    assert answer.status_code == 200, answer.text
    return decode_response(answer.content, parse_header_length(answer.headers.get(BINARY_HEADER)))


async def post(running: Any, images: np.ndarray, **fields: Any) -> httpx.Response:
    body, headers = message(images, **fields)
    answer: httpx.Response = await running.http.post(running.infer_path, content=body, headers=headers)
    return answer


async def test_json_by_hand(running: Any) -> None:
    tensor = {"name": "images", "shape": [1, 4, 4, 3], "datatype": "UINT8", "data": [7] * 48}
    body = {"id": "42", "inputs": [tensor], "outputs": [{"name": "logits"}]}
    answer = await running.http.post(running.infer_path, json=body, headers={REQUEST_ID_HEADER: "abc"})
    assert answer.json() == {
        "model_name": "pixel",
        "model_version": MadeModel.sha256,
        "id": "42",
        "outputs": [{"name": "logits", "shape": [1, 3], "datatype": "FP32", "data": [7.0, 7.0, 7.0]}],
    }
    assert answer.headers[REQUEST_ID_HEADER] == "abc"
    assert answer.headers["server-timing"].startswith("queue;dur=")


async def test_outputs_choose_their_form_one_by_one(running: Any) -> None:
    outputs = (RequestedOutput("probabilities", binary=False), RequestedOutput("logits"))
    answer = await post(running, running.model.images((0, 51, 255)), outputs=outputs, binary_output=True)
    head = json.loads(answer.content[: int(answer.headers[BINARY_HEADER])])
    assert ["data" in output for output in head["outputs"]] == [True, False]
    assert [tensor.name for tensor in read(answer).outputs] == ["probabilities", "logits"]


async def test_a_raw_body(running: Any) -> None:
    images = running.model.images((1, 2, 3), (4, 5, 6))
    answer = await running.http.post(running.infer_path, content=images.tobytes(), headers={BINARY_HEADER: "0"})
    logits = read(answer).output("logits")
    assert logits is not None
    assert logits.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("version", ["", f"/versions/{MadeModel.sha256}"])
async def test_routes_with_and_without_a_version(running: Any, version: str) -> None:
    body, headers = message(running.model.images((1, 2, 3)))
    path = f"/v2/models/pixel{version}"
    assert (await running.http.post(f"{path}/infer", content=body, headers=headers)).status_code == 200
    for suffix in ("", "/ready", "/config", "/stats"):
        assert (await running.http.get(path + suffix)).status_code == 200


async def test_only_the_servers_own_route_may_end_with_a_slash(running: Any) -> None:
    assert (await running.http.get("/v2/")).json() == (await running.http.get("/v2")).json()
    for path in (f"{running.infer_path}/", "/v2/models/pixel/", "/v2/health/live/", "/livez/", "/metrics/"):
        answer = await running.http.request("POST" if path.endswith("infer/") else "GET", path)
        assert (answer.status_code, answer.json()) == (404, {"error": f"no such route: {path}"})


async def test_a_batch_larger_than_the_largest_comes_back_whole(start_node: Any) -> None:
    async with start_node(max_batch_size=7) as running:
        pixels = [(value, value % 7, 0) for value in range(100)]
        logits = read(await post(running, running.model.images(*pixels))).output("logits")
        assert logits is not None
        assert logits.tolist() == [list(pixel) for pixel in pixels]


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({BINARY_HEADER: "-1"}, 400, "must be a number of bytes"),
        ({BINARY_HEADER: "99999999"}, 400, "but the body has"),
        ({BINARY_HEADER: "10"}, 400, "cannot be read"),
        ({BINARY_HEADER: "ten"}, 400, "must be a number of bytes"),
        ({BINARY_HEADER: "+9"}, 400, "must be a number of bytes"),
        ({BINARY_HEADER: "1e2"}, 400, "must be a number of bytes"),
        ({BINARY_HEADER: ""}, 400, "must be a number of bytes"),
        ({"Content-Encoding": "br"}, 415, "uncompressed"),
        ({"Content-Encoding": "gzip"}, 400, "not a gzip stream"),
        ({"Content-Encoding": "gzip, gzip"}, 415, "uncompressed"),
        ({BUDGET_HEADER: "soon"}, 400, "must be a number of at least 0"),
        ({BUDGET_HEADER: "-5"}, 400, "must be a number of at least 0"),
        ({BUDGET_HEADER: "nan"}, 400, "must be a number of at least 0"),
        ({BUDGET_HEADER: "0"}, 504, "0 ms are left"),
    ],
)
async def test_headers_that_lie(running: Any, headers: dict[str, str], status: int, says: str) -> None:
    body, right = message(running.model.images((1, 2, 3)))
    answer = await running.http.post(running.infer_path, content=body, headers=right | headers)
    assert answer.status_code == status
    assert says in answer.json()["error"]
    read(await post(running, running.model.images((1, 2, 3))))


async def test_a_binary_body_without_its_header_is_refused(running: Any) -> None:
    body, headers = message(running.model.images((1, 2, 3)))
    del headers[BINARY_HEADER]
    answer = await running.http.post(running.infer_path, content=body, headers=headers)
    assert answer.status_code == 400
    assert "JSON part cannot be read" in answer.json()["error"]
    assert f"{BINARY_HEADER} must be its length" in answer.json()["error"]


async def test_two_header_lengths_that_disagree_are_refused(running: Any) -> None:
    body, headers = message(running.model.images((1, 2, 3)))
    length = int(headers[BINARY_HEADER])
    fields = [*headers.items(), (BINARY_HEADER, str(length - 8))]
    answer = await running.http.post(running.infer_path, content=body, headers=fields)
    assert answer.status_code == 400
    assert "stands twice" in answer.json()["error"]


@pytest.mark.parametrize("top", [0, 2, 3])
async def test_an_answer_of_more_text_than_there_is_time_for_is_refused(start_node: Any, top: int) -> None:
    async with start_node(max_queue_images=20_000) as running:
        images = running.model.images(*[(1, 2, 3)] * 6000)
        outputs = [RequestedOutput(name, binary=False, classification=top) for name in ("logits", "probabilities")]
        answer = await post(running, images, outputs=tuple(outputs))
        if top == 2:  # 24,000 names
            assert answer.status_code == 200
        else:
            assert (answer.status_code, running.model.images_seen) == (413, 0)
            assert "would hold 36,000 numbers or names as text" in answer.json()["error"]
        assert (await post(running, images)).status_code == 200  # binary


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"inputs": [{"name": "images", "shape": [0, 4, 4, 3], "datatype": "UINT8", "data": []}]}, "inputs[0].shape"),
        ({"inputs": []}, "$.inputs"),
        ({"outputs": [{"name": "sums"}]}, "has the outputs ['logits', 'probabilities'], not 'sums'"),
        ({"outputs": [{"name": "logits"}, {"name": "x" * 10_000}]}, "outputs[1].name"),
    ],
    ids=["batch 0", "no inputs", "unknown output", "endless output name"],
)
async def test_messages_that_ask_for_what_is_not_there(running: Any, change: dict[str, Any], says: str) -> None:
    tensor = {"name": "images", "shape": [1, 4, 4, 3], "datatype": "UINT8", "data": [7] * 48}
    right = {"inputs": [tensor], "outputs": [{"name": "logits"}]}
    answer = await running.http.post(running.infer_path, json=right | change)
    assert (answer.status_code, says in answer.json()["error"]) == (400, True), answer.text
    assert running.model.images_seen == 0
    assert (await running.http.post(running.infer_path, json=right)).status_code == 200


async def test_a_raw_body_of_nothing_is_no_batch(running: Any) -> None:
    answer = await running.http.post(running.infer_path, content=b"", headers={BINARY_HEADER: "0"})
    assert answer.status_code == 400
    assert "not a whole number of rows" in answer.json()["error"]


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
async def test_features_that_are_no_numbers_are_refused_and_their_neighbours_are_not(
    start_node: Any, tail_model: Any, number: float
) -> None:
    async with start_node(tail_model) as running:

        def features(value: float) -> tuple[bytes, dict[str, str]]:
            array = np.full((1, 4, 4, 3), value, np.float32)
            chunks, headers = encode_request(InferRequest(inputs=(Tensor("features", array),)))
            return b"".join(chunks), headers

        async def send(value: float) -> httpx.Response:
            body, headers = features(value)
            answer: httpx.Response = await running.http.post(running.infer_path, content=body, headers=headers)
            return answer

        running.model.gate.clear()
        first = asyncio.create_task(send(1))
        await wait_for(running.model.entered.is_set)
        # These three wait together, and so would form one batch.
        waiting = [asyncio.create_task(send(value)) for value in (2, number, 3)]
        await wait_for(lambda: running.node.heartbeat().queued_images == 3)
        running.model.gate.set()
        answers = [await task for task in (first, *waiting)]
        assert [answer.status_code for answer in answers] == [200, 200, 400, 200]
        assert answers[2].json() == {"error": "input 'features' holds NaN or infinity"}
        firsts = [read(answers[index]).outputs[0].data[0, 0] for index in (0, 1, 3)]
        assert firsts == [1, 2, 3]


@pytest.mark.parametrize("timeout_us", [-1, "x", True])
async def test_a_bad_timeout_parameter(running: Any, timeout_us: Any) -> None:
    answer = await post(running, running.model.images((1, 2, 3)), parameters={"timeout": timeout_us})
    assert answer.status_code == 400


async def test_a_full_queue_answers_503_at_once_and_health_stays_quick(start_node: Any) -> None:
    async with start_node(max_queue_images=2) as running:
        running.model.gate.clear()
        images = running.model.images((1, 2, 3))
        running_one = asyncio.create_task(post(running, images))
        await wait_for(running.model.entered.is_set)
        waiting = [asyncio.create_task(post(running, images)) for _ in range(2)]
        await wait_for(lambda: running.node.heartbeat().queued_images == 2)

        refused = await post(running, images)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "images wait" in refused.json()["error"]
        for path in ("/readyz", "/livez", "/v2/health/ready", "/metrics"):
            assert (await running.http.get(path)).status_code == 200

        running.model.gate.set()
        assert [(await task).status_code for task in (running_one, *waiting)] == [200] * 3
        assert (await post(running, images)).status_code == 200


async def test_a_batch_that_has_no_room_is_refused_before_its_body_is_sent(start_node: Any) -> None:
    async with start_node(max_queue_images=10) as running:
        running.model.gate.clear()
        running_one = asyncio.create_task(post(running, running.model.images((1, 2, 3))))
        await wait_for(running.model.entered.is_set)
        waiting = asyncio.create_task(post(running, running.model.images(*[(1, 2, 3)] * 6)))
        await wait_for(lambda: running.node.heartbeat().queued_images == 6)
        body, headers = message(running.model.images(*[(4, 5, 6)] * 5))
        head = running.post_bytes(body, headers).removesuffix(body)
        answer = await running.exchange(head, then_eof=True)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"6 images wait, at most 10 may" in answer
        running.model.gate.set()
        assert (await waiting).status_code == (await running_one).status_code == 200


async def test_a_budget_that_the_queue_has_already_spent_is_refused_early(start_node: Any) -> None:
    async with start_node() as running:
        running.model.gate.clear()
        running_one = asyncio.create_task(post(running, running.model.images((1, 2, 3))))
        await wait_for(running.model.entered.is_set)
        backlog = asyncio.create_task(post(running, running.model.images(*[(1, 2, 3)] * 4000)))
        await wait_for(lambda: running.node.heartbeat().queued_images == 4000)
        running.node.default_runner._s_per_image = 0.001  # so that they take 4 s, whatever this machine can do
        late = await post(running, running.model.images((1, 2, 3)), parameters={"timeout": 1_000_000})
        assert late.status_code == 503
        assert "of work wait here" in late.json()["error"]
        running.model.gate.set()
        assert (await backlog).status_code == (await running_one).status_code == 200


async def test_a_client_that_hangs_up_leaves_the_queue(running: Any) -> None:
    running.model.gate.clear()
    first = asyncio.create_task(post(running, running.model.images((1, 2, 3))))
    await wait_for(running.model.entered.is_set)

    body, headers = message(running.model.images((4, 4, 4)))
    async with connected(running.url) as (_, writer):
        writer.write(running.post_bytes(body, headers))
        await wait_for(lambda: running.node.heartbeat().queued_images == 1)
    await wait_for(lambda: running.node.heartbeat().queued_images == 0)

    running.model.gate.set()
    assert (await first).status_code == 200
    assert running.model.images_seen == 1
    await wait_for(lambda: running.lifecycle.in_flight == 0)


async def test_draining_finishes_what_is_under_way_and_refuses_the_rest(running: Any) -> None:
    running.model.gate.clear()
    under_way = asyncio.create_task(post(running, running.model.images((1, 2, 3))))
    await wait_for(running.model.entered.is_set)
    running.lifecycle.drain()
    refused = await post(running, running.model.images((1, 2, 3)))
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert (await running.http.get("/v2/health/ready")).status_code == 503
    assert (await running.http.get("/v2/models/pixel/ready")).status_code == 503
    running.model.gate.set()
    assert read(await under_way).model_name == "pixel"


async def test_answers_are_never_swapped_or_lost(start_node: Any) -> None:
    """Thousands of unique requests of several images on 40 connections, some sent in pairs, among neighbours that hang
    up, break the model, are malformed or find the queue full."""
    numbers = iter(range(4000))
    outcomes: Counter[tuple[str, int]] = Counter()
    kinds = {"good": 200, "breaks the model": 500, "malformed": 400, "hangs up": 0}

    def pixels_of(number: int, kind: str) -> list[tuple[int, int, int]]:
        if kind == "breaks the model":
            return [(255, 255, 255)]
        return [(number % 251, number // 251, row) for row in range(number % 7 + 1)]

    def bytes_of(running: Any, number: int, kind: str) -> bytes:
        body, headers = message(running.model.images(*pixels_of(number, kind)), id=str(number))
        if kind == "malformed":
            body = body[:-1]
        sent: bytes = running.post_bytes(body, headers | {"Content-Length": str(len(body)), "Connection": "keep-alive"})
        return sent

    async def check_answer(reader: asyncio.StreamReader, number: int, kind: str) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split()[1])
        (length,) = re.findall(rb"\ncontent-length: (\d+)", head)
        content = await reader.readexactly(int(length))
        assert status in (kinds[kind], 503)
        outcomes[kind, status] += 1
        if status == 200:
            response = decode_response(content, header_length(head))
            logits = response.output("logits")
            assert response.id == str(number)
            assert logits is not None
            assert logits.tolist() == [list(pixel) for pixel in pixels_of(number, kind)]

    async def talk(
        running: Any, dice: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Use a connection until it is hung up; False when there is nothing more to ask."""
        for number in numbers:
            (kind,) = dice.choices(list(kinds), [85, 5, 5, 5])
            asked = [(number, kind)]
            if dice.random() < 0.2 and (second := next(numbers, None)) is not None:
                asked.insert(0, (second, "good"))
            writer.write(b"".join(bytes_of(running, *request) for request in asked))
            if kind == "hangs up":
                for _ in range(dice.randrange(30)):
                    await asyncio.sleep(0)
                outcomes[kind, 0] += 1
                return True
            for request in asked:
                await check_answer(reader, *request)
        return False

    async def client(running: Any, seed: int) -> None:
        dice = random.Random(seed)
        more = True
        while more:
            async with connected(running.url) as (reader, writer):
                more = await talk(running, dice, reader, writer)

    async def hold_up(running: Any) -> None:
        """The model stands still every now and then, so that requests gather in the queue."""
        while True:
            running.model.gate.clear()
            for _ in range(20):
                await asyncio.sleep(0)
            running.model.gate.set()
            await asyncio.sleep(0)

    async with start_node(max_batch_size=16, max_queue_images=150) as running:
        holding_up = asyncio.create_task(hold_up(running))
        async with asyncio.TaskGroup() as group:
            for seed in range(40):
                group.create_task(client(running, seed))
        holding_up.cancel()
        running.model.gate.set()
        await wait_for(lambda: running.lifecycle.in_flight == 0)
        assert running.node.heartbeat().queued_images == 0
        stats = (await running.http.get("/v2/models/pixel/stats")).json()["model_stats"][0]
    assert outcomes["good", 200] > 2000
    # Else the test shows nothing:
    assert {kind for kind, _ in outcomes} == set(kinds)
    assert outcomes["good", 503] > 0, "the queue was never full"
    assert stats["execution_count"] < stats["inference_stats"]["success"]["count"] * 0.7, "batches never formed"


def header_length(head: bytes) -> int | None:
    found = re.search(rb"inference-header-content-length: (\d+)", head)
    return int(found[1]) if found else None


async def test_metrics_count_what_happened(running: Any) -> None:
    def value(text: str, name: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(name) and 'tier="edge"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    names = {
        'terrace_request_duration_seconds_count{model="pixel",outcome="ok"': 2.0,
        'terrace_request_duration_seconds_count{model="pixel",outcome="invalid"': 1.0,
        'terrace_request_duration_seconds_count{model="pixel",outcome="failed"': 1.0,
        "terrace_batch_size_sum": 3.0,
        "terrace_compute_duration_seconds_count": 2.0,
        "terrace_queue_duration_seconds_count": 2.0,
    }
    before = (await running.http.get("/metrics")).text
    await post(running, running.model.images((1, 2, 3)))
    await post(running, running.model.images((1, 2, 3), (4, 5, 6)))
    await post(running, running.model.images((255, 255, 255)))
    await running.http.post(running.infer_path, content=b"{}")
    after = (await running.http.get("/metrics")).text
    assert {name: value(after, name) - value(before, name) for name in names} == names
    assert value(after, "terrace_upload_bytes_total") > value(before, "terrace_upload_bytes_total") + 4 * 48


@pytest.mark.parametrize("sent", ["identity", "zstd", "gzip", "deflate"])
@pytest.mark.parametrize("accepted", ["identity", "gzip", "deflate", "gzip, deflate"])
async def test_compressed_both_ways(running: Any, sent: str, accepted: str) -> None:
    """The length of the JSON is that of the content, in requests and in answers."""
    body, headers = message(running.model.images((7, 1, 2)))
    if sent != "identity":
        body = await compress(body, sent)
    headers |= {"Content-Encoding": sent, "Accept-Encoding": accepted, "Content-Length": str(len(body))}
    answer = await running.http.post(running.infer_path, content=body, headers=headers)
    assert answer.headers.get("content-encoding") == (accepted if accepted in ("gzip", "deflate") else None)
    assert read(answer).outputs[0].data.tolist() == [[7, 1, 2]]  # httpx has unpacked it


async def test_a_compressed_answer_as_json(running: Any) -> None:
    tensor = {"name": "images", "shape": [1, 4, 4, 3], "datatype": "UINT8", "data": [7] * 48}
    answer = await running.http.post(running.infer_path, json={"inputs": [tensor]}, headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.json()["outputs"][0]["data"] == [7.0, 7.0, 7.0]
