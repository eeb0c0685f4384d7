"""HTTP/1.1 connections with bounds on everything that a peer may send or leave out.

The bounds are on a slow, endless or absent head, a body that is too large or too slow, an answer that the client does
not read, and too many connections. The protocol class of uvicorn bounds only the idle time between two requests.
docs/explanation/performance.md gives the reason for each part.

A request may be answered before its body is complete: the rest of the body is discarded as it arrives, and the
connection stays open.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from tierkit.http.exchange import Exchange, head_bytes
from tierkit.http.head import refusal_of, without_upgrade
from tierkit.http.responses import error_response
from tierkit.settings import ServiceSettings

__all__ = ["bounded_protocol"]

log = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of the head of a request, and of a chunked body's framing: extensions of chunks, and trailers."""

_MAX_REMEMBERED, _MAX_REMEMBERED_BYTES = 256, 256
"""Targets that are remembered, and the longest of them."""

_CHUNK_BYTES = 32
"""Bytes that each chunk may use for its size and its line breaks."""

_READ_AHEAD_BYTES = 256 * 1024
"""Bytes of a body that are read before the application has asked for it. A batch of 50 images fits."""

_MAX_AHEAD = 1024
"""Requests that may wait on a connection for the answer to an earlier one. They come in one piece: nothing is read
while one waits."""

_LINGER_S = 2.0
"""Seconds for which the rest of a request is still read after its answer. Closing a socket with unread bytes resets the
connection, and the sender would see that reset instead of the answer."""

_RESERVE = 64
"""Connections above the limit that still get a proper 503; those beyond are closed at once."""


def bounded_protocol(settings: ServiceSettings) -> type[asyncio.Protocol]:
    """Protocol class for uvicorn with the limits of `settings`."""
    return type("BoundedHttpProtocol", (_HttpProtocol,), {"limits": settings})


class _HttpProtocol(asyncio.Protocol):
    limits: ServiceSettings

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._app = cast(ASGIApp, config.loaded_app)
        self._server_state = server_state
        self._loop = asyncio.get_running_loop()
        self._parser = self._new_parser()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # until `connection_made`
        self._addresses: dict[str, Any] = {}
        self._scheme = "http"
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._body_bytes = 0
        self._body_pieces = 0
        self._framing_bytes = 0
        """Bytes of the body's framing received so far, less `_CHUNK_BYTES` for each piece."""
        self._trailer_bytes = 0
        self._body_since = 0.0
        self._answering: Exchange | None = None
        """The request whose turn it is; it stays until it and its answer are complete."""
        self._receiving: Exchange | None = None
        """The request whose body is being received."""
        self._pipelined: deque[Exchange] = deque()
        self._ending = False
        """True if no more requests are taken from this client; further bytes are discarded."""
        self._paused = False
        self._waiting_for: Callable[[], None] | None = None
        """Called when `_timer` is due."""
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self.writable = True
        self._drained = asyncio.Event()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport, but not its class.
        self._transport = cast(asyncio.Transport, transport)
        # No name: the peer has gone already.
        self._addresses = {
            "client": (transport.get_extra_info("peername") or ())[:2] or None,
            "server": (transport.get_extra_info("sockname") or ())[:2] or None,
        }
        self._scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # uvicorn names its own classes
        excess = len(self._server_state.connections) - self.limits.max_connections
        if excess > _RESERVE:
            self._transport.abort()
            return
        if excess > 0:
            self._app = _too_many_connections
        self._wait(self._head_is_late, self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        self._ending = True
        self._wait(None)
        self.resume_writing()
        for exchange in (self._answering, *self._pipelined):
            if exchange is not None:
                exchange.give_up()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        receiving, body_bytes, body_pieces = self._receiving, self._body_bytes, self._body_pieces
        if receiving is None:
            self._head_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as exc:
            log.debug("not HTTP", extra={"peer": self._addresses["client"], "why": str(exc)})
            self._refuse(400, "this is no valid HTTP request")
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse_long_head()
        if receiving is not None and receiving is self._receiving:
            allowed = self._body_bytes - body_bytes + (self._body_pieces - body_pieces) * _CHUNK_BYTES
            self._framing_bytes += len(data) - allowed
            if self._framing_bytes > _MAX_HEAD_BYTES:
                self._refuse_long_framing()
        if self._receiving is not None and self._receiving.unread_bytes >= _READ_AHEAD_BYTES:
            self._pause_reading()
            self._receiving.wake()
        self._watch()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # A client that asks for the connection to be closed, and yet sends more, shall have its answer.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _feed(self, data: bytes | memoryview) -> None:
        """Have it parsed, as if no request offered to change the protocol."""
        while not self._ending:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as exc:
                if self._ending:
                    return
                # This parser reads no further: another one reads the head without the offer, and what follows.
                data = memoryview(data)[exc.args[0] :]
                method, version = self._parser.get_method(), self._parser.get_http_version()
                head = without_upgrade(method, self._url, version, self._headers)
                self._parser = self._new_parser()
                try:
                    self._parser.feed_data(head)
                except httptools.HttpParserUpgrade:
                    return  # CONNECT, on a connection that is closing already
            else:
                return

    def eof_received(self) -> bool:
        return False  # a client that closes its side has hung up

    def pause_writing(self) -> None:
        self.writable = False
        self._drained.clear()
        self._write_timer = self._loop.call_later(self.limits.write_timeout_s, self._transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        self.writable = True
        self._drained.set()

    # --- httptools ---

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._receiving is None:
            self._headers.append((name.lower(), value.rstrip(b" \t")))
            return
        # A trailer. Nobody reads any, and it shall not pass for a header (RFC 9110, 6.5.1).
        self._trailer_bytes += _line_bytes(name, value)
        if self._trailer_bytes > _MAX_HEAD_BYTES:
            self._refuse_long_framing()

    def on_headers_complete(self) -> None:
        if self._ending:
            return
        # More came than a head may hold. It may be the body, or the next request: count.
        if self._head_bytes > _MAX_HEAD_BYTES and self._head_length() > _MAX_HEAD_BYTES:
            self._refuse_long_head()
            return
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(501, "this is no proxy")
            return
        if self._parser.should_upgrade():
            return  # `_feed` has the head read once more
        version = self._parser.get_http_version()
        headers = dict(self._headers)
        if refusal := refusal_of(version, self._headers, headers):
            self._refuse(*refusal)
            return
        self._head_bytes = 0
        self._body_bytes = self._body_pieces = self._framing_bytes = self._trailer_bytes = 0
        self._body_since = self._loop.time()
        raw_path, path, query = _parsed(self._url) if len(self._url) <= _MAX_REMEMBERED_BYTES else _parse(self._url)
        exchange = self._receiving = Exchange(
            self,
            {
                "type": "http",
                "asgi": {"version": "3.0", "spec_version": "2.3"},
                "http_version": version,
                "method": method.decode("ascii"),
                "scheme": self._scheme,
                "path": path,
                "raw_path": raw_path,
                "query_string": query,
                "root_path": "",
                "headers": self._headers,
                **self._addresses,
            },
            headers,
            keep_alive=version != "1.0" and self._parser.should_keep_alive(),
            default_headers=self._server_state.default_headers,
        )
        if self._answering is None:
            self._answer(exchange)
        elif len(self._pipelined) < _MAX_AHEAD:
            self._pipelined.append(exchange)
            self._pause_reading()
        else:
            self._refuse(429, f"more than {_MAX_AHEAD} requests sent ahead")
            return
        if (length := int(headers.get(b"content-length", 0))) > self.limits.max_body_bytes:
            self._refuse(413, self._too_large(f"{length} bytes"))

    def on_body(self, piece: bytes) -> None:
        exchange = self._receiving
        if exchange is None or self._ending:
            return
        self._body_bytes += len(piece)
        self._body_pieces += 1
        if self._body_bytes > self.limits.max_body_bytes:
            self._refuse(413, self._too_large(f"more than {self.limits.max_body_bytes} bytes"))
        else:
            exchange.feed(piece)

    def on_message_complete(self) -> None:
        exchange, self._receiving = self._receiving, None
        if exchange is None or self._ending:
            return
        exchange.feed_end()
        if exchange.answered:
            self._next()
        else:
            exchange.wake()

    # --- one request after the other ---

    def _answer(self, exchange: Exchange) -> None:
        self._answering = exchange
        task = self._loop.create_task(exchange.run(self._app))
        # uvicorn waits for these when it stops.
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    def _next(self) -> None:
        """Request and answer are complete: on to the next one."""
        self._answering = None
        if self._pipelined:
            self._answer(self._pipelined.popleft())
        self.resume_reading()

    def shutdown(self) -> None:
        """Called by uvicorn when it stops: end the connection as soon as nothing is being answered."""
        if self._answering is None:
            self._transport.close()
        else:
            self._answering.keep_alive = False

    def abort(self) -> None:
        """End the connection now, even if the client has not read all of the answer."""
        self._transport.abort()

    # --- called by exchanges ---

    def write(self, *pieces: bytes) -> None:
        # Not `writelines`: before Python 3.12.9 and 3.13.2 it does not heed what is full or lost (CVE-2024-12254).
        self._transport.write(b"".join(pieces))

    async def drain(self) -> None:
        await self._drained.wait()

    def alone(self) -> bool:
        return len(self._server_state.tasks) == 1 and not self._pipelined

    def resume_reading(self) -> None:
        # With requests that wait for their turn there is nothing to read for: what is being answered has come whole.
        if self._paused and (self._ending or not self._pipelined):
            self._paused = False
            self._transport.resume_reading()

    def finished(self, exchange: Exchange) -> None:
        if not exchange.answered:
            # Breaking the connection is how HTTP tells that an answer, once begun, will not be completed.
            if not exchange.started:
                self._write_error(500, "internal error")
            self._transport.close()
        elif not exchange.keep_alive:
            self._close()
        elif exchange.received:
            self._next()
            self._watch()
        else:
            self.resume_reading()
            self._watch()

    # --- bounds ---

    def _watch(self) -> None:
        """Set the time by which the next bytes must be there."""
        if self._ending:
            return
        if self._receiving is not None:
            if self._receiving.answered:
                self._wait(self._rest_is_late, _LINGER_S)
            else:
                self._wait(self._body_is_late, self.limits.body_timeout_s)
        elif self._head_bytes:
            self._wait(self._head_is_late, self.limits.header_timeout_s)
        elif self._answering is None:
            self._wait(self._idle_for_long, self.limits.keep_alive_s)
        else:
            self._wait(None)  # for the application, however long it takes

    def _wait(self, then: Callable[[], None] | None, seconds: float = 0.0) -> None:
        """Call `then` after `seconds`, unless a new wait has begun by then."""
        if then == self._waiting_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._waiting_for = then
        self._timer = None if then is None else self._loop.call_later(seconds, then)

    def _idle_for_long(self) -> None:
        self._transport.close()

    def _rest_is_late(self) -> None:
        self._transport.close()

    def _head_is_late(self) -> None:
        self._waiting_for = None
        if self._paused:
            self._watch()  # it is we who do not read
        elif self._head_bytes:
            self._refuse(408, f"the head of the request was not complete after {self.limits.header_timeout_s:g} s")
        else:
            self._transport.close()

    def _body_is_late(self) -> None:
        self._waiting_for = None
        earned_s = self._body_bytes * 8 / self.limits.min_upload_bps
        left_s = self._body_since + self.limits.body_timeout_s + earned_s - self._loop.time()
        if self._paused:
            self._watch()
        elif left_s > 0:
            self._wait(self._body_is_late, left_s)
        else:
            self._refuse(408, f"the body did not arrive in time ({self._body_bytes} bytes so far)")

    def _head_length(self) -> int:
        """Bytes of the head: its target and its lines."""
        return len(self._url) + sum(_line_bytes(name, value) for name, value in self._headers)

    def _refuse_long_head(self) -> None:
        self._refuse(431, f"the head of the request is longer than {_MAX_HEAD_BYTES} bytes")

    def _refuse_long_framing(self) -> None:
        self._refuse(431, f"the extensions of chunks and the trailers are longer than {_MAX_HEAD_BYTES} bytes")

    def _too_large(self, size: str) -> str:
        return f"the body has {size}; {self.limits.max_body_bytes} are accepted (setting max_body_bytes)"

    def _refuse(self, status: int, message: str) -> None:
        """Answer in the application's place, and end the connection."""
        if self._ending or self._transport.is_closing():
            return
        exchange = self._answering
        if exchange is not None and exchange is not self._receiving:
            # Amid the answer to an earlier request, bytes of ours would be read as part of it: that one is completed.
            exchange.keep_alive = False
            self._ending = True
            self._wait(None)
            return
        if exchange is not None:
            exchange.give_up()
            if exchange.started:
                self._transport.close()
                return
        self._write_error(status, message)
        self._close()

    def _write_error(self, status: int, message: str) -> None:
        answer = error_response(status, message, close=True)
        self._transport.write(head_bytes(status, answer.raw_headers) + bytes(answer.body))

    def _close(self) -> None:
        """Close the connection, when what the client still sends has been taken in."""
        if self._receiving is None and not self._ending and not self._head_bytes:
            self._transport.close()
            return
        self._ending = True
        if self._transport.can_write_eof():  # TLS has no half-closed connections
            self._transport.write_eof()
        self.resume_reading()
        self._wait(self._rest_is_late, _LINGER_S)

    def _pause_reading(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _parse(target: bytes) -> tuple[bytes, str, bytes]:
    """The path of a request, raw and decoded, and its query."""
    url = httptools.parse_url(target)
    path = url.path.decode("ascii")
    return url.path, unquote(path) if "%" in path else path, url.query or b""


_parsed = lru_cache(_MAX_REMEMBERED)(_parse)


def _line_bytes(name: bytes, value: bytes) -> int:
    """Bytes of a header line, with its colon, its blank and its line break."""
    return len(name) + len(value) + 4


async def _too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    refusal = error_response(503, "too many connections; try again in a second", retry_after_s=1, close=True)
    await refusal(scope, receive, send)
