"""Connection pools, one for each peer.

A pool of httpcore looks at each of its connections for each request that begins or ends, and asks the kernel about the
idle ones. With a few connections to each of many peers that grows with their product; in pools of their own, each
request looks at the few connections that it could use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

__all__ = ["OriginPools"]

_MOST_POOLS = 256
"""Peers beyond these share one pool: their names may come from outside."""

Origin = tuple[bytes, bytes, int | None]


class OriginPools(httpx.AsyncBaseTransport):
    """A transport that gives each origin (scheme, host, port) a transport of its own.

    Args:
        make: makes one.
    """

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport]) -> None:
        self._make = make
        self._pools: dict[Origin | None, httpx.AsyncBaseTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        origin: Origin | None = (url.raw_scheme, url.raw_host, url.port)
        if origin not in self._pools and len(self._pools) >= _MOST_POOLS:
            origin = None
        pool = self._pools.get(origin)
        if pool is None:
            pool = self._pools[origin] = self._make()
        return await pool.handle_async_request(request)

    async def aclose(self) -> None:
        await asyncio.gather(*(pool.aclose() for pool in self._pools.values()))
