"""HTTP to other services: one client per process, one total budget per call, foreign errors translated once."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import httpx

from tierkit.errors import UpstreamError, UpstreamTimeout, UpstreamUnavailable

__all__ = ["calling", "open_client"]

_CONNECT_S = 3.0
"""A peer that does not take a connection within this time is taken for gone, whatever budget is left."""

_KEEPALIVE_S = 30.0
"""Shorter than the 75 s for which our services keep an idle connection: the side that closes first must be this one,
or a request could be sent into a connection that the other side is closing."""


@cache
def _tls() -> ssl.SSLContext:
    # Reading the certificate store takes some 30 ms and 3 MB: once per process is enough.
    return httpx.create_ssl_context(trust_env=False)


def open_client(*, max_connections: int = 64) -> httpx.AsyncClient:
    """A client for a service to share among its calls; close it with `async with`.

    Phases are bounded here (connecting 3 s; reading, writing and waiting for a free connection by the call's total
    budget alone, so use `calling`). Redirects are not followed, and proxies of the environment are not used: nodes
    talk to the addresses that they are given and to nothing else.
    """
    return httpx.AsyncClient(
        verify=_tls(),
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        limits=httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            keepalive_expiry=_KEEPALIVE_S,
        ),
        follow_redirects=False,
        trust_env=False,
    )


@asynccontextmanager
async def calling(who: str, *, budget_s: float | None) -> AsyncIterator[None]:
    """What runs inside is one call to `who`, at most `budget_s` seconds in total.

    Raises:
        UpstreamTimeout: no complete answer within the budget.
        UpstreamUnavailable: no connection, or it broke.
        UpstreamError: an answer that is none.
    """
    try:
        async with asyncio.timeout(budget_s):
            yield
    except httpx.ConnectTimeout as exc:
        raise UpstreamUnavailable(f"{who} takes no connection") from exc
    except (TimeoutError, httpx.TimeoutException) as exc:
        raise UpstreamTimeout(f"{who} did not answer within its budget") from exc
    except httpx.UnsupportedProtocol as exc:
        raise UpstreamError(f"{who} has no usable address: {exc}") from exc
    except httpx.TransportError as exc:
        raise UpstreamUnavailable(f"{who} cannot be reached: {str(exc) or type(exc).__name__}") from exc
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise UpstreamError(f"{who} gave no usable answer: {exc}") from exc
