"""`OipClient` against a real node, and against peers that do not keep to anything."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tierkit.errors import InvalidInput, UpstreamError, UpstreamTimeout, UpstreamUnavailable
from tierkit.http.client import open_client
from tierkit.inference.oip_client import InferOptions, OipClient
from tierkit.testing import listening, wait_for
from tierkit.wire.oip import InferRequest, InferResponse, Limits, RequestedOutput, Tensor, encode_response


@pytest.fixture
async def client() -> AsyncIterator[OipClient]:
    async with open_client() as http:
        yield OipClient(http, limits=Limits(max_body_bytes=100_000))


IMAGE = np.zeros((1, 4, 4, 3), np.uint8)


def ask(images: Any, **fields: Any) -> InferRequest:
    return InferRequest(inputs=(Tensor("images", images),), outputs=(RequestedOutput("logits"),), **fields)


async def test_an_answer(running: Any, client: OipClient) -> None:
    request = ask(running.model.images((1, 2, 3), (4, 5, 6)), id="7")
    response = await client.infer(running.url, "pixel", request, InferOptions(budget_s=5, request_id="abc"))
    logits = response.output("logits")
    assert logits is not None
    assert logits.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert response.id == "7"


async def test_refusals_keep_their_meaning(running: Any, client: OipClient) -> None:
    request = ask(running.model.images((1, 2, 3)))
    with pytest.raises(UpstreamError, match="404: no model 'nobody' here") as refusal:
        await client.infer(running.url, "nobody", request)
    assert refusal.value.status_code == 404
    broken = ask(running.model.images((255, 255, 255)))
    with pytest.raises(UpstreamError, match="500: internal error; request id abc"):
        await client.infer(running.url, "pixel", broken, InferOptions(request_id="abc"))
    with pytest.raises(UpstreamTimeout):
        await client.infer(running.url, "pixel", request, InferOptions(budget_s=0.0))
    running.lifecycle.drain()
    with pytest.raises(UpstreamUnavailable, match="503: the service is shutting down") as unavailable:
        await client.infer(running.url, "pixel", request)
    assert unavailable.value.retry_after_s == 1


async def test_a_node_that_says_504_is_out_of_time(client: OipClient) -> None:
    async with listening(answering(b"HTTP/1.1 504 \r\ncontent-length: 0\r\n\r\n")) as url:
        with pytest.raises(UpstreamTimeout, match="no reason given"):
            await client.infer(url, "pixel", ask(IMAGE))


async def test_the_budget_ends_the_call_and_takes_the_work_from_the_node(running: Any, client: OipClient) -> None:
    running.model.gate.clear()
    first = asyncio.create_task(client.infer(running.url, "pixel", ask(running.model.images((1, 2, 3)))))
    await wait_for(running.model.entered.is_set)
    with pytest.raises(UpstreamTimeout):
        await client.infer(running.url, "pixel", ask(running.model.images((4, 4, 4))), InferOptions(budget_s=0.3))
    await wait_for(lambda: running.node.heartbeat().queued_images == 0)
    running.model.gate.set()
    await first
    assert running.model.images_seen == 1


async def test_nobody_there(client: OipClient) -> None:
    with pytest.raises(UpstreamUnavailable, match="cannot be reached"):
        await client.infer("http://127.0.0.1:1", "pixel", ask(IMAGE))


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(answer: bytes) -> Handler:
    """A handler that reads a request's head and answers with these bytes, then closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    return handle


def http_200(response: InferResponse, *, cut: int = 0) -> bytes:
    chunks, headers = encode_response(response)
    body = b"".join(chunks)[: -cut or None]
    headers["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + body


def logits(rows: int, name: str = "logits") -> InferResponse:
    return InferResponse("pixel", "1", (Tensor(name, np.zeros((rows, 3), np.float32)),))


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (http_200(logits(1), cut=1), UpstreamError, "cannot be read"),
        (http_200(logits(2)), UpstreamError, "2 rows"),
        (http_200(logits(1, "other")), UpstreamError, "no such output"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", UpstreamError, "cannot be read"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello", UpstreamUnavailable, "broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + bytes(200000), UpstreamError, "more than 100000"),
        (b"HTTP/1.1 302 \r\nlocation: http://x/\r\ncontent-length: 0\r\n\r\n", UpstreamError, "302"),
        (b"this is no HTTP\r\n\r\n", UpstreamUnavailable, "no HTTP"),
        (b"", UpstreamUnavailable, "cannot be reached"),
    ],
)
async def test_answers_that_are_none(client: OipClient, answer: bytes, error: type[Exception], says: str) -> None:
    async with listening(answering(answer)) as url:
        with pytest.raises(error, match=says):
            await client.infer(url, "pixel", ask(IMAGE), InferOptions(budget_s=5))


async def test_whatever_goes_wrong_with_an_answer_is_the_fault_of_who_gave_it(
    client: OipClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tierkit.inference.oip_client.decode_response", fail)
    async with listening(answering(b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\n{}")) as url:
        with pytest.raises(UpstreamError, match="gave an answer that cannot be read: ZeroDivisionError"):
            await client.infer(url, "pixel", ask(IMAGE))


async def test_a_request_that_cannot_be_written_is_the_callers_fault(client: OipClient) -> None:
    with pytest.raises(InvalidInput):
        await client.infer("http://127.0.0.1:1", "pixel", ask(IMAGE[:0]))
