"""Server-sent events: their form on the wire, and the number from which a reader resumes."""

from __future__ import annotations

from tierkit.errors import InvalidInput

__all__ = ["EVENT_STREAM", "WAITING", "last_event_of", "server_sent"]

EVENT_STREAM = "text/event-stream"
"""Media type."""
WAITING = b": waiting\n\n"
"""A comment, which readers skip; it keeps the connection open while nothing happens."""


def server_sent(kind: str, data: bytes, number: int | None = None) -> bytes:
    """An event.

    Args:
        data: JSON without line breaks.
        number: from which a reader may resume; None: the event cannot be resumed from.
    """
    resume = b"" if number is None else b"id: %d\n" % number
    return b"event: %s\n%sdata: %s\n\n" % (kind.encode(), resume, data)


def last_event_of(header: str) -> int:
    """The number in `Last-Event-ID`. Raises InvalidInput."""
    if not (header.isascii() and header.isdigit() and len(header) < 19):
        raise InvalidInput(f"Last-Event-ID is a number that this stream has given, not {header[:32]!r}")
    return int(header)
