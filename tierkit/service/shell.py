"""The shell around every application: request ids, health and metrics, refusal while starting or draining, body bounds.

Pure ASGI: it costs a few microseconds a request and keeps answering health checks while the application inside is not
there yet.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierkit.errors import DeadlineExceeded, TooLarge
from tierkit.logs import request_context
from tierkit.protocol import REQUEST_ID_HEADER
from tierkit.service.lifecycle import Lifecycle
from tierkit.service.responses import refuse, send_body, send_error, send_json
from tierkit.settings import ServiceSettings

__all__ = ["Shell"]

log = logging.getLogger("tierkit.access")

_VALID_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Shell:
    """ASGI application that wraps `app`; `app` may be set after the shell has begun to serve."""

    def __init__(
        self, settings: ServiceSettings, lifecycle: Lifecycle, metrics: Callable[[], bytes], *, node_id: str = ""
    ) -> None:
        self.app: ASGIApp | None = None
        self._settings = settings
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._node_id = node_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        request_id = _request_id(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != _REQUEST_ID]
                message = {**message, "headers": [*headers, (_REQUEST_ID, request_id.encode())]}
            await send(message)

        with request_context(request_id):
            try:
                await self._route(scope, receive, send_with_id)
            except ClientDisconnect:
                log.debug("the client hung up")
            finally:
                if log.isEnabledFor(logging.DEBUG):
                    elapsed_ms = round((time.perf_counter() - started) * 1000, 2)
                    log.debug("%s %s %s", scope["method"], scope["path"], status, extra={"ms": elapsed_ms})

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["path"]:
            case "/livez":
                await send_json(send, 200, {"status": "alive"})
            case "/readyz" | "/healthz":
                await self._send_health(send)
            case "/metrics":
                await send_body(send, 200, self._metrics(), CONTENT_TYPE_LATEST.encode())
            case _ if self.app is None or not self._lifecycle.ready:
                await refuse(receive, send, 503, "the service is starting; try again in a second", retry_after_s=1)
            case _ if scope["method"] in _READS:
                await self.app(scope, receive, send)
            case _ if self._lifecycle.draining:
                await refuse(receive, send, 503, "the service is shutting down; try another node", retry_after_s=1)
            case _:
                with self._lifecycle.working():
                    await _BoundedBody(self._settings, scope, receive, send).run(self.app)

    async def _send_health(self, send: Send) -> None:
        lifecycle = self._lifecycle
        checks = await lifecycle.run_checks() if lifecycle.ready else {}
        if lifecycle.draining:
            state = "draining"
        elif not lifecycle.ready:
            state = "starting"
        else:
            state = "ready" if all(result == "ok" for result in checks.values()) else "failing"
        answer = {"status": state, "node_id": self._node_id, "in_flight": lifecycle.in_flight, "checks": dict(checks)}
        await send_json(send, 200 if state == "ready" else 503, answer)


class _BoundedBody:
    """One request whose body is bounded in size and in time.

    A breach raises inside the application, so that whatever reads the body stops; the answer is written here, for the
    application may take the exception for a broken connection or a bad form.
    """

    def __init__(self, settings: ServiceSettings, scope: Scope, receive: Receive, send: Send) -> None:
        self._settings = settings
        self._scope = scope
        self._receive = receive
        self._send = send
        self._received_bytes = 0
        self._complete = False
        self._started = False
        self._breach: tuple[int, str] | None = None
        self._since = asyncio.get_running_loop().time()

    async def run(self, app: ASGIApp) -> None:
        length = dict(self._scope["headers"]).get(b"content-length", b"0")
        if int(length) > self._settings.max_body_bytes:
            await refuse(self._receive, self._send, 413, self._too_large())
            return
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:
            if self._breach is None or self._started:
                raise
        if self._breach is not None and not self._started:
            status, message = self._breach
            if status == 408:
                await send_error(self._send, status, message, close=True)
            else:
                await refuse(self._receive, self._send, status, message)

    async def receive(self) -> Message:
        if self._complete:
            # The body is there; what comes now is the news that the client has gone, whenever that may be.
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._due()):
                message = await self._receive()
        except TimeoutError:
            self._breach = (408, f"the body did not arrive in time ({self._received_bytes} bytes so far)")
            raise DeadlineExceeded(self._breach[1]) from None
        self._received_bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._received_bytes > self._settings.max_body_bytes:
            self._breach = (413, self._too_large())
            raise TooLarge(self._breach[1])
        return message

    async def send(self, message: Message) -> None:
        if self._breach is None or self._started:
            self._started = True
            await self._send(message)

    def _due(self) -> float:
        earned_s = self._received_bytes * 8 / self._settings.min_upload_bps
        return self._since + self._settings.body_timeout_s + earned_s

    def _too_large(self) -> str:
        return f"the body is larger than the limit of {self._settings.max_body_bytes} bytes"


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == _REQUEST_ID and _VALID_REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)
