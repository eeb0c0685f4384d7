"""Ways for a worker to find the host of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from tierkit.client import AsyncClient, Backoff
from tierkit.errors import SetupError
from tierkit.wire.messages import checked_url
from tierkit.wire.runs import WorkerOffer

__all__ = ["FindHost", "HostAddress", "at", "through"]

_BUDGET_S = 10.0


class HostAddress(NamedTuple):
    """Address of the host of a run, and the ticket to show there."""

    url: str
    ticket: str | None = None
    """None if the worker's operator has named the host, which then gets the worker's token. A host named by the
    scheduler gets only its ticket; "" if it has none.
    """
    until: float = math.inf
    """Time to ask for the address again, even if the host is still there; monotonic seconds."""


FindHost = Callable[[], Awaitable[HostAddress]]


def at(url: str) -> FindHost:
    """Find the host always at this URL.

    Raises:
        ValueError: this is not a URL.
    """
    place = HostAddress(checked_url(url))

    async def find() -> HostAddress:
        return place

    return find


def through(scheduler: str, offer: WorkerOffer, token: Callable[[], str] | None, tls_ca: Path | None) -> FindHost:
    """Find the host through the scheduler. Its addresses are tried in turn; then the scheduler is asked again.

    Args:
        scheduler: its URL, or several URLs, comma-separated. If one has https, the worker follows only https.
        offer: description of this worker. It stays with the first run that it is sent to.
    """
    places: list[HostAddress] = []
    """Still to be given."""
    last = HostAddress("", until=0.0)
    https = any(each.strip().startswith("https://") for each in scheduler.split(","))

    async def find() -> HostAddress:
        nonlocal offer, last
        overdue = time.monotonic() >= last.until
        if not places or overdue:
            async with AsyncClient(
                scheduler, timeout_s=_BUDGET_S, backoff=Backoff(attempts=1), token=token, tls_ca=tls_ca
            ) as client:
                match = await client.match(offer)
            offer = offer.model_copy(update={"run": match.run})
            urls = [url for url in match.urls if url.startswith("https://") or not https]
            if not urls:
                raise SetupError(
                    f"the host of run {match.run} is at {match.urls[0]}, and the scheduler has https: nothing was sent "
                    "there. Let the run's owner start its host with --tls-cert and --tls-key, or name another --run"
                )
            if overdue and last.url in urls:  # it is there
                urls.insert(0, urls.pop(urls.index(last.url)))
            until = time.monotonic() + match.ticket_s / 2 if match.ticket else math.inf
            places[:] = [HostAddress(url, match.ticket, until) for url in urls]
        last = places.pop(0)
        return last

    return find
