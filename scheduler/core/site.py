"""Sites: places of a fleet, and where the pictures of each may go. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierkit.types import Share, Tier
from tierkit.wire.messages import checked_site

__all__ = ["ALL_SITES", "NO_SITE", "SharePolicy", "SitesSeen", "may_reach"]

NO_SITE = ""
"""The nodes that belong to no site."""


@dataclass(frozen=True, slots=True)
class SharePolicy:
    """Rules on where the pictures of each site may go."""

    default: Share = Share.CLOUD
    by_site: Mapping[str, Share] = field(default_factory=dict)

    def of(self, site: str) -> Share:
        """The rule of a site."""
        return self.by_site.get(site, self.default)

    @property
    def lends(self) -> bool:
        """True if the pictures of some site may go to edge nodes of others."""
        return Share.SITES in (self.default, *self.by_site.values())

    @classmethod
    def read(cls, rules: Sequence[str]) -> SharePolicy:
        """A policy from its rules, such as "cloud" and "shop-7=none". Raises ValueError with the rule in words."""
        default: Share | None = None
        by_site: dict[str, Share] = {}
        for rule in rules:
            site, equals, share = rule.rpartition("=")
            if share not in tuple(Share):
                raise ValueError(f"{rule!r}: give none, cloud or sites, or SITE=none, SITE=cloud, SITE=sites as a rule")
            if equals:
                checked_site(site)
            if site in by_site or (not equals and default is not None):
                raise ValueError(f"{rule!r} is the second rule for {f'the site {site!r}' if equals else 'all sites'}")
            if equals:
                by_site[site] = Share(share)
            else:
                default = Share(share)
        return cls(default or Share.CLOUD, by_site)


def may_reach(sender: str, share: Share, receiver: str, tier: Tier) -> bool:
    """True if pictures of one site may go to a node of another; "" stands for no site.

    Args:
        share: of the sender's site.
        tier: of the receiver.
    """
    if sender == receiver:
        return True
    if tier is Tier.CLOUD:
        return receiver == NO_SITE and share is not Share.NONE
    return sender != NO_SITE and share is Share.SITES and tier is Tier.EDGE


@dataclass(frozen=True, slots=True)
class SitesSeen:
    """The sites that an answer shows."""

    only: str | None = None
    """The site that the caller asks for; None: all that they may see."""
    allowed: tuple[str, ...] = ()
    """Sites to which the caller's token is limited; empty for all."""

    def site(self, site: str | None) -> bool:
        """True if it shows what belongs to a site; None and "" stand for no site."""
        if self.only is not None:
            return site == self.only
        return not self.allowed or site in self.allowed

    def node(self, site: str, tier: Tier) -> bool:
        """True if it shows a node of a tier: one of a site that it shows, or a cloud node that all sites share."""
        return self.site(site) or (site == NO_SITE and tier is Tier.CLOUD)


ALL_SITES = SitesSeen()
