"""What goes over a connection, in place of httpx's requests and responses: to make these takes longer than to write and
to read the bytes, and most of a request between services is the time until its first byte is sent."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import httpx

__all__ = [
    "Answer",
    "Fields",
    "Origin",
    "Pieces",
    "Question",
    "Timeouts",
    "Way",
    "question_of",
    "response_of",
    "to_post",
]

Origin = tuple[bytes, bytes, int | None]
"""Scheme, host and port of a URL; no port: that of the scheme."""

Piece = bytes | memoryview

_PLAIN_URL = re.compile(r"(https?://[^/?#]+)(/[!\"$-~]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds for the phases of an exchange; None for ever."""

    connect: float | None = None
    read: float | None = None
    write: float | None = None
    pool: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A request as it goes over the wire."""

    origin: Origin
    head: bytes
    """Request line and headers, with the empty line behind them."""
    body: Sequence[Piece] | AsyncIterable[bytes]
    length: int | None
    """Of the body in bytes; None where it goes in chunks."""
    timeouts: Timeouts
    bodiless: bool = False
    """Whether the answer is a head alone, whatever it says."""


class Answer(httpx.AsyncByteStream):
    """The answer, from its head on; iterates over its body as it comes over the wire. To be closed in any case."""

    status: int
    headers: list[tuple[bytes, bytes]]
    reason: bytes
    version: bytes


class Way(Protocol):
    """What leads to servers."""

    async def ask(self, question: Question) -> Answer:
        """Send a request; returns when the head of its answer is there.

        Raises:
            httpx.TransportError: there is no answer.
        """
        ...

    async def aclose(self) -> None: ...


class Fields(Mapping[str, str]):
    """Headers by name, in any case; of several of the same name the first one."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._headers = headers

    def __getitem__(self, name: str) -> str:
        wanted = name.lower().encode()
        for key, value in self._headers:
            if len(key) == len(wanted) and key.lower() == wanted:
                return value.decode("latin-1")
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key.decode("latin-1").lower() for key, _ in self._headers))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Pieces(httpx.AsyncByteStream):
    """A body that lies in memory in several places. Its length goes in a header of the request."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece  # type: ignore[misc]  # httpx says bytes; all that is done with them works on views


def to_post(url: str, pieces: Sequence[Piece], headers: Mapping[str, str], timeouts: Timeouts) -> Question:
    """A POST of a body that lies in memory.

    Args:
        headers: beside `Host`, which they have not; `Content-Length` may be among them, and is checked.

    Raises:
        InvalidURL, UnsupportedProtocol: no such URL.
        LocalProtocolError: a header that would end its line or is no ASCII, or another length.
    """
    plain = _PLAIN_URL.fullmatch(url)
    if plain is None:
        parsed = httpx.URL(url)
        (origin, host), target = _origin(f"{parsed.scheme}://{parsed.netloc.decode()}"), parsed.raw_path.decode()
    else:
        (origin, host), target = _origin(plain[1]), plain[2]
    length = sum(map(len, pieces))
    said = headers.get("Content-Length")
    if said is None:
        headers = {**headers, "Content-Length": str(length)}
    elif said != str(length):
        raise httpx.LocalProtocolError(f"Content-Length is {said}, and the body has {length} bytes")
    lines = [f"POST {target} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    return Question(origin, _encoded(lines), pieces, length, timeouts)


@lru_cache(maxsize=1024)
def _origin(base: str) -> tuple[Origin, str]:
    """Of a URL without a path: where it leads, and what the header `Host` says of it."""
    url = httpx.URL(base)
    return (url.raw_scheme, url.raw_host, url.port), url.netloc.decode()


def _encoded(lines: Sequence[str]) -> bytes:
    try:
        head = "\r\n".join([*lines, "", ""]).encode("ascii")
    except UnicodeEncodeError as exc:
        raise httpx.LocalProtocolError("a header of the request is no ASCII") from exc
    _check_lines(head, len(lines) + 1)
    return head


def _check_lines(head: bytes, lines: int) -> None:
    if head.count(b"\n") != lines or head.count(b"\r") != lines or b"\0" in head:
        raise httpx.LocalProtocolError("a header of the request holds a line break")


def question_of(request: httpx.Request) -> Question:
    """The same as a request of httpx.

    Raises:
        LocalProtocolError: a header that would end its line, or no proper length.
    """
    lines = [b"%b %b HTTP/1.1\r\n" % (request.method.encode("ascii"), request.url.raw_path)]
    length: int | None = 0
    for name, value in request.headers.raw:
        lines.append(b"%b: %b\r\n" % (name, value))
        if len(name) == 14 and name.lower() == b"content-length":
            if not value.isdigit():
                raise httpx.LocalProtocolError(f"{value!r} is no Content-Length")
            length = int(value)
        elif len(name) == 17 and name.lower() == b"transfer-encoding":
            length = None
    head = b"".join(lines) + b"\r\n"
    _check_lines(head, len(lines) + 1)
    stream = request.stream
    assert isinstance(stream, httpx.AsyncByteStream)
    return Question(
        (request.url.raw_scheme, request.url.raw_host, request.url.port),
        head,
        [request.content] if isinstance(stream, httpx.ByteStream) else stream,
        length,
        Timeouts(**request.extensions.get("timeout", {})),
        request.method == "HEAD",
    )


def response_of(answer: Answer) -> httpx.Response:
    """An answer as httpx knows it; its extensions are `http_version` and `reason_phrase`."""
    return httpx.Response(
        answer.status,
        headers=answer.headers,
        stream=answer,
        extensions={"http_version": answer.version, "reason_phrase": answer.reason},
    )
