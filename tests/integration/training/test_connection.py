"""What a worker makes of the time that its requests take."""

from __future__ import annotations

import asyncio
import ssl
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.integration.access.conftest import Certificates, certificates
from tierkit.errors import NotFound, UpstreamUnavailable
from tierkit.http.client import open_client
from training.messages import UpdateHead
from training.worker.connection import HostConnection

__all__ = ["certificates"]  # the fixture

BODY = bytes(8_000_000)
UPDATE = np.zeros(8, np.float32), np.zeros(0, np.float32)
SPEC: Any = SimpleNamespace(wire="fp32")
ANSWER_S = 0.5
"""16 MB/s, if it were the link's."""


@pytest.mark.parametrize(("host_s", "compressed"), [(0.0, True), (ANSWER_S, False)], ids=["slow link", "busy host"])
async def test_bodies_are_compressed_for_a_slow_link_and_not_for_a_busy_host(host_s: float, compressed: bool) -> None:
    async def update(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(ANSWER_S)
        return web.json_response({"verdict": "taken", "version": 1, "finished": False, "host_s": host_s})

    app = web.Application(client_max_size=2 * len(BODY))
    app.add_routes([web.post("/v1/updates", update)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with open_client() as http:
            worker = HostConnection("w", "0" * 16, http, url=site.name)
            head = UpdateHead(worker="w", incarnation="0" * 16, lease=1, first=0, stop=1, loss=0.0)
            assert worker.packed(*UPDATE, SPEC)[1] == {}
            await worker.update(head, (BODY, {}))
            assert bool(worker.packed(*UPDATE, SPEC)[1]) is compressed
    finally:
        await runner.cleanup()


async def said_at(app: web.Application, tls: ssl.SSLContext | None = None) -> str:
    """What a worker is told that looks for its run there."""
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        async with open_client() as http:
            worker = HostConnection("w", "0" * 16, http, url=site.name.replace("https", "http"))
            with pytest.raises((NotFound, UpstreamUnavailable)) as caught:
                await worker.spec()
    finally:
        await runner.cleanup()
    return str(caught.value)


async def test_who_asks_a_scheduler_for_its_run_is_told_how_to() -> None:
    async def other(request: web.Request) -> web.Response:
        return web.json_response({"error": "no such route"}, status=404)

    app = web.Application()
    app.add_routes([web.get("/v1/run", other)])
    assert "--scheduler http://127.0.0.1" in await said_at(app)


async def test_who_speaks_plainly_to_a_host_with_tls_is_told_so(certificates: Certificates) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*map(str, certificates.issue("host").values()))
    assert "https://" in await said_at(web.Application(), context)
