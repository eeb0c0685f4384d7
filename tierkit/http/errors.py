"""The one table of error classes and status codes, in both directions: servers answer by it, clients read by it."""

from __future__ import annotations

import json
import math

from tierkit.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    LimitReached,
    NotFound,
    NotTerrace,
    Standby,
    TerraceError,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnsupportedMedia,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from tierkit.plaintext import one_line

__all__ = ["error_of", "refusal_of", "retry_after_s", "sentence_of", "status_of"]

_STATUS: dict[type[TerraceError], int] = {
    InvalidInput: 400,
    Unauthenticated: 401,
    Forbidden: 403,
    NotFound: 404,
    Conflict: 409,
    TooLarge: 413,
    UnsupportedMedia: 415,
    Standby: 421,
    LimitReached: 429,
    UpstreamError: 502,
    Unavailable: 503,
    DeadlineExceeded: 504,
}
_ERROR = {status: cls for cls, status in _STATUS.items()} | {422: InvalidInput}  # FastAPI's code for a body

_MAX_SENTENCE = 500
"""Characters of what another node says that are passed on."""
_LONGEST_WAIT_S = 1e9
"""Longest wait reported to a caller: callers compute with it, so it must be a finite number."""


def status_of(error: TerraceError) -> int:
    """Return the HTTP status code of an error: the code of the nearest class in the table, else 500."""
    return next((_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS), 500)


def retry_after_s(error: TerraceError) -> int | None:
    """Value of the header Retry-After, whole seconds and at least 1; None if waiting does not help."""
    return max(1, math.ceil(error.retry_after_s)) if isinstance(error, Unavailable) else None


def error_of(who: str, status: int, body: bytes, retry_after: str | None = None) -> TerraceError:
    """The error that `who`, a Terrace service, has answered with.

    Args:
        status: not 2xx.
        retry_after: the header.
    """
    message = sentence_of(body)
    if message is None:
        return NotTerrace(f"{who} answered {status}, and not as a Terrace service does", status_code=status)
    cls = _ERROR.get(status, UpstreamError)
    if issubclass(cls, Unavailable):
        return cls(message, retry_after_s=_seconds(retry_after))
    return UpstreamError(message, status_code=status) if cls is UpstreamError else cls(message)


def refusal_of(who: str, status: int, body: bytes, retry_after: str | None = None) -> TerraceError:
    """Return the error for a task that another node, possibly of another make, has refused."""
    message = f"{who} answered {status}: {(sentence_of(body) or 'no reason given')[:_MAX_SENTENCE]}"
    if status == _STATUS[Unavailable]:
        return UpstreamUnavailable(message, retry_after_s=_seconds(retry_after))
    if status == _STATUS[DeadlineExceeded]:
        return UpstreamTimeout(message)
    return UpstreamError(message, status_code=status)


def sentence_of(body: bytes) -> str | None:
    """Return the sentence of an error body, {"error": sentence}; None for any other body."""
    try:
        said = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # JSON can hold half a character, which is no text, and lines that would look like those of the program that asks.
    return one_line(str(said).encode(errors="backslashreplace").decode())


def _seconds(retry_after: str | None) -> float:
    try:
        return min(max(0.0, float(retry_after or "1")), _LONGEST_WAIT_S)
    except ValueError:
        return 1.0
