"""Answers that are given below the web framework."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping

from starlette.types import Message, Receive, Send

__all__ = ["refuse", "send_body", "send_error", "send_json"]

LINGER_S = 2.0
"""How long the bytes of a refused request are still taken in."""


async def send_json(send: Send, status: int, content: Mapping[str, object], *headers: tuple[bytes, bytes]) -> None:
    """A complete JSON response."""
    await send_body(send, status, json.dumps(content).encode(), b"application/json", *headers)


async def refuse(receive: Receive, send: Send, status: int, message: str, *, retry_after_s: int | None = None) -> None:
    """Answer a request whose body has not been read, and close the connection.

    What still arrives is thrown away for a moment first: a socket that is closed with unread bytes resets the
    connection, and the sender would see that reset in place of the answer.
    """

    async def send_unfinished(event: Message) -> None:
        await send({**event, "more_body": True} if event["type"] == "http.response.body" else event)

    await send_error(send_unfinished, status, message, retry_after_s=retry_after_s, close=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})


async def send_error(
    send: Send, status: int, message: str, *, retry_after_s: int | None = None, close: bool = False
) -> None:
    """The form that every error has: {"error": sentence}; `close` ends the connection as well."""
    headers = []
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    if close:
        headers.append((b"connection", b"close"))
    await send_json(send, status, {"error": message}, *headers)


async def send_body(send: Send, status: int, body: bytes, content_type: bytes, *headers: tuple[bytes, bytes]) -> None:
    """A complete response."""
    start = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
