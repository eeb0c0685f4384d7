"""HTTP to other services, over aiohttp: one budget per call, and the one place where aiohttp's errors become ours."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import aiohttp
from aiohttp import AddrInfoType
from aiohttp.abc import AbstractResolver
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection

from tierkit.access import client_context, tls_trouble
from tierkit.errors import CertificateError, TerraceError, UpstreamError, UpstreamTimeout, UpstreamUnavailable

__all__ = ["Meter", "ask", "authorization", "calling", "open_client", "read_at_most"]

_CONNECT_S = 3.0
"""A peer that does not take a connection within this time counts as gone, even with budget left."""

_SILENT_S = 10
"""A peer whose machine acknowledges nothing for this long counts as gone. Without this, a request under way when the
network breaks would wait for its whole budget."""

_KEEPALIVE_S = 30.0
"""Seconds for which an idle connection is kept: less than the 75 s of our services. The client must close first, or it
could send a request into a connection that the service is closing."""

_SMALL_BYTES = 64 * 1024
"""Copying this many bytes takes less time than another write."""

_TLS_RECORD_BYTES, _TLS_LARGEST_RECORD = 22, 16 * 1024
_TLS_HANDSHAKE_BYTES = (900, 5000)
"""Bytes sent and received to open a connection with TLS 1.3: an estimate on the high side, since the certificates of
the peer decide."""

Meter = Callable[[int, int], None]
"""Takes numbers of bytes, sent and received."""

_MAX_REASON = 200
"""Characters of what is wrong with an answer; the peer chooses some of them."""


def authorization(token: str | None) -> dict[str, str]:
    """The header that presents a token; none if there is no token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def open_client(
    *,
    max_connections: int = 64,
    tls_ca: Path | None = None,
    middlewares: Sequence[aiohttp.ClientMiddlewareType] = (),
    meter: Meter | None = None,
    resolver: AbstractResolver | None = None,
) -> aiohttp.ClientSession:
    """Return a client for a service to share among its calls; use it in `async with`. Send with `ask`, inside
    `calling`.

    The client bounds connecting (3 s) and the silence of the peer's machine (10 s), which acknowledges packets even
    while its service computes. Only the call's total budget bounds everything else. The client ignores proxies of the
    environment and keeps no cookies: nodes talk only to the addresses that they are given.

    Args:
        max_connections: most connections to each peer; further requests wait for a free one.
        tls_ca: file with the certificates to trust instead of the usual public authorities.
        middlewares: aiohttp middlewares that the requests pass through.
        meter: called with the bytes sent and received, headers and TLS included.
        resolver: finds the addresses of a name at each new connection. Default: the system's.

    Raises:
        SetupError: the file cannot be used.
    """
    connector = aiohttp.TCPConnector(
        limit=0,
        limit_per_host=max_connections,
        keepalive_timeout=_KEEPALIVE_S,
        ssl=client_context(tls_ca),
        socket_factory=_socket,
        resolver=resolver,
        use_dns_cache=resolver is None,
    )
    if meter is not None:
        # aiohttp's own traces miss what is read piece by piece.
        connector._factory = partial(_MeteredHandler, meter)  # type: ignore[assignment]  # a subclass will do
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        response_class=_Answer,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        skip_auto_headers=("Accept", "User-Agent"),
        middlewares=middlewares,
    )


def _socket(address: AddrInfoType) -> socket.socket:
    """A socket whose connection breaks when the peer's machine acknowledges nothing for `_SILENT_S`: neither data, nor
    while the connection is idle the probes of its kernel."""
    sock = socket.socket(*address[:3])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_S * 1000)
    return sock


class _MeteredHandler(ResponseHandler):
    """Counts what passes a connection."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(asyncio.get_running_loop())
        self._count = meter
        self._record_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if transport.get_extra_info("ssl_object") is not None:
            self._record_bytes = _TLS_RECORD_BYTES
            self._count(*_TLS_HANDSHAKE_BYTES)
        super().connection_made(cast("asyncio.Transport", _MeteredTransport(transport, self._sent)))

    def data_received(self, data: bytes) -> None:
        self._count(0, self._on_wire(len(data)))
        super().data_received(data)

    def _sent(self, size: int) -> None:
        self._count(self._on_wire(size), 0)

    def _on_wire(self, size: int) -> int:
        return size + self._record_bytes * -(-size // _TLS_LARGEST_RECORD)


class _MeteredTransport:
    """A transport that counts the bytes written to it."""

    def __init__(self, transport: asyncio.BaseTransport, sent: Callable[[int], None]) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._sent = sent

    def write(self, data: bytes) -> None:
        self._sent(len(data))
        self._transport.write(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        pieces = list(pieces)
        self._sent(sum(map(len, pieces)))
        self._transport.writelines(pieces)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Answer(aiohttp.ClientResponse):
    """An answer to this very request, given up at once where it is given up."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        # aiohttp takes what a peer has sent on an idle connection for the next answer.
        if connection.protocol is not None and connection.protocol.should_close:
            raise aiohttp.ClientConnectionError("the peer has sent something unasked")
        return await super().start(connection)

    def close(self) -> None:
        # What has not been sent yet would wait in memory for a peer that may never read it.
        if self.connection is not None and self.connection.protocol is not None:
            self.connection.protocol.abort()
        super().close()


def ask(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    body: Sequence[bytes | memoryview] = (),
    headers: Mapping[str, str] | None = None,
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Send one request; redirects are not followed. The context is entered when the head of the answer is there, and
    leaving it before the end of the answer closes the connection.

    aiohttp sends a GET or DELETE a second time if a connection that had been idle breaks; never a POST.

    Args:
        body: in pieces. A small one leaves in one write with the head; of a large one nothing is copied.
    """
    data: bytes | AsyncIterator[bytes | memoryview] | None = None
    if body:
        size = sum(map(len, body))
        headers = {**(headers or {}), "Content-Length": str(size)}
        data = b"".join(body) if size <= _SMALL_BYTES else _each(body)
    return http.request(method, url, data=data, headers=headers, allow_redirects=False)


async def _each(pieces: Sequence[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    for piece in pieces:
        yield piece


async def read_at_most(answer: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The body of an answer, or its first bytes: its length is unknown."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) >= limit_bytes:
            break
    del body[limit_bytes:]
    return bytes(body)


@asynccontextmanager
async def calling(who: str, *, budget_s: float | None) -> AsyncIterator[None]:
    """Bound the body of the `with` statement to `budget_s` seconds in total, and raise its errors about a call to
    `who`.

    Raises:
        UpstreamTimeout: no complete answer within the budget.
        UpstreamUnavailable: no connection, or it broke, or the answer is not HTTP.
        CertificateError: the two sides do not agree on TLS, or the certificate does not prove who it is.
        UpstreamError: an address that leads nowhere.
    """
    try:
        async with asyncio.timeout(budget_s):
            yield
    except (aiohttp.ClientError, TimeoutError, UnicodeError) as exc:
        raise _translated(exc, who) from exc


def _translated(error: Exception, who: str) -> TerraceError:
    """Return the error of this package that an error of aiohttp stands for."""
    reason = (str(error) or type(error).__name__)[:_MAX_REASON]
    match error:
        case aiohttp.ConnectionTimeoutError():
            return UpstreamUnavailable(f"{who} takes no connection")
        case TimeoutError():
            return UpstreamTimeout(f"{who} did not answer within its budget")
        case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError() | UnicodeError():  # no name of a host
            return UpstreamError(f"{who} has no usable address: {reason}")
        case aiohttp.ClientResponseError() | aiohttp.ClientPayloadError():
            return UpstreamUnavailable(f"{who} broke off its answer, or it is no HTTP: {reason}")
    # aiohttp's errors are TLS errors as well, but without what OpenSSL says.
    if trouble := tls_trouble(error.__cause__ or error, who):
        return CertificateError(trouble)
    if isinstance(error, OSError) and error.errno:  # in aiohttp's own words it names its classes
        reason = (os.strerror(error.errno) if error.errno > 0 else str(error.strerror))[:_MAX_REASON]
    return UpstreamUnavailable(f"{who} cannot be reached: {reason}")
