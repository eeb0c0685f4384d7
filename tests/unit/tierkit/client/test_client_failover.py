"""The client with several schedulers that misbehave at exact points: which one it asks, and what it repeats there.

How it works with real ones is in tests/integration/fleet.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from anyio import to_thread

from tests.unit.tierkit.client.test_client import (
    COARSE,
    DONE,
    FINE,
    JOB,
    STATE,
    FakeApi,
    Reply,
    answer,
    image,
    ndjson,
)
from tierkit.client import AsyncClient, Backoff, Client, CoarseResults, FineResults, JobState, StateChange
from tierkit.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    Standby,
    TerraceError,
    Unauthenticated,
    Unavailable,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from tierkit.testing import listening

PIXELS = np.zeros((2, 4, 4, 3), dtype=np.uint8)
STANDBY = answer({"error": "this scheduler is a standby"}, status=421, headers={"Retry-After": "0"})
PATIENT = Backoff(attempts=2, first_s=0.001, cap_s=0.002, outage_s=30, failover_s=30)
HASTY = Backoff(attempts=2, first_s=0.001, cap_s=0.002, outage_s=0, failover_s=0)


@dataclass(frozen=True)
class Pair:
    first: FakeApi
    second: FakeApi
    kill_first: Callable[[], Awaitable[None]]
    """Its socket is gone."""

    @property
    def url(self) -> str:
        return f"{self.first.url}, {self.second.url}/"

    def client(self, backoff: Backoff = PATIENT, **more: Any) -> AsyncClient:
        return AsyncClient(self.url, backoff=backoff, **more)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    first, second = FakeApi(), FakeApi()
    async with AsyncExitStack() as stack, AsyncExitStack() as own:
        first.url = await own.enter_async_context(listening(first.handle))
        second.url = await stack.enter_async_context(listening(second.handle))
        yield Pair(first, second, own.aclose)


async def view(client: AsyncClient) -> Any:
    return (await client.job("j1")).id


async def cancel(client: AsyncClient) -> Any:
    return (await client.cancel("j1")).id


async def submit(client: AsyncClient) -> Any:
    return (await client.submit(PIXELS)).id


async def classify(client: AsyncClient) -> Any:
    return [type(one) async for one in client.classify(PIXELS)]


async def results(client: AsyncClient) -> Any:
    return [one.index async for one in client.results("j1")]


async def follow(client: AsyncClient) -> Any:
    return [type(one) async for one in client.events("j1")]


CALLS: dict[str, tuple[Callable[[AsyncClient], Awaitable[Any]], str, Reply, Any]] = {
    "view": (view, "GET /v1/jobs/j1", answer(JOB), "j1"),
    "cancel": (cancel, "DELETE /v1/jobs/j1", answer(DONE), "j1"),
    "submit": (submit, "POST /v1/jobs", answer(JOB, status=202), "j1"),
    "classify": (
        classify,
        "POST /v1/classify",
        Reply(body=ndjson({"event": "coarse", "results": [image(0)]}, {"event": "done"})),
        [CoarseResults],
    ),
    "results": (results, "GET /v1/jobs/j1/results", Reply(body=ndjson(image(0))), [0]),
    "follow": (follow, "GET /v1/jobs/j1/events", Reply(body=COARSE + STATE), [CoarseResults, StateChange]),
}
each_call = pytest.mark.parametrize(("call", "route", "reply", "expected"), CALLS.values(), ids=list(CALLS))


@each_call
async def test_each_call_finds_the_one_that_leads_and_stays_there(
    pair: Pair, call: Callable[[AsyncClient], Awaitable[Any]], route: str, reply: Reply, expected: Any
) -> None:
    pair.first.on(route, STANDBY)
    pair.second.on(route, reply, reply)
    async with pair.client(HASTY) as client:
        for _ in range(2):
            assert await call(client) == expected
        assert (client.url, client.urls) == (pair.second.url, (pair.first.url, pair.second.url))
    assert (len(pair.first.requests), len(pair.second.requests)) == (1, 2)


@each_call
async def test_each_call_goes_on_after_a_failover(
    pair: Pair, call: Callable[[AsyncClient], Awaitable[Any]], route: str, reply: Reply, expected: Any
) -> None:
    pair.first.on(route, reply)
    pair.second.on(route, *[STANDBY] * 20, reply)
    async with pair.client() as client:
        assert await call(client) == expected
        await pair.kill_first()
        assert await call(client) == expected
    assert len(pair.second.requests) == 21


@each_call
async def test_where_none_leads_each_call_says_so_in_the_end(
    pair: Pair, call: Callable[[AsyncClient], Awaitable[Any]], route: str, reply: Reply, expected: Any
) -> None:
    for api in (pair.first, pair.second):
        api.on(route, STANDBY)
    async with pair.client(HASTY) as client:
        with pytest.raises(Standby, match="no scheduler leads") as caught:
            await call(client)
    assert all(url in str(caught.value) for url in client.urls)


async def test_where_nobody_answers_no_failover_is_waited_for(pair: Pair) -> None:
    async with pair.client() as client:
        await pair.kill_first()
        pair.second.on("GET /v1/jobs/j1", None, None, None)
        with pytest.raises(UpstreamUnavailable) as caught:
            await client.job("j1")
    assert all(url in str(caught.value) for url in client.urls)
    assert len(pair.second.requests) == PATIENT.attempts


async def test_a_wait_for_a_failover_is_told_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds != 3.0:
            await asyncio.Event().wait()  # it is the pause before a look at the scheduler's health
        slept.append(seconds)

    monkeypatch.setattr("tierkit.client.http.anyio.sleep", sleep)
    wait = answer({"error": "this scheduler is a standby"}, status=421, headers={"Retry-After": "3"})
    pair.first.on("GET /v1/jobs/j1", *[wait] * 3, answer(JOB))
    pair.second.on("GET /v1/jobs/j1", *[wait] * 3)
    told: list[tuple[str, float]] = []
    async with pair.client(on_wait=lambda why, wait_s: told.append((why, wait_s))) as client:
        await client.job("j1")
    assert slept == [3.0] * 3
    ((why, wait_s),) = told
    assert pair.second.url in why
    assert wait_s == 3.0


@pytest.mark.parametrize(
    ("status", "kind"), [(401, Unauthenticated), (403, Forbidden), (404, NotFound), (409, Conflict), (503, Unavailable)]
)
async def test_a_refusal_by_the_one_that_leads_stands(pair: Pair, status: int, kind: type[TerraceError]) -> None:
    refusal = answer({"error": "no"}, status=status, headers={"Retry-After": "0"})
    pair.first.on("GET /v1/jobs/j1", *[refusal] * PATIENT.attempts)
    async with pair.client() as client:
        with pytest.raises(kind, match=r"^no$"):
            await client.job("j1")
    assert pair.second.requests == []


async def test_a_hanging_one_is_left_where_the_call_may_be_repeated(pair: Pair) -> None:
    for _, route, _, _ in CALLS.values():
        pair.first.on(route, Reply(body=b'{"id"', silent=True))
    pair.second.on("GET /v1/jobs/j1", answer(JOB))
    pair.second.on("DELETE /v1/jobs/j1", answer(DONE))
    async with pair.client(timeout_s=0.1) as client:
        assert await view(client) == "j1"
    async with pair.client(timeout_s=0.1) as client:
        with pytest.raises(UpstreamTimeout):
            await cancel(client)
        assert client.url == pair.second.url
        assert await cancel(client) == "j1", "a further call asks the next one"


async def test_what_may_have_happened_is_not_repeated_elsewhere(pair: Pair) -> None:
    pair.first.on("DELETE /v1/jobs/j1", None)
    pair.second.on("DELETE /v1/jobs/j1", answer(DONE))
    async with pair.client() as client:
        with pytest.raises(UpstreamUnavailable):
            await cancel(client)
        assert pair.second.requests == []
        assert await cancel(client) == "j1"


async def test_an_upload_that_breaks_in_the_middle_begins_anew_elsewhere(pair: Pair, tmp_path: Any) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(100_000)
        writer.transport.abort()

    (tmp_path / "images.npy").write_bytes(content := bytes(range(256)) * 20_000)
    pair.second.on("POST /v1/jobs", STANDBY, answer(JOB, status=202))
    async with (
        listening(cut) as broken,
        AsyncClient(f"{broken},{pair.second.url}", backoff=PATIENT) as client,
    ):
        assert (await client.submit(tmp_path / "images.npy")).id == "j1"
    first, second = pair.second.requests
    assert content in first.body
    assert first.body == second.body
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


@pytest.mark.parametrize("taken", ["all of it", "some of it"])
async def test_an_upload_to_one_that_hangs_begins_anew_elsewhere(pair: Pair, taken: str) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while taken == "all of it" and await reader.read(1 << 20):
            pass
        await asyncio.Event().wait()

    pair.second.on("POST /v1/jobs", answer(JOB, status=202))
    async with (
        listening(hang) as stopped,
        AsyncClient(f"{stopped},{pair.second.url}", backoff=HASTY, timeout_s=1.0) as client,
    ):
        images = np.zeros((800, 64, 64, 3), dtype=np.uint8)  # more than the buffers of a connection hold
        assert (await client.submit(images)).id == "j1"


async def hang(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """A process that is stopped: its connections are made, and nothing comes."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("name", [name for name in CALLS if name != "cancel"])
async def test_one_that_hangs_is_left(pair: Pair, name: str) -> None:
    call, route, reply, expected = CALLS[name]
    pair.second.on(route, reply)
    async with (
        listening(hang) as stopped,
        AsyncClient(f"{stopped},{pair.second.url}", backoff=PATIENT, timeout_s=0.3) as client,
    ):
        assert await call(client) == expected


async def test_one_that_hangs_in_the_middle_of_events_is_left(pair: Pair) -> None:
    async def stop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/events" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(COARSE), COARSE))
        await asyncio.Event().wait()

    pair.second.on("GET /v1/jobs/j1/events", Reply(body=FINE + STATE))
    async with (
        listening(stop) as stopped,
        AsyncClient(f"{stopped},{pair.second.url}", backoff=PATIENT, timeout_s=0.3) as client,
    ):
        assert await follow(client) == [CoarseResults, FineResults, StateChange]
    assert pair.second.requests[0].headers["last-event-id"] == "1"


async def test_one_that_is_silent_but_lives_is_waited_for(pair: Pair) -> None:
    looked = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /livez "):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            looked.set()
            return
        body = COARSE + FINE + STATE
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), COARSE))
        await looked.wait()
        writer.write(FINE + STATE)

    async with listening(slow) as busy, AsyncClient(f"{busy},{pair.second.url}", timeout_s=6) as client:
        assert await follow(client) == [CoarseResults, FineResults, StateChange]
    assert pair.second.requests == []


async def test_an_upload_may_take_longer_than_other_calls_while_the_scheduler_lives(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept, sign = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def sleep(_seconds: float) -> None:
        await slept.acquire()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /livez "):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            sign.release()
            return
        for _ in range(5):
            slept.release()
            await sign.acquire()
        reply = answer(JOB).body
        writer.write(b"HTTP/1.1 202 X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(reply), reply))

    monkeypatch.setattr("tierkit.client.http.anyio.sleep", sleep)
    async with listening(slow) as busy, AsyncClient(f"{busy},{pair.second.url}") as client:
        assert (await client.submit(PIXELS)).id == "j1"
    assert pair.second.requests == []


async def test_a_stream_of_events_goes_on_at_the_one_that_leads_now(pair: Pair) -> None:
    pair.first.on("GET /v1/jobs/j1/events", Reply(body=COARSE, cut=True))
    pair.second.on("GET /v1/jobs/j1/events", *[STANDBY] * 3, Reply(body=FINE + STATE))
    async with pair.client() as client:
        seen = []
        async for one in client.events("j1"):
            if isinstance(one, CoarseResults):
                await pair.kill_first()
            seen.append(type(one))
    assert seen == [CoarseResults, FineResults, StateChange]
    assert {request.headers["last-event-id"] for request in pair.second.requests} == {"1"}


async def test_a_stream_that_falls_silent_goes_on_elsewhere(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkit.client.aio._STREAM_SILENCE_S", 0.1)
    pair.first.on("GET /v1/jobs/j1/events", Reply(body=COARSE, silent=True))
    pair.second.on("GET /v1/jobs/j1/events", Reply(body=FINE + STATE))
    async with pair.client() as client:
        assert await follow(client) == [CoarseResults, FineResults, StateChange]


async def test_requests_that_fail_together_move_on_together(pair: Pair) -> None:
    pair.first.on("GET /v1/jobs/j1", *[STANDBY] * 8)
    pair.second.on("GET /v1/jobs/j1", *[answer(JOB)] * 8)
    async with pair.client(HASTY) as client:
        assert await asyncio.gather(*(view(client) for _ in range(8))) == ["j1"] * 8
        assert client.url == pair.second.url


async def test_the_blocking_client_does_the_same(pair: Pair) -> None:
    pair.first.on("DELETE /v1/jobs/j1", STANDBY)
    pair.second.on("DELETE /v1/jobs/j1", answer({**JOB, "state": "cancelled"}))

    def program() -> JobState:
        with Client(pair.url, backoff=HASTY) as client:
            state = client.cancel("j1").state
            assert client.url == client.urls[1] == pair.second.url
            return state

    assert await to_thread.run_sync(program) is JobState.CANCELLED


@pytest.mark.parametrize("url", ["http://a:1,", ",", "http://a:1,b:2", "http://a:1;http://b:1/?x"])
def test_each_url_must_be_one(url: str) -> None:
    with pytest.raises(InvalidInput, match="http://"):
        AsyncClient(url)


def test_the_usual_patience_outlasts_a_failover() -> None:
    assert Backoff().failover_s == 15, "three times the usual lease"
