"""Answers that are given below the web framework."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from starlette.types import Send

__all__ = ["Answer", "error_answer", "send_answer", "send_body", "send_error", "send_json"]


class Answer(NamedTuple):
    """A complete response; its length is among the headers."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def error_answer(
    status: int,
    message: str,
    *,
    retry_after_s: int | None = None,
    close: bool = False,
    challenge: bool = False,
) -> Answer:
    """The form that every error has: {"error": sentence}; `close` ends the connection as well, `challenge` says that a
    bearer token is wanted."""
    headers = []
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    if challenge:
        headers.append((b"www-authenticate", b'Bearer realm="terrace"'))
    if close:
        headers.append((b"connection", b"close"))
    return _json_answer(status, {"error": message}, *headers)


async def send_error(
    send: Send, status: int, message: str, *, retry_after_s: int | None = None, close: bool = False
) -> None:
    """An `error_answer`."""
    await send_answer(send, error_answer(status, message, retry_after_s=retry_after_s, close=close))


async def send_json(send: Send, status: int, content: Mapping[str, object]) -> None:
    """A complete JSON response."""
    await send_answer(send, _json_answer(status, content))


async def send_body(send: Send, status: int, body: bytes, content_type: bytes) -> None:
    """A complete response."""
    await send_answer(send, _answer(status, body, content_type))


async def send_answer(send: Send, answer: Answer) -> None:
    """A response that is complete already."""
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body})


def _json_answer(status: int, content: Mapping[str, object], *headers: tuple[bytes, bytes]) -> Answer:
    return _answer(status, json.dumps(content).encode(), b"application/json", *headers)


def _answer(status: int, body: bytes, content_type: bytes, *headers: tuple[bytes, bytes]) -> Answer:
    return Answer(
        status, [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers], body
    )
