"""Headers of an answer to an inference request."""

from __future__ import annotations

from tierkit.inference.runner import RunResult
from tierkit.wire.oip import BINARY_HEADER, Timing

__all__ = ["RAW_NAMES", "server_timing"]

RAW_NAMES = {name: name.lower().encode() for name in ("Content-Type", "Content-Length", BINARY_HEADER)}
"""Names of the headers of an answer, as they are sent."""


def server_timing(result: RunResult | Timing) -> bytes:
    """The value of the header `Server-Timing`: milliseconds, and the images of the batch."""
    return b'queue;dur=%.3f, infer;dur=%.3f;desc="%d"' % (
        result.queue_s * 1e3,
        result.compute_s * 1e3,
        result.batch_images,
    )
