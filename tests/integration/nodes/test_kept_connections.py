"""Inference requests on connections that stay open: each gets its own answer, with one parsed head for all that are
alike."""

import asyncio
import itertools
import random
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.integration.nodes.conftest import PixelModel
from tests.integration.nodes.test_infer_route import message
from tierkit.inference import thread as inference_thread
from tierkit.tensors import Array
from tierkit.testing import wait_for
from tierkit.wire.messages import BUDGET_HEADER
from tierkit.wire.oip import BINARY_HEADER, InferResponse, decode_response, parse_header_length


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

    async def infer(self, images: Array, budget_ms: float | None = None, **fields: Any) -> InferResponse:
        body, headers = message(images, **fields)
        answer = await self.post(body, headers if budget_ms is None else {**headers, BUDGET_HEADER: f"{budget_ms}"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["server-timing"].startswith("queue;dur=")
        assert answer.headers["content-type"] == "application/octet-stream"
        return decode_response(answer.content, parse_header_length(answer.headers[BINARY_HEADER]))


class Steady(PixelModel):
    """Depends on the batch alone."""

    steady = True
    thread = 0

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        self.thread = threading.get_ident()
        return super().run(inputs, outputs)


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


def logits(response: InferResponse) -> Any:
    array = response.output("logits")
    assert array is not None
    return array.tolist()


async def test_each_request_has_its_own_answer_and_its_own_id(steady: Any) -> None:
    dice = random.Random(3)
    total = images_sent = 0

    async def one(number: int) -> None:
        nonlocal total, images_sent
        async with connection(steady) as client:
            for turn in range(50):
                images = dice.choice((1, 1, 1, 2, 5))
                pixels = [(number, turn, row) for row in range(images)]
                fields = dice.choice(({}, {"id": f"{number}"}))
                budget_ms = dice.choice((None, dice.uniform(20_000, 60_000)))
                answer = await client.infer(steady.model.images(*pixels), budget_ms, **fields)
                assert logits(answer) == [list(pixel) for pixel in pixels]
                assert answer.id == fields.get("id", "")
                total, images_sent = total + 1, images_sent + images

    await asyncio.gather(*map(one, range(4)))
    [stats] = (await steady.http.get("/v2/models/pixel/stats")).json()["model_stats"]
    assert stats["inference_count"] == images_sent
    assert stats["inference_stats"]["success"]["count"] == total
    assert stats["inference_stats"]["fail"]["count"] == 0


async def test_a_head_that_came_before_is_held_against_the_bytes_that_follow_it(steady: Any) -> None:
    body, headers = message(steady.model.images((1, 2, 3)))
    async with connection(steady) as client:
        assert (await client.post(body, headers)).status_code == 200
        for wrong in (body[:-1], body + b"\0"):
            answer = await client.post(wrong, {**headers, "Content-Length": str(len(wrong))})
            assert answer.status_code == 400
        assert (await client.post(body, headers)).status_code == 200


async def test_hundreds_at_the_same_time_with_failing_and_leaving_neighbours_never_swap(steady: Any) -> None:
    dice = random.Random(5)
    answered = failed = 0

    async def one(number: int) -> None:
        nonlocal answered, failed
        turn = 0
        while turn < 40:
            async with connection(steady) as client:
                while turn < 40:
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
    await wait_for(lambda: steady.lifecycle.in_flight == 0, what="the requests of clients that left to end")
    [stats] = (await steady.http.get("/v2/models/pixel/stats")).json()["model_stats"]
    assert stats["inference_stats"]["success"]["count"] >= answered
    assert stats["inference_stats"]["fail"]["count"] == failed
    assert stats["execution_count"] < stats["inference_count"]


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
        for turn in range(3):
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
            return packed, {**headers, **lengths, "Content-Encoding": "deflate"}
    raise AssertionError("no such body")


async def test_no_compressed_body_is_taken_for_pixels(steady: Any) -> None:
    async with connection(steady) as client:
        for turn in range(3):
            images = steady.model.images((1, 2, 3))
            images.reshape(-1)[4:8] = turn
            answer = await client.post(*packed_to_its_own_length(images))
            assert answer.status_code == 200, answer.text
            response = decode_response(answer.content, parse_header_length(answer.headers[BINARY_HEADER]))
            assert logits(response) == [[1, 2, 3]]
