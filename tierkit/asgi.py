"""Reading a request straight from ASGI, for routes on which the web framework's own `Request` costs too much."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from tierkit.service.exchange import ON_DISCONNECT

__all__ = ["DirectRoutes", "cancelled_on_disconnect", "read_body"]


class DirectRoutes:
    """ASGI middleware: POST requests for some exact paths go straight to their endpoint, past the framework's routing
    and exception handling, which take as long as decoding the request.

    Args:
        app: answers all other requests.
        endpoints: by path, each with its path parameters. They answer errors by raising them.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, tuple[ASGIApp, Mapping[str, str]]]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        endpoint, scope["path_params"] = found
        await endpoint(scope, receive, send)


async def read_body(receive: Receive) -> bytes:
    """The whole request body. Its size and its pace are bounded by `tierkit.service`.

    What has come is kept in pieces and joined once: memory follows what the client really sent, not what it said
    that it would send.

    Raises:
        ClientDisconnect: the client hung up before the end.
    """
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return b"".join([*pieces, body]) if pieces else body
        pieces.append(body)


@contextmanager
def cancelled_on_disconnect(scope: Scope) -> Iterator[None]:
    """Cancel what runs inside as soon as the client hangs up. The body must have been read.

    Raises:
        ClientDisconnect: the client hung up while it ran.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def hang_up() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    take_back = scope["extensions"][ON_DISCONNECT](hang_up)
    try:
        yield
    except asyncio.CancelledError:
        # Cancelled from elsewhere as well: then that is what counts.
        if gone and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        take_back()
