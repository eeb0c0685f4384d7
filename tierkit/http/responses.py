"""Error answers that are given below the web framework."""

from __future__ import annotations

from starlette.responses import JSONResponse

__all__ = ["error_response"]


def error_response(
    status: int,
    message: str,
    *,
    retry_after_s: int | None = None,
    close: bool = False,
    challenge: bool = False,
) -> JSONResponse:
    """The form that every error has: {"error": sentence}; `close` ends the connection as well, `challenge` says that a
    bearer token is wanted."""
    headers = {}
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    if challenge:
        headers["www-authenticate"] = 'Bearer realm="terrace"'
    if close:
        headers["connection"] = "close"
    return JSONResponse({"error": message}, status, headers)
