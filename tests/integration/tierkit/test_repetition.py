"""Requests that are the last one once more are answered past the parser and the application, and only those."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.integration.tierkit.test_http_protocol import Wire, post, wire_to
from tierkit.access import TokenEntry, digest_of, new_token, write_book
from tierkit.http.exchange import REPEATABLE, Reply
from tierkit.http.lifecycle import Lifecycle
from tierkit.settings import ServiceSettings
from tierkit.testing import serve_app, wait_for

SAME = 4
"""Bytes of the body that repeat."""


class Sample:
    """Answers "app BODY", and what repeats with "again REST OF THE BODY"."""

    def __init__(self) -> None:
        self.asked = 0
        self.busy = False
        self.broken = False
        self.slow = False
        self.later: list[Reply] | None = None
        """Answers that are not given at once."""
        self.taken_back = 0
        self.alone: list[bool] = []
        self.gate = asyncio.Event()
        self.app = Starlette(
            routes=[Route("/again", self.again, methods=["POST"]), Route("/wait", self.wait, methods=["POST"])]
        )

    async def again(self, request: Request) -> Response:
        self.asked += 1
        body = await request.body()
        if self.slow:
            await self.gate.wait()
        if offer := request.scope["extensions"].get(REPEATABLE):
            offer(SAME, self.answer_again)
        return Response(b"app " + body)

    def answer_again(self, rest: memoryview, reply: Reply, *, alone: bool) -> Callable[[], None] | None:
        if self.broken:
            raise ZeroDivisionError
        if self.busy:
            return None
        self.alone.append(alone)
        body = b"again " + rest
        if self.later is None:
            reply(200, b"content-length: %d\r\n" % len(body), body)
        else:
            self.later.append(lambda status, *_: reply(status, b"content-length: %d\r\n" % len(body), body))
        return self.take_back

    def take_back(self) -> None:
        self.taken_back += 1

    async def wait(self, request: Request) -> Response:
        await self.gate.wait()
        return Response("waited")


@asynccontextmanager
async def served(settings: ServiceSettings | None = None) -> AsyncIterator[tuple[Lifecycle, Sample, Wire]]:
    """With a client that has asked once."""
    sample = Sample()
    async with serve_app(sample.app, settings) as service, wire_to(service) as client:
        client.send(post("/again", b"same1"))
        assert await client.answer() == (200, b"app same1")
        yield service, sample, client


async def idle(client: Wire) -> None:
    """Return when the server has nothing under way: the next request may be answered past the application."""

    async def repeats() -> bool:
        client.send(post("/again", b"same!"))
        return (await client.answer())[1] == b"again !"

    await wait_for(repeats, what="a request that is answered at once")


async def test_a_request_that_repeats_is_answered_past_the_application() -> None:
    async with served() as (_, sample, client):
        for number in range(100):
            client.send(post("/again", b"same%d" % (number % 10)))
            assert await client.answer() == (200, b"again %d" % (number % 10))
        assert sample.asked == 1


@pytest.mark.parametrize(
    "other",
    [
        post("/again", b"Same2"),
        post("/again", b"same22"),
        post("/again", b"same2", "x: y"),
        post("/again", b"same2").replace(b"host: x", b"host: y"),
        post("/again", b"same2").replace(b"host", b"Host"),
    ],
)
async def test_one_that_differs_by_a_byte_is_not(other: bytes) -> None:
    async with served() as (_, sample, client):
        client.send(other)
        assert await client.answer() == (200, b"app " + other.partition(b"\r\n\r\n")[2])
        client.send(post("/again", b"same3"))
        await client.answer()
        assert sample.asked >= 2


async def test_one_whose_rest_does_not_come_is_read_like_any_other() -> None:
    async with served() as (_, sample, client):
        client.send(post("/again", b"same2")[:-1])
        await wait_for(lambda: sample.asked == 2, what="the application to be asked")
        client.send(b"2")
        assert await client.answer() == (200, b"app same2")
        await idle(client)


async def test_two_in_one_packet_are_read_like_any_other() -> None:
    async with served() as (_, _, client):
        client.send(post("/again", b"same2"), post("/again", b"same3"))
        assert [await client.answer() for _ in range(2)] == [(200, b"app same2"), (200, b"app same3")]
        client.send(post("/again", b"same4"))
        assert await client.answer() == (200, b"app same4")


async def test_what_goes_on_with_a_request_that_has_begun_is_none_that_repeats() -> None:
    async with served() as (service, sample, client), wire_to(service) as other:
        sample.slow = True
        request = post("/again", b"same2", "x: y")
        client.send(request)
        await wait_for(lambda: sample.asked == 2)
        client.send(b"POST /again HTTP/1.1\r\nfoo: ")
        # When the other connection has its answer, the server has read this one as well.
        for _ in range(2):
            other.send(post("/nothing", b""))
            assert (await other.answer())[0] == 404
        sample.gate.set()
        assert await client.answer() == (200, b"app same2")
        client.send(request)  # of which the first line is the value of foo
        assert await client.answer() == (200, b"app same2")


async def test_a_head_that_came_apart_from_its_body_is_not_remembered() -> None:
    async with served() as (_, sample, client):
        head, _, body = post("/again", b"same2", "x: y").partition(b"\r\n\r\n")
        client.send(head, b"\r\n\r\n", body[:SAME])
        await wait_for(lambda: sample.asked == 2)
        client.send(body[SAME:])
        assert await client.answer() == (200, b"app same2")
        client.send(post("/again", b"same3", "x: y"))
        assert await client.answer() == (200, b"app same3")


@pytest.mark.parametrize("why", ["busy", "broken", "drain", "debug"])
async def test_the_application_answers_what_cannot_be_answered_at_once(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as (service, sample, client):
        await idle(client)
        asked = sample.asked
        sample.busy, sample.broken = why == "busy", why == "broken"
        if why == "drain":
            service.drain()
        if why == "debug":
            caplog.set_level(logging.DEBUG, "tierkit.access")
        client.send(post("/again", b"same2"))
        status, body = await client.answer()
        assert (status, body) == (200, b"app same2") if why != "drain" else status == 503
        assert sample.asked == asked + (why != "drain")
        assert service.in_flight == 0


async def awaiting(service: Lifecycle, sample: Sample, *clients: Wire) -> list[Reply]:
    """Let the clients' next requests wait for their answers, which the result gives."""
    for client in clients:
        await idle(client)
    later = sample.later = []
    for number, client in enumerate(clients):
        client.send(post("/again", b"same%d" % number))
        await wait_for(lambda: len(later) == service.in_flight == number + 1, what="the request")  # noqa: B023
    return later


async def test_answers_may_come_later_and_in_any_order() -> None:
    async with served() as (service, sample, one), wire_to(service) as two:
        replies = await awaiting(service, sample, one, two)
        assert sample.alone[-2:] == [True, False]
        for reply in reversed(replies):
            reply(200, b"", b"")
        assert [await client.answer() for client in (two, one)] == [(200, b"again 1"), (200, b"again 0")]
        assert service.in_flight == sample.taken_back == 0


async def test_one_beside_a_request_of_another_kind_is_not_alone() -> None:
    async with served() as (service, sample, client), wire_to(service) as other:
        await idle(client)
        other.send(post("/wait", b""))
        await wait_for(lambda: service.in_flight == 1)
        client.send(post("/again", b"same2"))
        assert await client.answer() == (200, b"again 2")
        assert not sample.alone[-1]
        sample.gate.set()
        assert await other.answer() == (200, b"waited")


async def test_an_answer_may_be_an_error() -> None:
    async with served() as (service, sample, client):
        [reply] = await awaiting(service, sample, client)
        reply(503, b"", b"")
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\ndate: ")
        assert await client.reader.readexactly(7) == b"again 0"


async def test_what_comes_before_the_answer_is_read_after_it() -> None:
    async with served() as (service, sample, client):
        [reply] = await awaiting(service, sample, client)
        asked = sample.asked
        client.send(post("/again", b"same5"), post("/again", b"same6")[:-1])
        async with wire_to(service) as other:  # when that one is answered, the server has read the first one as well
            other.send(post("/nothing", b""))
            assert (await other.answer())[0] == 404
        assert sample.asked == asked
        reply(200, b"", b"")
        client.send(b"6")
        assert [await client.answer() for _ in range(3)] == [
            (200, b"again 0"),
            (200, b"app same5"),
            (200, b"app same6"),
        ]


async def test_one_whose_client_hangs_up_is_taken_back() -> None:
    async with served() as (service, sample, client), wire_to(service) as other:
        await awaiting(service, sample, client, other)
        client.writer.close()
        await wait_for(lambda: sample.taken_back == 1, what="the request to be taken back")
        assert service.in_flight == 1


async def test_a_service_that_stops_answers_first() -> None:
    sample = Sample()
    async with AsyncExitStack() as clients:
        async with serve_app(sample.app, ServiceSettings(drain_s=10.0)) as service:
            client = await clients.enter_async_context(wire_to(service))
            [reply] = await awaiting(service, sample, client)
            asyncio.get_running_loop().call_later(0.1, reply, 200, b"", b"")
        assert await client.answer() == (200, b"again 0")
        assert await client.closed() == b""


@pytest.mark.parametrize("given", [None, "mine-7"])
async def test_the_request_id_is_echoed_as_ever(given: str | None) -> None:
    request = post("/again", b"same1", *([f"x-request-id: {given}"] if given else []))
    ids = set[bytes]()
    async with served() as (_, sample, client):
        for _ in range(20):
            client.send(request)
            head = await client.reader.readuntil(b"\r\n\r\n")
            [shown] = [line for line in head.split(b"\r\n") if line.startswith(b"x-request-id: ")]
            assert b"\r\ndate: " in head
            ids.add(shown)
            await client.reader.readexactly(9 if b"content-length: 9" in head else 7)
    assert len(ids) == (1 if given else 20)
    assert sample.asked <= 3


async def test_a_connection_on_which_requests_repeat_is_not_idle() -> None:
    async with (
        served(ServiceSettings(keep_alive_s=1, drain_s=2.0)) as (service, sample, client),
        wire_to(service) as other,
    ):
        [reply] = await awaiting(service, sample, other)
        sample.later = None
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while loop.time() < begin + 1.3:
            client.send(post("/again", b"same2"))
            await client.answer()
            await asyncio.sleep(0.05)
        assert sample.asked <= 3
        reply(200, b"", b"")
        assert await other.answer() == (200, b"again 0")
        last = loop.time()
        assert await client.closed() == b""
        assert loop.time() - last > 0.5


async def test_where_tokens_are_asked_for_each_request_is(tmp_path: Path) -> None:
    token = new_token()
    file = tmp_path / "tokens.toml"
    file.touch(mode=0o600)
    file.write_text(write_book([TokenEntry(name="alice", role="user", sha256=digest_of(token.encode()).hex())]))
    sample = Sample()
    async with serve_app(sample.app, ServiceSettings(tokens=file)) as service, wire_to(service) as client:
        for number in range(3):
            client.send(post("/again", b"same1", f"authorization: Bearer {token}"))
            assert await client.answer() == (200, b"app same1")
            assert sample.asked == number + 1
