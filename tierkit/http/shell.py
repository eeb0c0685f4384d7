"""The shell around every application: authentication, request ids, health and metrics, refusal while starting or
draining.

Pure ASGI: it costs a few microseconds a request and keeps answering health checks while the application inside is not
there yet.
"""

from __future__ import annotations

import logging
import random
import re
import socket
import time
from collections.abc import Callable, Sequence
from html import escape

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierkit.access import CALLER, READS, SIGN_IN_PAGE, Authenticator, Proxies, check_host, check_origin, needs_no_token
from tierkit.errors import Standby, TerraceError, Unauthenticated
from tierkit.http.answering import answer_to
from tierkit.http.exchange import REPEATABLE, Again, Reply
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.responses import error_response
from tierkit.logs import request_context
from tierkit.spans import is_recorded, new_root
from tierkit.wire.messages import REQUEST_ID_HEADER
from tierkit.wire.trace import Trace, new_trace, read_trace

__all__ = ["Shell"]

log = logging.getLogger("tierkit.access")

_VALID_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
_ids = random.Random()
"""Request ids need not be secret, only different: the system's randomness is a system call, in which the interpreter's
lock may go to the inference thread, for each request."""


_STANDBY_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Standby</title>
<h1>This scheduler is a standby</h1>
<p>{}.</p>
<p>Open the page at the address of the scheduler that leads. <code>terrace doctor --scheduler URL,URL</code>, with the
addresses of all of them, says which one that is.</p>
</html>
"""


class Shell:
    """ASGI application that wraps `app`; `app` may be set after the shell has begun to serve.

    Args:
        local_only: everyone on this machine may use the service, and nobody else can reach it.
        metrics: what `/metrics` shows; None leaves that path to `app`.
        proxies: in front of the service; None where it is asked directly.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        metrics: Callable[[], bytes] | None,
        *,
        node_id: str = "",
        authenticator: Authenticator | None = None,
        local_only: bool = False,
        proxies: Proxies | None = None,
    ) -> None:
        self._proxies = proxies
        self.app: ASGIApp | None = None
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._node_id = node_id
        self._authenticator = authenticator
        host = socket.gethostname().lower()
        self._own_names = (host, f"{host}.local") if local_only else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        request_id = _given_id(scope) or _new_id()
        trace = read_trace(scope["headers"]) or (new_trace() if scope["method"] in READS else new_root())
        status = 0
        hosts = () if self._proxies is None else _as_asked(scope, self._proxies)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, request_id.encode())]
            await send(message)

        with request_context(request_id, trace):
            try:
                await self._route(scope, receive, send_with_id, hosts)
            except ClientDisconnect:
                log.debug("the client hung up")
            if log.isEnabledFor(logging.DEBUG):
                elapsed_ms = round((time.perf_counter() - started) * 1000, 2)
                log.debug("%s %s %s", scope["method"], scope["path"], status, extra={"ms": elapsed_ms})

    async def _route(self, scope: Scope, receive: Receive, send: Send, hosts: Sequence[str]) -> None:
        path, lifecycle = scope["path"], self._lifecycle
        metrics = self._metrics if path == "/metrics" else None
        if path == "/livez":
            await JSONResponse({"status": "alive"})(scope, receive, send)
        elif path in ("/readyz", "/healthz"):
            standby_ok = scope["query_string"] == b"standby=ok"
            health = await self._health(told=self._may_know(scope), standby_ok=standby_ok)
            await health(scope, receive, send)
        elif metrics is None and (self.app is None or not lifecycle.ready):
            # Before the authenticator, which does not know its sessions yet: a page that is signed in should stay so.
            starting = error_response(
                503, "the service is starting; try again in a second", retry_after_s=1, close=True
            )
            await starting(scope, receive, send)
        elif metrics is None and lifecycle.standby() is not None:
            # Before the authenticator as well: the name of the one that leads is for those who may know it.
            said = "this scheduler is a standby: ask the one that leads"
            if (reason := lifecycle.standby()) and self._may_know(scope):
                said = reason
            refusal: Response = answer_to(Standby(said))
            if _is_visit(scope):
                refusal = HTMLResponse(_STANDBY_PAGE.format(escape(said)), 421, {"Cache-Control": "no-store"})
            await refusal(scope, receive, send)
        elif not await self._admitted(scope, receive, send, hosts):
            pass
        elif metrics is not None:
            await Response(metrics(), media_type=CONTENT_TYPE_LATEST)(scope, receive, send)
        elif self.app is not None and scope["method"] in READS:
            await self.app(scope, receive, send)
        elif lifecycle.draining:
            ending = error_response(503, "the service is shutting down; try another node", retry_after_s=1, close=True)
            await ending(scope, receive, send)
        else:
            self._see_to_repetitions(scope)
            assert self.app is not None
            with lifecycle.working():
                await self.app(scope, receive, send)

    def _see_to_repetitions(self, scope: Scope) -> None:
        """Requests that are answered past the shell (`REPEATABLE`) look as if they had passed it. While the service
        drains or logs each request there are none, and never where callers have to show tokens or want spans."""
        offer: Callable[[int, Again], None] | None = scope["extensions"].pop(REPEATABLE, None)
        if offer is not None and self._authenticator is None and not is_recorded(trace := read_trace(scope["headers"])):
            given = _given_id(scope)
            scope["extensions"][REPEATABLE] = lambda body_bytes, again: offer(
                body_bytes, _Within(self._lifecycle, given, trace, again)
            )

    async def _admitted(self, scope: Scope, receive: Receive, send: Send, hosts: Sequence[str]) -> bool:
        """True if the request may go on; it has been answered otherwise."""
        method, headers, authenticator = scope["method"], scope["headers"], self._authenticator
        try:
            if self._own_names is not None:
                check_host(headers, self._own_names)
            if authenticator is None or (authenticator.sessions is not None and needs_no_token(scope["path"])):
                check_origin(method, scope["scheme"], headers, hosts=hosts)
            else:
                caller = scope[CALLER] = authenticator.admit(
                    headers, method=method, scheme=scope["scheme"], hosts=hosts
                )
                if scope["path"] == "/metrics":
                    caller.need("user", "node", "fleet")  # machines of volunteers may not look at the service itself
        except TerraceError as exc:
            self._lifecycle.on_refusal(scope, exc)
            answer: Response = answer_to(exc)
            if (
                isinstance(exc, Unauthenticated)
                and authenticator is not None
                and authenticator.sessions is not None
                and _is_visit(scope)
            ):
                answer = RedirectResponse(scope["root_path"] + SIGN_IN_PAGE, 303, {"Cache-Control": "no-store"})
            await answer(scope, receive, send)
            return False
        return True

    def _may_know(self, scope: Scope) -> bool:
        """True if the caller may know more of the service than its state."""
        return self._authenticator is None or self._authenticator.knows(scope["headers"])

    async def _health(self, *, told: bool, standby_ok: bool) -> Response:
        """The answer to a health check.

        Args:
            told: the caller may know more than the state.
            standby_ok: a standby is as well as a service that is ready.
        """
        lifecycle = self._lifecycle
        standby = lifecycle.standby()
        checks = await lifecycle.run_checks()  # also while it starts: they say what it waits for
        if lifecycle.draining:
            state = "draining"
        elif not lifecycle.ready:
            state = "starting"
        elif any(result != "ok" for result in checks.values()):
            state = "failing"
        else:
            state = "ready" if standby is None else "standby"
        answer: dict[str, object] = {"status": state}
        if told:
            answer |= {"node_id": self._node_id, "in_flight": lifecycle.in_flight, "checks": dict(checks)}
            if standby is not None:
                answer["reason"] = standby
        return JSONResponse(answer, 200 if state == "ready" or (standby_ok and state == "standby") else 503)


class _Within:
    """Repeated requests as if they passed the shell; an `Again`.

    Args:
        lifecycle: of the service.
        given: what the client calls all of them; "" where it gives no id.
        trace: to which it says that they belong.
        again: answers them.
    """

    def __init__(self, lifecycle: Lifecycle, given: str, trace: Trace | None, again: Again) -> None:
        self._lifecycle = lifecycle
        self._given = given
        self._trace = trace
        self._again = again

    def __call__(self, rest: memoryview, reply: Reply, *, alone: bool) -> Callable[[], None] | None:
        lifecycle = self._lifecycle
        if lifecycle.draining or log.isEnabledFor(logging.DEBUG):
            return None
        request_id = self._given or _new_id()

        def reply_with_id(status: int, lines: bytes, body: bytes) -> None:
            lifecycle.end_work()
            reply(status, b"%b%b: %b\r\n" % (lines, _REQUEST_ID, request_id.encode()), body)

        lifecycle.begin_work()
        take_back = None
        try:
            with request_context(request_id, self._trace or new_trace()):
                take_back = self._again(rest, reply_with_id, alone=alone)
        finally:
            if take_back is None:
                lifecycle.end_work()
        if take_back is None:
            return None

        def take_back_and_end() -> None:
            take_back()
            lifecycle.end_work()

        return take_back_and_end


def _as_asked(scope: Scope, proxies: Proxies) -> tuple[str, ...]:
    """Bring a request into the form in which it came to the proxy in front, but for its path, which begins where the
    service does; returns the names of the site, in lower case."""
    client = scope["client"]
    asked = proxies.read(client and client[0], scope["headers"])
    root = scope["root_path"] = asked.root_path
    if root and (scope["path"] == root or scope["path"].startswith(f"{root}/")):
        scope["path"] = scope["path"][len(root) :] or "/"  # a proxy that does not take it away
    if asked.scheme is not None:
        scope["scheme"] = asked.scheme
    return asked.hosts


def _given_id(scope: Scope) -> str:
    """What the client calls its request; "" where it gives no valid id."""
    for name, value in scope["headers"]:
        if name == _REQUEST_ID and _VALID_REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return ""


def _is_visit(scope: Scope) -> bool:
    """True if a person has opened this address in a browser; programs and scripts of pages ask for no HTML."""
    accepts = (value for name, value in scope["headers"] if name == b"accept")
    return scope["method"] in READS and any(b"text/html" in value for value in accepts)


def _new_id() -> str:
    return f"{_ids.getrandbits(64):016x}"
