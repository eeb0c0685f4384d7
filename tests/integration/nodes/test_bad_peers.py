"""Peers that break the rules of HTTP or of patience cost a bounded amount, and the next request is served."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tierkit.testing import connected, wait_for
from tierkit.wire.oip import InferRequest, Tensor, encode_request


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


async def test_json_beyond_its_limit_is_refused_before_its_end(running: Any) -> None:
    head = f"POST {running.infer_path} HTTP/1.1\r\nHost: node\r\nContent-Length: {60 * 2**20}\r\n\r\n".encode()
    answer = await running.exchange(head + b"[" + b"[]," * 2**18)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"more than 655360 bytes of JSON: send tensors as binary" in answer
    assert running.model.images_seen == 0
    await assert_serves(running)


async def test_json_that_is_nested_deeply_is_the_senders_fault(running: Any) -> None:
    answer = await running.http.post(running.infer_path, content='{"a":' * 900 + "1" + "}" * 900)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]


async def test_many_uploads_that_trickle(start_node: Any) -> None:
    """Each byte comes in time for a timeout between bytes; only a bound on the whole ends them."""
    async with start_node(body_timeout_s=0.3) as running:
        whole = request(running)
        begin = asyncio.get_running_loop().time()

        async def trickle() -> bytes:
            async with connected(running.url) as (reader, writer):
                answer = asyncio.create_task(reader.read())
                for at in range(len(whole) - 1):
                    if at > 0 and answer.done():
                        break
                    writer.write(whole[at : at + 1])
                    # A pause, and at once the end of it: the answer.
                    await asyncio.wait({answer}, timeout=0 if at < len(whole) - 60 else 0.1)
                return await answer

        uploads = [asyncio.create_task(trickle()) for _ in range(50)]
        await wait_for(lambda: running.lifecycle.in_flight == 50, what="all of them to be under way")
        await assert_serves(running)
        answers = await asyncio.gather(*uploads)
        assert {answer.split(b" ", 2)[1] for answer in answers} == {b"408"}
        assert asyncio.get_running_loop().time() - begin < 5
        assert running.lifecycle.in_flight == 0
        await assert_serves(running)


async def test_a_client_that_asks_on_and_on_and_never_reads(start_node: Any) -> None:
    async with start_node(write_timeout_s=1) as running:
        images = running.model.images(*[(1, 2, 3)] * 500)
        # Answers of some 15 kB each, as JSON.
        chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", images),), binary_output=False))
        body = b"".join(chunks)
        lines = [f"{name}: {value}" for name, value in {"Host": "node", **headers}.items()]
        message = "\r\n".join([f"POST {running.infer_path} HTTP/1.1", *lines, "", ""]).encode() + body
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", running.port))

            async def ask_on() -> None:
                while True:
                    await loop.sock_sendall(client, message)

            asking = asyncio.create_task(ask_on())
            await wait_for(asking.done, what="the connection to be cut")
            assert isinstance(asking.exception(), ConnectionError)
        # So many answers lay in the buffers of two sockets; those to later requests were not even computed.
        assert running.model.images_seen < 500 * 150
        await wait_for(lambda: running.lifecycle.in_flight == 0)
        await assert_serves(running)


def room_for_connections(most: int) -> int:
    """So many connections to itself fit into this process's limit of open files, at two files each."""
    return min(most, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500) // 2)


@asynccontextmanager
async def left_open(running: Any, count: int) -> AsyncIterator[list[socket.socket]]:
    """Connections on which nothing is ever sent."""
    loop = asyncio.get_running_loop()
    clients: list[socket.socket] = []
    try:
        for _ in range(count):
            client = socket.socket()
            clients.append(client)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", running.port))
        yield clients
    finally:
        for client in clients:
            client.close()


async def test_ten_thousand_connections_opened_and_left(start_node: Any) -> None:
    count = room_for_connections(10_000)
    async with start_node(max_connections=20_000, header_timeout_s=60) as running:
        before = resident_bytes()
        async with left_open(running, count):
            await assert_serves(running)
            assert resident_bytes() - before < count * 16 * 1024 + 8 * 2**20
        await assert_serves(running)


async def test_connections_beyond_the_limit_free_their_places_by_themselves(start_node: Any) -> None:
    async with (
        start_node(max_connections=100, header_timeout_s=0.5) as running,
        left_open(running, room_for_connections(1000)),
    ):

        async def served() -> bool:
            try:
                answer: bytes = await running.exchange(request(running))
            except ConnectionError:
                return False  # cut off, for there were too many
            return answer.startswith(b"HTTP/1.1 200 ")

        await wait_for(served, what="the places of the silent ones")


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: node\r\n\r\nrubbish\r\n\r\n", 200),
        (b"POST %b HTTP/1.1\r\nHost: node\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n", 400),
        (None, 200),
    ],
    ids=["after a request without body", "amid chunks", "after a body"],
)
async def test_rubbish_does_not_cost_the_answer(running: Any, sent: bytes | None, status: int) -> None:
    if sent is None:
        sent = request(running).replace(b"Connection: close\r\n", b"") + b"{} and more\r\n\r\n"
    sent = sent.replace(b"%b", running.infer_path.encode())
    answer = await running.exchange(sent)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in answer.lower()
    await assert_serves(running)
