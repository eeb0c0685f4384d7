"""Metrics of each site."""

from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from scheduler.metrics import SiteCollector
from tierkit.types import Health, Tier


@dataclass
class Member:
    tier: Tier
    told: tuple[Health, bool] = (Health.ALIVE, True)


@dataclass
class Places:
    by_site: dict[str, list[Member]] = field(default_factory=dict)

    @property
    def sites(self) -> list[str]:
        return sorted(self.by_site)

    def members(self, site: str) -> list[Member]:
        return self.by_site[site]


@pytest.fixture
def places() -> Places:
    return Places()


@pytest.fixture
def collector(places: Places) -> SiteCollector:
    collector = SiteCollector()
    collector.show(places, lambda site: site != "shop-2")  # type: ignore[arg-type]  # has what is read of devices
    return collector


@pytest.fixture
def shown(collector: SiteCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def page(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_a_fleet_without_sites_has_no_series(
    places: Places, collector: SiteCollector, shown: CollectorRegistry
) -> None:
    places.by_site[""] = [Member(Tier.END)]
    collector.answered(None, 5)
    assert page(shown) == []


def test_nodes_by_health_and_a_zero_where_none_is_alive(places: Places, shown: CollectorRegistry) -> None:
    dead = Member(Tier.END, (Health.DEAD, False))
    places.by_site = {"": [Member(Tier.CLOUD)], "shop-1": [Member(Tier.EDGE), Member(Tier.END), dead], "shop-2": [dead]}

    def count(site: str, tier: Tier, health: Health) -> float | None:
        labels = {"site": site, "tier": tier.value, "health": health.value}
        return shown.get_sample_value("terrace_scheduler_site_devices", labels)

    assert [count("shop-1", tier, Health.ALIVE) for tier in Tier] == [1, 1, None]
    assert (count("shop-1", Tier.END, Health.DEAD), count("shop-2", Tier.END, Health.DEAD)) == (1, 1)
    assert count("shop-2", Tier.END, Health.ALIVE) == 0
    upstream = [
        shown.get_sample_value("terrace_scheduler_site_has_upstream", {"site": site}) for site in ("shop-1", "shop-2")
    ]
    assert upstream == [1, 0]
    assert not any('site=""' in line for line in page(shown))


def test_counts_follow_the_sites_on_the_list(
    places: Places, collector: SiteCollector, shown: CollectorRegistry
) -> None:
    places.by_site = {"shop-1": [Member(Tier.END)], "shop-2": []}
    collector.answered("shop-1", 50)
    collector.answered("shop-1", 7)
    collector.answered("gone", 9)
    collector.fell_back("shop-2")
    assert shown.get_sample_value("terrace_scheduler_site_images_total", {"site": "shop-1"}) == 57
    assert shown.get_sample_value("terrace_scheduler_site_fallbacks_total", {"site": "shop-2"}) == 1
    assert not any("gone" in line for line in page(shown))
    collector.show(None)
    assert page(shown) == []


def test_ten_thousand_sites_have_a_bounded_number_of_series(places: Places, shown: CollectorRegistry) -> None:
    places.by_site = {f"shop-{number}": [Member(Tier.END)] for number in range(10_000)}
    assert shown.get_sample_value("terrace_scheduler_sites_unlisted") == 9000
    assert len(page(shown)) == 4 * 1000 + 1
