"""What the API asks of its callers: who may use a route, and how much he may send. Where the scheduler asks nobody for
a token, all of this lets everybody pass."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator
from datetime import datetime
from typing import Annotated

from fastapi import Depends, Request
from pydantic import BaseModel

from tierkit.access import Allowance, Caller, caller_of

__all__ = ["CallerOf", "WhoAmI", "for_nodes", "for_users", "metered", "who_am_i"]


class WhoAmI(BaseModel):
    """The holder of the token that came with the request; nulls where no token is asked for."""

    name: str | None
    role: str | None
    expires: datetime | None


async def _caller(request: Request) -> Caller | None:
    return caller_of(request.scope)


CallerOf = Annotated[Caller | None, Depends(_caller)]
"""Who has sent the request; None where everybody may."""


async def for_users(caller: CallerOf) -> None:
    """A route for people and their programs. Raises Forbidden for others."""
    if caller is not None:
        caller.need("user")


async def for_nodes(caller: CallerOf) -> None:
    """A route for nodes. Raises Forbidden for others."""
    if caller is not None:
        caller.need("node")


def who_am_i(caller: Caller | None) -> WhoAmI:
    """What a caller may know of his token."""
    if caller is None:
        return WhoAmI(name=None, role=None, expires=None)
    return WhoAmI(name=caller.name, role=caller.role, expires=caller.entry.expires if caller.entry else None)


async def metered(stream: AsyncIterable[bytes], allowance: Allowance | None) -> AsyncIterator[bytes]:
    """An upload, counted as it comes.

    Raises:
        LimitReached: before its first byte, when earlier ones have used up the allowance.
    """
    if allowance is not None:
        allowance.check_upload(time.monotonic())
    async for piece in stream:
        if allowance is not None:
            allowance.count_bytes(len(piece))
        yield piece
