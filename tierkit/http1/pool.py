"""The connections to one server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable

import httpx

from tierkit.http1.connection import Connection

__all__ = ["Pool"]


class Pool:
    """Opens connections, up to a limit, and keeps those that can be used again.

    The latest used goes first, so that those which are not needed grow old and are closed; who finds none free waits
    in line. While somebody waits all places are taken and no connection is idle.

    Args:
        host: name or address.
        port: of the server.
        context: for TLS; None for none.
        max_connections: also counts those that are being made.
        keepalive_s: for which an idle one stays open.
        emptied: called when there is no connection any more.
    """

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None,
        *,
        max_connections: int,
        keepalive_s: float,
        emptied: Callable[[], None],
    ) -> None:
        self._host = host
        self._port = port
        self._context = context
        self._max_connections = max_connections
        self._keepalive_s = keepalive_s
        self._emptied = emptied
        self._taken = 0
        """Places: connections that are being made, used or idle."""
        self._idle: list[Connection] = []
        """The latest used last."""
        self._waiting: deque[asyncio.Future[Connection | None]] = deque()
        """Each gets a connection, or the place for one."""
        self._open: set[Connection] = set()
        """All whose socket is not closed yet."""
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, *, wait_s: float | None, connect_s: float | None) -> Connection:
        """A connection on which nothing is under way. It comes back by itself when its exchange is over.

        Args:
            wait_s: for one that is free; None for ever.
            connect_s: for a new one.

        Raises:
            PoolTimeout: none became free in time.
            ConnectTimeout: the server did not take one in time.
            ConnectError: there is no way to the server.
        """
        connection = self._take_idle()
        if connection is None:
            if self._taken < self._max_connections:
                self._taken += 1
            else:
                connection = await self._wait(wait_s)
        if connection is not None and connection.is_open:
            return connection
        try:
            return await self._connect(connect_s)
        except BaseException:
            self._free_place()
            raise

    def _take_idle(self) -> Connection | None:
        if not self._idle:
            return None
        oldest = asyncio.get_running_loop().time() - self._keepalive_s
        while self._idle:
            connection = self._idle.pop()
            # After a long pause of the whole process the server's patience may have ended, and the timer is late.
            if connection.idle_since > oldest and connection.is_quiet:
                return connection
            connection.drop()
            self._taken -= 1
        return None

    async def _wait(self, wait_s: float | None) -> Connection | None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Connection | None] = loop.create_future()
        timer = None if wait_s is None else loop.call_later(wait_s, _give_up, turn, wait_s)
        self._waiting.append(turn)
        try:
            return await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on(turn.result())  # cancelled at the moment at which it was its turn
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _connect(self, connect_s: float | None) -> Connection:
        made = Connection(self)
        try:
            async with asyncio.timeout(connect_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: made,
                    self._host,
                    self._port,
                    ssl=self._context,
                    server_hostname=None if self._context is None else self._host,
                )
        except BaseException as exc:
            made.drop()
            if isinstance(exc, TimeoutError) and exc.errno is None:  # the kernel's own has a number
                raise httpx.ConnectTimeout(f"no connection within {connect_s:g} s") from exc
            if isinstance(exc, (OSError, ValueError)):  # ValueError: a name that cannot be one
                raise httpx.ConnectError(str(exc) or type(exc).__name__) from exc
            raise
        if self._closed:
            made.drop()
        if not made.is_open:
            raise httpx.ConnectError("the connection was closed as soon as it was made")
        self._open.add(made)
        return made

    # --- Owner of the connections ---

    def done(self, connection: Connection) -> None:
        """See `Owner`."""
        self._pass_on(connection)

    def lost(self, connection: Connection) -> None:
        """See `Owner`."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
            self._free_place()

    def _pass_on(self, connection: Connection | None) -> None:
        """To the next in line, or among the idle ones; a place alone where it is closed."""
        if connection is None or not connection.is_open:
            self._free_place()
        elif not self._serve_next(connection):
            if self._keepalive_s <= 0.0:
                connection.drop()
                self._free_place()
                return
            loop = asyncio.get_running_loop()
            connection.idle_since = loop.time()
            self._idle.append(connection)
            if self._timer is None:
                self._timer = loop.call_at(connection.idle_since + self._keepalive_s, self._close_old)

    def _free_place(self) -> None:
        if not self._serve_next(None):
            self._taken -= 1
            if not self._taken:
                self._stop_timer()
                self._emptied()

    def _serve_next(self, connection: Connection | None) -> bool:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(connection)
                return True
        return False

    def _close_old(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._idle:
            due = self._idle[0].idle_since + self._keepalive_s
            if due > loop.time():
                self._timer = loop.call_at(due, self._close_old)
                return
            self._idle.pop(0).drop()
            self._free_place()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def aclose(self) -> None:
        """Close all connections, also those in use, and turn away who waits."""
        self._closed = True
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(httpx.PoolTimeout("the client is being closed"))
        self._waiting.clear()
        self._stop_timer()
        self._idle.clear()
        closing = list(self._open)
        for connection in closing:
            connection.drop((httpx.ReadError, "the client is being closed", None))
        if closing:
            await asyncio.wait([connection.closed for connection in closing])


def _give_up(turn: asyncio.Future[Connection | None], wait_s: float) -> None:
    if not turn.done():
        turn.set_exception(httpx.PoolTimeout(f"no connection was free for {wait_s:g} s"))
