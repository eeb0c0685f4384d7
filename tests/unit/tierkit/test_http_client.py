"""Which error a failed call becomes."""

import asyncio

import httpx
import pytest

from tierkit.errors import TerraceError, UpstreamError, UpstreamTimeout, UpstreamUnavailable
from tierkit.http.client import calling


async def test_every_foreign_error_is_translated() -> None:
    cases: list[tuple[Exception, type[TerraceError]]] = [
        (httpx.ConnectError("x"), UpstreamUnavailable),
        (httpx.ConnectTimeout("x"), UpstreamUnavailable),
        (httpx.ReadTimeout("x"), UpstreamTimeout),
        (httpx.PoolTimeout("x"), UpstreamTimeout),
        (TimeoutError(), UpstreamTimeout),
        (httpx.RemoteProtocolError("x"), UpstreamUnavailable),
        (httpx.ReadError(""), UpstreamUnavailable),
        (httpx.DecodingError("x"), UpstreamError),
        (httpx.UnsupportedProtocol("x"), UpstreamError),
        (httpx.InvalidURL("x"), UpstreamError),
        (httpx.TooManyRedirects("x"), UpstreamError),
    ]
    for foreign, ours in cases:
        with pytest.raises(ours, match="edge-1") as caught:
            async with calling("edge-1", budget_s=1.0):
                raise foreign
        assert type(caught.value) is ours
        assert caught.value.__cause__ is foreign


async def test_the_budget_is_for_the_whole_call() -> None:
    with pytest.raises(UpstreamTimeout):
        async with calling("edge-1", budget_s=0.01):
            await asyncio.Event().wait()
