"""Where a task may go after its coarse answer, and which of its images: what its sender asks for, checked. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

from pydantic import TypeAdapter, ValidationError

from tierkit.errors import Forbidden, InvalidInput
from tierkit.protocol import ESCALATION, ESCALATION_HEADER, UPSTREAM_HEADER, UPSTREAMS, Stage, Upstream
from tierkit.types import Tier

__all__ = ["MAX_UPSTREAMS", "read_stages", "read_upstreams"]

MAX_UPSTREAMS = 16
"""More would be a list of targets rather than a route."""

_T = TypeVar("_T")

_DEFAULT_PORTS = {"http": 80, "https": 443}


def read_upstreams(header: str | None, allowed: Sequence[str]) -> tuple[Upstream, ...]:
    """The upper nodes that a request names, in the order in which to try them.

    A node sends a user's pixels to these URLs because its caller says so. The list is therefore short, its URLs say
    plainly where they lead, and `allowed` can pin them.

    Args:
        header: value of `UPSTREAM_HEADER`; None and "[]" mean that the coarse answer alone is wanted.
        allowed: URLs below which each of them must lie; none for any.

    Raises:
        InvalidInput: it cannot be read, or names too many nodes, or a URL is not a plain http(s) one.
        Forbidden: a URL outside `allowed`.
    """
    if header is None:
        return ()
    upstreams = _read(UPSTREAMS, UPSTREAM_HEADER, header)
    if len(upstreams) > MAX_UPSTREAMS:
        raise InvalidInput(f"{UPSTREAM_HEADER} names {len(upstreams)} nodes; at most {MAX_UPSTREAMS} are accepted")
    for upstream in upstreams:
        parts = _plain(upstream.url)
        if allowed and not any(_is_below(parts, urlsplit(prefix)) for prefix in allowed):
            raise Forbidden(f"this node may not send images to {upstream.url}; --allowed-upstreams lists where it may")
    return upstreams


def read_stages(header: str | None, upstreams: Sequence[Upstream], *, coarse_known: bool) -> tuple[Stage, ...]:
    """The tiers to which the unsure images of a task go, one after the other; none where all go up together.

    Args:
        header: value of `ESCALATION_HEADER`.
        upstreams: of the same request.
        coarse_known: whether the coarse answer is not to be computed.

    Raises:
        InvalidInput: it cannot be read; the tiers do not rise from the edge on; there is no upper node, or one of
            another tier; or it is not the first threshold that is about a coarse answer to be computed, and the first
            list of images that is about one that is known.
    """
    if header is None:
        return ()
    stages = _read(ESCALATION, ESCALATION_HEADER, header)
    tiers = [stage.tier for stage in stages]
    if tiers not in ([Tier.EDGE], [Tier.CLOUD], [Tier.EDGE, Tier.CLOUD]):
        given = ", ".join(tiers) or "nothing"
        raise InvalidInput(f"{ESCALATION_HEADER} goes from edge to cloud, or has one of the two; it has {given}")
    named = {upstream.tier for upstream in upstreams}
    if not named or not named <= set(tiers):
        raise InvalidInput(
            f"{UPSTREAM_HEADER} has nodes of {', '.join(sorted(named)) or 'no tier'}, {ESCALATION_HEADER} asks about "
            f"{', '.join(tiers)}: name at least one node, and none of another tier"
        )
    if coarse_known and stages[0].below is not None:
        raise InvalidInput(
            f"the threshold of the first tier in {ESCALATION_HEADER} is about the coarse answer: ask for both stages"
        )
    for number, stage in enumerate(stages):
        if stage.only is not None and (number or not coarse_known or list(stage.only) != sorted(set(stage.only))):
            raise InvalidInput(
                f"'only' in {ESCALATION_HEADER} names the images, in rising order, that the first tier is asked about "
                "when the coarse answer is known; it has no other place"
            )
    return stages


def _read(adapter: TypeAdapter[_T], name: str, header: str) -> _T:
    try:
        return adapter.validate_json(header)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidInput(f"{name} cannot be read: {f'{place}: ' if place else ''}{first['msg']}") from exc


def _plain(url: str) -> SplitResult:
    try:
        # urlsplit drops line breaks and keeps backslashes; other parsers see another host behind those.
        if not url.isprintable() or "\\" in url:
            raise ValueError("characters that do not belong into one")
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as exc:
        raise InvalidInput(f"{UPSTREAM_HEADER}: {url!r} is no URL: {exc}") from exc
    if not host or parts.username is not None or parts.query or parts.fragment:
        raise InvalidInput(f"{UPSTREAM_HEADER}: {url!r} must be a plain URL: scheme, host, port and path alone")
    return parts


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
