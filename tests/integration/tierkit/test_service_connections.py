"""Bounds on connections, heads, bodies and answers; request ids; health checks. Real sockets, in this event loop."""

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tierkit import logs
from tierkit.http import asgi
from tierkit.http.answering import install
from tierkit.http.lifecycle import Lifecycle
from tierkit.settings import ServiceSettings
from tierkit.testing import connected, serve_app, wait_for
from tierkit.wire.trace import Trace

MIB = 1024 * 1024


class Sample:
    """An application that echoes sizes and remembers how its streams ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.seen_ids: list[str] = []
        self.seen_traces: list[Trace | None] = []
        self.app = Starlette(
            routes=[
                Route("/size", self.size, methods=["POST"]),
                Route("/whole", self.whole, methods=["POST"]),
                Route("/careless", self.careless, methods=["POST"]),
                Route("/endless", self.endless),
                Route("/slow", self.slow, methods=["POST"]),
            ]
        )
        install(self.app)
        self.release = asyncio.Event()

    async def size(self, request: Request) -> Response:
        self.seen_ids.append(logs.current_request_id())
        self.seen_traces.append(logs.current_trace())
        return JSONResponse({"bytes": len(await request.body())})

    async def whole(self, request: Request) -> Response:
        with asgi.BodyRoom() as room:
            return JSONResponse({"bytes": len(await asgi.read_body(request.receive, room))})

    async def careless(self, request: Request) -> Response:
        """Takes every exception for a bad form, as frameworks do."""
        try:
            await request.body()
        except Exception:
            return JSONResponse({"error": "bad form"}, status_code=400)
        return JSONResponse({})

    async def endless(self, request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(MIB)
                    await asyncio.sleep(0)
            finally:
                self.ended.append("endless")

        return StreamingResponse(chunks())

    async def slow(self, request: Request) -> Response:
        await self.release.wait()
        return JSONResponse({})


async def exchange(service: Lifecycle, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Send raw bytes, keep the sending side open, and read until the service closes the connection."""
    async with connected(service.url) as (reader, writer):
        writer.write(b"".join(parts))
        answer = await reader.read()
    if not answer:
        return 0, {}
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def test_a_slow_body_is_refused_in_bounded_time() -> None:
    head = b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    async with serve_app(Sample().app, ServiceSettings(body_timeout_s=0.05)) as service:
        status, answer = await exchange(service, head, b"abc")
        assert (status, answer["error"]) == (408, "the body did not arrive in time (3 bytes so far)")


async def test_a_steady_upload_may_take_longer_than_the_timeout() -> None:
    sample = Sample()
    settings = ServiceSettings(body_timeout_s=0.02, min_upload_bps=8)  # every byte earns a second

    async def trickle() -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        yield b"12345678"
        await wait_for(lambda: loop.time() > begin + 0.05)
        yield b"9"

    async with serve_app(sample.app, settings) as service, httpx.AsyncClient(trust_env=False) as http:
        assert (await http.post(f"{service.url}/size", content=trickle())).json() == {"bytes": 9}


async def test_a_slow_head_is_refused_and_a_silent_connection_closed() -> None:
    async with serve_app(Sample().app, ServiceSettings(header_timeout_s=0.05)) as service:
        status, answer = await exchange(service, b"GET / HTTP/1.1\r\nhost: x\r\n")
        assert status == 408
        assert "not complete after 0.05 s" in answer["error"]
        assert await exchange(service) == (0, {})
        # Line breaks before a request are no head, yet they must not keep a connection open for ever.
        assert (await exchange(service, b"\r\n\r\n"))[0] in (0, 408)


async def test_a_request_may_take_longer_than_its_head_was_allowed_to() -> None:
    sample = Sample()
    async with serve_app(sample.app, ServiceSettings(header_timeout_s=0.02)) as service, httpx.AsyncClient() as http:
        request = asyncio.create_task(http.post(f"{service.url}/slow", content=b"x" * 100_000))
        await wait_for(lambda: service.in_flight == 1)
        begin = asyncio.get_running_loop().time()
        await wait_for(lambda: asyncio.get_running_loop().time() > begin + 0.06)
        sample.release.set()
        assert (await request).status_code == 200


async def test_a_large_body_in_one_packet_is_not_taken_for_a_head() -> None:
    async with serve_app(Sample().app) as service, httpx.AsyncClient(trust_env=False) as http:
        for size in (70_000, 200_000, 70_000):
            assert (await http.post(f"{service.url}/size", content=bytes(size))).json() == {"bytes": size}


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nx-endless: " + b"a" * 100_000,
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(20_000)),
        b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 65_536 + b"\r\n\r\n",
    ],
    ids=["value", "target", "many", "whole, in one piece"],
)
async def test_an_endless_head_is_refused(head: bytes) -> None:
    async with serve_app(Sample().app) as service:
        status, answer = await exchange(service, head)
        assert (status, answer["error"]) == (431, "the head of the request is longer than 65536 bytes")


async def test_what_is_no_http_gets_a_json_error() -> None:
    async with serve_app(Sample().app) as service:
        assert await exchange(service, b"\x16\x03\x01 hello\r\n\r\n") == (
            400,
            {"error": "this is no valid HTTP request"},
        )


async def test_a_refused_upload_is_drained_so_that_its_sender_reads_the_refusal() -> None:
    async with (
        serve_app(Sample().app, ServiceSettings(max_body_bytes=1000)) as service,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        # More than the socket buffers hold: closing with unread bytes would reset the connection.
        answer = await http.post(f"{service.url}/size", content=bytes(32 * MIB))
        assert answer.status_code == 413


@pytest.mark.parametrize("route", ["size", "careless"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_above_the_limit_is_refused(route: str, chunked: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield bytes(500)

    async with (
        serve_app(Sample().app, ServiceSettings(max_body_bytes=1000)) as service,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        content = chunks() if chunked else bytes(1500)
        answer = await http.post(f"{service.url}/{route}", content=content)
        assert answer.status_code == 413
        said = "more than 1000 bytes" if chunked else "1500 bytes"
        assert answer.json() == {"error": f"the body has {said}; 1000 are accepted (setting max_body_bytes)"}
        assert (await http.post(f"{service.url}/size", content=bytes(1000))).json() == {"bytes": 1000}


async def test_large_bodies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "_MAX_LARGE_BYTES", 4 * MIB)
    async with (
        serve_app(Sample().app) as service,
        httpx.AsyncClient(base_url=service.url, trust_env=False) as http,
        contextlib.AsyncExitStack() as stack,
    ):
        head = f"POST /whole HTTP/1.1\r\nhost: x\r\ncontent-length: {3 * MIB}\r\n\r\n".encode()
        answers = []
        for _ in range(4):  # none of which is complete
            reader, writer = await stack.enter_async_context(connected(service.url))
            writer.write(head + bytes(2 * MIB))
            await writer.drain()
            answers.append(asyncio.create_task(reader.readuntil(b"\r\n\r\n")))
        done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        answer = (await done.pop()).lower()
        assert answer.startswith(b"http/1.1 503 ")
        assert b"retry-after: 1" in answer
        assert (await http.post("/whole", content=bytes(200_000))).json() == {"bytes": 200_000}
        for task in waiting:
            task.cancel()
        await stack.aclose()
        await wait_for(lambda: service.in_flight == 0, what="the service to notice that they have gone")
        # One alone has room, whatever its size.
        assert (await http.post("/whole", content=bytes(6 * MIB))).json() == {"bytes": 6 * MIB}


async def test_a_client_that_hangs_up_in_mid_upload_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_app(Sample().app) as service:
        async with connected(service.url) as (_, writer):
            writer.write(b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc")
            await wait_for(lambda: service.in_flight == 1)
        await wait_for(lambda: service.in_flight == 0)
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


async def test_a_client_that_does_not_read_is_cut() -> None:
    sample = Sample()
    async with (
        serve_app(sample.app, ServiceSettings(write_timeout_s=0.05, drain_s=0)) as service,
        connected(service.url) as (_, writer),
    ):
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await wait_for(lambda: sample.ended == ["endless"], what="the stream to be given up")


async def test_connections_above_the_limit_get_a_503() -> None:
    sample = Sample()
    async with serve_app(sample.app, ServiceSettings(max_connections=1)) as service:
        async with httpx.AsyncClient(trust_env=False) as first, httpx.AsyncClient(trust_env=False) as second:
            request = asyncio.create_task(first.post(f"{service.url}/slow"))
            await wait_for(lambda: service.in_flight == 1)
            refused = await second.post(f"{service.url}/size", content=b"x")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json() == {"error": "too many connections; try again in a second"}
            sample.release.set()
            assert (await request).status_code == 200
        async with httpx.AsyncClient(trust_env=False) as third:

            async def served() -> bool:
                return (await third.post(f"{service.url}/size", content=b"x")).status_code == 200

            await wait_for(served, what="the place of the connections that were closed")


@pytest.mark.parametrize("sent", ["job-1.task:7", None, "", "two words", "x" * 129, "bad\xe9"])
async def test_a_request_id_is_kept_or_made_and_echoed(sent: str | None) -> None:
    sample = Sample()
    headers = {} if sent is None else {b"X-Request-Id": sent.encode("latin-1")}
    async with serve_app(sample.app) as service, httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{service.url}/size", headers=headers, content=b"")
        echoed = answer.headers["x-request-id"]
        assert sample.seen_ids == [echoed]
        if sent == "job-1.task:7":
            assert echoed == sent
        else:
            assert len(echoed) == 16
            assert echoed != sent
        assert (await http.get(f"{service.url}/livez", headers=headers)).headers["x-request-id"]


@pytest.mark.parametrize("proper", [True, False])
async def test_a_trace_is_continued_or_begun(proper: bool) -> None:
    sample, trace_id, span_id = Sample(), "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace_id}-{span_id}-0{1 if proper else 'x'}", "tracestate": "foo=1"}
    async with serve_app(sample.app) as service, httpx.AsyncClient(trust_env=False) as http:
        for _ in range(2):
            await http.post(f"{service.url}/size", headers=headers, content=b"")
    first, second = sample.seen_traces
    assert first is not None
    assert second is not None
    if proper:
        assert first == second == Trace(trace_id, span_id, 1, "foo=1")
    else:
        assert (len(first.trace_id), first.sampled, first.state) == (32, False, "")
        assert len({trace_id, first.trace_id, second.trace_id}) == 3
    assert logs.current_trace() is None


async def test_readiness_shows_which_check_fails() -> None:
    works = True

    async def inference() -> None:
        if not works:
            raise RuntimeError("the inference thread is gone")

    async def stuck() -> None:
        if not works:
            await asyncio.Event().wait()

    def build(lifecycle: Lifecycle) -> Starlette:
        lifecycle.add_check("inference", inference)
        lifecycle.add_check("store", stuck)
        return Starlette()

    async with serve_app(build) as service, httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"{service.url}/readyz")).json()["checks"] == {"inference": "ok", "store": "ok"}
        works = False
        answer = await http.get(f"{service.url}/readyz")
        assert answer.status_code == 503
        assert answer.json()["status"] == "failing"
        assert answer.json()["checks"] == {
            "inference": "the inference thread is gone",
            "store": "no result within 2 s",
        }
        assert (await http.get(f"{service.url}/livez")).status_code == 200


async def test_metrics_keep_each_lag_of_the_event_loop() -> None:
    async def block(request: Request) -> Response:
        time.sleep(0.3)  # noqa: ASYNC251  # to block the event loop is what the test wants
        return JSONResponse({})

    def looks(metrics: str, bound: str) -> float:
        (line,) = [
            line
            for line in metrics.splitlines()
            if line.startswith(f'terrace_event_loop_lag_seconds_bucket{{le="{bound}"')
        ]
        return float(line.rpartition(" ")[2])

    app = Starlette(routes=[Route("/block", block, methods=["POST"])])
    async with serve_app(app) as service, httpx.AsyncClient(trust_env=False) as http:

        async def metrics() -> str:
            answer = await http.get(f"{service.url}/metrics")
            assert answer.headers["content-type"].startswith("text/plain")
            return answer.text

        before = await metrics()
        await http.post(f"{service.url}/block")

        async def seen() -> bool:
            now = await metrics()
            late = [looks(text, "+Inf") - looks(text, "0.2") for text in (before, now)]
            return late[1] > late[0]

        await wait_for(seen, what="the block among the lags")


async def test_a_service_whose_connections_wait_for_nothing_stops_at_once() -> None:
    async def seconds_to_stop() -> float:
        async with httpx.AsyncClient(trust_env=False) as http:
            async with serve_app(Starlette()) as service:
                assert (await http.get(f"{service.url}/livez")).status_code == 200
                told = time.monotonic()
            return time.monotonic() - told

    # The quickest of some: this machine may do other things meanwhile.
    assert min([await seconds_to_stop() for _ in range(5)]) < 0.08


async def test_an_answer_that_is_still_being_read_has_the_drain_time_and_no_more() -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        async with serve_app(Sample().app, ServiceSettings(drain_s=0.2)) as service:
            answer = await http.send(http.build_request("GET", f"{service.url}/endless"), stream=True)
            told = time.monotonic()
        # An event loop counts in milliseconds; without a bound, it would never end.
        assert 0.19 <= time.monotonic() - told < 30
        await answer.aclose()


async def test_what_a_client_has_not_read_by_the_end_of_the_drain_time_ends_with_the_service() -> None:
    loop = asyncio.get_running_loop()

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with socket.socket() as client:
        client.setblocking(False)
        async with serve_app(Sample().app, ServiceSettings(drain_s=0.1)) as service:
            await loop.sock_connect(client, ("127.0.0.1", int(service.url.rpartition(":")[2])))
            await loop.sock_sendall(client, b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            await loop.sock_recv(client, 1)
            before = files()
        assert files() == before - 2  # the connection, and what took it


async def test_an_endless_answer_can_end_itself_when_the_service_drains() -> None:
    def build(lifecycle: Lifecycle) -> Starlette:
        async def events(request: Request) -> Response:
            async def lines() -> AsyncIterator[bytes]:
                yield b"first\n"
                await lifecycle.wait_draining()
                yield b"last\n"

            return StreamingResponse(lines())

        return Starlette(routes=[Route("/events", events)])

    async with (
        httpx.AsyncClient(trust_env=False) as http,
        serve_app(build) as service,
        http.stream("GET", f"{service.url}/events") as answer,
    ):
        lines = answer.aiter_lines()
        assert await anext(lines) == "first"
        service.drain()
        assert [line async for line in lines] == ["last"]
