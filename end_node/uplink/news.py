"""News of sources: when a change of their state is worth a batch without observations. Pure: time is passed in."""

from __future__ import annotations

from tierkit.pacing import TokenBucket
from tierkit.wire.observations import ReportedSource

__all__ = ["SourceNews"]

_LINGER_S = 1.0
"""A change that lasts for less time than this costs nothing."""
_PER_S, _BURST = 0.1, 3
"""Batches of this kind per second, and at once."""


class SourceNews:
    """Compares the state of the sources with what the scheduler was last sent."""

    def __init__(self) -> None:
        self._sending: tuple[ReportedSource, ...] | None = None
        self._sent: tuple[ReportedSource, ...] | None = None
        self._since: float | None = None
        """Time at which a difference was noticed first."""
        self._bucket = TokenBucket(per_s=_PER_S, burst=_BURST)

    def due_in_s(self, sources: tuple[ReportedSource, ...], now: float) -> float | None:
        """Return the seconds until a batch may go for these states; None if the scheduler has them."""
        if sources == self._sent:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        return max(0.0, self._since + _LINGER_S - now, self._bucket.wait_s(now))

    def sending(self, sources: tuple[ReportedSource, ...]) -> None:
        """A batch with these states is on its way."""
        self._sending = sources

    def sent(self, now: float, *, alone: bool) -> None:
        """The batch has arrived. If the scheduler forgot the states meanwhile, they are due again.

        Args:
            alone: True if the batch held no observation.
        """
        self._sent, self._since = self._sending, None
        if alone:
            self._bucket.take(now)

    def forget(self) -> None:
        """The scheduler does not know the states any more. This includes a batch on its way."""
        self._sending = self._sent = None
