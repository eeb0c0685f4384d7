"""Inference requests that differ from the last one in their pixels alone, on connections that stay open."""

import asyncio
import contextlib
import itertools
import random
import struct
import threading
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.integration.nodes.conftest import PixelModel
from tests.integration.nodes.test_infer_route import message
from tierkit import spans
from tierkit.inference import thread as inference_thread
from tierkit.inference.endpoints import InferEndpoint
from tierkit.tensors import Array
from tierkit.testing import wait_for
from tierkit.wire.messages import BUDGET_HEADER, REQUEST_ID_HEADER
from tierkit.wire.oip import (
    BINARY_HEADER,
    InferRequest,
    InferResponse,
    RequestedOutput,
    decode_response,
    parse_header_length,
)


class Client:
    """One connection; head and body of a request leave together."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
        self.reader = reader
        self.writer = writer
        self.path = path

    async def post(self, body: bytes, headers: dict[str, str]) -> httpx.Response:
        fields = {"host": "node", "content-length": str(len(body)), **{k.lower(): v for k, v in headers.items()}}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.writer.write(f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()[:-1]
        answer = httpx.Headers([(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)])
        content = await self.reader.readexactly(int(answer["content-length"]))
        return httpx.Response(int(status.split()[1]), headers=answer, content=content)

    async def infer(self, images: Array, **fields: Any) -> InferResponse:
        answer = await self.post(*message(images, **fields))
        assert answer.status_code == 200, answer.text
        assert answer.headers["server-timing"].startswith("queue;dur=")
        assert answer.headers["content-type"] == "application/octet-stream"
        return decode_response(answer.content, parse_header_length(answer.headers[BINARY_HEADER]))


class Steady(PixelModel):
    """Depends on the batch alone."""

    steady = True
    thread = 0
    runs = 0

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        self.runs += 1
        self.thread = threading.get_ident()
        return super().run(inputs, outputs)


class Asked:
    """How many requests the endpoint has answered."""

    count = 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    seen = Asked()
    answer = InferEndpoint.__call__

    async def counted(self: InferEndpoint, *args: Any) -> None:
        seen.count += 1
        await answer(self, *args)

    monkeypatch.setattr(InferEndpoint, "__call__", counted)
    return seen


@pytest.fixture(params=[1, 2])
async def steady(start_node: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node whose model may run on the event loop, as if on so many cores."""
    monkeypatch.setattr(inference_thread, "_usable_cores", lambda: request.param)
    async with start_node(Steady()) as running:
        yield running


@asynccontextmanager
async def connection(running: Any) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        yield Client(reader, writer, running.infer_path)
    finally:
        writer.close()


@pytest.fixture
async def client(steady: Any) -> AsyncIterator[Client]:
    async with connection(steady) as client:
        yield client


async def repeating(client: Client, asked: Asked, images: Array, **fields: Any) -> None:
    """Ask until a request is answered past the endpoint."""

    async def past() -> bool:
        before = asked.count
        await client.infer(images, **fields)
        return asked.count == before

    await wait_for(past, what="a request that is answered at once")


def logits(response: InferResponse) -> Any:
    array = response.output("logits")
    assert array is not None
    return array.tolist()


async def test_each_connection_has_the_answers_to_its_own_requests(steady: Any, asked: Asked) -> None:
    dice = random.Random(3)
    total = images_sent = 0

    async def one(number: int) -> None:
        nonlocal total, images_sent
        async with connection(steady) as client:
            for turn in range(100):
                images = dice.choice((1, 1, 1, 2, 5))
                pixels = [(number, turn, row) for row in range(images)]
                fields = dice.choice(({}, {"id": f"{number}"}))
                answer = await client.infer(steady.model.images(*pixels), **fields)
                assert logits(answer) == [list(pixel) for pixel in pixels]
                assert answer.id == fields.get("id", "")
                total, images_sent = total + 1, images_sent + images
                if dice.random() < 0.3:
                    await asyncio.sleep(dice.random() * 0.01)

    await asyncio.gather(*map(one, range(4)))
    assert asked.count < total
    [stats] = (await steady.http.get("/v2/models/pixel/stats")).json()["model_stats"]
    assert stats["inference_count"] == images_sent
    assert stats["inference_stats"]["success"]["count"] == total
    assert stats["inference_stats"]["fail"]["count"] == 0


async def test_thousands_at_the_same_time_with_failing_and_leaving_neighbours_never_swap(
    steady: Any, asked: Asked
) -> None:
    dice = random.Random(5)
    answered = failed = 0

    async def one(number: int) -> None:
        nonlocal answered, failed
        turn = 0
        while turn < 50:
            async with connection(steady) as client:
                while turn < 50:
                    turn += 1
                    pixel = (number, turn, dice.randrange(200))
                    if dice.random() < 0.02:  # breaks the batch that it is part of
                        response = await client.post(*message(steady.model.images((255, 255, 255))))
                        assert response.status_code == 500
                        failed += 1
                    elif dice.random() < 0.02:  # hangs up before the answer
                        with pytest.raises(TimeoutError):
                            async with asyncio.timeout(0):
                                await client.infer(steady.model.images(pixel))
                        break
                    else:
                        assert logits(await client.infer(steady.model.images(pixel))) == [list(pixel)]
                        answered += 1

    await asyncio.gather(*map(one, range(24)))
    assert asked.count < answered / 2
    await wait_for(lambda: steady.lifecycle.in_flight == 0, what="the requests of clients that left to end")
    [stats] = (await steady.http.get("/v2/models/pixel/stats")).json()["model_stats"]
    assert stats["inference_stats"]["success"]["count"] >= answered
    assert stats["inference_stats"]["fail"]["count"] == failed
    assert stats["execution_count"] < stats["inference_count"]


async def test_a_repeated_request_without_room_is_refused_like_any_other(start_node: Any, asked: Asked) -> None:
    model = Steady()
    async with start_node(model, max_queue_images=2) as running, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connection(running)) for _ in range(4)]
        for client in clients:
            await repeating(client, asked, model.images((1, 2, 3)))
        model.gate.clear()
        runner, endpoint = running.node.default_runner, asked.count
        steady, runner._steady = runner._steady, False  # on the event loop it would stop this test as well
        waiting = list[asyncio.Task[InferResponse]]()
        for number, client in enumerate(clients[:3]):
            waiting.append(asyncio.create_task(client.infer(model.images((number, 2, 3)))))
            await wait_for(lambda: running.lifecycle.in_flight == len(waiting))
            await wait_for(lambda: runner.running_images == 1)
        answer = await clients[3].post(*message(model.images((4, 5, 6))))
        assert answer.status_code == 503
        assert "wait, at most 2 may" in answer.json()["error"]
        assert int(answer.headers["retry-after"]) >= 1
        assert REQUEST_ID_HEADER in answer.headers
        model.gate.set()
        assert [logits(answer) for answer in await asyncio.gather(*waiting)] == [
            [[number, 2, 3]] for number in range(3)
        ]
        runner._steady = steady
        assert logits(await clients[3].infer(model.images((4, 5, 6)))) == [[4, 5, 6]]
        assert asked.count == endpoint


async def test_what_repeats_is_counted_like_everything_else(steady: Any, client: Client, asked: Asked) -> None:
    async def counted() -> dict[str, float]:
        lines = (await steady.http.get("/metrics")).text.splitlines()
        names = ("terrace_request_duration_seconds_count", "terrace_upload_bytes_total", "terrace_batch_size_sum")
        return {
            name: sum(float(line.split()[-1]) for line in lines if line.startswith(name) and 'model="pixel"' in line)
            for name in names
        }

    images = steady.model.images((1, 2, 3), (4, 5, 6))
    await repeating(client, asked, images)
    before, endpoint = await counted(), asked.count
    for _ in range(10):
        await client.infer(images)
    after = await counted()
    assert asked.count < endpoint + 10
    assert [round(after[name] - before[name]) for name in before] == [10, 10 * len(message(images)[0]), 20]


@pytest.mark.parametrize(
    "other",
    [
        {"outputs": (RequestedOutput("probabilities", binary=True, classification=2),)},
        {"outputs": (RequestedOutput("logits", binary=False), RequestedOutput("probabilities", binary=True))},
        {"parameters": {"timeout": 5_000_000}},
        {"budget": "5000"},
    ],
)
async def test_what_needs_more_than_the_model_is_never_answered_at_once(
    other: dict[str, Any], steady: Any, client: Client, asked: Asked
) -> None:
    extra = {BUDGET_HEADER: other["budget"]} if "budget" in other else {}
    body, headers = message(steady.model.images((1, 2, 3)), **({} if extra else other))
    for number in range(5):
        assert (await client.post(body, {**headers, **extra})).status_code == 200
        assert asked.count == number + 1


async def test_what_is_looked_at_before_it_is_computed_is_looked_at_each_time(start_node: Any, asked: Asked) -> None:
    looked = 0

    async def guard(request: InferRequest) -> None:
        nonlocal looked
        looked += 1

    async with start_node(Steady(), guard=guard) as running, connection(running) as client:
        for number in range(5):
            await client.infer(running.model.images((1, 2, 3)))
            assert looked == asked.count == number + 1


async def test_a_repeated_request_that_fails_fails_as_ever(steady: Any, client: Client, asked: Asked) -> None:
    await repeating(client, asked, steady.model.images((1, 2, 3)))
    endpoint, runs = asked.count, steady.model.runs
    answer = await client.post(*message(steady.model.images((255, 255, 255))))
    assert answer.status_code == 500
    assert answer.json() == {"error": f"internal error; request id {answer.headers[REQUEST_ID_HEADER]}"}
    assert (asked.count, steady.model.runs) == (endpoint, runs + 1)
    assert logits(await client.infer(steady.model.images((7, 8, 9)))) == [[7, 8, 9]]
    [stats] = (await steady.http.get("/v2/models/pixel/stats")).json()["model_stats"]
    assert stats["inference_stats"]["fail"]["count"] == 1


async def test_nothing_is_answered_at_once_when_the_node_drains(steady: Any, client: Client, asked: Asked) -> None:
    await repeating(client, asked, steady.model.images((1, 2, 3)))
    steady.lifecycle.drain()
    answer = await client.post(*message(steady.model.images((1, 2, 3))))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_a_raw_body_repeats_too(steady: Any, client: Client, asked: Asked) -> None:
    for value in range(20):
        images = steady.model.images((value, 2, 3), (4, value, 6))
        answer = await client.post(np.ascontiguousarray(images).tobytes(), {BINARY_HEADER: "0"})
        response = decode_response(answer.content, parse_header_length(answer.headers[BINARY_HEADER]))
        assert logits(response) == [[value, 2, 3], [4, value, 6]]
    assert asked.count < 20


async def test_much_json_is_not_followed_by_an_inference_on_the_event_loop(
    start_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_thread, "_usable_cores", lambda: 2)
    model = Steady()
    async with start_node(model, max_batch_size=1024) as running:

        async def computed_on_the_loop(images: int) -> bool:
            tensor = {"name": "images", "shape": [images, 4, 4, 3], "datatype": "UINT8", "data": [7] * 48 * images}
            answer = await running.http.post(running.infer_path, json={"inputs": [tensor]})
            assert answer.status_code == 200, answer.text
            return model.thread == threading.get_ident()

        await wait_for(lambda: computed_on_the_loop(1))
        assert not await computed_on_the_loop(1000)


async def test_a_compressed_answer_is_compressed_each_time(steady: Any) -> None:
    async with connection(steady) as client:
        for turn in range(5):
            body, headers = message(steady.model.images((turn, 1, 2)))
            answer = await client.post(body, {**headers, "Accept-Encoding": "deflate"})
            assert answer.headers["content-encoding"] == "deflate"
            response = decode_response(answer.content, parse_header_length(answer.headers[BINARY_HEADER]))
            assert logits(response) == [[turn, 1, 2]]


def packed_to_its_own_length(images: Array) -> tuple[bytes, dict[str, str]]:
    """A request whose body is as long packed as unpacked: JSON that shrinks, pixels that are stored as they are."""
    body, headers = message(images)
    json_bytes = int(headers[BINARY_HEADER])
    pixels = body[json_bytes:]
    for blanks, empty_blocks in itertools.product(range(20), range(20)):
        content = body[:json_bytes] + b" " * blanks
        packer = zlib.compressobj(9)
        head = packer.compress(content) + packer.flush(zlib.Z_SYNC_FLUSH) + b"\0\0\0\xff\xff" * empty_blocks
        stored = b"\x01" + struct.pack("<HH", len(pixels), len(pixels) ^ 0xFFFF) + pixels
        packed = head + stored + struct.pack(">I", zlib.adler32(content + pixels))
        if len(packed) == len(content) + len(pixels):
            assert zlib.decompress(packed) == content + pixels
            lengths = {BINARY_HEADER: str(len(content)), "Content-Length": str(len(packed))}
            return packed, headers | lengths | {"Content-Encoding": "deflate"}
    raise AssertionError


async def test_no_compressed_body_is_taken_for_pixels(steady: Any) -> None:
    async with connection(steady) as client:
        for turn in range(5):
            images = steady.model.images((1, 2, 3))
            images.reshape(-1)[4:8] = turn
            answer = await client.post(*packed_to_its_own_length(images))
            assert answer.status_code == 200, answer.text
            response = decode_response(answer.content, parse_header_length(answer.headers[BINARY_HEADER]))
            assert logits(response) == [[1, 2, 3]]


@pytest.mark.parametrize("flag", ["00", "01"])
async def test_requests_of_a_sampled_trace_have_a_span_each(steady: Any, asked: Asked, flag: str) -> None:
    exporter = InMemorySpanExporter()
    spans.configure("edge", "edge-1", exporter)
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-{flag}"}
    try:
        async with connection(steady) as client:
            for turn in range(20):
                body, own = message(steady.model.images((turn, 1, 2)))
                answer = await client.post(body, own | headers)
                response = decode_response(answer.content, parse_header_length(answer.headers[BINARY_HEADER]))
                assert logits(response) == [[turn, 1, 2]]
    finally:
        spans.close()
    told = [span.name for span in exporter.get_finished_spans()]
    if flag == "01":
        assert asked.count == 20
        assert Counter(told) == {"upstream": 20, "queue": 20, "compute": 20}
    else:
        assert asked.count < 20
        assert told == []
