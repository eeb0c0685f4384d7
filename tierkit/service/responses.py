"""Answers that are given below the web framework."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.types import Send

__all__ = ["send_body", "send_error", "send_json"]


async def send_json(send: Send, status: int, content: Mapping[str, object], *headers: tuple[bytes, bytes]) -> None:
    """A complete JSON response."""
    await send_body(send, status, json.dumps(content).encode(), b"application/json", *headers)


async def send_error(
    send: Send,
    status: int,
    message: str,
    *,
    retry_after_s: int | None = None,
    close: bool = False,
    challenge: bool = False,
) -> None:
    """The form that every error has: {"error": sentence}; `close` ends the connection as well, `challenge` says that a
    bearer token is wanted."""
    headers = []
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    if challenge:
        headers.append((b"www-authenticate", b'Bearer realm="terrace"'))
    if close:
        headers.append((b"connection", b"close"))
    await send_json(send, status, {"error": message}, *headers)


async def send_body(send: Send, status: int, body: bytes, content_type: bytes, *headers: tuple[bytes, bytes]) -> None:
    """A complete response."""
    start = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
