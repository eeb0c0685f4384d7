"""Pixels of JPEG files, and what is wrong with the files. Blocks.

libjpeg continues after damaged data, and only warns. Pillow keeps these warnings to itself; simplejpeg, which decodes
to the same pixels by the same library, reports the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import simplejpeg

from tierkit.tensors import Array

__all__ = ["COLOURS", "END", "ended", "fault_in_tables", "frame_of", "is_sequential", "read_pixels"]

END = b"\xff\xd9"
"""Marker behind the last scan."""

COLOURS = {"L": ("GRAY", 1), "RGB": ("RGB", 3), "CMYK": ("CMYK", 4)}
"""Name in simplejpeg and number of channels, by Pillow's mode."""

_SEQUENTIAL = (0xC0, 0xC1)
_PROGRESSIVE = 0xC2
_HUFFMAN = (*_SEQUENTIAL, _PROGRESSIVE)
_QUANTISATION = 0xDB
_HUFFMAN_TABLES = 0xC4
_TABLES = (_HUFFMAN_TABLES, 0xC8, 0xCC)
"""Markers within the range of frame markers that begin something else."""
_SCAN = b"\xff\xda"
_HOLE_BYTES = 64

_WARNING = re.compile(r"Corrupt JPEG data|Premature end of JPEG file|Inconsistent progression")
"""Warnings about damaged pixels. Other messages mean that nothing is decoded beyond them."""
_HARMLESS = re.compile(r"bad ICC|Adobe color transform|JFIF revision|Invalid SOS parameters")
"""Warnings about metadata."""
_IN_A_HEAD = re.compile(r"extraneous bytes before marker 0x(c.|d[abd]|e.|fe)")
"""Bytes between the segments in front of the only scan."""


def _segments(data: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
    """Marker and content of each segment in front of the first scan."""
    at = 2
    while at + 4 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0x00, 0xFF):  # fill bytes, or none of a JPEG
            at += 1
            continue
        if marker == _SCAN[1]:
            return
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        yield marker, bytes(data[at + 4 : end])
        at = end


def frame_of(data: bytes | memoryview) -> int:
    """The marker that says how a file is coded, 0xC0 to 0xCF; 0 where there is none."""
    frames = (marker for marker, _ in _segments(data) if 0xC0 <= marker <= 0xCF and marker not in _TABLES)
    return next(frames, 0)


def is_sequential(frame: int) -> bool:
    """True if a decoder holds a few rows at a time, and no coefficients of the whole picture."""
    return frame in _SEQUENTIAL


def ended(data: bytes | memoryview, frame: int) -> bytes | memoryview:
    """A file with the marker at its end that small cameras leave out: whether data is missing before it shows without.

    That is not so in arithmetic coding, of which libjpeg makes up what is missing: such a file stays as it is.
    """
    return data if bytes(data[-2:]) == END or frame not in _HUFFMAN else bytes(data) + END


def read_pixels(
    data: bytes | memoryview, mode: str, size: tuple[int, int], *, single_scan: bool
) -> tuple[Array, str | None]:
    """Pixels, UINT8 `[height, width, channels]`, and what is wrong with them, or None.

    Args:
        data: a file that has gone through `ended`.
        mode: Pillow's, a key of `COLOURS`.
        size: width and height to which the decoder scales it: the file's own, a half, a quarter or an eighth.
        single_scan: True if the file holds one scan.

    Raises:
        ValueError: nothing can be decoded.
    """
    colours, channels = COLOURS[mode]
    width, height = size

    def read(file: bytes | memoryview, *, strict: bool) -> Array:
        # Rows that are not decoded must not show what was in memory.
        room = None if strict else np.zeros((height, width, channels), np.uint8)
        pixels: Array = simplejpeg.decode_jpeg(
            file, colours, min_width=width, min_height=height, buffer=room, strict=strict
        )
        return pixels

    try:
        return read(data, strict=True), (_hole_in(bytes(data)) if single_scan else None)
    except ValueError as exc:
        seen = str(exc)
    if _HARMLESS.search(seen) or (single_scan and _IN_A_HEAD.search(seen)):
        return read(data, strict=False), None
    if not (single_scan or _WARNING.search(seen)):
        raise ValueError(seen)
    if bytes(data[-2:]) == END:
        with suppress(ValueError):
            return read(_without_padding(data), strict=True), None
    return read(data, strict=False), seen


def fault_in_tables(data: bytes | memoryview) -> str | None:
    """Describe the fault in the tables in front of the first scan, which a decoder would use without a warning; None if
    there is none.

    A step of quantisation is never 0, and no two codes of a table stand for the same symbol.
    """
    for marker, content in _segments(data):
        if marker == _QUANTISATION and _faulty_steps(content):
            return "a damaged quantisation table"
        if marker == _HUFFMAN_TABLES and any(
            len(set(symbols)) < max(1, count) for _, symbols, count in _codes(content)
        ):
            return "a damaged Huffman table"
    return None


def _faulty_steps(content: bytes) -> bool:
    while content:
        size = 2 if content[0] >> 4 else 1
        steps = np.frombuffer(content[1 : 1 + 64 * size], np.uint8 if size == 1 else np.dtype(">u2"))
        if len(steps) < 64 or not steps.all():
            return True
        content = content[1 + 64 * size :]
    return False


def _codes(content: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Class and number, symbols, and how many of these there should be, of each table of a segment."""
    while content:
        count = sum(content[1:17])
        yield content[0], content[17 : 17 + count], count
        content = content[17 + count :]


def _hole_in(data: bytes) -> str | None:
    """Describe the fault of a file whose only scan has zeros in the middle, like disk sectors that were never written;
    None if there is none.

    A decoder may go through them and be in step again at the end. Zeros prove nothing if a code of zeros ends a block,
    as in a plain area. If it stands for a coefficient, no block has that many.
    """
    begin = data.find(_SCAN)
    at = data.find(bytes(_HOLE_BYTES), begin)
    if at < 0 or 0 <= data.find(END, begin) < at or _zeros_end_blocks(data):
        return None
    rest = data[at:].lstrip(b"\0")
    return None if rest.startswith(END) else f"{len(data) - at - len(rest)} zero bytes in the middle of its data"


def _zeros_end_blocks(data: bytes) -> bool:
    """True if the code of zeros ends a block in all tables of AC coefficients."""
    segments = (content for marker, content in _segments(data) if marker == _HUFFMAN_TABLES)
    firsts = {symbols[:1] for content in segments for table, symbols, _ in _codes(content) if table >> 4}
    return firsts == {b"\0"}


def _without_padding(data: bytes | memoryview) -> bytes:
    """A file without the zeros that some cameras write behind the data; one of them may belong to it."""
    content = bytes(data).removesuffix(END)
    return content[: len(content.rstrip(b"\0")) + 1] + END
