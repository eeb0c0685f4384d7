"""Failover between schedulers of which one leads: which one to ask, and when to ask the next. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from tierkit.errors import (
    CertificateError,
    NotTerrace,
    Standby,
    TerraceError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)

__all__ = ["Ring", "Round", "leads_elsewhere"]

_GATEWAY_CODES = frozenset({502, 503, 504})
"""Answers of a proxy whose scheduler is gone. A scheduler's own refusals with these codes become
other classes."""


def leads_elsewhere(error: TerraceError) -> bool:
    """True if the error means that this scheduler does not lead, or cannot be reached. A refusal by the leader is an
    answer, and would be the same from any other scheduler."""
    if isinstance(error, Standby | NotTerrace | UpstreamUnavailable | UpstreamTimeout | CertificateError):
        return True
    return isinstance(error, UpstreamError) and error.status_code in _GATEWAY_CODES


class Ring:
    """Addresses in a ring. The current one is asked until it no longer leads, then the next.

    Args:
        addresses: at least one; the first is asked first.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(dict.fromkeys(addresses))
        self.current = self.addresses[0]

    def leave(self, address: str) -> None:
        """Make the next address the current one, unless another request has left `address` already."""
        if address == self.current:
            following = (self.addresses.index(address) + 1) % len(self.addresses)
            self.current = self.addresses[following]


class Round:
    """Errors of one request at the addresses of a ring, until it has tried each of them."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._met: list[tuple[str, TerraceError]] = []

    def failed(self, address: str, error: TerraceError) -> TerraceError | None:
        """Note the error of `address`.

        Returns:
            None if the ring's current address is to be asked next. Else the error that ends the round: the refusal of
            the leader, or the errors of all. That is a `Standby` if one of them is a standby. The next call begins a
            new round.
        """
        if not leads_elsewhere(error):
            self._met = []
            return error
        self._ring.leave(address)
        self._met.append((address, error))
        if len(self._met) < len(self._ring.addresses):
            return None
        met, self._met = self._met, []
        return error if len(met) == 1 else _all_of(met)


def _all_of(met: Sequence[tuple[str, TerraceError]]) -> TerraceError:
    said = "; ".join(str(error) if address in str(error) else f"{address}: {error}" for address, error in met)
    if waits_s := [error.retry_after_s for _, error in met if isinstance(error, Standby)]:
        return Standby(f"no scheduler leads at the moment: {said}", retry_after_s=min(waits_s))
    return type(met[-1][1])(f"none of the schedulers answers: {said}")
