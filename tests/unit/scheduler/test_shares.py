"""The cloud's actual share of the images in the scheme `mapping`."""

from __future__ import annotations

from scheduler.placement.shares import CloudShares
from tierkit.types import Tier


def test_the_cloud_s_share_is_counted_by_images_and_site():
    shares = CloudShares()
    shares.add("", 0.5, Tier.CLOUD, 30)
    shares.add("", 0.5, Tier.EDGE, 10)
    shares.add("shop-1", 0.0, Tier.EDGE, 50)
    assert [
        (found.actual, found.images) for site in ("", "shop-1") if (found := shares.of(site, 0.5 * (not site)))
    ] == [
        (0.75, 40),
        (0.0, 50),
    ]


def test_another_planned_share_starts_the_count_again():
    """Otherwise the two shares could not be compared."""
    shares = CloudShares()
    shares.add("", 0.5, Tier.CLOUD, 30)
    assert shares.of("", 0.25) is None
    shares.add("", 0.25, Tier.EDGE, 10)
    share = shares.of("", 0.25)
    assert share is not None
    assert (share.actual, share.images) == (0.0, 10)
    assert shares.of("", 0.5) is None
    assert shares.of("", None) is None
