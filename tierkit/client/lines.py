"""Split bytes from the network into lines, and lines into server-sent events. No I/O.

Lines are split at the byte level and at the newline only: `str.splitlines` would also split at U+2028 and its kin,
which JSON may hold unescaped.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

from tierkit.errors import UpstreamError

__all__ = ["MAX_LINE_BYTES", "ServerSentEvent", "iter_lines", "iter_server_sent_events"]

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Far above any honest line; a peer that never ends its line must not fill our memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSentEvent:
    """One event of a `text/event-stream`; `id` is the newest id seen, even if this event carries none."""

    kind: str
    data: bytes
    id: str | None


async def iter_lines(chunks: AsyncIterable[bytes], *, max_line_bytes: int = MAX_LINE_BYTES) -> AsyncIterator[bytes]:
    """Complete lines without their ends. What follows the last newline is an unfinished line and is dropped."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if b"\n" not in chunk:
            if len(held) > max_line_bytes:
                raise UpstreamError(f"the scheduler sent a line of more than {max_line_bytes} bytes")
            continue
        *lines, rest = held.split(b"\n")
        held = rest
        for line in lines:
            yield bytes(line.removesuffix(b"\r"))


async def iter_server_sent_events(lines: AsyncIterable[bytes]) -> AsyncIterator[ServerSentEvent]:
    """Events of a stream. Comments keep the connection alive and yield nothing; an unfinished event is dropped."""
    kind, data, last_id = "message", list[bytes](), None
    async for line in lines:
        if not line:
            if data:
                yield ServerSentEvent(kind=kind, data=b"\n".join(data), id=last_id)
            kind, data = "message", []
            continue
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            kind = value.decode("utf-8", "replace")
        elif name == b"id":
            last_id = value.decode("utf-8", "replace")
