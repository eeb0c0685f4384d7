"""Sites: where pictures may go, and the mapping within them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import count

import pytest
from hypothesis import given, settings as effort, strategies as st

from models.manifest import Manifest, load_manifest
from scheduler.core import fleet as fleet_module
from scheduler.core.device import NO_INTENT, Device, Intent
from scheduler.core.fleet import Ledger
from scheduler.core.policy import JobRules
from scheduler.core.site import SharePolicy, SitesSeen, may_reach
from scheduler.placement.routes import Placement
from scheduler.settings import SchedulerSettings
from tierkit.errors import Conflict, Forbidden, Overloaded
from tierkit.types import Scheme, Share, Tier
from tierkit.wire.messages import ModelOffer, Registration

END, EDGE, CLOUD = Tier.END, Tier.EDGE, Tier.CLOUD


@cache
def manifest() -> Manifest:
    return load_manifest()


class Fleet:
    """A device list, and the placement over it."""

    def __init__(self, *share: str, n_map: int | None = 1) -> None:
        settings = SchedulerSettings(share=share or ("cloud",), n_map=n_map, trusted=("end", "edge", "cloud"))
        self.ledger = Ledger(settings.detector_times)
        self.placement = Placement(self.ledger, settings, manifest(), b"")
        self._ports = count(1)

    def add(self, node_id: str, site: str | None = None, *, ms: float = 1.0, incarnation: str = "the-first") -> Device:
        tier = next(tier for tier in Tier if tier in node_id)
        network = manifest().default_for(tier)
        self.ledger.register(
            Registration(
                node_id=node_id,
                incarnation=incarnation,
                tier=tier,
                url=f"http://127.0.0.1:{next(self._ports)}",
                models=(ModelOffer(name=network.name, sha256=network.sha256, ms_per_image=ms),),
                version="0",
                site=site,
            ),
            0.0,
        )
        return self.ledger.get(node_id)

    def shop(self, site: str, ends: int = 3, edges: int = 1) -> None:
        for number in range(ends):
            self.add(f"{site}-end-{number}", site)
        for number in range(edges):
            self.add(f"{site}-edge-{number}", site)

    def asked(self, scheme: Scheme = Scheme.MAPPING) -> dict[str, list[str]]:
        """The upstream nodes of each end device, in the order in which it asks them."""
        routes = self.placement.routes(scheme, 0.0)
        return {end: [node.node_id for node in route.upstreams] for end, route in routes.items()}


@pytest.mark.parametrize(
    ("sender", "share", "receiver", "tier", "may"),
    [
        ("", Share.CLOUD, "", EDGE, True),
        ("", Share.CLOUD, "", CLOUD, True),
        ("", Share.SITES, "a", EDGE, False),
        ("", Share.SITES, "a", CLOUD, False),
        ("a", Share.NONE, "a", EDGE, True),
        ("a", Share.NONE, "a", CLOUD, True),
        ("a", Share.NONE, "", CLOUD, False),
        ("a", Share.CLOUD, "", CLOUD, True),
        ("a", Share.CLOUD, "", EDGE, False),
        ("a", Share.CLOUD, "b", EDGE, False),
        ("a", Share.CLOUD, "b", CLOUD, False),
        ("a", Share.SITES, "", CLOUD, True),
        ("a", Share.SITES, "b", EDGE, True),
        ("a", Share.SITES, "b", CLOUD, False),
        ("a", Share.SITES, "b", END, False),
    ],
)
def test_where_pictures_may_go(sender: str, share: Share, receiver: str, tier: Tier, may: bool) -> None:
    assert may_reach(sender, share, receiver, tier) is may


def test_a_share_policy_has_a_rule_for_all_and_rules_for_some() -> None:
    policy = SharePolicy.read(["none", "shop-7=sites", "shop-8=cloud"])
    assert [policy.of(site) for site in ("shop-1", "shop-7", "shop-8")] == [Share.NONE, Share.SITES, Share.CLOUD]
    assert SharePolicy.read(["shop-7=none"]).of("shop-1") is Share.CLOUD


@pytest.mark.parametrize("rules", [["all"], ["shop=all"], ["none", "cloud"], ["a=none", "a=none"], ["Shop 7=none"]])
def test_rules_that_say_nothing_clear_are_refused(rules: list[str]) -> None:
    with pytest.raises(ValueError, match=r"rule|lower-case"):
        SharePolicy.read(rules)


@pytest.mark.parametrize(
    ("seen", "shown"),
    [
        (SitesSeen(), {"a-end", "b-end", "end", "edge", "cloud"}),
        (SitesSeen(only="a"), {"a-end", "cloud"}),
        (SitesSeen(allowed=("a", "b")), {"a-end", "b-end", "cloud"}),
    ],
)
def test_who_sees_which_nodes(seen: SitesSeen, shown: set[str]) -> None:
    nodes = {"a-end": ("a", END), "b-end": ("b", END), "end": ("", END), "edge": ("", EDGE), "cloud": ("", CLOUD)}
    assert {name for name, node in nodes.items() if seen.node(*node)} == shown


def test_devices_go_to_the_edge_node_of_their_own_site_and_the_rest_to_the_cloud() -> None:
    fleet = Fleet()
    fleet.shop("shop-1", ends=2)
    fleet.shop("shop-2", ends=1)
    fleet.add("cloud-0")
    assert fleet.asked() == {
        "shop-1-end-0": ["shop-1-edge-0", "cloud-0"],
        "shop-1-end-1": ["cloud-0", "shop-1-edge-0"],
        "shop-2-end-0": ["shop-2-edge-0", "cloud-0"],
    }


def test_when_a_device_stops_no_device_of_another_site_moves() -> None:
    """The fault that sites are there for: pairs by order alone moved devices of the next shop."""
    fleet = Fleet()
    for number in range(1, 4):
        fleet.shop(f"shop-{number}", ends=1)
    fleet.add("cloud-0")
    before = fleet.asked()
    fleet.ledger.leave("shop-1-end-0", "the-first", 0.0)
    after = fleet.asked()
    assert after == {end: asked for end, asked in before.items() if not end.startswith("shop-1")}


def test_each_site_has_its_own_n_map_and_theta() -> None:
    fleet = Fleet(n_map=None)
    for site, edge_ms in (("slow", 6.0), ("quick", 2.0)):
        for number in range(8):
            fleet.add(f"{site}-end-{number}", site, ms=2.0)
        fleet.add(f"{site}-edge-0", site, ms=edge_ms)
    counts = {site: fleet.placement.n_map(0.0, site).value for site in ("slow", "quick")}
    assert counts == {"slow": 3, "quick": 1}
    assert fleet.placement.theta_cloud(0.0, "slow") == 5 / 8
    assert fleet.placement.theta_cloud(0.0, "quick") == 7 / 8


def test_the_cloud_is_shared_in_proportion_to_what_each_site_cannot_do_itself() -> None:
    fleet = Fleet()
    for number, ends in enumerate((1, 2, 4, 5)):  # 0, 1, 3 and 4 devices more than places
        fleet.shop(f"shop-{number}", ends=ends)
    for number in range(4):
        fleet.add(f"cloud-{number}")
    shares = [fleet.placement.cloud_nodes(f"shop-{number}", 0.0) for number in range(4)]
    assert shares == [0.0, 0.5, 1.5, 2.0]
    first = Counter(asked[0] for asked in fleet.asked().values() if asked[0].startswith("cloud"))
    assert first == {f"cloud-{number}": 2 for number in range(4)}


def test_a_site_with_a_cloud_node_of_its_own_keeps_to_it() -> None:
    fleet = Fleet()
    fleet.shop("office", ends=2, edges=0)
    fleet.add("office-cloud-0", "office")
    fleet.add("cloud-0")
    assert fleet.asked() == {f"office-end-{number}": ["office-cloud-0", "cloud-0"] for number in range(2)}
    assert fleet.placement.cloud_nodes("office", 0.0) == 0.0


@pytest.mark.parametrize(
    ("share", "asked"),
    [
        ("none", []),
        ("cloud", ["cloud-0"]),
        ("sites", ["cloud-0", "shop-2-edge-0"]),
    ],
)
def test_a_site_whose_edge_node_is_gone(share: str, asked: list[str]) -> None:
    fleet = Fleet(share)
    fleet.shop("shop-1", ends=1)
    fleet.shop("shop-2", ends=1)
    fleet.add("cloud-0")
    fleet.ledger.leave("shop-1-edge-0", "the-first", 0.0)
    assert fleet.asked()["shop-1-end-0"] == asked
    rest = {"none": [], "cloud": ["cloud-0"], "sites": ["cloud-0", "shop-2-edge-0"]}[share]
    assert fleet.asked(Scheme.ADAPTIVE)["shop-1-end-0"] == rest
    foreign = {"sites": ["shop-2-edge-0"]}.get(share, [])
    assert fleet.asked(Scheme.END_EDGE)["shop-1-end-0"] == foreign
    if share == "none":
        assert "share = none" in fleet.placement.route(Scheme.MAPPING, "shop-1-end-0", 0.0).reason


def test_a_full_site_asks_others_only_without_a_cloud() -> None:
    fleet = Fleet("sites")
    fleet.shop("shop-1", ends=2)
    fleet.shop("shop-2", ends=1)
    assert fleet.asked()["shop-1-end-1"] == ["shop-2-edge-0", "shop-1-edge-0"]
    assert fleet.asked()["shop-1-end-0"][0] == "shop-1-edge-0"


def test_a_node_that_comes_back_in_another_site_is_of_that_site_alone() -> None:
    fleet = Fleet()
    fleet.shop("shop-1", ends=2)
    fleet.shop("shop-2", ends=1)
    fleet.ledger.leave("shop-1-end-0", "the-first", 0.0)
    fleet.add("shop-1-end-0", "shop-2", incarnation="a-second")
    assert [device.node_id for device in fleet.ledger.alive(END, 0.0, "shop-1")] == ["shop-1-end-1"]
    assert len(fleet.ledger.alive(END, 0.0, "shop-2")) == 2
    assert fleet.asked()["shop-1-end-0"] == ["shop-2-edge-0"]
    fleet.ledger.leave("shop-1-end-1", "the-first", 0.0)
    fleet.ledger.leave("shop-1-edge-0", "the-first", 0.0)
    assert fleet.ledger.sites == ["shop-1", "shop-2"], "a site is known until it is forgotten"
    assert list(fleet.ledger.members("shop-1")) == []
    fleet.ledger.forget_site("shop-1")
    assert fleet.ledger.sites == ["shop-2"]


def test_a_job_of_a_site_is_checked_by_the_nodes_that_it_may_reach() -> None:
    fleet = Fleet("none")
    fleet.shop("shop-1", ends=1)
    fleet.add("cloud-0")
    fleet.ledger.intend("cloud-0", Intent(trusted=False), 0.0)
    rules = JobRules()
    fleet.placement.check_trust(Scheme.MAPPING, rules, 0.0, "shop-1")
    assert not fleet.placement.has_upstream(Scheme.END_CLOUD, 0.0, rules, "shop-1")
    assert fleet.placement.has_upstream(Scheme.END_EDGE, 0.0, rules, "shop-1")


SITES = st.sampled_from([None, "a", "b", "c"])
CHANGES = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "drain"]), st.sampled_from(list(Tier)), st.integers(0, 5), SITES),
    min_size=1,
    max_size=40,
)


@effort(max_examples=150, deadline=None)
@given(changes=CHANGES, share=st.sampled_from([("none",), ("cloud",), ("sites",), ("cloud", "a=none", "b=sites")]))
def test_no_route_ever_leaves_what_a_site_may_reach(
    changes: list[tuple[str, Tier, int, str | None]], share: tuple[str, ...]
) -> None:
    fleet = Fleet(*share, n_map=2)
    for number, (what, tier, node, site) in enumerate(changes):
        node_id = f"{tier}-{node}"
        device = fleet.ledger.find(node_id)
        if what == "join" and device is None:
            fleet.add(node_id, site, incarnation=f"incarnation-{number}")
        elif what == "leave" and device is not None:
            fleet.ledger.leave(node_id, device.incarnation, 0.0)
            if fleet.ledger.find(node_id) is not None:
                fleet.ledger.forget(node_id)
        elif what == "drain" and device is not None:
            fleet.ledger.intend(node_id, Intent(drained=not device.intent.drained), 0.0)
        _check_index(fleet.ledger)
        for scheme in Scheme:
            for end, route in fleet.placement.routes(scheme, 0.0).items():
                sender = fleet.ledger.get(end)
                rule = fleet.placement.share(sender.site)
                for upper in route.upstreams:
                    assert may_reach(sender.site, rule, upper.site, upper.tier)
                    if upper.site not in (sender.site, ""):
                        assert [node.node_id for node in route.upstreams if node.site == sender.site] or not (
                            fleet.ledger.alive(upper.tier, 0.0, sender.site)
                        )


def _check_index(ledger: Ledger) -> None:
    for tier in Tier:
        every = ledger.alive(tier, 0.0)
        for site in ("", "a", "b", "c"):
            assert ledger.alive(tier, 0.0, site) == [device for device in every if device.site == site]
    assert set(ledger.sites) >= {view.device.site for view in ledger.view(0.0)}
    assert ("" in ledger.sites) == any(view.device.site == "" for view in ledger.view(0.0))


def test_what_is_wanted_with_a_site_counts_for_nodes_that_come_later() -> None:
    fleet = Fleet()
    fleet.shop("shop-1", ends=1)
    fleet.ledger.intend_site("shop-1", Intent(drained=True, by="olga"))
    assert fleet.add("shop-1-end-9", "shop-1").intent == Intent(drained=True, by="olga")
    assert fleet.ledger.get("shop-1-end-0").intent == NO_INTENT
    fleet.ledger.intend_site("shop-1", Intent(removed=True, by="olga"))
    with pytest.raises(Forbidden, match="terrace sites resume shop-1"):
        fleet.add("shop-1-end-10", "shop-1")
    fleet.ledger.intend_site("shop-1", NO_INTENT)
    assert fleet.add("shop-1-end-10", "shop-1").intent == NO_INTENT
    with pytest.raises(Conflict):
        fleet.ledger.forget_site("shop-1")


def test_one_site_too_many_takes_the_place_of_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MOST_SITES", 2)
    fleet = Fleet()
    fleet.add("end-1", "a")
    fleet.add("end-2", "b")
    with pytest.raises(Overloaded):
        fleet.add("end-3", "c")
    fleet.ledger.leave("end-1", "the-first", 0.0)
    fleet.add("end-3", "c")
    assert fleet.ledger.sites == ["b", "c"]


def test_more_nodes_than_the_list_keeps_dead_ones_can_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MOST_DEAD", 3)
    before = Fleet()
    for number in range(5):
        before.add(f"end-{number}", f"site-{number}")
    known = [before.ledger.known(f"end-{number}") for number in range(5)]
    after = Fleet()
    after.ledger.restore([each for each in known if each], 0.0)
    assert [view.device.node_id for view in after.ledger.view(0.0)] == ["end-2", "end-3", "end-4"]
    assert len(after.ledger.sites) == 5
