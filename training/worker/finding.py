"""How a worker finds the host of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from tierkit.client import AsyncClient, Backoff, RunState
from tierkit.errors import Unavailable
from tierkit.wire.messages import checked_url

__all__ = ["at", "through"]

_BUDGET_S = 10.0
_AGAIN_S = 3.0


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
    scheduler: str, run: str | None, token: Callable[[], str] | None, tls_ca: Path | None
) -> Callable[[], Awaitable[str]]:
    """The scheduler knows where it is.

    Args:
        scheduler: its URL, or those of several, comma-separated.
        run: id of the run. Default: the newest one that is under way, which then stays the one.
    """
    chosen = run

    async def find() -> str:
        nonlocal chosen
        async with AsyncClient(
            scheduler, timeout_s=_BUDGET_S, backoff=Backoff(attempts=1), token=token, tls_ca=tls_ca
        ) as client:
            if chosen is None:
                under_way = [each for each in (await client.runs(limit=200)).runs if each.state is RunState.RUNNING]
                if not under_way:
                    raise Unavailable("no training run is under way", retry_after_s=_AGAIN_S)
                chosen = under_way[0].id
            return (await client.run_host(chosen)).url

    return find
