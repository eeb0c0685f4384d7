"""One connection to a server, and the exchanges on it: a request and its answer, one after the other."""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Protocol, cast

import httptools
import httpx

from tierkit.http1.way import Answer, Pieces

__all__ = ["Connection", "Exchange", "Owner"]

_MAX_BARREN_BYTES = 64 * 1024
"""For what may come in a row without a byte of a body: the head with all 1xx before it, extensions of chunks, trailers.
A single read, 256 KiB, may bring more."""

_MAX_HEADERS = 256

_GATHER_BYTES = 64 * 1024
"""A request whose length is known goes out in pieces of at least this size: each write is a system call, and wakes the
server up once more."""

_READ_AHEAD_BYTES = 256 * 1024
"""So much of an answer is taken in before somebody reads it."""

_PIECE_BYTES = 64
"""What a piece of a body takes besides its own bytes: a server may send millions that hold next to nothing."""

Failure = tuple[type[httpx.TransportError], str, Exception | None]
"""What to raise, its words, and its cause. Not the error itself: once raised, it would hold on to its raiser."""

_DROPPED: Failure = (httpx.ReadError, "the exchange was given up before its end", None)


class Owner(Protocol):
    """Who is told what becomes of a connection."""

    def done(self, connection: Connection) -> None:
        """Its exchange is over; it can take another one if it is still open."""

    def lost(self, connection: Connection) -> None:
        """Its socket is closed."""


class Connection(asyncio.Protocol):
    """Reads answers, and knows whether it can be used again.

    Args:
        owner: told of the end of each exchange, and of its own.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._poll = select.poll()
        self._exchange: Exchange | None = None
        self._barren_bytes = 0
        """What has come since the last byte of a body."""
        self._fault = ""
        """What a callback of the parser objects to."""
        self._paused = False
        self.writable = True
        """Whether the socket takes more for now."""
        self.idle_since = 0.0
        """When its last exchange was over; for its owner."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """Whether nothing is known against sending another request."""
        return self._transport is not None

    @property
    def is_quiet(self) -> bool:
        """Whether it is open and the server has not said anything meanwhile, not even goodbye. Asks the kernel: the
        event loop may not have got round to it."""
        return self._transport is not None and not self._poll.poll(0)

    def begin(self, exchange: Exchange) -> None:
        """From now on what arrives is the answer to this one."""
        self._exchange = exchange
        self._barren_bytes = 0

    def write(self, pieces: list[bytes | memoryview]) -> None:
        """Send these bytes, or views, without a copy where the event loop makes none."""
        assert self._transport is not None
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    def resume(self) -> None:
        """Go on reading where too much had been unread."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def drop(self, failure: Failure = _DROPPED) -> None:
        """Close at once; the exchange under way gets no more than it has."""
        if self._exchange is not None and not self._exchange.complete:
            self._exchange.failure = failure
        self._close()
        self._leave()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def _leave(self) -> None:
        if self._exchange is not None:
            self._exchange.connection = None
            self._exchange.wake()
            self._exchange = None
            self._owner.done(self)

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport, but not its class.
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        exchange, parser = self._exchange, self._parser
        if exchange is None or parser is None:
            self._close()  # nobody asked
            return
        self._barren_bytes += len(data)
        reusable = True
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.drop((httpx.RemoteProtocolError, "the server goes on in another protocol, unasked", None))
            return
        except httptools.HttpParserError as exc:
            if not exchange.complete:
                self.drop((httpx.RemoteProtocolError, self._fault or f"this is no HTTP: {exc!s:.200}", None))
                return
            reusable = False
        if exchange.complete:
            if not (reusable and exchange.reusable and exchange.sent):
                self._close()
            self._leave()
            return
        if self._barren_bytes > _MAX_BARREN_BYTES:
            self.drop((httpx.RemoteProtocolError, f"more than {_MAX_BARREN_BYTES} bytes beside the body", None))
            return
        if exchange.unread_bytes > _READ_AHEAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        exchange.wake()

    def eof_received(self) -> None:
        self._ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(exc)
        self._parser = None  # the two hold each other
        self._owner.lost(self)
        self.closed.set_result(None)

    def _ended(self, exc: Exception | None) -> None:
        exchange = self._exchange
        if exchange is None:
            self._close()
        elif exc is not None:
            kind = httpx.ReadError if exchange.sent else httpx.WriteError
            self.drop((kind, f"the connection broke: {exc!s:.200}", exc))
        elif not exchange.answered:
            self.drop((httpx.RemoteProtocolError, "the server closed the connection without an answer", None))
        elif not exchange.ends_with_connection:
            self.drop((httpx.RemoteProtocolError, "the server closed the connection in the middle of its answer", None))
        else:
            exchange.complete = True
            self.drop()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self._exchange is not None:
            self._exchange.wake()

    # --- httptools ---

    def on_message_begin(self) -> None:
        if self._exchange is None or self._exchange.complete:
            self._object("a second answer")

    def on_status(self, reason: bytes) -> None:
        assert self._exchange is not None
        self._exchange.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        assert exchange is not None
        if exchange.answered:
            return  # behind a chunked body
        exchange.headers.append((name, value.rstrip(b" \t")))
        if len(exchange.headers) > _MAX_HEADERS:
            self._object(f"more than {_MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            exchange.headers.clear()
            exchange.reason = b""
            return
        exchange.status = status
        exchange.version = b"HTTP/" + self._parser.get_http_version().encode()
        exchange.answered = True
        if exchange.bodiless:
            exchange.complete = True  # the parser does not know, and waits for a body: it is of no use any more

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        assert exchange is not None
        if exchange.complete:
            self._object("a body where there is none")
        self._barren_bytes = 0
        exchange.unread_bytes += len(body) + _PIECE_BYTES
        exchange.pieces.append(body)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        assert self._parser is not None
        if exchange.answered and not exchange.complete:
            exchange.complete = True
            exchange.reusable = self._parser.should_keep_alive()

    def _object(self, to: str) -> None:
        self._fault = to
        raise ValueError(to)


class Exchange(Answer):
    """A request, and its answer as the stream of its body.

    The connection is free for the next exchange as soon as the answer has come whole, read or not.

    Args:
        connection: nothing else is under way on it.
        bodiless: whether the answer is a head alone, whatever it says.
        read_s: for how long the server may be silent; None for ever.
        write_s: for how long it may take in nothing.
    """

    def __init__(
        self, connection: Connection, *, bodiless: bool = False, read_s: float | None, write_s: float | None
    ) -> None:
        self.connection: Connection | None = connection
        """None once the answer is complete, or will never be."""
        self.bodiless = bodiless
        self._read_s = read_s
        self._write_s = write_s
        self._waiter: asyncio.Future[None] | None = None
        self.sent = False
        """Whether the request has gone out whole."""
        self.status = 0
        self.reason = b""
        self.version = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.answered = False
        """Whether the head is complete."""
        self.pieces: deque[bytes] = deque()
        """Body, unread."""
        self.unread_bytes = 0
        """What they take."""
        self.complete = False
        self.reusable = False
        """Whether the server keeps the connection open."""
        self.failure: Failure | None = None
        """Why the rest will not come."""
        connection.begin(self)

    @property
    def ends_with_connection(self) -> bool:
        """Whether the head names no other end of the body."""
        for name, value in self.headers:
            match name.lower():
                case b"content-length":
                    return False
                case b"transfer-encoding":
                    return not value.rstrip().lower().endswith(b"chunked")
        return True

    async def send(
        self, head: bytes, body: Sequence[bytes | memoryview] | AsyncIterable[bytes], length: int | None
    ) -> None:
        """Send the request, or as much of it as the server wants: an answer, or the end of the connection, ends it.

        Args:
            head: with its empty line.
            body: what lies in memory goes out at once.
            length: of the body in bytes; None to send it in chunks.

        Raises:
            LocalProtocolError: the body has another length.
            WriteTimeout: the server did not take it in.
        """
        if isinstance(body, Sequence):
            if length is not None:
                await self._write([head, *body], last=True)
                return
            body = Pieces(body)
        pieces: list[bytes | memoryview] = [head]
        gathered = 0
        left = length
        parts = aiter(body)
        try:
            async for part in parts:
                if not part:
                    continue
                if left is None:
                    pieces += (b"%x\r\n" % len(part), part, b"\r\n")
                else:
                    left -= len(part)
                    if left < 0:
                        raise httpx.LocalProtocolError(f"the body is longer than its Content-Length, {length}")
                    pieces.append(part)
                    gathered += len(part)
                    if left and gathered < _GATHER_BYTES:
                        continue
                    gathered = 0
                if not await self._write(pieces, last=left == 0):
                    return
                pieces = []
        finally:
            if close := getattr(parts, "aclose", None):
                await close()
        if left:
            raise httpx.LocalProtocolError(f"the body is {left} bytes shorter than its Content-Length, {length}")
        if left is None:
            pieces.append(b"0\r\n\r\n")
        if pieces:
            await self._write(pieces, last=True)

    async def _write(self, pieces: list[bytes | memoryview], *, last: bool) -> bool:
        """Whether more is wanted."""
        if self.connection is None or self.answered:
            return False
        self.sent = last
        self.connection.write(pieces)
        # With the last piece there is nothing to hold back: the answer is awaited in any case.
        if not last or self._write_s is not None:
            while self.connection is not None and not self.connection.writable and not self.answered:
                await self._wait(self._write_s, httpx.WriteTimeout)
        return True

    async def receive_head(self) -> None:
        """Return when the status and the headers are here.

        Raises:
            TransportError: the connection broke, or what came is no HTTP.
            ReadTimeout: the server is silent.
        """
        while not self.answered:
            self._raise_failure()
            await self._wait(self._read_s, httpx.ReadTimeout)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self.pieces:
            if self.complete:
                raise StopAsyncIteration
            self._raise_failure()
            await self._wait(self._read_s, httpx.ReadTimeout)
        piece = self.pieces.popleft()
        self.unread_bytes -= len(piece) + _PIECE_BYTES
        if self.connection is not None and self.unread_bytes <= _READ_AHEAD_BYTES // 2:
            self.connection.resume()
        return piece

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Nothing more is wanted; where something more would come, the connection goes."""
        if self.connection is not None:
            self.connection.drop()

    def wake(self) -> None:
        """Something has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, limit_s: float | None, late: type[httpx.TimeoutException]) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None if limit_s is None else loop.call_later(limit_s, _give_up, waiter, late, limit_s)
        try:
            await waiter
        except BaseException:
            self.close()
            raise
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            kind, why, cause = self.failure
            raise kind(why) from cause


def _give_up(waiter: asyncio.Future[None], late: type[httpx.TimeoutException], limit_s: float) -> None:
    if not waiter.done():
        waiter.set_exception(late(f"nothing for {limit_s:g} s"))
