"""The cloud's actual share of the images that go up in the scheme `mapping`, to compare with Eq. 5. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tierkit.types import Tier

__all__ = ["CloudShare", "CloudShares"]

_MOST_SITES = 10_000


@dataclass(slots=True)
class CloudShare:
    """Images of one site that upstream nodes answered since the planned share last changed."""

    planned: float
    """Eq. 5."""
    images: int = 0
    of_cloud: int = 0

    @property
    def actual(self) -> float | None:
        return self.of_cloud / self.images if self.images else None


class CloudShares:
    """The shares of all sites."""

    def __init__(self) -> None:
        self._of: dict[str, CloudShare] = {}

    def add(self, site: str, planned: float, tier: Tier, images: int) -> None:
        """An upstream node has answered a task.

        Args:
            planned: Eq. 5 for the site now. A new value starts the count again.
            tier: of the node.
        """
        share = self._of.pop(site, None)
        if share is None or share.planned != planned:
            share = CloudShare(planned)
        self._of[site] = share  # the newest last
        share.images += images
        share.of_cloud += images * (tier is Tier.CLOUD)
        if len(self._of) > _MOST_SITES:
            del self._of[next(iter(self._of))]

    def of(self, site: str, planned: float | None) -> CloudShare | None:
        """The share of a site, if it has been counted under this planned share."""
        share = self._of.get(site)
        return share if share is not None and share.planned == planned else None
