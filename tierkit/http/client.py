"""HTTP to other services: one client per process, one total budget per call, foreign errors translated once."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import TracebackType

import httpx

from tierkit.access import client_context, tls_trouble
from tierkit.errors import CertificateError, TerraceError, UpstreamError, UpstreamTimeout, UpstreamUnavailable
from tierkit.http1 import HttpTransport, ServiceClient, Way
from tierkit.links import LinkTransport, read_links

__all__ = ["announce_links", "authorization", "calling", "open_client"]

log = logging.getLogger(__name__)

_CONNECT_S = 3.0
"""A peer that does not take a connection within this time is taken for gone, whatever budget is left."""

_KEEPALIVE_S = 30.0
"""Shorter than the 75 s for which our services keep an idle connection: the side that closes first must be this one,
or a request could be sent into a connection that the other side is closing."""


def authorization(token: str | None) -> dict[str, str]:
    """The header that presents a token; none where there is no token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def announce_links(links: Path | None) -> None:
    """Say aloud, once for a service however many clients it opens, that its requests pass emulated links.

    Raises:
        SetupError: the file cannot be used.
    """
    if links is not None:
        names = ", ".join(link.name for link in read_links(links).link)
        log.warning("EMULATED LINKS are active: requests are delayed on purpose", extra={"links": names})


def open_client(*, max_connections: int = 64, links: Path | None = None, tls_ca: Path | None = None) -> ServiceClient:
    """A client for a service to share among its calls; close it with `async with`.

    Phases are bounded here (connecting 3 s; reading, writing and waiting for a free connection by the call's total
    budget alone, so use `calling`). Redirects are not followed, and proxies of the environment are not used: nodes
    talk to the addresses that they are given and to nothing else.

    Args:
        max_connections: to each peer; more requests wait for a free one.
        links: file of emulated links that the requests pass (`tierkit.links`); `announce_links` says so.
        tls_ca: file with the certificates to trust, in place of the usual public authorities.

    Raises:
        SetupError: one of the files cannot be used.
    """
    way: Way = HttpTransport(client_context(tls_ca), max_connections=max_connections, keepalive_s=_KEEPALIVE_S)
    if links is not None:
        way = LinkTransport(read_links(links), way)
    return ServiceClient(way, timeout=httpx.Timeout(None, connect=_CONNECT_S))


class calling:
    """What runs inside is one call to `who`, at most `budget_s` seconds in total.

    A class, for a generator takes several times as long to enter and leave, which counts when it is done per request.

    Raises:
        UpstreamTimeout: no complete answer within the budget.
        UpstreamUnavailable: no connection, or it broke.
        CertificateError: the two sides do not agree on TLS, or the certificate does not prove who it is.
        UpstreamError: an answer that is none.
    """

    def __init__(self, who: str, *, budget_s: float | None) -> None:
        self._who = who
        self._limit = None if budget_s is None else asyncio.timeout(budget_s)

    async def __aenter__(self) -> None:
        if self._limit is not None:
            await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._limit is not None:
            try:
                await self._limit.__aexit__(kind, error, traceback)
            except TimeoutError as exc:
                error = exc
        if error is not None and (known := _translated(error, self._who)) is not None:
            raise known from error


def _translated(error: BaseException, who: str) -> TerraceError | None:
    """What the error of another library means here; None for what is not its."""
    match error:
        case httpx.ConnectTimeout():
            return UpstreamUnavailable(f"{who} takes no connection")
        case TimeoutError() | httpx.TimeoutException():
            return UpstreamTimeout(f"{who} did not answer within its budget")
        case httpx.UnsupportedProtocol():
            return UpstreamError(f"{who} has no usable address: {error}")
        case httpx.TransportError():
            if trouble := tls_trouble(error, who):
                return CertificateError(trouble)
            return UpstreamUnavailable(f"{who} cannot be reached: {str(error) or type(error).__name__}")
        case httpx.HTTPError() | httpx.InvalidURL():
            return UpstreamError(f"{who} gave no usable answer: {error}")
    return None
