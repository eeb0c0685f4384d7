"""Streamed answers: NDJSON, CSV and server-sent events. None is held in memory as a whole."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from datetime import datetime
from typing import Any

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from scheduler.api.routing import NOSNIFF
from scheduler.jobs.views import Rows
from tierkit.access import Allowance
from tierkit.http.asgi import cancelled_on_disconnect
from tierkit.http.server_sent import EVENT_STREAM, WAITING, server_sent
from tierkit.plaintext import spreadsheet_cell

__all__ = [
    "NO_STORE",
    "OBSERVATION_CSV",
    "EventStream",
    "Stream",
    "as_csv",
    "as_lines",
    "as_server_sent",
    "event_stream",
]


def event_stream(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    """The description in `/openapi.json` of an answer that is a `text/event-stream`.

    Args:
        schemas: schema of the `data` of each kind of event.
    """
    return {EVENT_STREAM: {"schema": {"anyOf": [*schemas]}}}


NO_STORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

_CSV_HEADER = (
    "index,name,label,confidence,coarse_label,coarse_confidence,coarse_node,coarse_model,coarse_sha256,coarse_ms,fine_label,"
    "fine_confidence,fine_node,fine_tier,fine_model,fine_sha256,fine_ms,fine_coarse_label,fine_coarse_confidence,"
    "sent_form,sent_upload_bytes,answered_by,not_escalated,fallback,error,damaged,resized_from,"
    "true_fine,true_coarse,request_id,trace_id"
)
OBSERVATION_CSV = (
    "node,source,sequence,revision,taken_at,name,label,confidence,coarse_label,coarse_confidence,coarse_node,"
    "coarse_model,coarse_sha256,fine_label,fine_confidence,fine_node,fine_tier,fine_model,fine_sha256,"
    "fine_coarse_label,fine_coarse_confidence,sent_form,sent_upload_bytes,answered_by,unsure,waits,fallback,damaged,"
    "picture,release"
)
"""Columns of observations; those that results of jobs have too have the same names."""
_ASK_AGAIN_S = 1.0
"""Seconds for which a reader without a valid token may continue."""

_JSON = msgspec.json.Encoder(enc_hook=lambda view: view.model_dump(mode="json"))


class Stream(StreamingResponse):
    """Ends its generator when it ends, even if it is cut off between two pieces."""

    def __init__(
        self,
        pieces: AsyncGenerator[str | bytes, None],
        *,
        media_type: str,
        headers: Mapping[str, str],
        until_sent: AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._pieces = pieces
        self._until_sent = until_sent or nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The framework's own way takes two tasks more.
        with self._until_sent, cancelled_on_disconnect(scope):
            await self.stream_response(send)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._pieces):
            # Before the status is sent: what fails at once is an error like others, such as a database that is away.
            first = await anext(self._pieces, b"")
            self.body_iterator = _after(first, self._pieces)
            await super().stream_response(send)


async def _after(first: str | bytes, pieces: AsyncGenerator[str | bytes, None]) -> AsyncGenerator[str | bytes, None]:
    yield first
    async for piece in pieces:
        yield piece


class EventStream(Stream):
    """Server-sent events; counts as an open stream of its reader, and ends when their token does.

    Raises:
        LimitReached: before its first byte, when the reader has too many.
    """

    def __init__(
        self, pieces: AsyncGenerator[str | bytes, None], allowance: Allowance, may_read: Callable[[], bool]
    ) -> None:
        super().__init__(
            _while(may_read, pieces),
            media_type=EVENT_STREAM,
            headers={**NO_STORE, **NOSNIFF},
            until_sent=allowance.streaming(),
        )


async def _while(
    may_read: Callable[[], bool], pieces: AsyncGenerator[str | bytes, None]
) -> AsyncGenerator[str | bytes, None]:
    """The pieces until they end, or must not be read any more."""
    async with aclosing(pieces):
        upcoming: asyncio.Task[str | bytes | None] | None = None
        try:
            while True:
                upcoming = upcoming or asyncio.create_task(anext(pieces, None), name="next event")
                await asyncio.wait({upcoming}, timeout=_ASK_AGAIN_S)
                if not may_read():
                    return
                if upcoming.done():
                    piece, upcoming = upcoming.result(), None
                    if piece is None:
                        return
                    yield piece
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)


async def as_lines(batches: AsyncGenerator[Sequence[object], None]) -> AsyncGenerator[bytes, None]:
    """Objects as NDJSON, batch by batch."""
    async with aclosing(batches):
        async for rows in batches:
            yield _JSON.encode_lines(rows)


async def as_csv(
    batches: AsyncGenerator[Rows, None], *, bom: bool = False, header: str = _CSV_HEADER
) -> AsyncGenerator[str, None]:
    """Image results, or observations, as CSV, batch by batch. No cell begins a formula.

    Args:
        bom: begin with the mark by which spreadsheets know UTF-8.
        header: names of the columns.
    """
    yield ("\ufeff" if bom else "") + header + "\r\n"
    async with aclosing(batches):
        async for rows in batches:
            text = io.StringIO()
            csv.DictWriter(text, header.split(","), extrasaction="ignore").writerows(map(_flat, rows))
            yield text.getvalue()


def _flat(result: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(result)
    for stage in ("coarse", "fine"):
        values |= {f"{stage}_{key}": value for key, value in (result[stage] or {}).items()}
    values |= {f"sent_{key}": value for key, value in (values.get("fine_sent") or {}).items()}
    if size := result.get("resized_from"):
        height, width = size
        values["resized_from"] = f"{width}x{height}"
    return {key: _cell(value) for key, value in values.items()}


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return spreadsheet_cell(value) if isinstance(value, str) else value


async def as_server_sent(events: AsyncGenerator[tuple[str, object, int] | None, None]) -> AsyncGenerator[bytes, None]:
    """A `text/event-stream` of kinds, data and numbers. For None a comment, which readers skip, keeps the connection
    open while nothing happens."""
    async with aclosing(events):
        async for event in events:
            if event is None:
                yield WAITING
            else:
                kind, data, number = event
                yield server_sent(kind, _JSON.encode(data), number)
