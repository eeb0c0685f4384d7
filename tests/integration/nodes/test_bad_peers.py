"""Peers that break the rules of HTTP or of patience cost a bounded amount, and the next request is served."""

import asyncio
from typing import Any

import pytest

from tierkit.oip import InferRequest, Tensor, encode_request


def request(running: Any, *, length: int | str | None = None, body: bytes | None = None) -> bytes:
    chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", running.model.images((1, 2, 3))),)))
    content = b"".join(chunks) if body is None else body
    headers["Content-Length"] = str(len(content) if length is None else length)
    sent: bytes = running.post_bytes(content, headers)
    return sent


async def assert_serves(running: Any) -> None:
    assert (await running.exchange(request(running))).startswith(b"HTTP/1.1 200 ")


async def test_a_body_shorter_than_its_content_length(running: Any) -> None:
    full = request(running)
    assert await running.exchange(full[:-10], then_eof=True) == b""
    assert running.model.images_seen == 0
    await assert_serves(running)


async def test_a_body_longer_than_its_content_length(running: Any) -> None:
    whole = request(running)
    length = len(whole.partition(b"\r\n\r\n")[2]) - 5
    body = whole.partition(b"\r\n\r\n")[2]
    answer = await running.exchange(request(running, length=length, body=body))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"claims 48 bytes" in answer
    await assert_serves(running)


@pytest.mark.parametrize("length", [2**31, 10**18])
async def test_a_content_length_beyond_the_limit(running: Any, length: int) -> None:
    answer = await running.exchange(request(running, length=length), then_eof=True)
    assert answer.startswith(b"HTTP/1.1 413 ")
    await assert_serves(running)


@pytest.mark.parametrize("length", ["-1", "ten", "1e3"])
async def test_a_content_length_that_is_no_number(running: Any, length: str) -> None:
    answer = await running.exchange(request(running, length=length))
    assert answer.startswith(b"HTTP/1.1 400 ")
    await assert_serves(running)


async def test_an_upload_that_stalls(start_node: Any) -> None:
    async with start_node(body_timeout_s=0.2) as running:
        answer = await running.exchange(request(running)[:-10])
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive in time" in answer
        assert running.model.images_seen == 0
        await assert_serves(running)


async def test_a_body_beyond_the_limit_in_chunks_without_a_length(start_node: Any) -> None:
    async with start_node(max_body_bytes=1000) as running:
        head = f"POST {running.infer_path} HTTP/1.1\r\nHost: node\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        answer = await running.exchange(head + b"400\r\n" + bytes(0x400) + b"\r\n0\r\n\r\n", then_eof=True)
        assert answer.startswith(b"HTTP/1.1 413 ")
        await assert_serves(running)


async def test_many_connections_opened_and_left(running: Any) -> None:
    connections = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(300)]
    await assert_serves(running)
    for _reader, writer in connections:
        writer.close()
    await assert_serves(running)
