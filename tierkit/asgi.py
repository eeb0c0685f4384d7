"""Reading a request straight from ASGI, for routes on which the web framework's own `Request` costs too much."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from tierkit.service.exchange import ON_DISCONNECT

__all__ = ["cancelled_on_disconnect", "read_body"]


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
