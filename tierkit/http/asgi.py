"""Reading a request straight from ASGI, on routes for which the web framework's own `Request` costs too much."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierkit.errors import Overloaded, TooLarge
from tierkit.http.exchange import ALONE, FIELDS, ON_DISCONNECT
from tierkit.memory import give_back

__all__ = ["BodyRoom", "HeadAsGet", "ReadsWhileWanted", "cancelled_on_disconnect", "fields_of", "is_alone", "read_body"]

_SMALL_BODY_BYTES = 256 * 1024
"""Bodies up to this are always taken in: the number of connections bounds them."""

_MAX_LARGE_BYTES = 256 * 1024**2
"""Most bytes of all larger bodies together, until their requests have been answered."""

_MAX_KEPT_BYTES = 64 * 1024**2
"""After larger peaks than this, free memory is returned to the system."""


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
        waiting: list[Callable[[], None]] = []
        """Callbacks for the end of the connection, the innermost last."""

        def on_disconnect(callback: Callable[[], None]) -> Callable[[], None]:
            waiting.append(callback)
            take_back: Callable[[], None] = scope["extensions"][ON_DISCONNECT](callback)

            def take_back_both() -> None:
                waiting.remove(callback)
                take_back()

            return take_back_both

        async def send_head(message: Message) -> None:
            nonlocal over
            if over:
                return
            await send(message)
            over = message["type"] == "http.response.body"
            if over and message.get("more_body", False):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                # The answer is complete, but the application would go on: to it the client has gone.
                if waiting:
                    waiting[-1]()

        extensions = {**scope["extensions"], ON_DISCONNECT: on_disconnect}
        await self._app({**scope, "method": "GET", "extensions": extensions}, receive, send_head)


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


async def read_body(receive: Receive, room: BodyRoom | None = None, *, most_bytes: float = math.inf) -> bytes:
    """Return the whole request body. `tierkit.http` bounds its size and its pace.

    The received pieces are kept and joined once, so memory follows the bytes received and not the announced length.

    Args:
        room: counts the bytes of the body.
        most_bytes: limit of the route, if it is below the service's limit.

    Raises:
        TooLarge: more than `most_bytes`, raised as soon as they have arrived.
        ClientDisconnect: the client hung up before the end.
        Overloaded: the service already holds too many large bodies.
    """
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body: bytes = message.get("body", b"")
        size += len(body)
        if size > most_bytes:
            raise TooLarge(f"the body is larger than the {most_bytes} bytes that this route takes")
        if room is not None:
            room.grow(size)
        if not message.get("more_body", False):
            return b"".join([*pieces, body]) if pieces else body
        pieces.append(body)


class BodyRoom:
    """Context manager around the answer to a request: its body, if it is large, counts as held until the end."""

    total_bytes: ClassVar[int] = 0
    """Bytes of all large bodies that this process holds."""
    most_bytes: ClassVar[int] = 0
    """Largest `total_bytes` since it was last 0."""

    def __init__(self) -> None:
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def grow(self, size: int) -> None:
        """It is this large by now, or larger. Raises Overloaded when there is no room for it."""
        if size <= _SMALL_BODY_BYTES:
            return
        BodyRoom.total_bytes += size - self._bytes
        self._bytes = size
        BodyRoom.most_bytes = max(BodyRoom.most_bytes, BodyRoom.total_bytes)
        # Whatever its size, one body alone has room.
        if BodyRoom.total_bytes - size > _MAX_LARGE_BYTES:
            raise Overloaded("too many large request bodies at a time; try again in a second", retry_after_s=1)

    def __exit__(self, *_error: object) -> None:
        if not self._bytes:
            return
        BodyRoom.total_bytes -= self._bytes
        if BodyRoom.total_bytes == 0:
            if BodyRoom.most_bytes > _MAX_KEPT_BYTES:
                asyncio.get_running_loop().run_in_executor(None, give_back)
            BodyRoom.most_bytes = 0


def fields_of(scope: Scope) -> Mapping[bytes, bytes]:
    """The headers of a request by name, in lower case; if a name is repeated, its last value."""
    fields: Mapping[bytes, bytes] = scope["extensions"][FIELDS]
    return fields


def is_alone(scope: Scope) -> bool:
    """True if no other request is under way, so that this one may hold up the event loop for a moment."""
    alone: Callable[[], bool] | None = scope["extensions"].get(ALONE)
    return alone is not None and alone()


class cancelled_on_disconnect:
    """Context manager: what runs inside is cancelled as soon as the client hangs up. The body must have been read.

    Raises:
        ClientDisconnect: the client hung up while it ran.
    """

    __slots__ = ("_hung_up", "_scope", "_take_back", "_task")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._hung_up = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._take_back: Callable[[], None] = self._scope["extensions"][ON_DISCONNECT](self._hang_up)

    def _hang_up(self) -> None:
        self._hung_up = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._take_back()
        # Cancelled from elsewhere as well: then that is what counts.
        if kind is asyncio.CancelledError and self._hung_up and self._task.uncancel() == 0:
            raise ClientDisconnect from None
