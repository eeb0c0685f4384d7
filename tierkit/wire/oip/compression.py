"""Bodies as one Zstandard frame (RFC 8878), for packed features. Packing takes a while, so it runs in a thread.

docs/privacy.md compares codecs on the features of the shipped encoders.
"""

from __future__ import annotations

import asyncio

import zstandard

from tierkit.errors import MalformedMessage, TooLarge

__all__ = ["CODING", "compress", "content_bytes", "decompress"]

CODING = "zstd"
"""Value of the header Content-Encoding."""

_LEVEL = 1


async def compress(body: bytes) -> bytes:
    """`body` as one frame, which says how long it was."""
    return await asyncio.to_thread(_compress, body)


def content_bytes(body: bytes, most_bytes: int) -> int:
    """How long the content of a frame is, by what it says itself.

    Raises:
        MalformedMessage: it is no frame that says so.
        TooLarge: that is more than `most_bytes`.
    """
    try:
        frame = zstandard.get_frame_parameters(body)
    except zstandard.ZstdError as exc:
        raise MalformedMessage(f"the body is no {CODING} frame: {exc}") from exc
    if frame.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise MalformedMessage(f"the {CODING} frame does not say how long its content is")
    # A window of its own would let a small frame ask for much memory.
    if max(frame.content_size, frame.window_size) > most_bytes:
        raise TooLarge(f"the body unpacks to {frame.content_size} bytes; at most {most_bytes} are accepted")
    return frame.content_size


async def decompress(body: bytes, most_bytes: int) -> bytes:
    """What is in a frame.

    Raises:
        MalformedMessage: it is not one whole frame that says how long its content is.
        TooLarge: that is more than `most_bytes`. Nothing has been unpacked then.
    """
    return await asyncio.to_thread(_decompress, body, content_bytes(body, most_bytes))


# A context of the library serves one thread at a time; making one costs microseconds.


def _compress(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(body)


def _decompress(body: bytes, size: int) -> bytes:
    try:
        content = zstandard.ZstdDecompressor().decompress(
            body, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as exc:
        raise MalformedMessage(f"the {CODING} frame is damaged: {exc}") from exc
    if len(content) != size:
        raise MalformedMessage(f"the {CODING} frame holds {len(content)} bytes, and says {size}")
    return content
