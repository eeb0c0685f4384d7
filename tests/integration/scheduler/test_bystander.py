"""A bystander gets its answers, the same as those of the bare networks, while other clients send broken requests."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from urllib.parse import urlsplit

import httpx
import pytest

from experiments.chaos.verdict import Truth, tally
from models.data import read_sample
from tests.mutations import changed_body, changed_bytes
from tierkit.client import AsyncClient
from tierkit.testing import ServiceProcess, service_process, wait_for
from tierkit.types import Scheme, UpstreamLoss

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

IMAGES = read_sample().images[:10]
REQUESTS = int(os.environ.get("TERRACE_FUZZ_REQUESTS", "600"))
SEED = int(os.environ.get("TERRACE_FUZZ_SEED", "0"))
CONNECTIONS = 16
ANSWER_S, HEALTH_S = 2.0, 10.0
TROUBLE = ("Traceback (most recent call last)", "Task was destroyed", "unexpected error")
SENT_ON_PURPOSE = (501, 503, 504)
"""Statuses above 499 that a service gives on purpose: no such method or coding, busy, too late."""
PATHS = ("/v1/jobs", "/v1/classify", "/v1/devices", "/v2/models/mobilenet-v1-0.5/infer", "/v1/tasks/t-1", "/livez", "/")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 40)
HEADERS = (
    "Content-Type: application/json",
    "Content-Type: multipart/form-data; boundary=" + "b" * 300,
    "Content-Encoding: zstd",
    "Transfer-Encoding: chunked",
    "Expect: 100-continue",
    "Upgrade: websocket",
    "Range: bytes=9-1,-",
    "Idempotency-Key: " + "k" * 5000,
    "Inference-Header-Content-Length: -1",
    "Terrace-Budget-Ms: 0",
)
BODY = json.dumps(
    {
        "inputs": [{"name": "images", "shape": [1, 32, 32, 3], "datatype": "UINT8", "data": [7] * 3072}],
        "node_id": "x",
        "tier": "end",
        "scheme": "end-edge",
    }
).encode()


def broken(chance: Random) -> bytes:
    """A request that no honest client sends."""
    body = BODY if chance.random() < 0.2 else changed_body(BODY, chance)
    if chance.random() < 0.01:
        body = b"[" + b"[]," * 300_000 + b"[]]"
    length = len(body) + (chance.choice((-3, 5, 10**6, 10**20)) if chance.random() < 0.05 else 0)
    path = chance.choice(PATHS) + chance.choice(("", "", "?limit=-1", "/..", "%2f", "/" + "A" * 70_000))
    lines = [f"{chance.choice(METHODS)} {path} HTTP/1.1", "Host: 127.0.0.1", *chance.sample(HEADERS, 2)]
    content = "\r\n".join([*lines, f"Content-Length: {length}"]).encode() + b"\r\n\r\n" + body
    return changed_bytes(content, chance) if chance.random() < 0.05 else content


async def send(url: str, content: bytes, chance: Random) -> int:
    """Send a request, or half of one, or reset the connection before the answer; return the status, 0 if none came."""
    writer = None
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
            kind = chance.choice(("whole",) * 8 + ("half", "reset"))
            writer.write(content if kind != "half" else content[: len(content) // 2])
            if kind == "whole":
                await writer.drain()
                return int((await reader.readline()).split()[1])
    except (OSError, TimeoutError, IndexError, ValueError):  # the service has closed it, or waits for the rest
        pass
    finally:
        if writer is not None:
            writer.transport.abort()
    return 0


@pytest.fixture(scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mapping[str, ServiceProcess]]:
    """A scheduler, an end node and an edge node."""
    folder = tmp_path_factory.mktemp("bystander")
    found: dict[str, ServiceProcess] = {}
    async with AsyncExitStack() as stack:
        for service in ("scheduler", "end", "edge"):
            joins = ["--scheduler", found["scheduler"].url] if found else ["--state", str(folder / "state")]
            process = service_process(
                ["-m", "terrace", service, "--port", "0", *joins], ready_file=folder / f"{service}.ready"
            )
            found[service] = await stack.enter_async_context(process)

        async with AsyncClient(found["scheduler"].url) as client:

            async def joined() -> bool:
                return len(await client.devices()) == 2

            await wait_for(joined, what="both nodes")
        yield found


@asynccontextmanager
async def repeated(once: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call it again and again meanwhile, and at least once."""
    over = asyncio.Event()

    async def loop() -> None:
        await once()
        while not over.is_set():
            await once()

    async with asyncio.TaskGroup() as group:
        group.create_task(loop())
        try:
            yield
        finally:
            over.set()


@pytest.fixture
async def bystander(services: Mapping[str, ServiceProcess]) -> AsyncIterator[None]:
    """Checks its own answers and the health of all services during a test; afterwards all of them are well."""
    truth = await asyncio.to_thread(Truth.of, IMAGES)
    async with AsyncClient(services["scheduler"].url) as client, httpx.AsyncClient(trust_env=False) as http:

        async def job() -> None:
            number = await client.submit(IMAGES, scheme=Scheme.END_EDGE, on_upstream_loss=UpstreamLoss.WAIT)
            await client.wait(number, budget_s=120.0)
            found = tally(len(IMAGES), [result async for result in client.results(number)], {}, truth)
            assert (found.wrong, found.lost, found.fine) == (0, 0, len(IMAGES))

        async def health() -> None:
            for service in services.values():
                (await http.get(f"{service.url}/livez", timeout=HEALTH_S)).raise_for_status()

        async with repeated(job), repeated(health):
            yield
    for name, service in services.items():
        assert [line for line in service.log.splitlines() if any(word in line for word in TROUBLE)] == [], name


async def test_broken_requests_spoil_no_answer(services: Mapping[str, ServiceProcess], bystander: None) -> None:
    harm: list[tuple[int, str, int]] = []
    seen: set[int] = set()
    numbers: Iterator[int] = iter(range(REQUESTS))

    async def client() -> None:
        for number in numbers:
            chance = Random(f"{SEED}/{number}")
            name = chance.choice(list(services))
            status = await send(services[name].url, broken(chance), chance)
            seen.add(status)
            if status >= 500 and status not in SENT_ON_PURPOSE:
                harm.append((number, name, status))

    await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
    assert harm == []
    assert {400, 404, 405} <= seen
