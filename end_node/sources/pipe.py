"""Messages between a node and the process that reads a video for it.

The node writes one line of JSON, a `ReaderOrder`, and then one byte for each picture that it is ready for. The reader
writes messages: a kind, a length and a body.
"""

from __future__ import annotations

import struct

from msgspec import Struct

__all__ = ["ALIVE", "DONE", "ERROR", "HEAD", "MAX_BODY_BYTES", "PICTURE", "PROGRESS", "READY", "TAKEN", "ReaderOrder"]

READY = b"n"
"""The node takes one more picture."""

HEAD = struct.Struct(">cI")
"""Kind and length of a message."""
MAX_BODY_BYTES = 32 * 2**20

ALIVE = b"A"
"""Frames have been decoded. The body is `PROGRESS`."""
PICTURE = b"P"
"""The body is `TAKEN` and a JPEG."""
ERROR = b"E"
"""The reader gives up. The body is a sentence in UTF-8."""
DONE = b"D"
"""The file has ended."""

PROGRESS = struct.Struct(">Id")
"""Frames not handed over since the last message, and the longest time between two frames so far, in seconds."""
TAKEN = struct.Struct(">d")
"""Time of a frame by `time.monotonic`, which is the same for all processes of a machine."""


class ReaderOrder(Struct, frozen=True, kw_only=True):
    """Video to read, and the frames to hand over."""

    url: str
    """RTSP or HTTP URL, absolute path of a file, or device of a camera."""
    camera: bool
    rate: float
    changed: float
    tls_ca: str
    """File with the certificates to trust."""
