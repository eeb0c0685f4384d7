"""Hosts that wait for a person to start a training run on them, and the starts that they have not taken yet.

Only in memory. Hosts repeat their offers every second, so a scheduler that takes over knows them at once; starts that
no host has taken are lost with the scheduler, and with their host.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.runs.state import SILENT_S
from tierkit.errors import Conflict, LimitReached, NotFound, Overloaded
from tierkit.wire.offers import HostOffer, Offer, OfferedStart, OfferOrders, StartWish

__all__ = ["Offers"]

_MOST_OFFERS = 100
_MOST_WAITING = 4
"""Starts that one host has not taken yet."""
_AGAIN_S = 5.0


@dataclass(slots=True)
class _Known:
    owner: str | None
    said: HostOffer
    heard: float
    waiting: list[OfferedStart] = field(default_factory=list)

    def take(self, said: HostOffer) -> OfferOrders:
        """Take a report; the run to start."""
        self.said, latest = said, said.latest
        if latest is not None:
            self.waiting = [each for each in self.waiting if each.id != latest.start]
        free = latest is None or latest.over
        return OfferOrders(start=self.waiting[0] if free and self.waiting else None)


class Offers:
    """The offers of hosts that were heard in the last seconds.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, _Known] = {}

    def tell(self, offer_id: str, said: HostOffer, owner: str | None) -> OfferOrders:
        """Take the offer of a host; the run that it is to start.

        Raises:
            Conflict: the id is another owner's offer.
            LimitReached: this owner has as many offers as there is room left for others.
            Overloaded: there are too many.
        """
        there = self._there()
        known = there.get(offer_id)
        if known is None:
            theirs = sum(each.owner == owner for each in there.values())
            left = _MOST_OFFERS - len(there)
            if left <= 0:
                raise Overloaded(f"{len(there)} hosts offer runs; try again", retry_after_s=_AGAIN_S)
            if owner is not None and theirs >= left:
                raise LimitReached(f"{owner!r} offers runs on {theirs} hosts: end one", retry_after_s=_AGAIN_S)
            known = there[offer_id] = _Known(owner, said, self._clock())
        elif known.owner != owner:
            raise Conflict(f"the id {offer_id} is another host's: choose a fresh one")
        known.heard = self._clock()
        return known.take(said)

    def seen_by(self, only: str | None) -> tuple[Offer, ...]:
        """The offers of one owner, all for None, in the order in which they came."""
        return tuple(
            Offer(
                id=offer_id,
                owner=known.owner,
                waiting=tuple(known.waiting),
                **{name: getattr(known.said, name) for name in HostOffer.model_fields},
            )
            for offer_id, known in self._there().items()
            if only in (None, known.owner)
        )

    def start(self, offer_id: str, wish: StartWish, only: str | None) -> OfferedStart:
        """Put a run into the queue of a host that takes it: its limits are checked before.

        Raises:
            NotFound: this owner has no such offer, or its host is not heard any more.
            Overloaded: too many starts wait for this host.
        """
        known = self.offer_of(offer_id, only)
        if len(known.waiting) >= _MOST_WAITING:
            raise Overloaded(f"{len(known.waiting)} runs wait for this host: start yours later", retry_after_s=_AGAIN_S)
        start = OfferedStart(id=secrets.token_hex(16), **dict(wish))
        known.waiting.append(start)
        return start

    def offer_of(self, offer_id: str, only: str | None) -> _Known:
        """An offer, by its id. Raises NotFound."""
        known = self._there().get(offer_id)
        if known is None or only not in (None, known.owner):
            raise NotFound(f"no offer {offer_id[:64]!r}: its host has gone, or was not heard for {SILENT_S:g} s")
        return known

    def _there(self) -> dict[str, _Known]:
        now = self._clock()
        for offer_id in [each for each, known in self._known.items() if now - known.heard > SILENT_S]:
            del self._known[offer_id]
        return self._known
