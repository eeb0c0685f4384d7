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
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierkit.access import CALLER, READS, SIGN_IN_PAGE, Authenticator, Proxies, check_host, check_origin, needs_no_token
from tierkit.errors import Forbidden, Standby, TerraceError, Unauthenticated
from tierkit.http.answering import answer_to
from tierkit.http.asgi import fields_of
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.responses import error_response
from tierkit.logs import request_context
from tierkit.spans import new_root
from tierkit.wire.messages import REQUEST_ID_HEADER
from tierkit.wire.trace import new_trace, read_trace

__all__ = ["Direct", "Shell", "answer_directly"]

log = logging.getLogger("tierkit.access")

_DIRECT = "direct"
"""Name in the state of an application under which it keeps its direct routes."""

_VALID_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
_ids = random.Random()
"""Request ids must differ, but need not be secret. The system's randomness would cost a system call for each request,
and the interpreter's lock could go to the inference thread meanwhile."""


_STANDBY_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Standby</title>
<h1>This scheduler is a standby</h1>
<p>{}.</p>
<p>Open the page at the address of the scheduler that leads. <code>terrace doctor --scheduler URL,URL</code>, with the
addresses of all of them, says which one that is.</p>
</html>
"""


class Direct(NamedTuple):
    """Application that answers a route without the web framework."""

    app: ASGIApp
    parameters: Mapping[str, str] = {}
    """Parameters of its path."""
    last: str = ""
    """The path parameter that is the last segment of the path. Only for a route that ends with a slash."""


def answer_directly(app: Starlette, routes: Mapping[str, Direct]) -> None:
    """Have the POST requests of these paths found with one look-up.

    `app` must have the same routes: it answers other methods, and describes them.
    """
    setattr(app.state, _DIRECT, routes)


class Shell:
    """ASGI application around a service's application, which may be added after the shell has begun to serve.

    Args:
        local_only: every user of this machine may use the service, and no other machine can reach it.
        metrics: returns the content of `/metrics`; None leaves that path to the application.
        proxies: reverse proxies in front of the service; None if there are none.
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
        self._app: ASGIApp | None = None
        self._direct: Mapping[str, Direct] = {}
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._node_id = node_id
        self._authenticator = authenticator
        host = socket.gethostname().lower()
        self._own_names = (host, f"{host}.local") if local_only else None

    def serve(self, app: Starlette) -> None:
        """Pass requests on to `app` from now on."""
        self._app = app
        self._direct = getattr(app.state, _DIRECT, {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        fields = fields_of(scope)
        request_id = (_REQUEST_ID in fields and _given_id(scope)) or _new_id()
        trace = read_trace(scope["headers"]) if b"traceparent" in fields else None
        if trace is None:
            trace = new_trace() if scope["method"] in READS else new_root()
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
            except Exception as exc:
                if status:
                    # Part of the answer is on its way. Raising breaks the connection, and so tells the client.
                    log.error("the answer broke off: %s", exc)
                    raise
                await answer_to(exc)(scope, receive, send_with_id)
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
        elif metrics is None and (self._app is None or not lifecycle.ready):
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
        elif self._app is not None and scope["method"] in READS:
            await self._app(scope, receive, send)
        elif lifecycle.draining:
            ending = error_response(503, "the service is shutting down; try another node", retry_after_s=1, close=True)
            await ending(scope, receive, send)
        else:
            assert self._app is not None
            with lifecycle.working():
                await (self._directly(scope, path) or self._app)(scope, receive, send)

    def _directly(self, scope: Scope, path: str) -> ASGIApp | None:
        """Return the application that answers this POST without the framework; None if there is none."""
        if scope["method"] != "POST":
            return None
        at = path.rfind("/") + 1
        found = self._direct.get(path) or self._direct.get(path[:at])
        if found is None or (found.last and at == len(path)):
            return None
        scope["path_params"] = {found.last: path[at:]} if found.last else found.parameters
        scope["app"] = self._app
        return found.app

    async def _admitted(self, scope: Scope, receive: Receive, send: Send, hosts: Sequence[str]) -> bool:
        """Return True if the request may pass; otherwise it has been answered."""
        method, headers, authenticator = scope["method"], scope["headers"], self._authenticator
        try:
            if self._own_names is not None:
                check_host(headers, self._own_names)
            keyed = self._lifecycle.keyed_path
            if (
                authenticator is None
                or (authenticator.sessions is not None and needs_no_token(scope["path"]))
                or (keyed and scope["path"].startswith(keyed) and method in READS)
            ):
                if b"origin" in fields_of(scope):  # else it passes
                    check_origin(method, scope["scheme"], headers, hosts=hosts)
            else:
                caller = scope[CALLER] = authenticator.admit(
                    headers, method=method, scheme=scope["scheme"], hosts=hosts, path=scope["path"]
                )
                if scope["path"] == "/metrics":
                    caller.need("user", "node", "fleet")  # machines of volunteers may not look at the service itself
                    if caller.sites:
                        raise Forbidden("the metrics are about all sites, and your token is limited to some")
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
            checks = {**checks, **await lifecycle.run_notes()}
            answer |= {"node_id": self._node_id, "in_flight": lifecycle.in_flight, "checks": checks}
            if standby is not None:
                answer["reason"] = standby
        return JSONResponse(answer, 200 if state == "ready" or (standby_ok and state == "standby") else 503)


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
    """Return the client's id of its request; "" if the header is missing or invalid."""
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
