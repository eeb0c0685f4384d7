"""The transport that gives httpx these connections."""

from __future__ import annotations

import asyncio
import ssl
from functools import partial

import httpx

from tierkit.http1.connection import Exchange
from tierkit.http1.pool import Pool

__all__ = ["HttpTransport"]

_MAX_KEPT = 1024
"""Servers beyond these get a connection for each request: their names may come from outside."""

_PORTS = {b"http": 80, b"https": 443}

Origin = tuple[bytes, bytes, int | None]


class HttpTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 over connections that stay open, with a pool for each origin (scheme, host, port).

    Of the extensions of a request it knows `timeout`; the answer's are `http_version` and `reason_phrase`.

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

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        head, length = _encode_head(request)
        assert isinstance(request.stream, httpx.AsyncByteStream)
        timeouts = request.extensions.get("timeout", {})
        pool = self._pool_of(request.url)
        connection = await pool.take(wait_s=timeouts.get("pool"), connect_s=timeouts.get("connect"))
        exchange = Exchange(
            connection,
            bodiless=request.method == "HEAD",
            read_s=timeouts.get("read"),
            write_s=timeouts.get("write"),
        )
        try:
            await exchange.send(head, request.stream, length)
            await exchange.receive_head()
        except BaseException:
            exchange.close()
            raise
        return httpx.Response(
            exchange.status,
            headers=exchange.headers,
            stream=exchange,
            extensions={"http_version": exchange.version, "reason_phrase": exchange.reason},
        )

    def _pool_of(self, url: httpx.URL) -> Pool:
        origin = (url.raw_scheme, url.raw_host, url.port)
        pool = self._pools.get(origin)
        if pool is None:
            scheme, host, port = origin
            if scheme not in _PORTS or not host:
                raise httpx.UnsupportedProtocol(f"{str(url)!r:.200} is no http:// or https:// URL with a host")
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


def _encode_head(request: httpx.Request) -> tuple[bytes, int | None]:
    """Request line and headers, and the length of the body; None where it goes in chunks.

    Raises:
        LocalProtocolError: a header that would end its line, or no proper length.
    """
    lines = [b"%b %b HTTP/1.1\r\n" % (request.method.encode("ascii"), request.url.raw_path)]
    length: int | None = 0
    for name, value in request.headers.raw:
        lines.append(b"%b: %b\r\n" % (name, value))
        if len(name) == 14 and name.lower() == b"content-length":
            if not value.isdigit():
                raise httpx.LocalProtocolError(f"{value!r} is no Content-Length")
            length = int(value)
        elif len(name) == 17 and name.lower() == b"transfer-encoding":
            length = None
    head = b"".join(lines)
    if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
        raise httpx.LocalProtocolError("a header of the request holds a line break")
    return head + b"\r\n", length
