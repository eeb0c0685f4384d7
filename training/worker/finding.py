"""How a worker finds the host of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from tierkit.client import AsyncClient, Backoff
from tierkit.wire.messages import checked_url
from tierkit.wire.runs import WorkerOffer

__all__ = ["at", "through"]

_BUDGET_S = 10.0


def at(url: str) -> Callable[[], Awaitable[str]]:
    """The host is there, and stays there.

    Raises:
        ValueError: this is no URL.
    """
    checked = checked_url(url)

    async def find() -> str:
        return checked

    return find


def through(
    scheduler: str, offer: WorkerOffer, token: Callable[[], str] | None, tls_ca: Path | None
) -> Callable[[], Awaitable[str]]:
    """The scheduler says where the host is. Each address is given in its turn; then it is asked again.

    Args:
        scheduler: its URL, or those of several, comma-separated.
        offer: what this worker tells of itself. The run that it is sent to first stays the one.
    """
    left: list[str] = []

    async def find() -> str:
        nonlocal offer
        if not left:
            async with AsyncClient(
                scheduler, timeout_s=_BUDGET_S, backoff=Backoff(attempts=1), token=token, tls_ca=tls_ca
            ) as client:
                match = await client.match(offer)
            offer = offer.model_copy(update={"run": match.run})
            left.extend(match.urls)
        return left.pop(0)

    return find
