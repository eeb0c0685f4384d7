"""Requests over emulated links, on a clock that jumps to whatever is waited for."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from yarl import URL

from experiments.emulation.links import Links, LinkTo
from experiments.emulation.middleware import LinkMiddleware

BODY = b"x" * 1000


class JumpingClock:
    """Time passes by waiting alone."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    async def wait_until(self, when: float) -> None:
        await asyncio.sleep(0)
        self.now_s = max(self.now_s, when)


class Request:
    """What the middleware looks at of a request."""

    def __init__(self, host: str, body: bytes) -> None:
        self.url = URL(f"http://{host}:8073/")
        self.headers = {"Host": f"{host}:8073", "Content-Length": str(len(body))}


class Answer:
    """An answer whose body comes in pieces; between them the peer computes, on the same clock."""

    def __init__(self, clock: JumpingClock, *pieces: bytes | Exception, pause_s: float = 0.0) -> None:
        self.clock, self.pieces, self.pause_s = clock, pieces, pause_s
        self.headers = {"Content-Type": "text/plain"}
        self.content: Any = self

    async def iter_any(self) -> AsyncIterator[bytes]:
        for number, piece in enumerate(self.pieces):
            if number and self.pause_s:
                await self.clock.wait_until(self.clock.now() + self.pause_s)
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def close(self) -> None:
        self.content.set_exception(aiohttp.ClientConnectionError("closed"))


@pytest.fixture
def clock() -> JumpingClock:
    return JumpingClock()


class Client:
    """Sends over one link, to a peer that answers at once."""

    def __init__(self, clock: JumpingClock, answer: Callable[[], Answer], seed: int = 0, **spec: Any) -> None:
        self.links = LinkMiddleware(
            Links(seed=seed, link=(LinkTo(name="up", to=("10.0.9.0/24",), **spec),)), clock=clock
        )
        self.answer = answer
        self.asked_at: list[float] = []
        self.clock = clock

    async def ask(self, host: str = "10.0.9.1") -> Answer:
        async def handler(_request: Any) -> Any:
            self.asked_at.append(self.clock.now())
            return self.answer()

        answer: Any = await self.links(Request(host, BODY), handler)  # type: ignore[arg-type]
        return answer  # type: ignore[no-any-return]

    async def read(self, host: str = "10.0.9.1") -> bytes:
        body: bytes = await (await self.ask(host)).content.read()
        return body


async def test_question_and_answer_each_take_the_delay(clock: JumpingClock) -> None:
    client = Client(clock, lambda: Answer(clock, BODY), delay_s=0.5)
    assert await client.read() == BODY
    assert client.asked_at == [0.5]
    assert clock.now() == pytest.approx(1.0)


async def test_other_hosts_are_asked_at_once(clock: JumpingClock) -> None:
    client = Client(clock, lambda: Answer(clock), delay_s=0.5)
    await client.ask("127.0.0.1")
    assert clock.now() == 0.0


async def test_bytes_take_the_time_of_the_bandwidth_each_way(clock: JumpingClock) -> None:
    assert await Client(clock, lambda: Answer(clock, BODY), bandwidth_bps=8000).read() == BODY
    # 1,000 bytes there and back at 1,000 bytes a second, and two heads of some bytes.
    assert 2.0 < clock.now() < 2.4


async def test_pieces_of_an_answer_keep_their_distance(clock: JumpingClock) -> None:
    """The coarse answer comes before the fine one is there: the delay shifts both and does not add up."""
    client = Client(clock, lambda: Answer(clock, b"coarse\n", b"fine\n", pause_s=2.0), delay_s=0.5)
    answer = await client.ask()
    assert [piece async for piece in answer.content.iter_any()] == [b"coarse\n", b"fine\n"]
    assert clock.now() == pytest.approx(3.0)


async def test_a_peer_that_cannot_be_reached_is_known_after_both_ways(clock: JumpingClock) -> None:
    def refuse() -> Answer:
        raise aiohttp.ClientConnectionError("refused")

    with pytest.raises(aiohttp.ClientConnectionError):
        await Client(clock, refuse, delay_s=0.5).ask()
    assert clock.now() == pytest.approx(1.0)


@pytest.mark.parametrize("error", [aiohttp.ClientPayloadError("cut"), RuntimeError("odd")])
async def test_an_answer_that_breaks_off_does_so_here_too(clock: JumpingClock, error: Exception) -> None:
    with pytest.raises(type(error)):
        await Client(clock, lambda: Answer(clock, b"half", error), delay_s=0.5).read()


async def test_resets_are_the_same_in_every_run(clock: JumpingClock) -> None:
    async def run(seed: int) -> list[str]:
        client = Client(clock, lambda: Answer(clock, BODY), seed=seed, reset=0.5)
        outcomes = []
        for _ in range(40):
            before = len(client.asked_at)
            try:
                await client.read()
                outcomes.append("answered")
            except aiohttp.ClientConnectionError:
                outcomes.append("lost, done" if len(client.asked_at) > before else "lost, not done")
        return outcomes

    first, again, other = await run(7), await run(7), await run(8)
    assert first == again != other
    assert set(first) == {"answered", "lost, done", "lost, not done"}


async def test_a_lost_answer_breaks_in_its_middle(clock: JumpingClock) -> None:
    client = Client(clock, lambda: Answer(clock, BODY, BODY), seed=1, reset=1.0)
    read = b""
    while not read:  # an answer comes now and then
        try:
            async for piece in (await client.ask()).content.iter_any():
                read += piece
        except aiohttp.ClientConnectionError as exc:
            assert "reset" in str(exc)  # noqa: PT017  # every exchange breaks, at one point or the other
        else:
            raise AssertionError("the exchange was not lost")
    assert read == BODY[:500]


async def test_a_stall_lasts_until_the_caller_has_had_enough(clock: JumpingClock) -> None:
    client = Client(clock, lambda: Answer(clock, BODY), stall=1.0)
    for _ in range(8):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.read()


async def test_who_stops_waiting_leaves_nothing_behind() -> None:
    class Frozen(JumpingClock):
        async def wait_until(self, when: float) -> None:
            await super().wait_until(when)
            if when > 0.5:
                await asyncio.Event().wait()

    clock = Frozen()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await Client(clock, lambda: Answer(clock, *[BODY] * 1000), delay_s=0.5).ask()
    await asyncio.sleep(0)
    assert [task for task in asyncio.all_tasks() if task.get_name() == "emulated link"] == []
