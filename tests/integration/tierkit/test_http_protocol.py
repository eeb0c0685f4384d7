"""HTTP/1.1 as clients write it: several requests on a connection, answers before the body, odd but legal forms."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tierkit.http import protocol
from tierkit.http.exchange import ALONE, Exchange, head_bytes
from tierkit.http.lifecycle import Lifecycle
from tierkit.testing import connected, serve_app, wait_for


class Sample:
    """Answers requests in ways that a server must get right."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.app = Starlette(
            routes=[
                Route("/echo", self.echo, methods=["GET", "POST"]),
                Route("/full", self.full, methods=["POST"]),
                Route("/wait", self.wait, methods=["POST"]),
                Route("/lines", self.lines),
                Route("/empty", self.empty),
                Route("/split", self.split),
                Route("/breaks", self.breaks),
                Route("/alone", self.alone, methods=["POST"]),
            ]
        )

    async def echo(self, request: Request) -> Response:
        self.headers = request.headers.raw
        return Response(await request.body() or request.url.query)

    async def alone(self, request: Request) -> Response:
        self.asked += 1
        await request.body()
        return Response(str(request.scope["extensions"][ALONE]()))

    async def full(self, request: Request) -> Response:
        return Response("full", 503)

    async def wait(self, request: Request) -> Response:
        await self.gate.wait()
        return Response("waited")

    async def lines(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"one\n"
            yield b""
            yield b"two\n"

        return StreamingResponse(parts())

    async def empty(self, request: Request) -> Response:
        return Response(status_code=204)

    async def split(self, request: Request) -> Response:
        return Response("x", headers={"x-name": request.query_params["value"]})

    async def breaks(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"one\n"
            raise ZeroDivisionError

        return StreamingResponse(parts())


class Wire:
    """A connection on which a test writes bytes and reads answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer, which must have a content-length."""
        async with asyncio.timeout(10):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.partition(b":")[2]) for line in head.splitlines() if line.lower().startswith(b"content-length")
            )
            return int(head.split()[1]), await self.reader.readexactly(length)

    async def closed(self) -> bytes:
        """What still comes before the server closes the connection."""
        async with asyncio.timeout(10):
            return await self.reader.read()


@asynccontextmanager
async def wire_to(service: Lifecycle) -> AsyncIterator[Wire]:
    async with connected(service.url) as (reader, writer):
        yield Wire(reader, writer)


@asynccontextmanager
async def wire() -> AsyncIterator[tuple[Wire, Sample]]:
    sample = Sample()
    async with serve_app(sample.app) as service, wire_to(service) as connection:
        yield connection, sample


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def chunked(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "transfer-encoding: chunked", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def test_a_refusal_before_the_body_is_there_keeps_the_connection() -> None:
    async with wire() as (client, _):
        head, _, body = post("/full", bytes(200_000)).partition(b"\r\n\r\n")
        client.send(head, b"\r\n\r\n", body[:10])
        assert await client.answer() == (503, b"full")
        client.send(body[10:], post("/echo", b"next"))
        assert await client.answer() == (200, b"next")


async def test_the_rest_of_a_body_that_was_not_read_is_thrown_away_however_long_it_is() -> None:
    async with wire() as (client, sample):
        client.send(post("/wait", bytes(30_000_000)))
        left: list[int] = []

        def nothing_is_taken_in() -> bool:
            left.append(client.writer.transport.get_write_buffer_size())
            return len(left) > 20 and left[-20] == left[-1]

        await wait_for(nothing_is_taken_in)
        assert left[-1] > 0
        sample.gate.set()
        assert await client.answer() == (200, b"waited")
        client.send(post("/echo", b"next"))
        assert await client.answer() == (200, b"next")


async def test_the_rest_of_a_refused_body_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_LINGER_S", 0.05)
    async with wire() as (client, _):
        client.send(post("/full", bytes(100))[:-1])
        assert await client.answer() == (503, b"full")
        assert await client.closed() == b""


async def test_requests_in_one_packet_are_answered_in_their_order() -> None:
    async with wire() as (client, sample):
        client.send(post("/wait", b""), *(post("/echo", str(number).encode()) for number in range(50)))
        sample.gate.set()
        assert await client.answer() == (200, b"waited")
        assert [await client.answer() for _ in range(50)] == [(200, str(number).encode()) for number in range(50)]
        client.send(post("/echo", b"later"))
        assert await client.answer() == (200, b"later")


async def test_a_request_knows_whether_it_is_alone_on_the_server() -> None:
    sample = Sample()
    async with serve_app(sample.app) as service, wire_to(service) as client, wire_to(service) as other:
        client.send(post("/alone", b"ab"))
        assert await client.answer() == (200, b"True")
        other.send(post("/alone", b"ab")[:-1])
        await wait_for(lambda: sample.asked == 2, what="the other request, whose body is not complete")
        client.send(post("/alone", b"ab"))
        assert await client.answer() == (200, b"False")
        other.send(b"b")
        assert await other.answer() == (200, b"True")
        # The next one on the same connection is here already.
        client.send(2 * post("/alone", b"ab"))
        assert await client.answer() == (200, b"False")
        await client.answer()


async def test_rubbish_after_a_request_does_not_cost_it_its_answer() -> None:
    async with wire() as (client, sample):
        client.send(post("/wait", b""), b"\0\0 rubbish\r\n\r\n")
        sample.gate.set()
        assert await client.answer() == (200, b"waited")
        assert await client.closed() == b""


async def test_a_request_that_comes_byte_by_byte() -> None:
    async with wire() as (client, _):
        for byte in post("/echo", b"slowly"):
            client.send(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert await client.answer() == (200, b"slowly")


async def test_a_chunk_that_is_none_is_refused_amid_the_body() -> None:
    async with wire() as (client, _):
        client.send(b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nZZ\r\n")
        status, body = await client.answer()
        assert (status, json.loads(body)) == (400, {"error": "this is no valid HTTP request"})
        assert await client.closed() == b""


async def test_a_client_that_waits_for_100_continue_gets_it_when_its_body_is_wanted() -> None:
    async with wire() as (client, _):
        client.send(post("/echo", b"abc", "expect: 100-continue")[:-3])
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"abc")
        assert await client.answer() == (200, b"abc")
        client.send(post("/full", b"abc", "expect: 100-continue")[:-3])
        assert await client.answer() == (503, b"full")


@pytest.mark.parametrize(
    "head", [b"GET /echo?q HTTP/1.0\r\n\r\n", b"GET /echo?q HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"]
)
async def test_a_client_that_wants_one_answer_gets_one(head: bytes) -> None:
    async with wire() as (client, _):
        client.send(head)
        answer = await client.closed()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nconnection: close\r\n" in answer
        assert answer.endswith(b"\r\n\r\nq")


@pytest.mark.parametrize(
    "offer",
    [
        ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"),
        ("connection: upgrade", "upgrade: websocket"),
    ],
)
async def test_another_protocol_is_not_taken_up(offer: tuple[str, ...]) -> None:
    async with wire() as (client, sample):
        request = post("/echo", b"abc", *offer)
        client.send(3 * request, request[:-2])
        assert [await client.answer() for _ in range(3)] == 3 * [(200, b"abc")]
        client.send(request[-2:], chunked("/echo", b"3\r\nabc\r\n0\r\n\r\n", *offer))
        assert [await client.answer() for _ in range(2)] == 2 * [(200, b"abc")]
        assert not any(name == b"upgrade" for name, _ in sample.headers)


async def test_this_is_no_proxy() -> None:
    async with wire() as (client, _):
        client.send(b"CONNECT example.org:80 HTTP/1.1\r\nhost: x\r\n\r\nmore")
        assert (await client.answer())[0] == 501
        assert await client.closed() == b""


CONNECT = b"CONNECT / HTTP/1.1\r\nhost: x\r\n\r\n"
LONG = b"connection: upgrade\r\nupgrade: x\r\nx: %b\r\n\r\n" % (b"A" * 70_000)


@pytest.mark.parametrize(
    "sent",
    [
        CONNECT + CONNECT,
        CONNECT[:-2] + LONG,
        CONNECT[:-2] + LONG + CONNECT[:-2] + LONG,
        b"GET /echo HTTP/1.1\r\nhost: x\r\n" + LONG,
        b"GET /echo HTTP/1.1\r\nhost: x\r\n" + LONG + b"GET /echo HTTP/1.1\r\nhost: x\r\n" + LONG,
        b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n" + CONNECT + CONNECT,
    ],
    ids=["twice", "long", "long twice", "offer", "offer twice", "pipelined"],
)
async def test_a_refused_offer_of_another_protocol_ends_the_connection_in_good_order(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with wire() as (client, _):
        client.send(sent)
        answer = await client.closed()
        assert answer.startswith((b"HTTP/1.1 501 ", b"HTTP/1.1 431 ", b"HTTP/1.1 200 "))
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_trailers_are_passed_over() -> None:
    async with wire() as (client, sample):
        client.send(chunked("/echo", b"3;a=b\r\nabc\r\n0\r\nauthorization: Bearer x\r\n\r\n"))
        assert await client.answer() == (200, b"abc")
        assert [name for name, _ in sample.headers] == [b"host", b"transfer-encoding"]
        client.send(post("/echo", b"next"))
        assert await client.answer() == (200, b"next")


@pytest.mark.parametrize(
    "framing",
    [
        b"0\r\n" + 6000 * b"xab: yyyyyyy\r\n" + b"\r\n",
        b"0\r\nxab: " + bytes(70_000).replace(b"\0", b"y") + b"\r\n\r\n",
        b"0\r\nxab: " + bytes(4_000_000).replace(b"\0", b"y"),
        b"0\r\n" + 400_000 * b"xab: y\r\n",
        b"3;" + bytes(4_000_000).replace(b"\0", b"e"),
        bytes(4_000_000).replace(b"\0", b"0"),
    ],
    ids=["trailers", "one trailer", "an endless trailer", "endless trailers", "extension", "zeros"],
)
async def test_what_a_chunked_body_has_beside_its_data_is_bounded(framing: bytes) -> None:
    async with wire() as (client, _):
        client.send(chunked("/echo", b"2\r\n{}\r\n" + framing))
        status, body = await client.answer()
        assert (status, b"longer than 65536 bytes" in body) == (431, True)
        await client.closed()


async def test_a_body_in_chunks_of_one_byte_is_read() -> None:
    body = bytes(range(256)) * 100
    async with wire() as (client, _):
        client.send(chunked("/echo", b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"))
        assert await client.answer() == (200, body)


@pytest.mark.parametrize(
    ("head", "status", "sentence"),
    [
        (b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n", 501, "only 'chunked' is known"),
        (b"GET /echo HTTP/1.1\r\n", 400, "no header Host"),
        (b"GET /echo HTTP/1.1\r\nhost: x\r\nhost: x\r\n", 400, "Host stands twice"),
        (b"GET /echo HTTP/1.1\r\nhost: x\r\nTerrace-Stage: all\r\nterrace-stage: all\r\n", 400, "Stage stands twice"),
    ],
)
async def test_a_head_that_no_application_can_answer_is_refused(head: bytes, status: int, sentence: str) -> None:
    async with wire() as (client, sample):
        client.send(post("/wait", b""), head, b"\r\n")
        sample.gate.set()
        assert await client.answer() == (200, b"waited")
        assert await client.closed() == b""
    async with wire() as (client, _):
        client.send(head, b"\r\n")
        answer = await client.answer()
        assert (answer[0], sentence in answer[1].decode()) == (status, True)
        assert await client.closed() == b""


async def test_blanks_around_a_header_are_no_part_of_it() -> None:
    async with wire() as (client, sample):
        client.send(b"GET /echo HTTP/1.1\r\nHost:  x \t \r\n\r\n")
        assert (await client.answer())[0] == 200
        assert sample.headers == [(b"host", b"x")]


async def test_answers_without_a_body_leave_the_connection_in_order() -> None:
    async with serve_app(Sample().app) as service, httpx.AsyncClient(base_url=service.url, trust_env=False) as http:
        for _ in range(2):
            empty = await http.get("/empty")
            assert (empty.status_code, empty.content) == (204, b"")
            assert "content-length" not in empty.headers
            assert (await http.head("/livez")).content == b""
            assert (await http.get("/lines")).content == b"one\ntwo\n"
            assert (await http.head("/lines")).content == b""


async def test_an_answer_that_breaks_off_is_seen_to(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_app(Sample().app) as service, httpx.AsyncClient(base_url=service.url, trust_env=False) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("/breaks")
        assert "exception in the application" in caplog.text


async def test_a_header_of_an_answer_adds_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_app(Sample().app) as service, httpx.AsyncClient(base_url=service.url, trust_env=False) as http:
        answer = await http.get("/split", params={"value": "a\r\nset-cookie: b"})
        assert answer.status_code == 500
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("value", [b"a\nb", b"a\rb", b"a\r\nb", b"a\0b"])
def test_head_bytes_take_one_line_a_header(value: bytes) -> None:
    assert head_bytes(299, [(b"a", b"b")]) == b"HTTP/1.1 299 \r\na: b\r\n\r\n"
    with pytest.raises(RuntimeError, match="line break"):
        head_bytes(200, [(b"x", value)])


async def test_a_stopping_service_ends_idle_connections_at_once_and_busy_ones_after_their_answer() -> None:
    sample = Sample()
    async with serve_app(sample.app) as service, wire_to(service) as busy, wire_to(service) as idle:
        idle.send(post("/echo", b"a"))
        assert await idle.answer() == (200, b"a")
        busy.send(post("/wait", b""))
        await wait_for(lambda: service.in_flight == 1)
        service.drain()
        sample.gate.set()
        assert await busy.answer() == (200, b"waited")
        closing = asyncio.gather(busy.closed(), idle.closed())
    assert list(await closing) == [b"", b""]


async def test_requests_sent_far_ahead_wait_in_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one connection has under way is bounded, however fast its client writes and whether it reads or not."""
    made = 0

    class Counted(Exchange):
        def __init__(self, *args: Any, **options: Any) -> None:
            nonlocal made
            made += 1
            super().__init__(*args, **options)

    monkeypatch.setattr(protocol, "Exchange", Counted)
    request = b"POST /alone HTTP/1.1\r\nHost: x\r\nContent-Length: 6000\r\n\r\n" + bytes(6000)
    one_read = 256 * 1024 // len(request) + 1
    async with wire() as (client, sample):
        client.send(request * 3000)
        for _ in range(600):
            assert await client.answer() == (200, b"False")
            assert made - sample.asked <= 2 * one_read
        client.writer.transport.abort()


async def test_too_many_requests_in_one_piece_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is being answered is answered."""
    monkeypatch.setattr(protocol, "_MAX_AHEAD", 8)
    request = b"GET /echo?a HTTP/1.1\r\nHost: x\r\n\r\n"
    async with wire() as (client, _):
        client.send(request * 9)
        for _ in range(9):
            assert await client.answer() == (200, b"a")
        client.send(request * 10)
        assert await client.answer() == (200, b"a")
        assert await client.closed() == b""
    async with wire() as (client, _):
        client.send(request)
        assert await client.answer() == (200, b"a")
