"""Which error a failed call becomes."""

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from tierkit.errors import TerraceError, UpstreamError, UpstreamTimeout, UpstreamUnavailable
from tierkit.http.client import calling

KEY = ConnectionKey("10.0.0.1", 80, False, False, None, None, None)
REQUEST: Any = SimpleNamespace(real_url="http://10.0.0.1/")


async def test_every_foreign_error_is_translated() -> None:
    cases: list[tuple[Exception, type[TerraceError]]] = [
        (aiohttp.ClientConnectorError(KEY, OSError(111, "refused")), UpstreamUnavailable),
        (aiohttp.ClientConnectorDNSError(KEY, OSError(-2, "no such name")), UpstreamUnavailable),
        (aiohttp.ConnectionTimeoutError(), UpstreamUnavailable),
        (aiohttp.SocketTimeoutError("x"), UpstreamTimeout),
        (TimeoutError(), UpstreamTimeout),
        (aiohttp.ServerDisconnectedError(), UpstreamUnavailable),
        (aiohttp.ClientOSError(104, "reset"), UpstreamUnavailable),
        (aiohttp.ClientConnectionError(""), UpstreamUnavailable),
        (aiohttp.ClientPayloadError("x"), UpstreamUnavailable),
        (aiohttp.ClientResponseError(REQUEST, (), status=400, message="x"), UpstreamUnavailable),
        (aiohttp.NonHttpUrlClientError("ftp://x"), UpstreamError),
        (aiohttp.InvalidURL("x"), UpstreamError),
    ]
    for foreign, ours in cases:
        with pytest.raises(ours, match="edge-1") as caught:
            async with calling("edge-1", budget_s=1.0):
                raise foreign
        assert type(caught.value) is ours
        assert caught.value.__cause__ is foreign


@pytest.mark.parametrize(
    ("error", "words"),
    [(OSError(111, "Connect call failed"), "Connection refused"), (OSError(-2, "Name not known"), "Name not known")],
)
async def test_why_no_connection_came_about_is_said_plainly(error: OSError, words: str) -> None:
    with pytest.raises(UpstreamUnavailable, match=f"cannot be reached: {words}$"):
        async with calling("edge-1", budget_s=1.0):
            raise aiohttp.ClientConnectorError(KEY, error)


async def test_the_budget_is_for_the_whole_call() -> None:
    with pytest.raises(UpstreamTimeout):
        async with calling("edge-1", budget_s=0.01):
            await asyncio.Event().wait()
