"""A client for load generation: HTTP/1.1 on one kept-alive connection, and as little else as will do.

A general client spends a millisecond of CPU on a request of 150 kB, several times what a fast server does, so it would
measure itself. Here a request is bytes that were made before the clock started, the answer is parsed by httptools (the
parser that uvicorn uses), and one core sends well above ten thousand requests a second.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from tierkit.access import client_context, tls_trouble
from tierkit.errors import InvalidInput, UpstreamUnavailable
from tierkit.http.client import authorization

__all__ = ["Connection", "ConnectionBroken", "Origin", "Reply", "encode_http"]

_CONNECT_S = 5.0


class ConnectionBroken(UpstreamUnavailable):
    """The server closed the connection, or sent something that is not HTTP, before the answer was complete."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Address of a server, and the path in front of all its routes ("" for none)."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    context: ssl.SSLContext | None = field(default=None, compare=False, repr=False)
    """Trusted certificates, with `tls`."""
    token: str | None = field(default=None, compare=False, repr=False)
    """Shown with every request."""

    @classmethod
    def parse(cls, url: str, *, token: str | None = None, tls_ca: Path | None = None) -> Origin:
        """Read "host:port" or an http(s) URL.

        Args:
            token: to show with every request.
            tls_ca: file with the certificates to trust; None for the public authorities.

        Raises:
            InvalidInput: it is neither.
            SetupError: `tls_ca` cannot be used.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise InvalidInput(f"{url!r} has no valid port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InvalidInput(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        context = client_context(tls_ca) if tls else None
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"), context, token)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


def encode_http(
    method: str, origin: Origin, path: str, headers: dict[str, str] | None = None, body: bytes = b""
) -> bytes:
    """A whole request, ready to be sent any number of times.

    Raises:
        InvalidInput: a header that would break the message.
    """
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    fields = {"Host": f"{host}:{origin.port}", **authorization(origin.token)}
    given = {name.lower() for name in headers or ()}
    fields = {name: value for name, value in fields.items() if name.lower() not in given} | (headers or {})
    if body:
        fields["Content-Length"] = str(len(body))
    lines = [f"{method} {origin.prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise InvalidInput("a header or a name holds a line break")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


@dataclass(slots=True)
class Reply:
    """An answer. Times are `time.perf_counter` seconds."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Names in lower case."""
    chunks: list[bytes] = field(default_factory=list)
    first_at: float = 0.0
    """Time when the first byte of its body had arrived; without a body, the first byte of its head."""

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def header(self, name: bytes) -> str | None:
        """Value of a header by its lower-case name, None where there is none."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)


class Connection(asyncio.Protocol):
    """One connection, one request at a time; it connects when it has to and stays open as long as the server lets it.

    Use as an async context manager, which closes it.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._reply = Reply()
        self._waiter: asyncio.Future[Reply] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        return self._transport is not None

    def close(self) -> None:
        """Close at once, even in the middle of a request."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def connect(self, timeout_s: float = _CONNECT_S) -> None:
        """Open the connection if it is not open.

        Raises:
            ConnectionBroken: no server answers there.
            TimeoutError: none did within `timeout_s`, which was short.
        """
        if self._transport is not None:
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(min(timeout_s, _CONNECT_S)):
                await loop.create_connection(
                    lambda: self, self._origin.host, self._origin.port, ssl=self._origin.context
                )
        except (OSError, TimeoutError) as exc:
            # The time may have run out between `connection_made` and here: that transport is of no use to anybody.
            self.close()
            if isinstance(exc, TimeoutError) and timeout_s < _CONNECT_S:
                raise
            trouble = tls_trouble(exc, str(self._origin))
            raise ConnectionBroken(trouble or f"no server answers at {self._origin}") from exc
        if self._transport is None:
            raise ConnectionBroken(f"{self._origin} closed the connection")

    async def request(self, message: bytes, *, timeout_s: float) -> Reply:
        """Send one request, made by `encode_http`, and wait for its whole answer.

        Raises:
            ConnectionBroken: no connection, or it ended before the answer did.
            TimeoutError: no answer within `timeout_s`; the connection is closed.
        """
        await self.connect(timeout_s)
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        # One timer costs less than the task machinery of asyncio.timeout.
        timer = loop.call_later(timeout_s, self._fail, TimeoutError())
        try:
            self._transport.write(message)
            return await self._waiter
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
            self._waiter = None

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport, but not its class.
        self._transport = cast(asyncio.Transport, transport)
        self._parser = HttpResponseParser(self)
        self._reply = Reply()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserError as exc:
            self._fail(ConnectionBroken(f"{self._origin} does not speak HTTP: {exc}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(ConnectionBroken(f"{self._origin} closed the connection"))

    # --- httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._reply.first_at = time.perf_counter()

    def on_body(self, body: bytes) -> None:
        if not self._reply.chunks:
            self._reply.first_at = time.perf_counter()
        self._reply.chunks.append(body)

    def on_message_complete(self) -> None:
        reply, self._reply = self._reply, Reply()
        reply.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(reply)
