"""The way that leads over these connections."""

from __future__ import annotations

import asyncio
import ssl
from functools import partial

import httpx

from tierkit.http1.connection import Exchange
from tierkit.http1.pool import Pool
from tierkit.http1.way import Answer, Origin, Question

__all__ = ["HttpTransport"]

_MAX_KEPT = 1024
"""Servers beyond these get a connection for each request: their names may come from outside."""

_PORTS = {b"http": 80, b"https": 443}


class HttpTransport:
    """HTTP/1.1 over connections that stay open, with a pool for each origin (scheme, host, port).

    Args:
        context: for https.
        max_connections: to each origin; more requests wait for a free one.
        keepalive_s: for which an idle connection stays open.
    """

    def __init__(self, context: ssl.SSLContext, *, max_connections: int, keepalive_s: float) -> None:
        self._context = context
        self._max_connections = max_connections
        self._keepalive_s = keepalive_s
        self._pools: dict[Origin, Pool] = {}

    async def ask(self, question: Question) -> Answer:
        """See `Way.ask`."""
        timeouts = question.timeouts
        connection = await self._pool_of(question.origin).take(wait_s=timeouts.pool, connect_s=timeouts.connect)
        exchange = Exchange(connection, bodiless=question.bodiless, read_s=timeouts.read, write_s=timeouts.write)
        try:
            await exchange.send(question.head, question.body, question.length)
            await exchange.receive_head()
        except BaseException:
            exchange.close()
            raise
        return exchange

    def _pool_of(self, origin: Origin) -> Pool:
        pool = self._pools.get(origin)
        if pool is None:
            scheme, host, port = origin
            if scheme not in _PORTS or not host:
                address = f"{scheme.decode('latin-1')}://{host.decode('latin-1')}"
                raise httpx.UnsupportedProtocol(f"{address!r:.200} is no http:// or https:// URL with a host")
            pool = self._pools[origin] = Pool(
                host.decode("ascii"),
                port or _PORTS[scheme],
                self._context if scheme == b"https" else None,
                max_connections=self._max_connections,
                keepalive_s=self._keepalive_s if len(self._pools) < _MAX_KEPT else 0.0,
                emptied=partial(self._forget, origin),
            )
        return pool

    def _forget(self, origin: Origin) -> None:
        self._pools.pop(origin, None)

    async def aclose(self) -> None:
        await asyncio.gather(*(pool.aclose() for pool in list(self._pools.values())))
