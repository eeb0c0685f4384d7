"""Compressed bodies: zstd (RFC 8878) for packed features between Terrace's nodes, gzip and deflate (RFC 1952, 1950) for
other clients. Packing and unpacking take a while, so they run in a thread.

docs/explanation/privacy.md compares codecs on the features of the shipped encoders.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import zstandard

from tierkit.errors import MalformedMessage, TooLarge, UnsupportedMedia

__all__ = ["CODINGS", "ZSTD", "accepted_coding", "compress", "compress_blocking", "decompress"]

ZSTD = "zstd"

_FORMATS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Window sizes by coding, as zlib expects them. HTTP's deflate is zlib's own format."""

CODINGS = (ZSTD, *_FORMATS)
"""Values of the header Content-Encoding."""

_LEVEL = 1

_STEP_BYTES = 2**20
"""Bytes of content unpacked before `hold` is called with the length so far."""
_AT_ONCE_BYTES = 1024
"""A packed body up to this size, which unpacks to a megabyte at most, is unpacked on the event loop."""
_SLICE_BYTES = 2**16
"""Packed bytes handed to zlib at a time: it copies the input that it leaves over."""


def accepted_coding(header: str) -> str | None:
    """The coding of an answer, by the request's header Accept-Encoding; None for an uncompressed answer.

    It is gzip or deflate if the header names one of them and no other coding. Libraries name all codings that they know
    without being asked, and probabilities shrink by only a few percent: such a client gains nothing from compression.
    """
    named: list[tuple[str, str]] = []
    for each in header.lower().split(","):
        coding, _, parameter = each.partition(";")
        if (coding := coding.strip()) not in ("", "identity"):
            named.append((coding, parameter.replace(" ", "")))
    if len(named) != 1:
        return None
    ((coding, parameter),) = named
    refused = parameter.startswith("q=") and not parameter[2:].strip("0.")
    return coding if coding in _FORMATS and not refused else None


async def compress(body: bytes, coding: str = ZSTD) -> bytes:
    """`body` in a coding of `CODINGS`; a zstd frame holds its length."""
    return await asyncio.to_thread(compress_blocking, body, coding)


async def decompress(
    body: bytes, most_bytes: int, coding: str = ZSTD, *, hold: Callable[[int], object] = lambda _size: None
) -> bytes:
    """Return the content of a compressed body.

    Args:
        body: one zstd frame that gives the length of its content, one gzip member, or one zlib stream.
        most_bytes: most bytes of content.
        coding: the value of the header Content-Encoding, in lower case.
        hold: called with the length of the content known so far, and again as it grows; an error that it raises ends
            the work.

    Raises:
        UnsupportedMedia: the coding is unknown.
        MalformedMessage: the body does not fit its coding.
        TooLarge: the content is longer than `most_bytes`; no more than that is unpacked.
    """
    if coding == ZSTD:
        size = _content_bytes(body, most_bytes)
        hold(size)
        return await asyncio.to_thread(_decompress, body, size)
    if coding not in _FORMATS:
        raise UnsupportedMedia(
            f"content encoding {coding[:32]!r}: send the body uncompressed, or as {', '.join(CODINGS)}"
        )
    unpacker = zlib.decompressobj(_FORMATS[coding])
    pieces: list[bytes] = []
    size = 0
    packed = memoryview(body)
    while not unpacker.eof and (packed or unpacker.unconsumed_tail):
        room = min(_STEP_BYTES, most_bytes + 1 - size)
        if len(body) <= _AT_ONCE_BYTES:  # a thread would take longer
            piece, packed = _step(unpacker, packed, room, coding)
        else:
            piece, packed = await asyncio.to_thread(_step, unpacker, packed, room, coding)
        size += len(piece)
        if size > most_bytes:
            raise TooLarge(f"the body unpacks to more than the {most_bytes} bytes that are accepted")
        hold(size)
        pieces.append(piece)
    if not unpacker.eof or unpacker.unused_data or packed:
        raise MalformedMessage(f"the body is not one whole {coding} stream")
    return b"".join(pieces)


def _step(unpacker: zlib._Decompress, packed: memoryview, room: int, coding: str) -> tuple[bytes, memoryview]:
    """Return up to `room` bytes of content, and the packed bytes that the unpacker has not taken."""
    pieces: list[bytes] = []
    while room and not unpacker.eof and (packed or unpacker.unconsumed_tail):
        source: bytes | memoryview = unpacker.unconsumed_tail
        if not source:
            source, packed = packed[:_SLICE_BYTES], packed[_SLICE_BYTES:]
        try:
            piece = unpacker.decompress(source, room)
        except zlib.error as exc:
            raise MalformedMessage(f"the body is not a {coding} stream: {exc}") from exc
        room -= len(piece)
        pieces.append(piece)
    return b"".join(pieces), packed


def _content_bytes(body: bytes, most_bytes: int) -> int:
    """Length of the content of a zstd frame, as its header gives it."""
    try:
        frame = zstandard.get_frame_parameters(body)
    except zstandard.ZstdError as exc:
        raise MalformedMessage(f"the body is not a {ZSTD} frame: {exc}") from exc
    if frame.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise MalformedMessage(f"the {ZSTD} frame does not say how long its content is")
    # A window of its own would let a small frame ask for much memory.
    if max(frame.content_size, frame.window_size) > most_bytes:
        raise TooLarge(f"the body unpacks to {frame.content_size} bytes; at most {most_bytes} are accepted")
    return frame.content_size


# A context of the library serves one thread at a time; making one costs microseconds.


def compress_blocking(body: bytes, coding: str = ZSTD) -> bytes:
    """Return what `compress` returns, computed in the calling thread."""
    if coding == ZSTD:
        return zstandard.ZstdCompressor(level=_LEVEL).compress(body)
    packer = zlib.compressobj(_LEVEL, wbits=_FORMATS[coding])
    return packer.compress(body) + packer.flush()


def _decompress(body: bytes, size: int) -> bytes:
    try:
        content = zstandard.ZstdDecompressor().decompress(
            body, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as exc:
        raise MalformedMessage(f"the {ZSTD} frame is damaged: {exc}") from exc
    if len(content) != size:
        raise MalformedMessage(f"the {ZSTD} frame holds {len(content)} bytes, and says {size}")
    return content
