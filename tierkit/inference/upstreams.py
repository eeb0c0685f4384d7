"""The upstream nodes that a request names, read from its header and checked. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

from pydantic import TypeAdapter, ValidationError

from tierkit.errors import InvalidInput
from tierkit.wire.messages import UPSTREAM_HEADER, UPSTREAMS, Upstream

__all__ = ["MAX_UPSTREAMS", "forbidden_url", "is_allowed", "read_header", "read_upstreams"]

MAX_UPSTREAMS = 16
"""More would be a list of targets rather than a route."""

_MAX_REMEMBERED, _MAX_REMEMBERED_CHARACTERS = 64, 2048
"""Routes that are remembered, and the longest of them: a device gets few different ones, again and again."""

_T = TypeVar("_T")

_DEFAULT_PORTS = {"http": 80, "https": 443}


def read_upstreams(header: str | None) -> tuple[Upstream, ...]:
    """Return the upstream nodes that a request names, in the order in which to try them.

    A node sends a user's pixels to these URLs because its caller asks for it. The list is therefore short, and its URLs
    are plain; `forbidden_url` restricts them.

    Args:
        header: value of `UPSTREAM_HEADER`; None and "[]" ask only for the coarse answer.

    Raises:
        InvalidInput: it cannot be read, or names too many nodes or an end device, or a URL is not a plain http(s) one.
    """
    if header is None:
        return ()
    return (_remembered if len(header) <= _MAX_REMEMBERED_CHARACTERS else _read)(header)


def _read(header: str) -> tuple[Upstream, ...]:
    upstreams = read_header(UPSTREAMS, UPSTREAM_HEADER, header)
    if len(upstreams) > MAX_UPSTREAMS:
        raise InvalidInput(f"{UPSTREAM_HEADER} names {len(upstreams)} nodes; at most {MAX_UPSTREAMS} are accepted")
    return upstreams


_remembered = lru_cache(_MAX_REMEMBERED)(_read)


def forbidden_url(upstream: Upstream, allowed: Sequence[str]) -> str | None:
    """The URL of this upstream node, or of the node that encodes for it, to which a node with the list
    `allowed_upstreams` sends nothing; None if it may send to both."""
    urls = (upstream.url, *(() if upstream.relay is None else (upstream.relay.url,)))
    return next((url for url in urls if not is_allowed(url, allowed)), None)


def is_allowed(url: str, allowed: Sequence[str]) -> bool:
    """True if a URL is below one of `allowed`; an empty list allows all."""
    return not allowed or any(_is_below(urlsplit(url), urlsplit(prefix)) for prefix in allowed)


def read_header(adapter: TypeAdapter[_T], name: str, header: str) -> _T:
    """The JSON value of the header `name`.

    Raises:
        InvalidInput: what is wrong with it.
    """
    try:
        return adapter.validate_json(header)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise InvalidInput(f"{name} cannot be read: {f'{place}: ' if place else ''}{said}") from exc


def _is_below(url: SplitResult, prefix: SplitResult) -> bool:
    if (url.scheme, url.hostname, _port(url)) != (prefix.scheme, prefix.hostname, _port(prefix)):
        return False
    # Whole path segments: /edge is no prefix of /edge-2. ".." could climb out of the prefix again.
    segments, wanted = _segments(url), _segments(prefix)
    return ".." not in segments and "%" not in url.path and segments[: len(wanted)] == wanted


def _port(url: SplitResult) -> int | None:
    return url.port or _DEFAULT_PORTS.get(url.scheme)


def _segments(url: SplitResult) -> list[str]:
    return [segment for segment in url.path.split("/") if segment]
