"""Requests over emulated links, on a clock that jumps to whatever is waited for."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tierkit.http1 import Answer, Question, ServiceClient
from tierkit.links import Links, LinkTo, LinkTransport

BODY = b"x" * 1000
URL = "http://10.0.9.1:8073/"


class JumpingClock:
    """Time passes by waiting alone."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    async def wait_until(self, when: float) -> None:
        await asyncio.sleep(0)
        self.now_s = max(self.now_s, when)


class Pieces(httpx.AsyncByteStream):
    """A body in pieces; between them the peer computes, on the same clock. Counts how often it is closed."""

    def __init__(self, clock: JumpingClock, *pieces: bytes | Exception, pause_s: float = 0.0) -> None:
        self.clock, self.pieces, self.pause_s, self.closed = clock, pieces, pause_s, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number, piece in enumerate(self.pieces):
            if number and self.pause_s:
                await self.clock.wait_until(self.clock.now() + self.pause_s)
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def aclose(self) -> None:
        self.closed += 1


@pytest.fixture
def clock() -> JumpingClock:
    return JumpingClock()


Handler = Callable[[bytes], httpx.Response]


class Handled(Answer):
    """What a handler says."""

    def __init__(self, response: httpx.Response) -> None:
        self.status, self.headers = response.status_code, response.headers.raw
        self.reason, self.version = b"", b"HTTP/1.1"
        self.stream = response.stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self.stream, httpx.AsyncByteStream)
        async for piece in self.stream:
            yield piece

    async def aclose(self) -> None:
        assert isinstance(self.stream, httpx.AsyncByteStream)
        await self.stream.aclose()


@dataclass
class Inner:
    """Lets a handler answer."""

    handler: Handler

    async def ask(self, question: Question) -> Handled:
        assert isinstance(question.body, Sequence)
        return Handled(self.handler(b"".join(question.body)))

    async def aclose(self) -> None:
        pass


def client(clock: JumpingClock, handler: Handler, seed: int = 0, **spec: Any) -> ServiceClient:
    links = Links(seed=seed, link=(LinkTo(name="up", to=("10.0.9.0/24",), **spec),))
    return ServiceClient(LinkTransport(links, Inner(handler), clock=clock), timeout=httpx.Timeout(5))


async def test_question_and_answer_each_take_the_delay(clock: JumpingClock) -> None:
    asked_at = []

    def answer(body: bytes) -> httpx.Response:
        asked_at.append(clock.now())
        return httpx.Response(200, content=body)

    async with client(clock, answer, delay_s=0.5) as http:
        response = await http.post(URL, content=BODY)
        assert response.content == BODY
        assert asked_at == [0.5]
        assert clock.now() == pytest.approx(1.0)


async def test_other_hosts_are_asked_at_once(clock: JumpingClock) -> None:
    async with client(clock, lambda _body: httpx.Response(200), delay_s=0.5) as http:
        await http.get("http://127.0.0.1:8073/")
    assert clock.now() == 0.0


async def test_bytes_take_the_time_of_the_bandwidth_each_way(clock: JumpingClock) -> None:
    async with client(clock, lambda _body: httpx.Response(200, content=BODY), bandwidth_bps=8000) as http:
        await http.post(URL, content=BODY)
    # 1,000 bytes there and back at 1,000 bytes a second, and two heads of about 150 and 30 bytes.
    assert 2.0 < clock.now() < 2.4


async def test_pieces_of_an_answer_keep_their_distance(clock: JumpingClock) -> None:
    """The coarse answer comes before the fine one is there: the delay shifts both and does not add up."""
    body = Pieces(clock, b"coarse\n", b"fine\n", pause_s=2.0)
    async with client(clock, lambda _body: httpx.Response(200, stream=body), delay_s=0.5) as http:
        arrived = []
        async with http.stream("POST", URL, content=BODY) as response:
            async for piece in response.aiter_raw():
                arrived.append((piece, clock.now()))
    assert [piece for piece, _ in arrived] == [b"coarse\n", b"fine\n"]
    assert clock.now() == pytest.approx(3.0)
    assert body.closed == 1


async def test_a_body_that_is_streamed_up_arrives_whole(clock: JumpingClock) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield BODY

    async with client(clock, lambda body: httpx.Response(200, content=body), delay_s=0.1) as http:
        assert (await http.post(URL, content=body())).content == 3 * BODY


async def test_a_peer_that_cannot_be_reached_is_known_after_both_ways(clock: JumpingClock) -> None:
    def refuse(body: bytes) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with client(clock, refuse, delay_s=0.5) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(URL)
    assert clock.now() == pytest.approx(1.0)


@pytest.mark.parametrize("error", [httpx.ReadError("cut"), RuntimeError("odd")])
async def test_an_answer_that_breaks_off_does_so_here_too(clock: JumpingClock, error: Exception) -> None:
    body = Pieces(clock, b"half", error)
    async with client(clock, lambda _body: httpx.Response(200, stream=body), delay_s=0.5) as http:
        with pytest.raises(type(error)):
            await http.get(URL)
    assert body.closed == 1


async def test_resets_are_the_same_in_every_run(clock: JumpingClock) -> None:
    async def run(seed: int) -> list[str]:
        reached = 0

        def answer(body: bytes) -> httpx.Response:
            nonlocal reached
            reached += 1
            return httpx.Response(200, content=BODY)

        outcomes = []
        async with client(clock, answer, seed=seed, reset=0.5) as http:
            for _ in range(40):
                before = reached
                try:
                    await http.get(URL)
                    outcomes.append("answered")
                except httpx.ReadError:
                    outcomes.append("lost, done" if reached > before else "lost, not done")
        return outcomes

    first, again, other = await run(7), await run(7), await run(8)
    assert first == again != other
    assert set(first) == {"answered", "lost, done", "lost, not done"}


async def test_a_lost_answer_breaks_in_its_middle(clock: JumpingClock) -> None:
    body = Pieces(clock, BODY, BODY)
    read = b""
    async with client(clock, lambda _body: httpx.Response(200, stream=body), seed=1, reset=1.0) as http:
        with pytest.raises(httpx.ReadError):  # noqa: PT012  # an answer comes now and then; ask until one does
            while True:
                try:
                    async with http.stream("GET", URL) as response:
                        async for piece in response.aiter_raw():
                            read += piece
                except httpx.ReadError:
                    if read:
                        raise
    assert read == BODY[:500]
    assert body.closed >= 1


async def test_a_stall_lasts_until_the_caller_has_had_enough(clock: JumpingClock) -> None:
    async with client(clock, lambda _body: httpx.Response(200, content=BODY), stall=1.0) as http:
        for _ in range(4):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await http.get(URL)
            with pytest.raises(httpx.ReadTimeout):
                await http.get(URL, timeout=0.01)


async def test_who_stops_waiting_leaves_nothing_behind(clock: JumpingClock) -> None:
    body = Pieces(clock, BODY)

    class Frozen(JumpingClock):
        async def wait_until(self, when: float) -> None:
            await super().wait_until(when)
            if when > 0.5:
                await asyncio.Event().wait()

    async with client(Frozen(), lambda _body: httpx.Response(200, stream=body), delay_s=0.5) as http:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await http.get(URL)
    assert body.closed == 1
    assert [task for task in asyncio.all_tasks() if task.get_name() == "emulated link"] == []
