"""Retries with exponential backoff for a host that is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tierkit.errors import DeadlineExceeded, TerraceError, Unavailable, UpstreamError, UpstreamTimeout
from tierkit.pacing import backoff_s
from training.worker.connection import HostConnection
from training.worker.finding import FindHost

__all__ = ["HostRetry"]

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.2, 3.0
_AGAIN_S = 60.0
"""Seconds between two tries to get a new ticket."""

T = TypeVar("T")


class HostRetry:
    """Repeats what fails while the host is away."""

    def __init__(self, seconds: float, connection: HostConnection, find_host: FindHost) -> None:
        self._seconds = seconds
        self._connection, self._find_host = connection, find_host
        self._until = 0.0

    async def have(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `ask` once it succeeds. All requests of a worker may be sent twice."""
        failures, away_since = 0, time.monotonic()
        while True:
            try:
                if failures or not self._connection.url:
                    await self._find()
                elif time.monotonic() >= self._until:
                    self._until = time.monotonic() + _AGAIN_S
                    with contextlib.suppress(TerraceError):  # the ticket that is there is valid for a while
                        await self._find()
                answer = await ask()
                if failures:
                    log.info("the host is back after %.0f s", time.monotonic() - away_since)
                return answer
            except (Unavailable, UpstreamTimeout, UpstreamError) as error:
                # An answer of another make, such as a proxy's, has a status; one that proves nothing is the end.
                final = isinstance(error, UpstreamError) and (error.status_code or 0) < 500
                if final:
                    raise
                left_s = away_since + self._seconds - time.monotonic()
                if left_s < 0:
                    raise DeadlineExceeded(f"the host was away for {self._seconds:g} s: {error}") from error
                if failures == 0:
                    log.warning("the host is away: %s", error)
                failures += 1
                wait_s = backoff_s(
                    failures, first_s=_FIRST_BACKOFF_S, cap_s=_LONGEST_BACKOFF_S, chance=secrets.randbelow(1000) / 1000
                )
                asked_s = error.retry_after_s if isinstance(error, Unavailable) else 0.0
                await asyncio.sleep(max(wait_s, min(asked_s, left_s)))

    async def _find(self) -> None:
        self._connection.url, self._connection.ticket, self._until = await self._find_host()
