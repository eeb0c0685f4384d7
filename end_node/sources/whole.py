"""Tell if a picture file that a program may still be writing is whole, from the end that its format prescribes."""

from __future__ import annotations

import os
from typing import BinaryIO

from tierkit.picture_files import START_BYTES, kind_of

__all__ = ["is_whole"]

_PADDING = b"\0\r\n"
"""Bytes that some cameras and transfers leave after the end."""
_TAIL_BYTES = 4096


def is_whole(file: BinaryIO) -> bool:
    """True if the file ends as its format prescribes, or if its format has no such end."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    start = file.read(START_BYTES)
    file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read(_TAIL_BYTES).rstrip(_PADDING)
    match kind_of(start):
        case "JPEG":
            return tail.endswith(b"\xff\xd9")
        case "PNG":
            return tail.endswith(b"IEND\xaeB`\x82")
        case "GIF":
            return tail.endswith(b";")
        case "WEBP":
            return size >= 8 + int.from_bytes(start[4:8], "little")
        case "BMP":
            return size >= int.from_bytes(start[2:6], "little")
        case "AVIF" | "HEIF":
            return _boxes_end(file, size)
        case "TIFF":
            return True
        case _:
            return size > 0


def _boxes_end(file: BinaryIO, size: int) -> bool:
    """True if the boxes of an ISO base media file (ISO/IEC 14496-12) fill it."""
    at = 0
    while at < size:
        file.seek(at)
        head = file.read(16)
        length = int.from_bytes(head[:4])
        if length == 1:
            length = int.from_bytes(head[8:16])
        elif length == 0:  # until the end of the file
            return True
        if length < 8:
            return False
        at += length
    return at == size and size > 0
