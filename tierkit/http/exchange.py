"""One HTTP request and its answer, between a connection (`tierkit.http.protocol`) and an ASGI application.

The head of an answer and the first piece of its body leave in one write. Each write is a system call and a packet: for
a small answer, a second one costs a sixth of the whole request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

from starlette.types import ASGIApp, Message

from tierkit.errors import TerraceError

__all__ = [
    "ALONE",
    "FIELDS",
    "ON_DISCONNECT",
    "Connection",
    "Exchange",
    "head_bytes",
]

log = logging.getLogger(__name__)

ON_DISCONNECT = "terrace.on_disconnect"
"""Extension in the ASGI scope: a function that takes a callback, to be called when the client hangs up before its
answer is complete, and returns what takes it back. To wait for that by `receive()` costs a task for each request."""

ALONE = "terrace.alone"
"""Extension in the ASGI scope: a function that tells whether this is the only request that the server is receiving or
answering. Its endpoint may then hold up the event loop for a moment: no other request waits."""

FIELDS = "terrace.fields"
"""Extension in the ASGI scope: the headers by name, in lower case; if a name is repeated, its last value."""

_LARGE_PIECE_BYTES = 64 * 1024
"""Pieces above it are written on their own: copying them costs more than a system call."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

_BODILESS = frozenset({204, 304})


class Connection(Protocol):
    """Part of a connection that an exchange uses."""

    writable: bool
    """True if the client takes in what is written."""

    def write(self, *pieces: bytes) -> None: ...

    async def drain(self) -> None:
        """Return when the client has taken in enough of what was written, or has gone."""
        ...

    def alone(self) -> bool:
        """True if no other request is under way, on this connection or on others."""
        ...

    def resume_reading(self) -> None:
        """The application has taken what has come of the body: read on."""
        ...

    def finished(self, exchange: Exchange) -> None:
        """The answer is complete; or, if not `exchange.answered`, the application failed amid it."""
        ...


class Exchange:
    """ASGI's `receive` and `send` for one request.

    Args:
        connection: where the answer goes.
        scope: of the request.
        fields: its headers by name.
        keep_alive: True if the client will send more requests on this connection.
        default_headers: of the answer.
    """

    def __init__(
        self,
        connection: Connection,
        scope: dict[str, Any],
        fields: Mapping[bytes, bytes],
        *,
        keep_alive: bool,
        default_headers: Iterable[tuple[bytes, bytes]],
    ) -> None:
        self.keep_alive = keep_alive
        self.received = False
        """True if the whole request is here."""
        self.started = False
        """True if a part of the answer has been written."""
        self.answered = False
        """True if the answer is complete."""
        self.unread_bytes = 0
        """Bytes of the body that the application has not taken yet."""
        self._connection = connection
        self._scope = scope
        self._expects_continue = fields.get(b"expect", b"").lower() == b"100-continue"
        self._default_headers = default_headers
        self._pieces: list[bytes] = []
        self._delivered = False
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None
        self._start: Message | None = None
        self._chunked = False
        self._left_bytes = 0
        self._on_disconnect: Callable[[], None] | None = None
        scope["extensions"] = {ON_DISCONNECT: self.on_disconnect, ALONE: connection.alone, FIELDS: fields}

    # --- called by the connection ---

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer."""
        try:
            await app(self._scope, self.receive, self.send)
            if not (self.answered or self._gone):
                log.error("the application returned without an answer")
        except TerraceError as exc:
            # An answer that breaks off is no fault of the program, and `Answering` has said why.
            log.debug("the connection is cut: %s", exc)
        except Exception:
            log.exception("exception in the application")
        finally:
            # The scope refers to this object, and this object to the scope.
            del self._scope["extensions"]
            if not (self.answered or self._gone):
                self._connection.finished(self)

    def feed(self, piece: bytes) -> None:
        """A piece of the body has come."""
        if self.answered or self._gone:
            return
        self._pieces.append(piece)
        self.unread_bytes += len(piece)

    def feed_end(self) -> None:
        """The body is complete."""
        self.received = True

    def wake(self) -> None:
        """Hand what has come to the application. Called once for all pieces that came in one packet."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def give_up(self) -> None:
        """The client has gone, or the connection answers in the application's place: to the application both look
        the same."""
        if self._gone or self.answered:
            return
        self._gone = True
        self._pieces.clear()
        self.wake()
        if self._on_disconnect is not None:
            self._on_disconnect()

    # --- called by the application ---

    def on_disconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """The extension `ON_DISCONNECT`."""
        if self._gone:
            callback()
        outer, self._on_disconnect = self._on_disconnect, callback

        def take_back() -> None:
            self._on_disconnect = outer

        return take_back

    async def receive(self) -> Message:
        """ASGI: the body as far as it has come, then the news that the client has gone or the answer is complete."""
        if self._expects_continue:
            self._expects_continue = False
            if not (self.started or self._gone):
                self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._gone or self.answered):
            if (self._pieces or self.received) and not self._delivered:
                pieces, self._pieces = self._pieces, []
                self.unread_bytes = 0
                self._delivered = self.received
                self._connection.resume_reading()
                body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                return {"type": "http.request", "body": body, "more_body": not self.received}
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """ASGI: the answer's head, then its body."""
        if self._gone:
            return
        if self._start is None:
            self._start = message
            return
        if self.answered:
            raise RuntimeError("the answer is already complete")
        # Also before the last piece: a client that asks on and on and never reads gets no further than this.
        if not self._connection.writable:
            await self._connection.drain()
            if self._gone:
                return
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        head = b""
        if not self.started:
            head = self._head(self._start, None if more else len(body))
            self.started = True
        if self._scope["method"] == "HEAD" or self._start["status"] in _BODILESS:
            body = b""
        elif self._chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else b"0\r\n\r\n")
        else:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (self._left_bytes and not more):
                raise RuntimeError("the answer has another length than its content-length says")
        if len(body) > _LARGE_PIECE_BYTES:
            self._connection.write(head, body)
        elif head or body:
            self._connection.write(head + body)
        if not more:
            self.answered = True
            # Nobody will read it. What counts as unread would keep the connection from being read on.
            self._pieces.clear()
            self.unread_bytes = 0
            self.wake()
            self._connection.finished(self)

    def _head(self, start: Message, body_bytes: int | None) -> bytes:
        """The answer's head; `body_bytes` is the length of the body where it is known."""
        status: int = start["status"]
        headers = [*self._default_headers, *start.get("headers", ())]
        length: bytes | None = None
        closes = False
        for name, value in headers:
            # The lengths first: this is done for each header of each answer.
            if len(name) == 14 and name.lower() == b"content-length":
                length = value
            elif len(name) == 10 and name.lower() == b"connection":
                closes = b"close" in value.lower()
        if length is not None:
            self._left_bytes = int(length)
        elif status not in _BODILESS:
            if body_bytes is None:
                self._chunked = True
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                self._left_bytes = body_bytes
                headers.append((b"content-length", b"%d" % body_bytes))
        if closes:
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append((b"connection", b"close"))
        return head_bytes(status, headers)


def head_bytes(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Status line and headers.

    Raises:
        RuntimeError: a header holds a line break, and would so add headers, or a body, chosen by another party.
    """
    lines = [b"%b: %b\r\n" % pair for pair in headers]
    text = b"".join(lines)
    if text.count(b"\n") != len(lines) or text.count(b"\r") != len(lines) or b"\0" in text:
        raise RuntimeError("a header of the answer holds a line break")
    return (_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status) + text + b"\r\n"
