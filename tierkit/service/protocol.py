"""HTTP/1.1 connections with bounds: a slow, endless or absent request head, an unread answer, too many at once.

uvicorn bounds the idle time between two requests; what happens on a connection before a request reaches the
application is bounded here. Request bodies are bounded in `tierkit.service.shell`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tierkit.service.responses import LINGER_S, refuse
from tierkit.settings import ServiceSettings

__all__ = ["bounded_protocol"]

_MAX_HEAD_BYTES = 64 * 1024

_RESERVE = 64
"""Connections above the limit that still get a proper 503; those beyond are closed at once."""


def bounded_protocol(settings: ServiceSettings) -> type[asyncio.Protocol]:
    """Protocol class for uvicorn with the limits of `settings`."""
    return type("BoundedHttpProtocol", (_BoundedHttpProtocol,), {"limits": settings})


class _BoundedHttpProtocol(HttpToolsProtocol):
    limits: ServiceSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading_head = True
        self._head_bytes = 0
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        excess = len(self.connections) - self.limits.max_connections
        if excess > _RESERVE:
            transport.abort()  # type: ignore[attr-defined]  # every TCP transport has it
            return
        if excess > 0:
            self.app = _too_many_connections
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._reading_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(431, f"the head of the request is longer than {_MAX_HEAD_BYTES} bytes")
        elif self._head_bytes and self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reading_head = True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        # uvicorn answers what is no HTTP in plain text; every error of ours is JSON.
        self._refuse(400, "this is no valid HTTP request")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            self._refuse(408, f"the head of the request was not complete after {self.limits.header_timeout_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        self._refused = True
        self._stop_head_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            # Amid the answer to an earlier request on this connection, bytes of ours would be read as part of it.
            self.transport.close()
            return
        body = json.dumps({"error": message}).encode()
        self.transport.write(
            b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, len(body), body)
        )
        # Not closed yet, for the same reason as in `refuse`: the rest of what arrives is ignored above.
        self.transport.write_eof()
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


async def _too_many_connections(scope: Any, receive: Any, send: Any) -> None:
    await refuse(receive, send, 503, "too many connections; try again in a second", retry_after_s=1)
