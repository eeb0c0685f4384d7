"""The HTTP client of services, against servers that answer in every way they can think of."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import trustme

from tierkit.access import client_context
from tierkit.http1 import Fields, HttpTransport, ServiceClient, transport as transport_module
from tierkit.http1.connection import Connection
from tierkit.testing import listening, wait_for

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LARGE = 32 * 1024 * 1024
"""More than the kernel holds for a connection."""


@pytest.fixture(scope="module", params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


@dataclass
class Asked:
    """A request as it arrived, and the way back."""

    connection: int
    head: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    body: bytes = b""

    async def read_body(self) -> None:
        lower = self.head.lower()
        if b"content-length: " in lower:
            length = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
            self.body = await self.reader.readexactly(length)
        elif b"transfer-encoding: chunked" in lower:
            while size := int(await self.reader.readline(), 16):
                self.body += (await self.reader.readexactly(size + 2))[:-2]
            assert await self.reader.readline() == b"\r\n"


Answer = Callable[[Asked], Awaitable[bytes | None]]


@dataclass
class Server:
    """Takes connections and requests, and answers as it is told."""

    answer: Answer
    reads_bodies: bool = True
    url: str = ""
    opened: int = 0
    closed: int = 0
    asked: list[Asked] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether no connection is open any more."""
        return self.closed == self.opened

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.opened
        self.opened += 1
        try:
            while True:
                asked = Asked(number, await reader.readuntil(b"\r\n\r\n"), reader, writer)
                if self.reads_bodies:
                    await asked.read_body()
                self.asked.append(asked)
                said = await self.answer(asked)
                if said is None:
                    return
                writer.write(said)
                if not self.reads_bodies and not asked.body:
                    while await reader.read(65536):
                        pass
        finally:
            self.closed += 1


@asynccontextmanager
async def serving(answer: Answer | bytes, *, reads_bodies: bool = True) -> AsyncIterator[Server]:
    async def always(_: Asked) -> bytes:
        assert isinstance(answer, bytes)
        return answer

    server = Server(always if isinstance(answer, bytes) else answer, reads_bodies)
    async with listening(server.handle) as server.url:
        yield server


def client(
    *, max_connections: int = 8, keepalive_s: float = 30.0, context: ssl.SSLContext | None = None, **timeouts: float
) -> ServiceClient:
    transport = HttpTransport(context or client_context(), max_connections=max_connections, keepalive_s=keepalive_s)
    return ServiceClient(transport, timeout=httpx.Timeout(None, **timeouts))


async def close_after(asked: Asked, said: bytes) -> None:
    asked.writer.write(said)
    await asked.writer.drain()


# --- Answers ---


@pytest.mark.parametrize(
    ("said", "status", "body", "stays"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", 200, b"abc", True),
        (b"HTTP/1.1 200\r\ncontent-length:0\r\n\r\n", 200, b"", True),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 1\r\n\r\nx", 404, b"x", True),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", 302, b"", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, b"", True),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n1\r\nc\r\n0\r\nTrailer: 1\r\n\r\n",
            200,
            b"abc",
            True,
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok", True),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", False),
        (OK + b"garbage", 200, b"ok", False),
        (OK + OK, 200, b"ok", False),
        (OK + b"HTTP/1.1 204 No Content\r\n\r\n", 200, b"ok", False),
    ],
)
@pytest.mark.parametrize("by_byte", [False, True], ids=["whole", "bytes"])
async def test_an_answer_and_whether_the_connection_stays(
    said: bytes, status: int, body: bytes, stays: bool, by_byte: bool
) -> None:
    async def answer(asked: Asked) -> bytes:
        for at in range(len(said) if by_byte else 0):
            if not asked.writer.is_closing():
                asked.writer.write(said[at : at + 1])
                await asyncio.sleep(0)
        return b"" if by_byte else said

    async with serving(answer) as server, client() as http:
        for _ in range(2):
            response = await http.get(f"{server.url}/a%20b?c=d")
            assert (response.status_code, response.content) == (status, body)
            assert "trailer" not in response.headers
            if by_byte and not stays:
                await wait_for(lambda: server.idle)
        assert [asked.connection for asked in server.asked] == ([0, 0] if stays else [0, 1])
        assert server.asked[0].head.startswith(b"GET /a%20b?c=d HTTP/1.1\r\n")
    assert response.http_version == f"HTTP/{said[5:8].decode()}"


async def test_headers_come_as_they_are() -> None:
    said = b"HTTP/1.1 418 Short and stout\r\nX-Twice: a\r\nx-twice:  b \r\nEmpty:\r\nContent-Length: 0\r\n\r\n"
    async with serving(said) as server, client() as http:
        response = await http.get(server.url)
    assert response.headers.get_list("x-twice") == ["a", "b"]
    assert response.headers["empty"] == ""
    assert response.reason_phrase == "Short and stout"


async def test_the_answer_to_head_has_no_body() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n") as server, client() as http:
        response = await http.head(server.url)
        assert (response.headers["content-length"], response.content) == ("1000", b"")


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n"])
async def test_a_body_may_end_with_the_connection(head: bytes) -> None:
    async with serving(lambda asked: close_after(asked, head + b"abc")) as server, client() as http:
        for _ in range(2):
            assert (await http.get(server.url)).content == b"abc"
        assert [asked.connection for asked in server.asked] == [0, 1]


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"", "without an answer"),
        (HEAD, "without an answer"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "without an answer"),
        (HEAD + b"Content-Length: 5\r\n\r\nabc", "in the middle"),
        (CHUNKED + b"3\r\nabc\r\n", "in the middle"),
        (CHUNKED + b"3\r\nabc\r\n0\r\n", "in the middle"),
        (CHUNKED + b"x\r\n", "no HTTP"),
        (b"SSH-2.0-OpenSSH\r\n", "no HTTP"),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", "another protocol"),
        (HEAD + b"a: b\r\n" * 300, "256 headers"),
        (HEAD + b"a: " + b"b" * 70_000, "65536 bytes"),
        (HEAD + b"a: " + b"b" * 70_000 + b"\r\n\r\n", "65536 bytes"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 3000, "65536 bytes"),
        (CHUNKED + b"3\r\nabc\r\n0\r\na: " + b"b" * 200_000, "65536 bytes"),
    ],
)
async def test_what_is_no_answer_is_an_error_and_ends_the_connection(said: bytes, words: str) -> None:
    async def answer(asked: Asked) -> bytes | None:
        if asked.connection:
            return OK
        await close_after(asked, said)
        return None

    async with serving(answer) as server, client(max_connections=1) as http:
        with pytest.raises(httpx.RemoteProtocolError, match=words):
            await http.post(server.url, content=b"x")
        assert (await http.get(server.url)).content == b"ok"
        assert server.closed == 1


@pytest.mark.parametrize("said", [b"", HEAD + b"Content-Length: 5\r\n\r\nabc"])
async def test_a_reset_is_a_read_error_with_its_cause(said: bytes) -> None:
    async def answer(asked: Asked) -> None:
        await close_after(asked, said)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):  # for what was said to arrive first
                await asked.reader.read(1)
        socket_of(asked).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with serving(answer) as server, client() as http:
        with pytest.raises(httpx.ReadError) as caught:
            await http.get(server.url)
        assert isinstance(caught.value.__cause__, ConnectionResetError)


async def test_a_reset_while_sending_is_a_write_error() -> None:
    async def answer(asked: Asked) -> None:
        socket_of(asked).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with serving(answer, reads_bodies=False) as server, client() as http:
        with pytest.raises(httpx.WriteError):
            await http.post(server.url, content=pieces(*[bytes(1 << 20)] * 32))


def socket_of(asked: Asked) -> Any:
    return asked.writer.transport.get_extra_info("socket")


# --- Requests ---


async def pieces(*parts: Any) -> AsyncIterator[Any]:
    for part in parts:
        yield part


@pytest.mark.parametrize(
    ("make", "headers", "arrives"),
    [
        (lambda: None, {}, b""),
        (lambda: b"abc", {}, b"abc"),
        (lambda: bytes(5_000_000), {}, bytes(5_000_000)),
        (lambda: pieces(b"a", b"", memoryview(b"bc")), {"Content-Length": "3"}, b"abc"),
        (lambda: pieces(b"a" * 300_000, bytes(300_000)), {"Content-Length": "600000"}, b"a" * 300_000 + bytes(300_000)),
        (lambda: pieces(b"a", b"", memoryview(b"bc" * 20)), {}, b"a" + b"bc" * 20),
        (lambda: pieces(), {}, b""),
        (lambda: pieces(b""), {"Content-Length": "0"}, b""),
    ],
    ids=["none", "bytes", "large", "pieces", "large pieces", "chunked", "chunked, empty", "empty"],
)
async def test_bodies_arrive_and_requests_follow_each_other(
    make: Callable[[], Any], headers: dict[str, str], arrives: bytes
) -> None:
    async with serving(OK) as server, client() as http:
        for _ in range(2):
            assert (await http.post(server.url, content=make(), headers=headers)).content == b"ok"
        assert [(asked.connection, asked.body == arrives) for asked in server.asked] == [(0, True), (0, True)]


@pytest.mark.parametrize("body", [[b"first", b""], [b"fi", b"rs", memoryview(b"t")]])
async def test_the_head_and_a_small_body_arrive_together(body: list[Any]) -> None:
    arrived = bytearray()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.extend(await reader.read(1 << 20))
        writer.write(OK)

    async with listening(handler) as url, client() as http, aclosing(await http.ask(url + "/", body, {})) as answer:
        assert b"".join([piece async for piece in answer]) == b"ok"
    assert arrived.endswith(b"\r\nContent-Length: 5\r\n\r\nfirst")


async def test_a_question_past_httpx_is_the_same_to_the_server() -> None:
    """Also where the server closes the connection, in the middle of a large body, and where there is no server."""
    async with serving(OK) as server, client() as http:
        for path in ("/v1/tasks/a-1?x=%20y", "/größe/1"):
            said = {"X-One": "1", "Content-Length": "3"}
            async with aclosing(await http.ask(server.url + path, [b"ab", memoryview(b"c")], said)) as answer:
                assert (answer.status, Fields(answer.headers).get("content-LENGTH")) == (200, "2")
                assert [piece async for piece in answer] == [b"ok"]
            assert (await http.post(server.url + path, content=b"abc", headers={"X-One": "1"})).content == b"ok"
        plain, same, spelled, same_spelled = server.asked
        assert set(plain.head.split(b"\r\n")) == set(same.head.split(b"\r\n"))
        assert set(spelled.head.split(b"\r\n")) == set(same_spelled.head.split(b"\r\n"))
        assert [asked.body for asked in server.asked] == [b"abc"] * 4
        assert {asked.connection for asked in server.asked} == {0}
    with pytest.raises(httpx.ConnectError):
        async with client() as http:
            await http.ask(server.url + "/", [b""], {})
    with pytest.raises(RuntimeError, match="has been closed"):
        await http.ask(server.url + "/", [b""], {})


@pytest.mark.parametrize(
    ("url", "headers", "error", "says"),
    [
        ("/path", {"X": "1\r\nY: 2"}, httpx.LocalProtocolError, "holds a line break"),
        ("/path", {"X\n": "1"}, httpx.LocalProtocolError, "holds a line break"),
        ("/path", {"X": "\0"}, httpx.LocalProtocolError, "holds a line break"),
        ("/path", {"X": "ä"}, httpx.LocalProtocolError, "no ASCII"),
        ("/path", {"Content-Length": "4"}, httpx.LocalProtocolError, "is 4, and the body has 3 bytes"),
        ("/a\r\nb", {}, httpx.InvalidURL, "non-printable"),
        ("ftp://127.0.0.1/", {}, httpx.UnsupportedProtocol, "ftp"),
        ("http:///path", {}, httpx.UnsupportedProtocol, "host"),
        ("path", {}, httpx.UnsupportedProtocol, "host"),
    ],
)
async def test_questions_past_httpx_that_cannot_be_sent(
    url: str, headers: dict[str, str], error: type[Exception], says: str
) -> None:
    async with serving(OK) as server, client() as http:
        with pytest.raises(error, match=says):
            await http.ask(server.url + url if url.startswith("/") else url, [b"abc"], headers)
        assert server.asked == []


async def test_a_large_body_goes_out_as_it_comes() -> None:
    """What is gathered is bounded: the server has the first part while the client still makes the second one."""

    async def body(begun: asyncio.Event) -> AsyncIterator[bytes]:
        yield bytes(100_000)
        await begun.wait()
        yield b"x"

    begun = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(100_000)
        begun.set()
        await reader.readexactly(1)
        writer.write(OK)

    async with listening(handler) as url, client() as http, asyncio.timeout(5):
        await http.post(url, content=body(begun), headers={"Content-Length": "100001"})


async def test_only_the_headers_given_and_those_of_the_body_are_sent() -> None:
    async with serving(OK) as server, client() as http:
        await http.post(f"{server.url}/a", content=b"abc", headers={"X-Own": "1"})
        sent = server.asked[0].head.split(b"\r\n")
        assert sent[0] == b"POST /a HTTP/1.1"
        assert sorted(line.partition(b":")[0].lower() for line in sent[1:] if line) == [
            b"content-length",
            b"host",
            b"x-own",
        ]
        response = await http.get(f"{server.url}/b", params={"c": "d"}, timeout=3)
        assert str(response.request.url).endswith("/b?c=d")


@pytest.mark.parametrize(("length", "words"), [("2", "longer than"), ("4", "1 bytes shorter")])
async def test_a_body_of_another_length_is_an_error_of_ours(length: str, words: str) -> None:
    async def answer(asked: Asked) -> bytes:
        return OK if asked.connection else await forever(asked)

    async with serving(answer, reads_bodies=False) as server, client(max_connections=1) as http:
        with pytest.raises(httpx.LocalProtocolError, match=words):
            await http.post(server.url, content=pieces(b"ab", b"c"), headers={"Content-Length": length})
        async with asyncio.timeout(5):
            await http.get(server.url)
        await wait_for(lambda: server.closed == server.opened - 1)


async def test_headers_that_would_break_the_message_are_errors_of_ours() -> None:
    async with serving(OK) as server, client() as http:
        for value in ("a\r\nb: c", "a\nb", "a\rb", "a\0b"):
            with pytest.raises(httpx.LocalProtocolError, match="line break"):
                await http.get(server.url, headers={"x": value})
        with pytest.raises(httpx.LocalProtocolError, match="no Content-Length"):
            await http.post(server.url, headers={"Content-Length": "x"}, content=b"")
        assert server.opened == 0


@pytest.mark.parametrize("first", [b"busy", b"bu"], ids=["whole", "in two parts"])
async def test_an_early_answer_ends_the_sending_and_the_connection(first: bytes) -> None:
    taken = 0
    rest = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(LARGE // 65536):
            taken += 1
            yield bytes(65536)

    async def answer(asked: Asked) -> bytes:
        asked.writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\n" + first)
        await rest.wait()
        return b"busy"[len(first) :]

    async with serving(answer, reads_bodies=False) as server, client(max_connections=1) as http:
        request = http.build_request("POST", server.url, content=body(), headers={"Content-Length": str(LARGE)})
        response = await http.send(request, stream=True)
        assert taken < LARGE // 65536
        rest.set()
        assert (response.status_code, await response.aread()) == (503, b"busy")
        await http.get(server.url)
        assert server.asked[-1].connection == 1


async def test_an_early_answer_to_a_request_that_is_out_keeps_the_connection() -> None:
    async def answer(asked: Asked) -> bytes:
        asked.writer.write(OK)
        await asked.read_body()
        return b""

    async with serving(answer, reads_bodies=False) as server, client() as http:
        for _ in range(2):
            await http.post(server.url, content=bytes(1_000_000))
        assert [asked.connection for asked in server.asked] == [0, 0]


# --- The pool ---


class Door:
    """A server that answers each request when it is told to."""

    def __init__(self) -> None:
        self.open: dict[bytes, asyncio.Event] = {}

    async def __call__(self, asked: Asked) -> bytes:
        event = self.open[asked.head.split()[1]] = asyncio.Event()
        await event.wait()
        return OK


async def test_connections_are_limited_and_requests_wait_in_line() -> None:
    door = Door()
    async with serving(door) as server, client(max_connections=2) as http:
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(http.get(f"{server.url}/{number}")))
            if number < 2:
                await wait_for(lambda: len(server.asked) == len(tasks))
        for number in range(5):
            await wait_for(lambda: len(door.open) == min(5, number + 2))  # noqa: B023  # awaited here
            door.open[f"/{number}".encode()].set()
            await tasks[number]
        assert list(door.open) == [b"/0", b"/1", b"/2", b"/3", b"/4"]
        assert server.opened == 2


async def test_the_latest_used_connection_is_used_again() -> None:
    door = Door()
    async with serving(door) as server, client() as http:
        tasks = []
        for name in (b"/a", b"/b"):
            tasks.append(asyncio.create_task(http.get(server.url + name.decode())))
            await wait_for(lambda: name in door.open)  # noqa: B023  # awaited here
        for name, task in zip((b"/b", b"/a"), reversed(tasks), strict=True):
            door.open[name].set()
            await task
        third = asyncio.create_task(http.get(f"{server.url}/c"))
        await wait_for(lambda: b"/c" in door.open)
        door.open[b"/c"].set()
        await third
        assert [asked.connection for asked in server.asked] == [0, 1, 0]


async def test_idle_connections_are_closed_in_time_though_nobody_asks() -> None:
    async with serving(OK) as server, client(keepalive_s=0.05) as http:
        await asyncio.gather(*(http.get(server.url) for _ in range(3)))
        assert server.opened == 3
        await wait_for(lambda: server.idle)
        await http.get(server.url)
        assert server.asked[-1].connection == 3


@pytest.mark.parametrize("unasked", [b"", OK, b"x"], ids=["end", "answer", "byte"])
@pytest.mark.parametrize("noticed", [True, False])
async def test_a_connection_that_ended_while_idle_is_not_used(unasked: bytes, noticed: bool) -> None:
    async with serving(OK) as server, client(max_connections=1) as http:
        await http.get(server.url)
        end = socket.socket(fileno=socket_of(server.asked[0]).fileno())
        try:
            end.send(unasked) if unasked else end.shutdown(socket.SHUT_WR)
        finally:
            end.detach()
        if noticed:
            await wait_for(lambda: server.idle)
        await http.post(server.url, content=b"x")
        assert [asked.connection for asked in server.asked] == [0, 1]


async def test_a_request_into_a_connection_that_ends_is_not_sent_twice() -> None:
    async def answer(asked: Asked) -> bytes | None:
        return OK if len(server.asked) == 1 else None

    async with serving(answer) as server, client() as http:
        await http.get(server.url)
        with pytest.raises(httpx.RemoteProtocolError, match="without an answer"):
            await http.get(server.url)
        assert len(server.asked) == 2


async def test_a_connection_that_grew_old_while_the_process_stood_still_is_not_used() -> None:
    async with serving(OK) as server, client(keepalive_s=0.05) as http:
        await http.get(server.url)
        time.sleep(0.06)  # noqa: ASYNC251  # stands still
        await http.get(server.url)
        assert server.asked[-1].connection == 1


async def test_servers_without_end_leave_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_MAX_KEPT", 1)
    async with serving(OK) as first, serving(OK) as second, client() as http:
        for _ in range(2):
            for server in (first, second):
                await http.get(server.url)
        await wait_for(lambda: second.idle)
        assert (first.opened, second.opened) == (1, 2)


async def test_a_server_that_is_no_longer_called_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_MAX_KEPT", 1)
    async with serving(OK) as first, serving(OK) as second, client(keepalive_s=0.05) as http:
        await http.get(first.url)
        await wait_for(lambda: first.idle)
        await asyncio.gather(*(http.get(second.url) for _ in range(2)))
        await http.get(second.url)
        assert second.opened == 2


# --- Errors and limits of time ---


async def test_a_refused_connection_has_its_cause() -> None:
    async with serving(OK) as server:
        pass
    async with client() as http:
        with pytest.raises(httpx.ConnectError) as caught:
            await http.get(server.url)
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("ftp://127.0.0.1/", httpx.UnsupportedProtocol),
        ("/relative", httpx.UnsupportedProtocol),
        ("http:///path", httpx.UnsupportedProtocol),
        (f"http://{'x' * 64}.invalid/", httpx.ConnectError),
    ],
)
async def test_an_address_that_is_none(url: str, kind: type[Exception]) -> None:
    async with client() as http:
        with pytest.raises(kind):
            await http.get(url)


@pytest.fixture
def deaf() -> Any:
    """URL of a port that takes no connection, and does not refuse one either."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_connecting_has_a_limit(deaf: str) -> None:
    async with client(connect=0.05) as http:
        with pytest.raises(httpx.ConnectTimeout):
            await http.get(deaf)


async def test_waiting_for_a_connection_has_a_limit() -> None:
    door = Door()
    async with serving(door) as server, client(max_connections=1, pool=0.05) as http:
        first = asyncio.create_task(http.get(f"{server.url}/1"))
        await wait_for(lambda: b"/1" in door.open)
        with pytest.raises(httpx.PoolTimeout):
            await http.get(f"{server.url}/2")
        door.open[b"/1"].set()
        assert (await first).content == b"ok"


async def forever(asked: Asked) -> bytes:
    await asked.reader.read()
    return b""


@pytest.mark.parametrize("said", [b"", HEAD, HEAD + b"Content-Length: 5\r\n\r\nabc"], ids=["silence", "head", "body"])
async def test_a_silent_server_has_a_limit(said: bytes) -> None:
    async def answer(asked: Asked) -> bytes:
        asked.writer.write(said)
        return await forever(asked)

    async with serving(answer) as server, client(read=0.05) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.get(server.url)
        await wait_for(lambda: server.idle)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_server_that_does_not_read_has_a_limit(chunked: bool) -> None:
    async def answer(asked: Asked) -> bytes:
        await asyncio.Event().wait()
        return b""

    content = pieces(*[bytes(1 << 20)] * 32) if chunked else bytes(LARGE)
    async with serving(answer, reads_bodies=False) as server, client(write=0.05) as http:
        with pytest.raises(httpx.WriteTimeout):
            await http.post(server.url, content=content)


async def test_sending_waits_for_the_reader() -> None:
    taken = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(LARGE // 65536):
            taken += 1
            yield bytes(65536)

    begin = asyncio.Event()

    async def answer(asked: Asked) -> bytes:
        await begin.wait()
        await asked.read_body()
        return OK

    async with serving(answer, reads_bodies=False) as server, client() as http:
        request = asyncio.create_task(http.post(server.url, content=body(), headers={"Content-Length": str(LARGE)}))
        await wait_for(lambda: bool(server.asked))
        await asyncio.sleep(0.05)
        assert taken < LARGE // 65536
        begin.set()
        assert (await request).content == b"ok"
        assert len(server.asked[0].body) == LARGE


async def test_receiving_waits_for_the_reader() -> None:
    async def answer(asked: Asked) -> bytes:
        asked.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % LARGE)
        return bytes(LARGE)

    async with serving(answer) as server, client() as http, http.stream("GET", server.url) as response:
        stream: Any = response.stream
        await wait_for(lambda: stream.unread_bytes > 256 * 1024)
        for _ in range(100):
            await asyncio.sleep(0)
        assert stream.unread_bytes <= 512 * 1024
        assert sum([len(piece) async for piece in response.aiter_raw()]) == LARGE


async def test_receiving_waits_for_the_reader_of_the_smallest_pieces_as_well() -> None:
    said = CHUNKED + b"1\r\nx\r\n" * 300_000 + b"0\r\n\r\n"
    async with serving(said) as server, client() as http, http.stream("GET", server.url) as response:
        stream: Any = response.stream
        await wait_for(lambda: stream.unread_bytes > 256 * 1024)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(stream.pieces) < 100_000  # what one read brings, and a little
        assert sum([len(piece) async for piece in response.aiter_raw()]) == 300_000


# --- Cancellation ---


@pytest.mark.parametrize("stage", ["waiting", "its turn", "sending", "head", "body", "closed"])
async def test_nothing_is_left_of_a_cancelled_request(stage: str) -> None:
    door = Door()

    async def answer(asked: Asked) -> bytes:
        if asked.head.startswith(b"GET /x"):
            return OK
        if asked.head.startswith(b"PUT") or stage in ("body", "closed"):
            asked.writer.write(HEAD + b"Content-Length: 5\r\n\r\nabc")
            return await forever(asked)
        return await door(asked)

    reached = asyncio.Event()

    async def ask() -> None:
        content = bytes(LARGE) if stage == "sending" else b"x"
        async with http.stream("POST", f"{server.url}/it", content=pieces(content, content)) as response:
            async for _ in response.aiter_raw():
                reached.set()
                if stage == "closed":
                    return

    async with serving(answer, reads_bodies=stage != "sending") as server, client(max_connections=1) as http:
        if stage in ("waiting", "its turn"):
            other = await http.send(http.build_request("PUT", server.url), stream=True)
        asking = asyncio.create_task(ask())
        match stage:
            case "waiting":
                await asyncio.sleep(0)
            case "its turn":
                await asyncio.sleep(0)
                await other.aclose()  # does not wait: whose turn it is has not noticed yet
            case "sending" | "head":
                await wait_for(lambda: b"/it" in door.open)
            case _:
                await reached.wait()
        if stage != "closed":
            asking.cancel()
        if stage == "waiting":
            await other.aclose()  # its place goes to nobody who has gone
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        for event in door.open.values():
            event.set()
        await wait_for(lambda: server.idle)
        async with asyncio.timeout(5):
            assert (await http.get(f"{server.url}/x")).content == b"ok"
    await wait_for(lambda: server.idle)


async def test_a_cancelled_connection_leaves_its_place(deaf: str) -> None:
    async with client(max_connections=1) as http:
        first = asyncio.create_task(http.get(deaf))
        second = asyncio.create_task(http.get(deaf, timeout=httpx.Timeout(0.05, pool=None)))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(httpx.ConnectTimeout):  # it had the place
            await second


async def test_a_cancelled_reader_ends_the_connection_before_anybody_closes_the_answer() -> None:
    async def answer(asked: Asked) -> bytes:
        asked.writer.write(HEAD + b"Content-Length: 5\r\n\r\n")
        return await forever(asked)

    async with serving(answer) as server, client() as http:
        response = await http.send(http.build_request("GET", server.url), stream=True)
        reader = asyncio.create_task(response.aread())
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await wait_for(lambda: server.idle)


async def test_closing_the_client_ends_connections_that_are_being_made() -> None:
    async with serving(forever) as server, client() as http:
        asking = asyncio.create_task(http.get(server.url))
        await asyncio.sleep(0)
        await http.aclose()
        with pytest.raises(httpx.ConnectError):
            await asking
        await wait_for(lambda: server.idle)


async def test_closing_the_client_ends_everything() -> None:
    async with serving(forever) as server, client(max_connections=1) as http:
        under_way = [asyncio.create_task(http.get(server.url)) for _ in range(2)]
        await wait_for(lambda: bool(server.asked))
        await http.aclose()
        outcome = await asyncio.gather(*under_way, return_exceptions=True)
        assert [type(error) for error in outcome] == [httpx.ReadError, httpx.PoolTimeout]
        await wait_for(lambda: server.idle)
        with pytest.raises(RuntimeError, match="closed"):
            await http.get(server.url)


# --- The client ---


async def test_no_request_leaves_objects_in_a_circle() -> None:
    said = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000)
    async with serving(said) as server, client() as http:

        async def ask(times: int) -> None:
            for _ in range(times):
                async with http.stream("POST", server.url, content=pieces(b"a", bytes(100_000))) as response:
                    async for _ in response.aiter_raw():
                        pass
                await http.post(server.url, content=b"x")

        await ask(5)
        gc.collect()
        gc.disable()
        try:
            await ask(50)
            assert gc.collect() < 50
        finally:
            gc.enable()


async def test_no_connection_is_left_in_a_circle() -> None:
    said = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    async with serving(said) as server, client() as http:
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await http.get(server.url)
            await wait_for(lambda: server.idle)
            assert sum(isinstance(one, Connection) for one in gc.get_objects()) < 5
        finally:
            gc.enable()


async def test_an_answer_that_cannot_be_unpacked_ends_the_connection() -> None:
    async def answer(asked: Asked) -> bytes:
        asked.writer.write(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 100\r\n\r\nno gzip")
        return await forever(asked)

    async with serving(answer) as server, client() as http:
        with pytest.raises(httpx.DecodingError):
            await http.get(server.url)
        await wait_for(lambda: server.idle)


async def test_cookies_are_neither_kept_nor_sent() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n") as server, client() as http:
        for _ in range(2):
            await http.get(server.url)
        assert b"ookie" not in server.asked[1].head


# --- TLS ---


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@asynccontextmanager
async def serving_tls(authority: trustme.CA, host: str) -> AsyncIterator[tuple[str, Server]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host).configure_cert(context)

    async def answer(asked: Asked) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(asked.body), asked.body)

    server = Server(answer)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await server.handle(reader, writer)
        finally:
            writer.transport.abort()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}", server
        await wait_for(lambda: server.idle)


async def test_tls_carries_large_bodies_and_its_connections_stay(authority: trustme.CA) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with serving_tls(authority, "127.0.0.1") as (url, server):
        async with client(context=context) as http:
            body = bytes(range(256)) * 8000
            for content in (b"", body, pieces(memoryview(body), b"x" * 70_000)):
                response = await http.post(url, content=content)
                assert response.content == server.asked[-1].body
        assert [asked.connection for asked in server.asked] == [0, 0, 0]
        assert server.asked[2].body == body + b"x" * 70_000


@pytest.mark.parametrize("host", ["127.0.0.1", "other.example"], ids=["stranger", "other name"])
async def test_a_certificate_that_proves_nothing_is_a_connect_error(authority: trustme.CA, host: str) -> None:
    context = ssl.create_default_context()
    if host != "127.0.0.1":
        authority.configure_trust(context)
    async with serving_tls(authority, host) as (url, server), client(context=context) as http:
        with pytest.raises(httpx.ConnectError) as caught:
            await http.get(url)
        assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)
        assert not server.asked


async def test_a_server_without_tls_and_one_that_hangs_up_are_connect_errors() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async with serving(b"", reads_bodies=False) as plain, listening(hang_up) as gone, client() as http:
        plain_port = plain.url.rpartition(":")[2]

        for url in (gone.replace("http:", "https:"), f"https://127.0.0.1:{plain_port}"):
            with pytest.raises((httpx.ConnectError, httpx.ConnectTimeout)):
                await http.get(url, timeout=httpx.Timeout(None, connect=0.3))


async def test_a_handshake_can_be_cancelled() -> None:
    arrived = asyncio.Event()
    gone = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        arrived.set()
        await reader.read()
        gone.set()

    async with listening(handler) as url, client() as http:
        asking = asyncio.create_task(http.get(url.replace("http:", "https:")))
        await arrived.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(gone.wait(), 5)
