"""The plan of faults, the relay that strikes connections, and the count of what got lost."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from experiments.chaos.faults import Direction, Kind, plan_faults
from experiments.chaos.relay import Relay
from experiments.chaos.verdict import Truth, tally
from tierkit.client import CoarseAnswer, FineAnswer, ImageResult
from tierkit.types import Tier

NODES = (("end-1", "end-2", "end-3"), ("edge-1", "edge-2"), ("cloud-1",))


def test_a_seed_gives_one_plan_and_every_kind_comes() -> None:
    plan = plan_faults(1, 1000, scheduler="scheduler", nodes=NODES, disk=True)
    assert plan == plan_faults(1, 1000, scheduler="scheduler", nodes=NODES, disk=True)
    assert plan != plan_faults(2, 1000, scheduler="scheduler", nodes=NODES, disk=True)
    kinds = Counter(fault.kind for fault in plan)
    assert set(kinds) == set(Kind)
    assert kinds[Kind.FULL] == 1
    struck = {(fault.kind, fault.target) for fault in plan}
    assert {(kind, name) for kind in (Kind.KILL, Kind.STOP) for tier in NODES for name in tier} <= struck
    assert {(Kind.KILL, "scheduler"), (Kind.STOP, "scheduler"), (Kind.LOCK, "scheduler")} <= struck
    assert {fault.target for fault in plan if fault.kind is Kind.LOCK} == {"scheduler"}


def test_without_a_disk_of_its_own_it_is_never_full() -> None:
    plan = plan_faults(1, 200, scheduler="scheduler", nodes=NODES, disk=False)
    assert Kind.FULL not in {fault.kind for fault in plan}


# --- the relay --------------------------------------------------------------------------------------------------------

REQUEST = b"POST / HTTP/1.1\r\n\r\n" + bytes(5000)


class Service:
    """Answers each request of `len(REQUEST)` bytes with ten kilobytes."""

    answer = b"x" * 10_000

    def __init__(self) -> None:
        self.requests = 0
        self.changed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readexactly(len(REQUEST)):
                self.requests += 1
                self.changed.set()
                writer.write(self.answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            await close(writer)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, Relay]]:
    service = Service()
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    relay = Relay(server.sockets[0].getsockname(), work_bytes=1000)
    await relay.open()
    yield service, relay
    await relay.close()
    server.close()
    await server.wait_closed()


async def connect(relay: Relay) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = relay.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def ask(relay: Relay) -> int:
    """Bytes of the answer to one request on a connection of its own."""
    reader, writer = await connect(relay)
    writer.write(REQUEST)
    try:
        return len(await asyncio.wait_for(reader.readexactly(len(Service.answer)), 5))
    except asyncio.IncompleteReadError as exc:
        return len(exc.partial)
    finally:
        await close(writer)


async def test_what_is_not_struck_passes(service: tuple[Service, Relay]) -> None:
    assert await ask(service[1]) == 10_000


async def test_an_answer_is_cut(service: tuple[Service, Relay]) -> None:
    _, relay = service
    struck = asyncio.create_task(relay.strike(Kind.CUT, Direction.ANSWER, 0, budget_s=5))
    await asyncio.sleep(0)
    assert 0 < await ask(relay) < 10_000
    assert await struck
    assert await ask(relay) == 10_000


@pytest.mark.parametrize("direction", Direction)
async def test_a_connection_is_reset(service: tuple[Service, Relay], direction: Direction) -> None:
    _, relay = service
    struck = asyncio.create_task(relay.strike(Kind.RESET, direction, 0, budget_s=5))
    await asyncio.sleep(0)
    with pytest.raises(ConnectionResetError):
        await ask(relay)
    assert await struck
    assert await ask(relay) == 10_000


async def test_an_answer_is_held_up(service: tuple[Service, Relay]) -> None:
    _, relay = service
    struck = asyncio.create_task(relay.strike(Kind.DELAY, Direction.ANSWER, 0.2, budget_s=5))
    await asyncio.sleep(0)
    began = asyncio.get_running_loop().time()
    assert await ask(relay) == 10_000
    assert asyncio.get_running_loop().time() - began >= 0.2
    assert await struck


async def test_a_request_reaches_the_service_twice(service: tuple[Service, Relay]) -> None:
    answering, relay = service
    struck = asyncio.create_task(relay.strike(Kind.DUPLICATE, Direction.REQUEST, 0, budget_s=5))
    await asyncio.sleep(0)
    assert await ask(relay) == 10_000
    assert await struck
    while answering.requests < 2:
        answering.changed.clear()
        await asyncio.wait_for(answering.changed.wait(), 5)


async def test_a_probe_is_no_work(service: tuple[Service, Relay]) -> None:
    _, relay = service
    struck = asyncio.create_task(relay.strike(Kind.RESET, Direction.REQUEST, 0, budget_s=0.1))
    await asyncio.sleep(0)
    _, writer = await connect(relay)
    writer.write(bytes(100))
    assert not await struck
    await close(writer)


async def test_connections_are_refused_and_taken_again(service: tuple[Service, Relay]) -> None:
    _, relay = service
    reader, writer = await connect(relay)
    writer.write(REQUEST)
    await reader.readexactly(len(Service.answer))
    relay.refuse()
    with pytest.raises(ConnectionError):
        await reader.readexactly(1)
    with pytest.raises(ConnectionRefusedError):
        await connect(relay)
    await relay.open()
    assert await ask(relay) == 10_000
    await close(writer)


@pytest.fixture
def unreachable() -> Iterator[tuple[str, int]]:
    """Where a connection is neither taken nor refused: the queue of a listener that accepts none is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 10])
async def test_a_connection_that_is_still_being_made_ends_with_the_relay(
    unreachable: tuple[str, int], steps: int
) -> None:
    relay = Relay(unreachable, work_bytes=1000)
    await relay.open()
    reader, writer = await connect(relay)
    for _ in range(steps):
        await asyncio.sleep(0)
    await relay.close()
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    await close(writer)


# --- the count --------------------------------------------------------------------------------------------------------


def image(index: int, coarse: int | None = 1, fine: int | None = 2, fallback: str | None = None) -> ImageResult:
    return ImageResult(
        index=index,
        coarse=None if coarse is None else CoarseAnswer(index=coarse, label="", confidence=1, node="end-1", ms=1),
        fine=None
        if fine is None
        else FineAnswer(
            index=fine, label="", confidence=1, coarse_index=1, coarse_label="", node="edge-1", tier=Tier.EDGE, ms=1
        ),
        fallback=fallback,
    )


@pytest.mark.parametrize(
    ("results", "told", "expected"),
    [
        ([image(0), image(1)], {}, {}),
        ([image(0)], {}, {"lost": 1, "fine": 1}),
        ([image(0), image(1, coarse=None, fine=None)], {}, {"lost": 1, "fine": 1}),
        ([image(0), image(1), image(1)], {}, {"duplicated": 1, "fine": 3}),
        ([image(0), image(1)], {("final", 1): 2, ("coarse", 0): 1}, {"duplicated": 1}),
        ([image(0), image(1, coarse=7)], {}, {"wrong": 1}),
        ([image(0), image(1, fine=7)], {}, {"wrong": 1}),
        ([image(0), image(1, fine=None, fallback="why")], {}, {"fallback": 1, "fine": 1}),
        ([image(0), image(1, fine=None)], {}, {"unmarked": 1, "fine": 1}),
    ],
)
def test_what_is_counted(
    results: list[ImageResult], told: dict[tuple[str, int], int], expected: dict[str, int]
) -> None:
    ones, twos = np.ones(2, int), np.full(2, 2)
    counts = tally(2, results, told, Truth(ones, {Tier.EDGE: twos}))
    found = {"images": 2, "fine": 2} | expected
    for name in ("images", "lost", "duplicated", "wrong", "fine", "fallback", "unmarked"):
        assert getattr(counts, name) == found.get(name, 0), name
