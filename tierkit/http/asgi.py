"""Reading a request straight from ASGI, for routes on which the web framework's own `Request` costs too much."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from types import TracebackType
from typing import ClassVar

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierkit.errors import Overloaded, TooLarge
from tierkit.http.exchange import ON_DISCONNECT
from tierkit.memory import give_back

__all__ = ["DirectRoutes", "HeadAsGet", "ReadsWhileWanted", "cancelled_on_disconnect", "read_body"]

_SMALL_BODY_BYTES = 256 * 1024
"""Bodies up to this are always taken in: the number of connections bounds them."""

_MAX_LARGE_BYTES = 256 * 1024**2
"""For all larger bodies together, until their requests have been answered."""

_MAX_KEPT_BYTES = 64 * 1024**2
"""What was needed for more than this is given back to the system."""


class DirectRoutes:
    """ASGI middleware: POST requests for some paths go straight to their endpoint, past the framework's routing and
    exception handling, which take as long as decoding the request.

    Args:
        app: answers all other requests.
        endpoints: by path, each with its path parameters. They answer their own errors.
        below: endpoints of all paths that are one of these and one more segment, each with the name of the path
            parameter that this segment is. Likewise.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, tuple[ASGIApp, Mapping[str, str]]],
        below: Mapping[str, tuple[ASGIApp, str]],
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._below = below

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._find(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (endpoint or self._app)(scope, receive, send)

    def _find(self, scope: Scope) -> ASGIApp | None:
        if found := self._endpoints.get(scope["path"]):
            endpoint, scope["path_params"] = found
            return endpoint
        above, _, last = scope["path"].rpartition("/")
        if last and (known := self._below.get(above)):
            endpoint, name = known
            scope["path_params"] = {name: last}
            return endpoint
        return None


class HeadAsGet:
    """ASGI middleware for frameworks that refuse HEAD: it is answered as GET up to the head. The server leaves the body
    out, and an endless one ends with its first piece.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        over = False

        async def send_head(message: Message) -> None:
            nonlocal over
            if over:
                return
            await send(message)
            over = message["type"] == "http.response.body"
            if over and message.get("more_body", False):
                # From here on the server says to the application that the client has gone, which ends a stream.
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, send_head)


class ReadsWhileWanted:
    """ASGI middleware: GET requests end with the connection of who has sent them. Nothing that they wait for in `app`
    may suffer from being cancelled."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        with cancelled_on_disconnect(scope):
            # A request and the reset of its connection are read in two rounds of the event loop. Thousands of them cost
            # little if they are not begun.
            for _ in range(2):
                await asyncio.sleep(0)
            await self._app(scope, receive, send)


async def read_body(receive: Receive, *, most_bytes: float = math.inf) -> bytes:
    """The whole request body. Its size and its pace are bounded by `tierkit.http`.

    Args:
        most_bytes: where the route takes less than the service does.

    What has come is kept in pieces and joined once: memory follows what the client really sent, not what it said
    that it would send.

    Raises:
        TooLarge: more than `most_bytes`, as soon as it shows.
        ClientDisconnect: the client hung up before the end.
        Overloaded: the service holds too many large bodies besides.
    """
    pieces: list[bytes] = []
    size = 0
    large: _LargeBody | None = None
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body: bytes = message.get("body", b"")
        size += len(body)
        if size > most_bytes:
            raise TooLarge(f"the body is larger than the {most_bytes} bytes that this route takes")
        if size > _SMALL_BODY_BYTES:
            large = large or _LargeBody()
            large.grow(size)
        if not message.get("more_body", False):
            return b"".join([*pieces, body]) if pieces else body
        pieces.append(body)


class _LargeBody:
    """Counts a body from now on until the task that reads it, which answers the request, has ended."""

    total_bytes: ClassVar[int] = 0
    """Of all that this process holds."""
    most_bytes: ClassVar[int] = 0
    """Of all that it held at a time, since there were none."""

    def __init__(self) -> None:
        self._bytes = 0
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(self._let_go)

    def grow(self, size: int) -> None:
        _LargeBody.total_bytes += size - self._bytes
        self._bytes = size
        _LargeBody.most_bytes = max(_LargeBody.most_bytes, _LargeBody.total_bytes)
        # Whatever its size, one body alone has room.
        if _LargeBody.total_bytes - size > _MAX_LARGE_BYTES:
            raise Overloaded("too many large request bodies at a time; try again in a second", retry_after_s=1)

    def _let_go(self, _task: asyncio.Task[object]) -> None:
        _LargeBody.total_bytes -= self._bytes
        if _LargeBody.total_bytes == 0:
            if _LargeBody.most_bytes > _MAX_KEPT_BYTES:
                asyncio.get_running_loop().run_in_executor(None, give_back)
            _LargeBody.most_bytes = 0


class cancelled_on_disconnect:
    """Context manager: cancel what runs inside as soon as the client hangs up. The body must have been read.

    A class, for a generator takes three times as long to enter and leave, which counts when it is done per request.

    Raises:
        ClientDisconnect: the client hung up while it ran.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._gone = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._take_back = self._scope["extensions"][ON_DISCONNECT](self._hang_up)

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._take_back()
        # Cancelled from elsewhere as well: then that is what counts.
        if kind is not None and issubclass(kind, asyncio.CancelledError) and self._gone and self._task.uncancel() == 0:
            raise ClientDisconnect from None

    def _hang_up(self) -> None:
        self._gone = True
        self._task.cancel()
