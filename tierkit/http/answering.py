"""Errors in HTTP answers. `install(app)` gives every error of a Starlette or FastAPI application the JSON body
`{"error": "a sentence"}`, and the status code of the table in `tierkit.http.errors`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierkit.errors import TerraceError
from tierkit.http.errors import retry_after_s, status_of
from tierkit.http.responses import error_response
from tierkit.logs import current_request_id

__all__ = ["Answering", "answer_to", "install"]

log = logging.getLogger(__name__)

_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def install(app: Starlette) -> None:
    """Answer every error of `app`, its own and the framework's, in Terrace's form. Call once, before it serves."""
    # The framework would send whoever adds a slash to a route on to it: an answer that many clients do not follow with
    # a POST, and whose address is the name that the client sent as Host.
    app.router.redirect_slashes = False
    app.add_exception_handler(HTTPException, _on_http_exception)
    if "fastapi" in sys.modules:  # nodes do without it: it would be a third of their start-up time
        from fastapi.exceptions import RequestValidationError

        app.add_exception_handler(RequestValidationError, _on_validation_error)
    # Not as exception handlers: a handler for Exception stands outside all middleware and raises the error once more
    # after it has answered, which the server then logs a second time.
    app.add_middleware(Answering)


class Answering:
    """ASGI middleware: what `app` raises becomes the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            raise  # the client is gone; the shell knows
        except Exception as exc:
            if started:
                # Part of the answer is on its way. Raising breaks the connection, which is how HTTP tells the client.
                log.error("the answer broke off: %s", exc)
                raise
            response = _on_http_exception(Request(scope), exc) if isinstance(exc, HTTPException) else answer_to(exc)
            await response(scope, receive, send)


def answer_to(exc: Exception) -> Response:
    """The answer to a request that ended in this error, which is logged if it is our fault."""
    if isinstance(exc, TerraceError):
        status = status_of(exc)
        if status == 500:
            log.error("the request failed", exc_info=exc)
        return error_response(status, str(exc), retry_after_s=retry_after_s(exc), challenge=status == 401)
    log.error("unexpected error", exc_info=exc)
    return error_response(500, f"internal error; request id {current_request_id() or 'unknown'}")


def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    sentences = {
        "There was an error parsing the body": "the body cannot be read as JSON",
        "Not Found": f"no such route: {request.url.path[:200]}",
        "Method Not Allowed": f"{request.method} is not allowed on {request.url.path[:200]}",
    }
    headers = dict(exc.headers or {})
    if exc.status_code == 405:
        headers["Allow"] = _allowed(request)
    return JSONResponse({"error": sentences.get(exc.detail, exc.detail)}, exc.status_code, headers)


def _allowed(request: Request) -> str:
    """Return the methods of all routes of this path: the framework names only the methods of the first route."""
    allowed = {
        method
        for method in _METHODS
        for route in request.app.routes
        if route.matches({**request.scope, "method": method})[0] is Match.FULL
    }
    return ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))


def _on_validation_error(request: Request, exc: Exception) -> Response:
    errors: Sequence[Mapping[str, Any]] = getattr(exc, "errors", tuple)()
    # Where an entry of a list is wrong, the list is said to be too short as well.
    outer = {tuple(error["loc"][:depth]) for error in errors for depth in range(1, len(error["loc"]))}
    sentences = [_validation_sentence(error) for error in errors if tuple(error["loc"]) not in outer]
    # 422 is for a body that could be read; what is wrong with a path, a query or a header is a bad request.
    of_body = any(error["loc"][0] == "body" for error in errors)
    return JSONResponse({"error": "; ".join(sentences)}, 422 if of_body else 400)


_VALIDATION = {
    "missing": "is missing",
    "extra_forbidden": "is unknown",
    "model_attributes_type": "should be a JSON object, sent as application/json",
    "tuple_type": "should be a list",
    "too_short": "has too few entries",
    "int_parsing_size": "is too large",
}
"""Sentences for pydantic's errors that mention Python, by error type."""


def _validation_sentence(error: Mapping[str, Any]) -> str:
    """Return what is wrong with one field of a request, and what is expected. Texts from the request are not repeated,
    because they may hold secrets."""
    kind, place, sent = error["type"], ".".join(map(str, error["loc"])), error.get("input")
    if kind == "json_invalid":
        return f"the body is no JSON: {error['ctx']['error']}, at character {error['loc'][-1]}"
    if kind in _VALIDATION:
        return f"{place} {_VALIDATION[kind]}"
    reason = error["msg"].removeprefix("Value error, ")
    told = f" is {sent!r}" if isinstance(sent, int | float) and abs(sent) < 1e100 else ""
    return f"{place}{told}: {reason}"
