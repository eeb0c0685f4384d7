"""Emulated links between real sockets, with the client of services."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from experiments.emulation.links import read_links
from experiments.emulation.middleware import LinkMiddleware
from tierkit.errors import UpstreamTimeout, UpstreamUnavailable
from tierkit.http.client import ask, calling, open_client
from tierkit.testing import serve_app

BUSY_S = 1.5
"""What a busy machine may add to a wait."""


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def two_lines(request: Request) -> Response:
    async def lines() -> AsyncIterator[bytes]:
        yield b"coarse\n"
        yield b"fine\n"

    return StreamingResponse(lines())


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = Starlette(
        routes=[Route("/echo", echo, methods=["POST"]), Route("/lines", two_lines, methods=["POST"])],
    )
    async with serve_app(app) as lifecycle:
        yield lifecycle.url


def links(folder: Path, rest: str) -> Path:
    path = folder / "links.toml"
    path.write_text(f'seed = 3\n[[link]]\nname = "up"\nto = ["127.0.0.1"]\n{rest}')
    return path


def emulated(folder: Path, rest: str, max_connections: int = 64) -> aiohttp.ClientSession:
    return open_client(max_connections=max_connections, middlewares=[LinkMiddleware(read_links(links(folder, rest)))])


async def timed(http: aiohttp.ClientSession, url: str, body: bytes = b"x") -> float:
    started = time.perf_counter()
    async with ask(http, "POST", f"{url}/echo", [body]) as answer:
        assert await answer.read() == body
    return time.perf_counter() - started


async def test_delay_is_latency_and_not_occupancy(tmp_path: Path, url: str) -> None:
    async with emulated(tmp_path, "delay_s = 0.05") as http:
        alone = await timed(http, url)
        assert 0.1 <= alone < 0.1 + BUSY_S
        started = time.perf_counter()
        await asyncio.gather(*(timed(http, url) for _ in range(20)))
        # One after the other they would take two seconds.
        assert 0.1 <= time.perf_counter() - started < 0.1 + BUSY_S


async def test_bandwidth_is_shared(tmp_path: Path, url: str) -> None:
    async with emulated(tmp_path, "bandwidth_bps = 8_000_000") as http:
        body = bytes(25_000)  # 25 ms each way
        assert 0.05 <= await timed(http, url, body) < 0.05 + BUSY_S
        started = time.perf_counter()
        await asyncio.gather(*(timed(http, url, body) for _ in range(4)))
        # Four questions one after the other, and the answer to the last.
        assert 0.125 <= time.perf_counter() - started < 0.125 + BUSY_S


async def test_both_lines_of_a_stream_come_whole(tmp_path: Path, url: str) -> None:
    async with emulated(tmp_path, "delay_s = 0.02") as http:
        started = time.perf_counter()
        async with ask(http, "POST", f"{url}/lines") as answer:
            assert await answer.read() == b"coarse\nfine\n"
        assert 0.04 <= time.perf_counter() - started < 0.04 + BUSY_S


async def test_a_reset_is_an_unavailable_upstream(tmp_path: Path, url: str) -> None:
    async with emulated(tmp_path, "reset = 1.0") as http:
        for _ in range(6):
            with pytest.raises(UpstreamUnavailable, match="reset"):
                async with calling("edge-1", budget_s=5.0):
                    await timed(http, url)


async def test_a_stall_is_an_upstream_timeout_within_the_budget(tmp_path: Path, url: str) -> None:
    async with emulated(tmp_path, "stall = 1.0") as http:
        started = time.perf_counter()
        for _ in range(4):
            with pytest.raises(UpstreamTimeout):
                async with calling("edge-1", budget_s=0.05):
                    await timed(http, url)
        assert time.perf_counter() - started < 0.2 + BUSY_S


async def test_a_connection_that_was_lost_can_be_used_no_more_but_others_can(tmp_path: Path, url: str) -> None:
    async with emulated(tmp_path, "reset = 0.5", max_connections=2) as http:
        answered = 0
        for _ in range(30):
            try:
                answered += await timed(http, url, b"y" * 1000) > 0
            except aiohttp.ClientError:
                continue
        assert 5 < answered < 25
