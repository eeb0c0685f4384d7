"""The HTTP client of services, against servers that answer in every way they can think of."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from scheduler.dispatch.transport import may_have_held
from tierkit.errors import UpstreamError, UpstreamTimeout, UpstreamUnavailable
from tierkit.http import client as client_module
from tierkit.http.client import ask, calling, open_client, read_at_most
from tierkit.testing import listening, wait_for

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LARGE = 32 * 1024 * 1024
"""More than the kernel holds for a connection."""


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


Answer = Callable[[Asked], Awaitable[bytes | None]]


@dataclass
class Server:
    """Takes connections and requests, and answers as it is told; None closes the connection."""

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


async def send(http: aiohttp.ClientSession, method: str, url: str, *body: Any, **headers: str) -> tuple[int, bytes]:
    async with calling("the peer", budget_s=20), ask(http, method, url, body, headers) as answer:
        return answer.status, await answer.read()


async def say(asked: Asked, said: bytes) -> None:
    asked.writer.write(said)
    await asked.writer.drain()


async def forever(asked: Asked) -> bytes:
    await asked.reader.read()
    return b""


# --- Answers ---


@pytest.mark.parametrize(
    ("said", "status", "body", "stays"),
    [
        (HEAD + b"Content-Length: 3\r\n\r\nabc", 200, b"abc", True),
        (b"HTTP/1.1 200\r\ncontent-length:0\r\n\r\n", 200, b"", True),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 1\r\n\r\nx", 404, b"x", True),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", 302, b"", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
        (CHUNKED + b"2;x=y\r\nab\r\n1\r\nc\r\n0\r\nTrailer: 1\r\n\r\n", 200, b"abc", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok", True),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok", True),
        (HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", False),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 7\r\n\r\nno gzip", 200, b"no gzip", True),
        (OK + OK, 200, b"ok", False),
    ],
)
@pytest.mark.parametrize("by_byte", [False, True], ids=["whole", "bytes"])
async def test_an_answer_and_whether_the_connection_stays(
    said: bytes, status: int, body: bytes, stays: bool, by_byte: bool
) -> None:
    by_byte = by_byte and said != OK + OK  # the second one would come to an idle connection, which has its own test

    async def answer(asked: Asked) -> bytes:
        for at in range(len(said) if by_byte else 0):
            if not asked.writer.is_closing():
                asked.writer.write(said[at : at + 1])
                await asyncio.sleep(0)
        return b"" if by_byte else said

    async with serving(answer) as server, open_client() as http:
        for _ in range(2):
            assert await send(http, "GET", f"{server.url}/a%20b?c=d") == (status, body)
            if by_byte and not stays:
                await wait_for(lambda: server.idle)
        assert [asked.connection for asked in server.asked] == ([0, 0] if stays else [0, 1])
        assert server.asked[0].head.startswith(b"GET /a%20b?c=d HTTP/1.1\r\n")


async def test_a_body_may_end_with_the_connection() -> None:
    async with serving(lambda asked: say(asked, HEAD + b"\r\nabc")) as server, open_client() as http:
        for _ in range(2):
            assert await send(http, "GET", server.url) == (200, b"abc")
        assert [asked.connection for asked in server.asked] == [0, 1]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        HEAD,
        b"HTTP/1.1 100 Continue\r\n\r\n",
        HEAD + b"Content-Length: 5\r\n\r\nabc",
        CHUNKED + b"3\r\nabc\r\n",
        CHUNKED + b"3\r\nabc\r\n0\r\n",
        CHUNKED + b"x\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"a: b\r\n" * 300,
        HEAD + b"a: " + b"b" * 70_000,
        HEAD + b"a: " + b"b" * 70_000 + b"\r\n\r\n",
        CHUNKED + b"3\r\nabc\r\n0\r\na: " + b"b" * 200_000,
        OK + b"garbage",
    ],
)
async def test_what_is_no_answer_is_an_error_and_ends_the_connection(said: bytes) -> None:
    async def answer(asked: Asked) -> bytes | None:
        if asked.connection:
            return OK
        await say(asked, said)
        return None

    async with serving(answer) as server, open_client(max_connections=1) as http:
        with pytest.raises(UpstreamUnavailable) as caught:
            await send(http, "POST", server.url, b"x")
        assert may_have_held(caught.value)
        assert len(str(caught.value)) < 400
        assert await send(http, "GET", server.url) == (200, b"ok")
        assert server.closed == 1


@pytest.mark.parametrize("endless", [b"HTTP/1.1 100 Continue\r\n\r\n", b"a: b\r\n", b"x", CHUNKED[17:] + b"1;"])
async def test_an_answer_without_end_ends_with_the_budget_or_sooner(endless: bytes) -> None:
    async def answer(asked: Asked) -> bytes:
        asked.writer.write(b"" if endless.startswith(b"HTTP") else HEAD)
        while True:
            await say(asked, endless * 1000)

    async with serving(answer) as server, open_client() as http:
        with pytest.raises((UpstreamTimeout, UpstreamUnavailable)):
            async with calling("the peer", budget_s=0.3), ask(http, "GET", server.url) as said:
                await said.read()
        await wait_for(lambda: server.idle)


@pytest.mark.parametrize("said", [b"", HEAD + b"Content-Length: 5\r\n\r\nabc"])
async def test_a_reset_is_an_unavailable_peer_that_may_have_the_request(said: bytes) -> None:
    async def answer(asked: Asked) -> None:
        await say(asked, said)
        socket_of(asked).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with serving(answer) as server, open_client() as http:
        with pytest.raises(UpstreamUnavailable) as caught:
            await send(http, "POST", server.url, b"x")
        assert may_have_held(caught.value)


def socket_of(asked: Asked) -> Any:
    return asked.writer.transport.get_extra_info("socket")


# --- Requests ---


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (b"",),
        (b"abc",),
        (bytes(5_000_000),),
        (b"a", b"", memoryview(b"bc")),
        (b"a" * 300_000, memoryview(bytes(300_000))),
    ],
    ids=["none", "empty", "bytes", "large", "pieces", "large pieces"],
)
async def test_bodies_arrive_and_requests_follow_each_other(pieces: tuple[Any, ...]) -> None:
    async with serving(OK) as server, open_client() as http:
        for _ in range(2):
            assert await send(http, "POST", server.url, *pieces) == (200, b"ok")
        arrived = [(asked.connection, asked.body == b"".join(pieces)) for asked in server.asked]
        assert arrived == [(0, True), (0, True)]


async def test_only_the_headers_given_and_what_http_needs_are_sent() -> None:
    async with serving(OK) as server, open_client() as http:
        await send(http, "POST", f"{server.url}/a", b"ab", memoryview(b"c"), **{"X-Own": "1", "Content-Length": "3"})
        sent = server.asked[0].head.lower().split(b"\r\n")
    assert sent[0] == b"post /a http/1.1"
    assert sorted(line for line in sent[1:] if line) == [
        b"accept-encoding: identity",
        b"content-length: 3",
        b"content-type: application/octet-stream",
        b"host: " + server.url.removeprefix("http://").encode(),
        b"x-own: 1",
    ]


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\rb", "a\0b"])
async def test_a_header_that_would_break_the_message_is_an_error_of_ours(value: str) -> None:
    async with serving(OK) as server, open_client() as http:
        for headers in ({"X": value}, {value: "x"}):
            with pytest.raises(ValueError, match="header"):
                await send(http, "POST", server.url, b"x", **headers)
        assert await send(http, "POST", server.url, b"x") == (200, b"ok")
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1/",
        "/relative",
        "path",
        "http:///path",
        "http://127.0.0.1:99999/",
        "http://127.1/",
        f"http://{'x' * 64}.invalid/",
    ],
)
async def test_an_address_that_is_none(url: str) -> None:
    async with open_client() as http:
        with pytest.raises(UpstreamError, match="no usable address"):
            await send(http, "GET", url)


async def test_redirects_are_not_followed_and_cookies_neither_kept_nor_sent() -> None:
    said = b"HTTP/1.1 302 Found\r\nSet-Cookie: a=b\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"
    async with serving(said) as server, open_client() as http:
        for _ in range(2):
            assert await send(http, "GET", server.url) == (302, b"")
        assert len(server.asked) == 2
        assert b"ookie" not in server.asked[1].head


async def test_an_early_answer_ends_the_sending_and_the_connection() -> None:
    async def answer(asked: Asked) -> bytes:
        return b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"

    pieces = [bytes(65536)] * (LARGE // 65536)
    async with serving(answer, reads_bodies=False) as server, open_client(max_connections=1) as http:
        server.reads_bodies = False
        for number in range(2):
            assert await send(http, "POST", server.url, *pieces) == (503, b"busy")
            assert server.asked[-1].connection == number


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
    async with serving(door) as server, open_client(max_connections=2) as http:
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(send(http, "GET", f"{server.url}/{number}")))
            if number < 2:
                await wait_for(lambda: len(server.asked) == len(tasks))
        for number in range(5):
            await wait_for(lambda: len(door.open) == min(5, number + 2))  # noqa: B023  # awaited here
            door.open[f"/{number}".encode()].set()
            await tasks[number]
        assert list(door.open) == [b"/0", b"/1", b"/2", b"/3", b"/4"]
        assert server.opened == 2


@pytest.mark.parametrize("unasked", [b"", b"x"], ids=["end", "byte"])
async def test_a_connection_that_ended_while_idle_is_not_used(unasked: bytes) -> None:
    async with serving(OK) as server, open_client(max_connections=1) as http:
        await send(http, "GET", server.url)
        end = socket.socket(fileno=socket_of(server.asked[0]).fileno())
        try:
            end.send(unasked) if unasked else end.shutdown(socket.SHUT_WR)
        finally:
            end.detach()
        await wait_for(lambda: server.idle)
        assert await send(http, "POST", server.url, b"x") == (200, b"ok")
        assert [asked.connection for asked in server.asked] == [0, 1]


async def test_an_answer_that_came_unasked_belongs_to_no_request() -> None:
    async with serving(OK) as server, open_client(max_connections=1) as http:
        await send(http, "GET", server.url)
        server.asked[0].writer.write(HEAD + b"Content-Length: 5\r\n\r\nfalse")
        for _ in range(100):
            await asyncio.sleep(0)
        with pytest.raises(UpstreamUnavailable, match="unasked"):
            await send(http, "POST", server.url, b"x")
        assert await send(http, "POST", server.url, b"x") == (200, b"ok")
        assert server.opened == 2


@pytest.mark.parametrize(("method", "times"), [("POST", 2), ("GET", 3)])
async def test_a_task_sent_into_a_connection_that_ends_is_not_sent_twice(method: str, times: int) -> None:
    """aiohttp repeats what may be repeated, a GET."""

    async def answer(asked: Asked) -> bytes | None:
        return OK if len(server.asked) != 2 else None

    async with serving(answer) as server, open_client() as http:
        await send(http, method, server.url, *([b"x"] if method == "POST" else []))
        if method == "POST":
            with pytest.raises(UpstreamUnavailable) as caught:
                await send(http, method, server.url, b"x")
            assert may_have_held(caught.value)
        else:
            await send(http, method, server.url)
        assert len(server.asked) == times


# --- Errors and limits of time ---


async def test_a_refused_connection_never_held_the_request() -> None:
    async with serving(OK) as server:
        pass
    async with open_client() as http:
        with pytest.raises(UpstreamUnavailable) as caught:
            await send(http, "POST", server.url, b"x")
        assert not may_have_held(caught.value)


@pytest.fixture
def deaf() -> Any:
    """URL of a port that takes no connection, and does not refuse one either."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_connecting_has_a_limit(deaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_CONNECT_S", 0.05)
    async with open_client() as http:
        with pytest.raises(UpstreamUnavailable, match="takes no connection") as caught:
            await send(http, "POST", deaf, b"x")
        assert not may_have_held(caught.value)


@pytest.mark.parametrize("said", [b"", HEAD, HEAD + b"Content-Length: 5\r\n\r\nabc"], ids=["silence", "head", "body"])
async def test_a_silent_server_has_the_budget(said: bytes) -> None:
    async def answer(asked: Asked) -> bytes:
        asked.writer.write(said)
        return await forever(asked)

    async with serving(answer) as server, open_client() as http:
        with pytest.raises(UpstreamTimeout):
            async with calling("the peer", budget_s=0.05), ask(http, "GET", server.url) as slow:
                await slow.read()
        await wait_for(lambda: server.idle)


async def test_sending_waits_for_the_reader() -> None:
    class Counted:
        """Pieces that tell how many of them have been taken."""

        taken = 0

        def __len__(self) -> int:
            return LARGE // 65536

        def __iter__(self) -> Any:
            for _ in range(LARGE // 65536):
                self.taken += 1
                yield bytes(65536)

    begin = asyncio.Event()

    async def answer(asked: Asked) -> bytes:
        await begin.wait()
        await asked.read_body()
        return OK

    pieces: Any = Counted()
    async with serving(answer, reads_bodies=False) as server, open_client() as http:
        async with asyncio.TaskGroup() as group:

            async def post() -> None:
                async with ask(http, "POST", server.url, pieces) as said:
                    assert await said.read() == b"ok"

            group.create_task(post())
            await wait_for(lambda: bool(server.asked))
            for _ in range(100):
                await asyncio.sleep(0)
            Counted.taken, before = 0, pieces.taken
            assert before < 2 * LARGE // 65536  # the length was counted first
            begin.set()
        assert len(server.asked[0].body) == LARGE


@pytest.mark.parametrize(
    "said", [HEAD + b"Content-Length: %d\r\n\r\n" % LARGE + bytes(LARGE), CHUNKED + b"1\r\nx\r\n" * 300_000]
)
async def test_receiving_waits_for_the_reader(said: bytes) -> None:
    written = 0

    async def answer(asked: Asked) -> bytes:
        nonlocal written
        asked.writer.transport.set_write_buffer_limits(0)
        for at in range(0, len(said), 65536):
            await say(asked, said[at : at + 65536])
            written += 65536
        return b""

    async with serving(answer) as server, open_client() as http, ask(http, "GET", server.url) as response:
        for _ in range(1000):
            await asyncio.sleep(0)
        assert written < len(said) or len(said) < LARGE  # what the kernel holds is more than the small answer
        assert len(await read_at_most(response, 1000)) == 1000
    assert response.closed


# --- Cancellation ---


@pytest.mark.parametrize("stage", ["waiting", "sending", "head", "body", "left early"])
async def test_nothing_is_left_of_a_cancelled_request(stage: str) -> None:
    door = Door()
    reached = asyncio.Event()

    async def answer(asked: Asked) -> bytes:
        if asked.head.startswith(b"GET /x"):
            return OK
        if asked.head.startswith(b"PUT") or stage in ("body", "left early"):
            asked.writer.write(HEAD + b"Content-Length: 5\r\n\r\nabc")
            return await forever(asked)
        return await door(asked)

    async def it() -> None:
        async with ask(http, "POST", f"{server.url}/it", [bytes(LARGE if stage == "sending" else 1)]) as response:
            async for _ in response.content.iter_any():
                reached.set()
                if stage == "left early":
                    return

    reads = stage != "sending"
    async with serving(answer, reads_bodies=reads) as server, open_client(max_connections=1) as http:
        async with contextlib.AsyncExitStack() as stack:
            if stage == "waiting":
                await stack.enter_async_context(ask(http, "PUT", server.url))
            asking = asyncio.create_task(it())
            match stage:
                case "waiting":
                    await asyncio.sleep(0)
                case "sending" | "head":
                    await wait_for(lambda: b"/it" in door.open)
                case _:
                    await reached.wait()
            if stage != "left early":
                asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
        for event in door.open.values():
            event.set()
        await wait_for(lambda: server.idle)
        async with asyncio.timeout(5):
            assert await send(http, "GET", f"{server.url}/x") == (200, b"ok")
    await wait_for(lambda: server.idle)


async def test_what_was_not_sent_of_a_cancelled_request_is_dropped() -> None:
    """It would wait in memory for a peer that may never read it."""
    asked, cancelled, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    arrived = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await cancelled.wait()
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                arrived += len(piece)
        over.set()

    async with listening(handler) as url, open_client() as http:
        sending = asyncio.create_task(send(http, "POST", url, bytes(LARGE)))
        await asked.wait()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        cancelled.set()
        await asyncio.wait_for(over.wait(), 10)
    assert arrived < LARGE


# --- TLS ---


async def test_a_server_without_tls_and_one_that_hangs_up_never_held_the_request() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async with serving(b"", reads_bodies=False) as plain, listening(hang_up) as gone, open_client() as http:
        for url in (gone, plain.url):
            with pytest.raises((UpstreamUnavailable, UpstreamTimeout)) as caught:
                async with calling("the peer", budget_s=0.5), ask(http, "POST", url.replace("http:", "https:"), [b"x"]):
                    pass
            assert not may_have_held(caught.value)


async def test_a_handshake_can_be_cancelled() -> None:
    arrived = asyncio.Event()
    gone = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        arrived.set()
        await reader.read()
        gone.set()

    async with listening(handler) as url, open_client() as http:
        asking = asyncio.create_task(send(http, "GET", url.replace("http:", "https:")))
        await arrived.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(gone.wait(), 5)
