"""The client against a scheduler that misbehaves at exact points: what it repeats, what it does not, and what it says.

How it works with the real one is in tests/integration/fleet.
"""

import asyncio
import gc
import inspect
import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from anyio import to_thread
from anyio.from_thread import BlockingPortal

from tierkit.client import (
    AsyncClient,
    Backoff,
    Client,
    CoarseResults,
    FineResults,
    Job,
    JobState,
    StateChange,
)
from tierkit.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    NotFound,
    TerraceError,
    TooLarge,
    Unavailable,
    UnsupportedMedia,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from tierkit.testing import listening

FAST = Backoff(attempts=3, first_s=0.001, cap_s=0.002, outage_s=0.5)
PIXELS = np.zeros((2, 4, 4, 3), dtype=np.uint8)
JOB = {"id": "j1", "state": "running", "scheme": "mapping", "images": 2, "tasks": 1, "a_later_field": 1}
DONE = {**JOB, "state": "completed"}


@dataclass(frozen=True, kw_only=True)
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    """Break the connection after the body, in the middle of the answer."""
    silent: bool = False
    """Keep the connection open after the body and say nothing more."""


@dataclass(kw_only=True)
class FakeApi:
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    replies: dict[str, deque[Reply | None]] = field(default_factory=lambda: defaultdict(deque))

    def on(self, route: str, *replies: Reply | None) -> None:
        """Answer `METHOD /path` with these in turn; None cuts the connection before any answer."""
        self.replies[route].extend(replies)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            line, *fields = head.decode().strip().split("\r\n")
            method, target, _ = line.split()
            headers = {name.lower(): value for name, value in (one.split(": ", 1) for one in fields)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.requests.append(Request(method=method, target=target, headers=headers, body=body))
            waiting = self.replies[f"{method} {target.partition('?')[0]}"]
            reply = waiting.popleft() if waiting else Reply(status=404, body=b'{"error": "nobody scripted this"}')
            if reply is None:
                return
            open_ended = reply.cut or reply.silent
            length = "Transfer-Encoding: chunked" if open_ended else f"Content-Length: {len(reply.body)}"
            extra = "".join(f"{name}: {value}\r\n" for name, value in reply.headers.items())
            writer.write(f"HTTP/1.1 {reply.status} X\r\n{extra}{length}\r\n\r\n".encode())
            if open_ended and reply.body:
                writer.write(f"{len(reply.body):x}\r\n".encode() + reply.body + b"\r\n")
            elif not open_ended:
                writer.write(reply.body)
            await writer.drain()
            if reply.cut:
                return
            if reply.silent:
                await asyncio.Event().wait()


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    fake = FakeApi()
    async with listening(fake.handle) as url:
        fake.url = url
        yield fake


def answer(body: Any, **more: Any) -> Reply:
    return Reply(body=json.dumps(body).encode(), **more)


def image(index: int, kind: str = "coarse") -> dict[str, Any]:
    coarse = {"index": 1, "label": "fish", "confidence": 0.5, "node": "end-1", "ms": 3.0}
    fine = {
        "index": 2,
        "label": "ray",
        "confidence": 0.9,
        "coarse_index": 1,
        "coarse_label": "fish",
        "node": "cloud-1",
        "tier": "cloud",
        "ms": 9.0,
    }
    return {"index": index, "name": f"{index}.png", "coarse": coarse, "fine": fine if kind == "fine" else None}


def event(number: int, kind: str, data: Any) -> bytes:
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def results(kind: str, *indices: int) -> dict[str, Any]:
    return {"task": 0, "first_index": indices[0], "results": [image(index, kind) for index in indices]}


COARSE = event(1, "coarse", results("coarse", 0, 1))
FINE = event(2, "fine", results("fine", 0, 1))
STATE = event(3, "state", DONE)


@pytest.fixture
async def client(api: FakeApi) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(api.url, backoff=FAST) as client:
        yield client


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidInput),
        (403, Forbidden),
        (404, NotFound),
        (409, Conflict),
        (413, TooLarge),
        (415, UnsupportedMedia),
        (422, InvalidInput),
        (500, UpstreamError),
        (502, UpstreamError),
        (503, Unavailable),
        (504, DeadlineExceeded),
    ],
)
async def test_error_answers_become_named_errors(
    api: FakeApi, client: AsyncClient, status: int, kind: type[TerraceError]
) -> None:
    api.on("GET /v1/jobs/j1", *[answer({"error": "a sentence"}, status=status, headers={"Retry-After": "0"})] * 3)
    with pytest.raises(kind, match=r"^a sentence$") as caught:
        await client.job("j1")
    assert type(caught.value) is kind


async def test_a_wait_that_the_scheduler_asks_for_is_told(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("tierkit.client.http.anyio.sleep", sleep)
    limit = answer({"error": "'alice' has used up her 2 requests a minute"}, status=429, headers={"Retry-After": "25"})
    api.on("GET /v1/jobs/j1", limit, answer({"error": "soon"}, status=503, headers={"Retry-After": "0"}), answer(JOB))
    told: list[tuple[str, float]] = []
    async with AsyncClient(api.url, backoff=FAST, on_wait=lambda why, wait_s: told.append((why, wait_s))) as client:
        await client.job("j1")
    assert told == [("'alice' has used up her 2 requests a minute", 25.0)]
    assert slept[0] == 25.0


@pytest.mark.parametrize(("said", "told"), [("1e400", 1e9), ("9" * 400, 1e9), ("nan", 0.0), ("-5", 0.0), ("soon", 1.0)])
async def test_a_wait_that_cannot_be_is_told_as_a_number(api: FakeApi, said: str, told: float) -> None:
    api.on("GET /v1/jobs/j1", answer({"error": "full"}, status=503, headers={"Retry-After": said}))
    async with AsyncClient(api.url, backoff=Backoff(attempts=1)) as client:
        with pytest.raises(Unavailable) as refusal:
            await client.job("j1")
    assert refusal.value.retry_after_s == told


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'"text"', b"{}", b"[" * 100_000], ids=lambda body: str(body[:8]))
async def test_another_kind_of_server_is_recognised(api: FakeApi, client: AsyncClient, body: bytes) -> None:
    api.on("GET /v1/jobs/j1", Reply(status=404, body=body))
    with pytest.raises(UpstreamError, match="not as a Terrace service does"):
        await client.job("j1")


async def test_an_answer_that_is_no_job_is_an_error(api: FakeApi, client: AsyncClient) -> None:
    api.on("GET /v1/jobs/j1", answer({**JOB, "images": "many"}))
    with pytest.raises(UpstreamError, match="not a Job: images"):
        await client.job("j1")


@pytest.mark.parametrize("url", ["127.0.0.1:8070", "ftp://host", "", "http://127.0.0.1:99999", "http://"])
def test_a_url_must_be_one(url: str) -> None:
    with pytest.raises(InvalidInput, match="http://"):
        AsyncClient(url)


async def test_nobody_there() -> None:
    async with listening(FakeApi().handle) as url:
        pass
    async with AsyncClient(url, backoff=FAST) as client:
        with pytest.raises(UpstreamUnavailable, match=f"no scheduler answers at {url}"):
            await client.submit(PIXELS)


@pytest.mark.parametrize(
    "mishap",
    [None, answer({"error": "full"}, status=503, headers={"Retry-After": "0"}), Reply(body=b'{"id"', cut=True)],
    ids=["cut before the answer", "full", "cut in the answer"],
)
async def test_a_submission_is_repeated_under_one_key(api: FakeApi, client: AsyncClient, mishap: Reply | None) -> None:
    api.on("POST /v1/jobs", mishap, answer(JOB, status=202))
    job = await client.submit(PIXELS, scheme="mapping")
    first, second = api.requests
    assert job.id == "j1"
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"] != ""
    assert first.body == second.body
    assert first.target == second.target == "/v1/jobs?scheme=mapping"


async def test_submissions_differ_unless_told_otherwise(api: FakeApi, client: AsyncClient) -> None:
    api.on("POST /v1/jobs", *[answer(JOB, status=202)] * 3)
    for key in (None, None, "mine"):
        await client.submit(PIXELS, idempotency_key=key)
    keys = [request.headers["idempotency-key"] for request in api.requests]
    assert len(set(keys)) == 3
    assert keys[2] == "mine"


async def test_a_submission_goes_on_for_as_long_as_it_is_told(api: FakeApi, client: AsyncClient) -> None:
    refused = answer({"error": "full"}, status=503, headers={"Retry-After": "0"})
    api.on("POST /v1/jobs", *[None, refused] * FAST.attempts, answer(JOB, status=202))
    assert (await client.submit(PIXELS, patience_s=60)).id == "j1"
    assert len({request.headers["idempotency-key"] for request in api.requests}) == 1


async def test_a_submission_gives_up_when_its_patience_is_over(api: FakeApi, client: AsyncClient) -> None:
    api.on("POST /v1/jobs", *[None] * 5)
    with pytest.raises(UpstreamUnavailable):
        await client.submit(PIXELS, patience_s=0)
    assert len(api.requests) == 1


async def test_what_is_wrong_with_a_submission_is_told_at_once(api: FakeApi, client: AsyncClient) -> None:
    api.on("POST /v1/jobs", answer({"error": "no such scheme"}, status=400))
    with pytest.raises(InvalidInput):
        await client.submit(PIXELS, patience_s=60)


async def test_retries_end(api: FakeApi, client: AsyncClient) -> None:
    api.on("POST /v1/jobs", *[None] * 5)
    with pytest.raises(UpstreamUnavailable, match="broke"):
        await client.submit(PIXELS)
    assert len(api.requests) == FAST.attempts


@pytest.mark.parametrize(
    ("route", "call"),
    [
        ("DELETE /v1/jobs/j1", lambda client: client.cancel("j1")),
        ("DELETE /v1/devices/end-1", lambda client: client.forget("end-1")),
        ("DELETE /v1/runs/r1", lambda client: client.stop_run("r1")),
    ],
    ids=["cancel", "forget", "stop_run"],
)
async def test_what_may_have_happened_is_not_repeated(
    api: FakeApi, client: AsyncClient, route: str, call: Callable[[AsyncClient], Awaitable[Any]]
) -> None:
    api.on(route, None, answer(DONE))
    with pytest.raises(UpstreamUnavailable):
        await call(client)
    assert len(api.requests) == 1


async def test_what_was_refused_is_repeated_even_if_it_may_not_happen_twice(api: FakeApi, client: AsyncClient) -> None:
    refusal = answer({"error": "draining"}, status=503, headers={"Retry-After": "0"})
    api.on("DELETE /v1/jobs/j1", refusal, answer({**JOB, "state": "cancelled"}))
    assert (await client.cancel("j1")).state is JobState.CANCELLED


async def test_ids_stay_one_segment_of_the_path(api: FakeApi, client: AsyncClient) -> None:
    for several in ("../devices", "..", ""):
        with pytest.raises(NotFound, match="no job"):
            await client.job(several)
    assert api.requests == []
    with pytest.raises(NotFound):
        await client.job("devices?x#y")
    assert api.requests[0].target == "/v1/jobs/devices%3Fx%23y"


async def test_silence_has_a_bound(api: FakeApi) -> None:
    api.on("GET /v1/jobs/j1", Reply(body=b'{"id"', silent=True))
    async with AsyncClient(api.url, timeout_s=0.05, backoff=FAST) as client:
        with pytest.raises(UpstreamTimeout):
            await client.job("j1")


async def test_coarse_and_fine_are_events_of_their_own(api: FakeApi, client: AsyncClient) -> None:
    later = event(9, "a-later-kind", {"x": 1})
    api.on("GET /v1/jobs/j1/events", Reply(body=b": hello\n\n" + COARSE + later + FINE + STATE))
    coarse, fine, state = [one async for one in client.events("j1")]
    assert isinstance(coarse, CoarseResults)
    assert [result.label for result in coarse.results] == ["fish", "fish"]
    assert isinstance(fine, FineResults)
    assert [result.label for result in fine.results] == ["ray", "ray"]
    assert state == StateChange(job=Job(id="j1", state=JobState.COMPLETED, scheme="mapping", images=2, tasks=1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cut", [COARSE, COARSE + FINE[:-2], COARSE + FINE[:20]], ids=["between", "at the end", "within"]
)
async def test_a_broken_event_stream_goes_on_where_it_broke(api: FakeApi, client: AsyncClient, cut: bytes) -> None:
    api.on("GET /v1/jobs/j1/events", None, Reply(body=cut, cut=True), None, Reply(body=FINE + STATE))
    kinds = [type(one) for one in await drain(client)]
    assert kinds == [CoarseResults, FineResults, StateChange]
    assert [request.headers.get("last-event-id") for request in api.requests] == [None, None, "1", "1"]


async def test_a_stream_that_ends_early_is_taken_up_again(api: FakeApi, client: AsyncClient) -> None:
    api.on("GET /v1/jobs/j1/events", Reply(body=COARSE + FINE), Reply(body=STATE))
    assert len(await drain(client)) == 3
    assert api.requests[1].headers["last-event-id"] == "2"


async def test_a_stream_that_never_comes_back_is_given_up(api: FakeApi, client: AsyncClient) -> None:
    api.on("GET /v1/jobs/j1/events", Reply(body=COARSE, cut=True), *[None] * 1000)
    began = time.monotonic()
    with pytest.raises(UpstreamUnavailable):
        await drain(client)
    assert time.monotonic() - began >= FAST.outage_s


async def test_without_a_budget_a_job_is_followed_over_an_outage_of_a_minute() -> None:
    assert (Backoff().outage_s, Backoff().cap_s) == (60, 2)
    assert max(Backoff().wait_s(failures) for failures in (1, 10, 10_000)) <= 2


@pytest.mark.parametrize("follow", [AsyncClient.events, AsyncClient.stream_results, AsyncClient.wait])
async def test_with_a_budget_nothing_else_ends_the_patience(api: FakeApi, follow: Callable[..., Any]) -> None:
    api.on("GET /v1/jobs/j1/events", *[None] * 20, Reply(body=COARSE, cut=True), *[None] * 20, Reply(body=FINE + STATE))
    api.on("GET /v1/jobs/j1/results", None, Reply(body=ndjson(image(0), image(1))))
    async with AsyncClient(api.url, backoff=Backoff(attempts=1, first_s=0.001, cap_s=0.002, outage_s=0)) as client:
        followed = follow(client, "j1", budget_s=30)
        if follow is AsyncClient.wait:
            assert (await followed).done
        else:
            assert len([one async for one in followed]) == (3 if follow is AsyncClient.events else 2)


async def test_results_go_on_where_they_broke(api: FakeApi, client: AsyncClient) -> None:
    api.on("GET /v1/jobs/j1/events", Reply(body=COARSE + STATE))
    api.on("GET /v1/jobs/j1/results", Reply(body=ndjson(image(0)), cut=True), Reply(body=ndjson(image(0), image(1))))
    assert [result.index async for result in client.stream_results("j1")] == [0, 1]


async def test_a_job_that_does_not_exist_is_not_asked_for_again(api: FakeApi, client: AsyncClient) -> None:
    api.on("GET /v1/jobs/j1/events", answer({"error": "no job j1"}, status=404))
    with pytest.raises(NotFound, match="no job j1"):
        await drain(client)
    assert len(api.requests) == 1


async def drain(client: AsyncClient) -> list[Any]:
    return [one async for one in client.events("j1")]


async def test_wait_returns_the_final_state(api: FakeApi, client: AsyncClient) -> None:
    api.on("GET /v1/jobs/j1/events", Reply(body=COARSE + event(2, "state", JOB) + STATE))
    assert (await client.wait("j1")).done


async def test_wait_has_a_budget(api: FakeApi, client: AsyncClient) -> None:
    api.on("GET /v1/jobs/j1/events", Reply(body=COARSE, silent=True))
    with pytest.raises(DeadlineExceeded, match=r"j1 was not done within 0\.05 s"):
        await client.wait("j1", budget_s=0.05)


async def test_waiting_without_a_budget_to_wait_looks_once(api: FakeApi, client: AsyncClient) -> None:
    api.on("GET /v1/jobs/j1", answer(JOB), answer(DONE))
    with pytest.raises(DeadlineExceeded, match="j1 is not done yet"):
        await client.wait("j1", budget_s=0)
    assert (await client.wait("j1", budget_s=0)).done


async def test_the_budget_counts_while_the_scheduler_is_away(api: FakeApi) -> None:
    api.on("GET /v1/jobs/j1/events", *[None] * 5)
    async with AsyncClient(api.url, backoff=Backoff(first_s=30, cap_s=60)) as client:
        with pytest.raises(DeadlineExceeded, match=r"not done within 0\.5 s; the connection to the scheduler .* broke"):
            await client.wait("j1", budget_s=0.5)


async def test_each_image_is_streamed_once(api: FakeApi, client: AsyncClient) -> None:
    first_only = event(2, "fine", results("fine", 1))
    api.on("GET /v1/jobs/j1/events", Reply(body=COARSE + first_only + first_only + STATE))
    lines = "".join(json.dumps(image(index)) + "\n" for index in (0, 1))
    api.on("GET /v1/jobs/j1/results", Reply(body=lines.encode()))
    found = [result async for result in client.stream_results("j1")]
    assert [(result.index, result.label) for result in found] == [(1, "ray"), (0, "fish")]


async def test_results_that_break_off_are_an_error_not_a_short_list(api: FakeApi, client: AsyncClient) -> None:
    api.on("GET /v1/jobs/j1/results", Reply(body=json.dumps(image(0)).encode() + b"\n", cut=True))
    with pytest.raises(UpstreamUnavailable):
        assert [result async for result in client.results("j1")] == []


async def test_a_file_of_results_appears_whole_or_not_at_all(api: FakeApi, client: AsyncClient, tmp_path: Any) -> None:
    api.on("GET /v1/jobs/j1/results", Reply(body=b"index,fine\n", cut=True), Reply(body=b"index,fine\n0,ray\n"))
    with pytest.raises(UpstreamUnavailable):
        await client.save_results("j1", tmp_path / "out.csv", format="csv")
    assert list(tmp_path.iterdir()) == []
    await client.save_results("j1", tmp_path / "out.csv", format="csv")
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    assert (tmp_path / "out.csv").read_bytes() == b"index,fine\n0,ray\n"
    assert {request.target for request in api.requests} == {"/v1/jobs/j1/results?format=csv"}


def ndjson(*lines: Any) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def test_classify_streams_coarse_then_fine(api: FakeApi, client: AsyncClient) -> None:
    lines = ndjson(
        {"event": "coarse", "results": [image(0)]},
        {"event": "fine", "results": [image(0, "fine")]},
        {"event": "done"},
    )
    api.on("POST /v1/classify", Reply(body=lines))
    coarse, fine = [one async for one in client.classify(PIXELS)]
    assert isinstance(coarse, CoarseResults)
    assert isinstance(fine, FineResults)


@pytest.mark.parametrize(
    ("last", "message"),
    [([], "ended its answer in the middle"), ([{"event": "error", "error": "the node is gone"}], "the node is gone")],
)
async def test_classify_tells_of_an_unfinished_answer(
    api: FakeApi, client: AsyncClient, last: list[Any], message: str
) -> None:
    api.on("POST /v1/classify", Reply(body=ndjson({"event": "coarse", "results": [image(0)]}, *last)))
    with pytest.raises(UpstreamError, match=message):
        assert [one async for one in client.classify(PIXELS)] == []


def public(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}


def test_the_blocking_client_has_every_method_with_its_signature() -> None:
    assert public(Client) - {"close"} == public(AsyncClient)
    for name in public(AsyncClient) - {"tls_ca", "url", "urls"}:
        assert inspect.signature(getattr(Client, name)) == inspect.signature(getattr(AsyncClient, name)), name


async def test_the_blocking_client_does_the_same(api: FakeApi) -> None:
    api.on("POST /v1/jobs", None, answer(JOB, status=202))
    api.on("GET /v1/jobs/j1/events", Reply(body=COARSE, cut=True), Reply(body=FINE + STATE))

    def program() -> list[type]:
        with Client(api.url, backoff=FAST) as client:
            return [type(one) for one in client.events(client.submit(PIXELS))]

    assert await to_thread.run_sync(program) == [CoarseResults, FineResults, StateChange]


async def test_a_blocking_iteration_may_be_left(api: FakeApi) -> None:
    api.on("GET /v1/jobs/j1/events", Reply(body=COARSE, silent=True))
    api.on("GET /v1/jobs/j1", answer(JOB))

    def program() -> Job:
        with Client(api.url, backoff=FAST) as client:
            for one in client.events("j1"):
                assert isinstance(one, CoarseResults)
                break
            return client.job("j1")

    assert (await to_thread.run_sync(program)).id == "j1"


async def test_ctrl_c_at_the_start_of_a_call_ends_an_iteration(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    api.on("GET /v1/jobs/j1/events", Reply(body=COARSE, silent=True))
    api.on("GET /v1/jobs/j1", answer(JOB))
    begun: list[str] = []

    def program() -> Job:
        with Client(api.url, backoff=FAST) as client:
            events = client.events("j1")
            assert isinstance(next(events), CoarseResults)
            start = BlockingPortal.start_task_soon

            def interrupted(portal: BlockingPortal, function: Any, *args: Any) -> Any:
                call = start(portal, function, *args)
                if not begun:
                    begun.append("the call")
                    raise KeyboardInterrupt
                return call

            monkeypatch.setattr(BlockingPortal, "start_task_soon", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(events)
            return client.job("j1")

    assert (await to_thread.run_sync(program)).id == "j1"
    assert begun


async def test_an_iteration_may_outlive_its_client(api: FakeApi) -> None:
    api.on("GET /v1/jobs/j1/events", Reply(body=COARSE, silent=True))

    def program() -> None:
        with Client(api.url, backoff=FAST) as client:
            events = client.events("j1")
            assert isinstance(next(events), CoarseResults)
        del events
        # What goes wrong when the iterator is thrown away shows up as a warning, and warnings are errors here.
        gc.collect()

    await to_thread.run_sync(program)


async def test_the_blocking_client_raises_the_same_errors(api: FakeApi) -> None:
    api.on("GET /v1/jobs/j1", answer({"error": "no job j1"}, status=404))

    def program() -> None:
        with Client(api.url, backoff=FAST) as client:
            client.job("j1")

    with pytest.raises(NotFound, match=r"^no job j1$"):
        await to_thread.run_sync(program)


async def test_the_blocking_client_works_outside_of_a_block_until_it_is_closed(api: FakeApi) -> None:
    gone = answer({"error": "no job j1"}, status=404)
    api.on("GET /v1/jobs/j1", gone, gone)

    def program() -> None:
        client = Client(api.url, backoff=FAST)
        for _ in range(2):
            with pytest.raises(NotFound, match=r"^no job j1$"):
                client.job("j1")
        client.close()
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.job("j1")

    await to_thread.run_sync(program)


async def test_a_program_that_does_not_close_its_client_ends_all_the_same(api: FakeApi) -> None:
    api.on("GET /v1/jobs/j1", answer({"error": "no job j1"}, status=404))
    program = (
        "import sys; from terrace import Client; client = Client(sys.argv[1])\n"
        "try: client.job('j1')\nexcept Exception as error: print(error)"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", program, api.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, out.decode().strip(), err.decode()) == (0, "no job j1", "")


@pytest.mark.parametrize("patience_s", [float("nan"), -1.0])
async def test_a_patience_that_is_no_time_is_refused(patience_s: float) -> None:
    async with AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidInput, match="patience_s"):
            await client.submit(PIXELS, patience_s=patience_s)
