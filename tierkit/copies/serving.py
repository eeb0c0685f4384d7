"""Requesting and sending pieces of files over HTTP, by a host and by workers that pass them on."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tierkit.errors import InvalidInput

__all__ = ["KEY_HEADER", "Read", "bounded", "knows", "piece_route"]

KEY_HEADER = "Terrace-Data-Key"
"""Header of a worker's request for a piece of a file: the key that the host has given to workers that may have it."""

Read = Callable[[str, range | None], Awaitable[tuple[bytes, int]]]
"""Returns some bytes of the file with this sha256, or all; and the length of the file."""

_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")
_WHOLE_BYTES = 1 << 20
"""A file of no more bytes is sent whole; else a chunk is the most."""


def piece_route(path: str, read: Read, allow: Callable[[Request], Awaitable[None]]) -> Route:
    """`GET PATH/{sha256}`, with `Range: bytes=A-B`."""

    async def piece(request: Request) -> Response:
        await allow(request)
        span = _span(request.headers.get("range"))
        body, size = await read(request.path_params["sha256"], span)
        headers = {"Accept-Ranges": "bytes"}
        if span is not None:
            headers["Content-Range"] = f"bytes {span.start}-{span.start + len(body) - 1}/{size}"
        return Response(body, 200 if span is None else 206, media_type="application/octet-stream", headers=headers)

    return Route(path + "/{sha256}", piece, methods=["GET"])


def knows(request: Request, key: str) -> bool:
    """True if a request shows this key; an empty key opens nothing."""
    return bool(key) and hmac.compare_digest(request.headers.get(KEY_HEADER, "").encode(), key.encode())


def bounded(span: range | None, *, size: int, chunk_bytes: int) -> range:
    """The bytes of an answer.

    Raises:
        InvalidInput: there are none of these, or more than one answer has.
    """
    asked = range(size) if span is None else range(span.start, min(span.stop, size))
    most = max(chunk_bytes, _WHOLE_BYTES)
    if not 0 < len(asked) <= most:
        raise InvalidInput(
            f"an answer has from 1 to {most:,} of the {size:,} bytes of the file: ask for Range: bytes=A-B"
        )
    return asked


def _span(header: str | None) -> range | None:
    """Bytes that are asked for; None for all.

    Raises:
        InvalidInput: no single range of bytes.
    """
    if header is None:
        return None
    found = _RANGE.fullmatch(header)
    if found is None:
        raise InvalidInput(f"the range {header[:60]!r} is not known here; bytes=A-B is")
    return range(int(found[1]), int(found[2]) + 1)
