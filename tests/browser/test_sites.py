"""Sites on the page: their list, the map of one, and what an operator does to all of its nodes.

The snapshots are made here: what a browser does with them does not depend on who sends them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from playwright.sync_api import Page, Request, Route, expect

from tests.browser.conftest import OpenPage, faults
from tests.browser.test_live import source_now
from tests.browser.test_try import pictures
from tests.browser.watching import HOSTILE, PLAYS_EVENTS, jpeg, streams

_LONG = "a-shop-with-a-name-that-is-as-long-as-the-name-of-a-site-may-be"


def node(node_id: str, tier: str, site: str | None, health: str = "alive") -> dict[str, Any]:
    return {
        "node_id": node_id,
        "tier": tier,
        "site": site,
        "health": health,
        "reason": "heartbeat 20 ms ago",
        "draining": False,
        "trusted": True,
        "models": ["a-network"],
        "network": "a-network",
        "accuracy": None,
        "version": "1",
        "outstanding": 0,
        "queued_images": 0,
        "images_per_s": 3.0,
        "ms_per_image": 5.0,
        "own_ms_per_image": 5.0,
        "images_per_minute": None,
        "joined_at": 1.8e9,
        "last_seen": None,
    }


def site_now(name: str, health: str = "ok", **changes: Any) -> dict[str, Any]:
    nodes = {"end": 4, "edge": 1}
    return {
        "site": name,
        "share": "cloud",
        "health": health,
        "reason": "all nodes are alive" if health == "ok" else "end-1 is dead",
        "nodes": nodes,
        "alive": nodes if health == "ok" else {"end": 3, "edge": 1},
        "images_per_s": 12.0,
        "n_map": 2,
        "theta_cloud": 0.25,
        "cloud_share": 0.2,
        "cloud_nodes": 0.5,
        **changes,
    }


def snapshot(
    sites: Iterable[dict[str, Any]], nodes: Iterable[dict[str, Any]] = (), site: str | None = None, **changes: Any
) -> dict[str, Any]:
    """All of a fleet with these sites, or one of them."""
    sites, nodes = list(sites), list(nodes)
    return {
        "at": 1.8e9,
        "scheme": "mapping",
        "doubting": False,
        "nodes": nodes,
        "known": sum(sum(each["nodes"].values()) for each in sites) + sum(each["site"] is None for each in nodes),
        "links": [],
        "jobs": [],
        "unfinished": 0,
        "figures": {"first": 1000.0, "first_p50_ms": 12.0},
        "theta_cloud": None,
        "cloud_share": None,
        "sites": sites,
        "site": site,
        **changes,
    }


def shop(name: str, *, foreign: str = "shop-9") -> list[dict[str, Any]]:
    """The nodes of a site, a cloud node that all share, and an edge node of another site."""
    own = [node(f"{name}-end-{number}", "end", name) for number in range(1, 5)]
    others = [node("cloud-1", "cloud", None), node(f"{foreign}-edge-1", "edge", foreign)]
    return [*own, node(f"{name}-edge-1", "edge", name), *others]


class PlayedFleet:
    """The page of a fleet whose scheduler is played: `tell` sends a snapshot, and `sites` answers requests."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.sites: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.asked: list[str] = []
        """Changes that the page asked for."""
        page.add_init_script(PLAYS_EVENTS)
        page.route("**/v1/fleet?site=*", self._fleet)
        page.route("**/v1/history?*site=*", lambda route: route.fulfill(json={"events": self.history}))
        page.route("**/v1/sites/**", self._change)

    def _fleet(self, route: Route) -> None:
        name = route.request.url.partition("site=")[2]
        if name in [each["site"] for each in self.sites]:
            route.fulfill(json=snapshot(self.sites, site=name))
        else:
            route.fulfill(status=400, json={"error": f"there is no site {name}"})

    def _change(self, route: Route) -> None:
        request: Request = route.request
        self.asked.append(f"{request.method} {request.url.partition('/v1/sites')[2]}")
        route.fulfill(json={"nodes": []})

    def tell(self, news: dict[str, Any]) -> None:
        """Send a snapshot in the streams that it is for."""
        path = "/v1/fleet/events" + ("" if news["site"] is None else f"?site={news['site']}")
        self.page.evaluate("([path, data]) => keep(path, data)", [path, json.dumps(news)])


Plays = Callable[..., PlayedFleet]


@pytest.fixture
def plays(watched_url: str, open_page: OpenPage) -> Plays:
    """Opens the page of a played fleet."""

    def opened(sites: list[dict[str, Any]], fragment: str = "", **options: Any) -> PlayedFleet:
        made: list[PlayedFleet] = []

        def before(page: Page) -> None:
            made.append(PlayedFleet(page))
            made[0].sites = sites

        open_page(f"{watched_url}/ui{fragment}", before=before, **options)
        return made[0]

    return opened


def names(page: Page) -> list[str]:
    """The sites in the order in which they are shown."""
    return [
        str(each) for each in page.get_by_test_id("site").evaluate_all("(all) => all.map((one) => one.dataset.site)")
    ]


def test_sites_in_trouble_come_first_then_others_by_name(plays: Plays) -> None:
    healths = {"shop-10": "ok", "shop-2": "ok", "shop-3": "down", "shop-1": "degraded", "shop-4": "drained"}
    fleet = plays([])
    fleet.tell(snapshot(site_now(name, health) for name, health in healths.items()))
    page = fleet.page
    tile = page.locator("[data-site=shop-1]")
    expect(tile).to_contain_text("degraded")
    for words in ("end-1 is dead", "end 3/4", "edge 1/1", "12 images/s", "cloud"):
        expect(tile).to_contain_text(words)
    assert names(page) == ["shop-3", "shop-1", "shop-4", "shop-2", "shop-10"]
    page.locator("[data-site=shop-3] a").focus()
    fleet.tell(snapshot(site_now(name, "ok" if name == "shop-3" else health) for name, health in healths.items()))
    expect(page.locator("[data-site=shop-3]")).to_have_attribute("data-site-health", "ok")
    assert names(page) == ["shop-1", "shop-4", "shop-2", "shop-3", "shop-10"]
    assert page.evaluate("document.activeElement.closest('li').dataset.site") == "shop-3"
    expect(page.locator("svg.map")).to_be_hidden()


def test_sites_are_found_by_name(plays: Plays) -> None:
    fleet = plays([])
    fleet.tell(snapshot(site_now(f"shop-{number}") for number in range(1, 51)))
    page = fleet.page
    page.get_by_label("Find").fill("op-4")
    expect(page.locator("[data-testid=site]:visible")).to_have_count(11)
    fleet.tell(snapshot(site_now(f"shop-{number}") for number in range(1, 51)))
    expect(page.locator("[data-testid=site]:visible")).to_have_count(11)


def test_nodes_without_a_site_are_an_entry_of_the_list(plays: Plays) -> None:
    fleet = plays([])
    page = fleet.page
    everything = snapshot([site_now("shop-1")], [*shop("shop-1")[:5], node("cloud-1", "cloud", None)])
    fleet.tell(everything)
    entry = page.locator("[data-testid=site][data-site='']")
    expect(entry).to_contain_text("1 node")
    entry.get_by_role("link").click()
    fleet.tell(everything)
    expect(page.locator("[data-testid=map-node]")).to_have_count(1)
    expect(page.locator("[data-testid=map-node][data-node=cloud-1]")).to_be_visible()
    expect(page.get_by_test_id("site-orders")).to_be_hidden()
    page.get_by_test_id("all-sites").click()
    fleet.tell(snapshot([site_now("shop-1")], shop("shop-1")[:5]))
    expect(page.get_by_test_id("site")).to_have_count(1)


def test_a_site_has_a_map_with_what_it_shares_and_back_leads_to_the_list(plays: Plays) -> None:
    sites = [site_now("shop-1"), site_now("shop-2", "degraded")]
    fleet = plays(sites)
    page = fleet.page
    fleet.tell(snapshot(sites))
    page.get_by_role("link", name="shop-2").click()
    links = [{"end": "shop-2-end-1", "upper": "cloud-1", "mapped": True, "images_per_s": 3.0}]
    job = {"id": "j" * 32, "name": "night", "owner": None, "state": "running", "reason": "", "images": 10}
    here = {"links": links, "jobs": [job | {"answered_coarse": 5, "answered_fine": 2}], "unfinished": 7}
    fleet.history = [
        {"id": 1, "at": 1.8e9, "kind": "dead", "node": "shop-2-end-4", "job": None, "count": 1, "text": "no"}
    ]
    fleet.tell(snapshot(sites, shop("shop-2"), "shop-2", **here))
    assert page.url.endswith("/ui#site=shop-2")
    expect(page.get_by_test_id("site-name")).to_have_text("shop-2")
    expect(page.get_by_test_id("site-name")).to_be_focused()
    expect(page.get_by_test_id("one-site")).to_contain_text("end-1 is dead")
    expect(page.locator("[data-testid=map-node]")).to_have_count(7)
    expect(page.locator("svg.map .links path")).to_have_count(1)
    expect(page.locator("[data-testid=map-node][data-elsewhere]")).to_have_count(2)
    expect(page.locator("[data-testid=map-node][data-node=cloud-1]")).to_contain_text("shared")
    expect(page.locator("[data-testid=map-node][data-node=shop-9-edge-1]")).to_contain_text("shop-9")
    expect(page.locator("[data-testid=node][data-node=shop-9-edge-1] .site")).to_have_text("shop-9")
    expect(page.get_by_test_id("site-job")).to_contain_text("night")
    expect(page.get_by_test_id("sites")).to_be_hidden()
    page.go_back()
    fleet.tell(snapshot(sites))
    expect(page.get_by_test_id("site")).to_have_count(2)
    expect(page.get_by_test_id("one-site")).to_be_hidden()
    assert page.evaluate("document.activeElement.closest('li').dataset.site") == "shop-2"


def test_events_of_a_site_are_those_of_before_and_new_ones(plays: Plays) -> None:
    def event(number: int) -> dict[str, Any]:
        return {
            "id": number,
            "at": 1.8e9,
            "kind": "dead",
            "node": f"end-{number}",
            "job": None,
            "count": 1,
            "text": "no",
        }

    sites = [site_now("shop-1")]
    fleet = plays(sites)
    fleet.history = [event(1), event(2)]
    fleet.page.evaluate("location.hash = 'site=shop-1'")
    fleet.tell(snapshot(sites, shop("shop-1"), "shop-1"))
    expect(fleet.page.get_by_test_id("event")).to_have_count(2)
    fleet.page.evaluate("(event) => tell('/v1/fleet/events?site=shop-1', 'happened', event)", event(3))
    expect(fleet.page.get_by_test_id("event")).to_have_count(3)
    expect(fleet.page.get_by_test_id("event").first).to_contain_text("end-3")


@pytest.mark.parametrize(
    ("button", "asked"),
    [
        ("Drain", "POST /shop-1/drain"),
        ("Resume", "DELETE /shop-1/drain"),
        ("Remove", "DELETE /shop-1"),
        ("Forget", "DELETE /shop-1?forget=true"),
    ],
)
def test_an_operator_acts_on_a_whole_site(plays: Plays, button: str, asked: str) -> None:
    sites = [site_now("shop-1")]
    fleet = plays(sites, "#site=shop-1")
    page = fleet.page
    nodes = [*shop("shop-1"), node("gone", "end", "shop-1", "removed")]
    fleet.tell(snapshot(sites, nodes, "shop-1"))
    there = page.get_by_role("button", name=f"{button} shop-1", exact=True)
    yes = there
    if button != "Resume":
        there.click()
        page.get_by_test_id("confirm").get_by_role("button", name="Cancel").click()
        expect(page.get_by_test_id("confirm")).to_have_count(0)
        there.click()
        yes = page.get_by_test_id("confirm").get_by_role("button", name=button)
    assert fleet.asked == []
    with page.expect_response("**/v1/sites/**"):
        yes.click()
    assert fleet.asked == [asked]


def test_a_site_is_reached_and_left_by_keyboard_alone(plays: Plays) -> None:
    sites = [site_now("shop-1"), site_now("shop-2")]
    fleet = plays(sites)
    page = fleet.page
    fleet.tell(snapshot(sites))
    fleet.tell(snapshot(sites, shop("shop-2"), "shop-2"))
    page.get_by_label("Find").focus()
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("site-name")).to_be_focused()
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    expect(page.get_by_test_id("site-name")).to_have_text("shop-2")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("[data-site=shop-2] a")).to_be_focused()


def test_an_address_of_a_site_that_comes_and_goes(plays: Plays) -> None:
    """After a restart of the scheduler, its nodes register one after the other."""
    fleet = plays([], "#site=shop-1", allowed="400")
    page = fleet.page
    fleet.tell(snapshot([site_now("shop-2")]))
    expect(page.get_by_test_id("no-site")).to_contain_text("shop-1")
    expect(page.get_by_test_id("site")).to_have_count(1)
    fleet.sites = [site_now("shop-1"), site_now("shop-2")]
    fleet.tell(snapshot(fleet.sites))
    fleet.tell(snapshot(fleet.sites, shop("shop-1"), "shop-1"))
    expect(page.get_by_test_id("site-name")).to_have_text("shop-1")
    expect(page.get_by_test_id("no-site")).to_be_hidden()
    fleet.sites = [site_now("shop-2")]
    fleet.tell(snapshot(fleet.sites, [], "shop-1"))
    fleet.tell(snapshot(fleet.sites))
    expect(page.get_by_test_id("no-site")).to_be_visible()
    expect(page.get_by_test_id("site")).to_have_count(1)


def test_a_fleet_without_sites_looks_as_ever(plays: Plays) -> None:
    fleet = plays([])
    page = fleet.page
    fleet.tell(snapshot([], [node("end-1", "end", None), node("cloud-1", "cloud", None)]))
    expect(page.locator("svg.map")).to_be_visible()
    expect(page.get_by_test_id("sites")).to_be_hidden()
    expect(page.get_by_role("columnheader", name="Site")).to_have_count(0)
    expect(page.locator("[data-elsewhere]")).to_have_count(0)


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 800, "light"), (390, 844, "dark")])
def test_fifty_sites_have_no_serious_fault_and_whole_names(plays: Plays, width: int, height: int, scheme: str) -> None:
    fleet = plays([], width=width, height=height, scheme=scheme)
    page = fleet.page
    sites = [site_now(f"shop-{number}", "ok" if number % 9 else "coarse") for number in range(1, 50)]
    sites.append(site_now(_LONG, "down", reason="no end device is alive: " + _LONG * 3))
    fleet.sites = sites
    fleet.tell(snapshot(sites, [node("cloud-1", "cloud", None)]))
    expect(page.get_by_test_id("site").first).to_contain_text("down")
    wrong = {"list": faults(page)}
    assert page.get_by_role("link", name=_LONG).get_attribute("title") == _LONG
    page.get_by_role("link", name=_LONG).click()
    fleet.tell(snapshot(sites, shop(_LONG[:50], foreign=_LONG), _LONG))
    expect(page.locator("[data-testid=map-node]")).to_have_count(7)
    wrong["a site"] = faults(page)
    assert {name: found for name, found in wrong.items() if found} == {}


def test_sources_are_shown_with_their_site_and_by_it(watched_url: str, open_page: OpenPage) -> None:
    content = jpeg(3)

    def before(page: Page) -> None:
        page.add_init_script(PLAYS_EVENTS)
        page.route("**/picture?size=320", lambda route: route.fulfill(body=content, content_type="image/jpeg"))

    def tell(*sites: str | None) -> None:
        streams(page, "/v1/sources/events")
        sources = [{**source_now(number, 1), "site": site} for number, site in enumerate(sites)]
        page.evaluate("(sources) => tell('/v1/sources/events', 'snapshot', { sources })", sources)

    page = open_page(f"{watched_url}/ui/live", before=before)
    tiles, place = page.locator("[data-testid=tile]:visible"), page.get_by_label("Site")
    tell(None, None)
    expect(tiles).to_have_count(2)
    expect(place).to_be_hidden()
    tell("shop-10", "shop-9", "shop-9", None)
    expect(place.locator("option")).to_have_text(["all", "shop-9", "shop-10", "no site"])
    expect(page.locator("[data-source=cam-0000]")).to_contain_text("shop-10")
    for chosen, count in (("shop-9", 2), ("no site", 1), ("all", 4), ("shop-10", 1)):
        place.select_option(label=chosen)
        expect(tiles).to_have_count(count)
        expect(page.get_by_test_id("show-all")).to_have_text(f"All {count}")
    assert page.url.endswith("/ui/live#site=shop-10")
    page.go_back()
    expect(tiles).to_have_count(4)
    page.get_by_label("Find").fill("shop-10")
    expect(tiles).to_have_count(1)
    page.goto(f"{watched_url}/ui/live#site=shop-9")
    page.reload()
    tell("shop-10", "shop-9", "shop-9", None)
    expect(tiles).to_have_count(2)
    expect(place).to_have_value("shop-9")


def test_hostile_names_are_text(plays: Plays) -> None:
    """The scheduler takes no such name, but the page does not depend on that."""
    sites = [site_now(HOSTILE, "down", reason=HOSTILE)]
    fleet = plays(sites)
    page = fleet.page
    fleet.tell(snapshot(sites, [node("end-1", "end", HOSTILE)]))
    tile = page.get_by_test_id("site")
    expect(tile).to_contain_text("<img src=x onerror=window.hit=1> \ufffdgnp.\ufffdevil")
    assert "\u202e" not in str(tile.get_by_role("link").get_attribute("title"))
    expect(page.locator("[data-testid=node] .site")).to_contain_text("<img src=x")
    wrong = faults(page)
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.hit") is None
    assert wrong == []


@pytest.mark.parametrize(
    ("limited", "offered"), [([], ["any", "shop-1", "shop-2"]), (["shop-1", "shop-2"], ["shop-1", "shop-2"])]
)
def test_pictures_are_tried_in_a_site(
    watched_url: str, open_page: OpenPage, limited: list[str], offered: list[str]
) -> None:
    asked: list[str] = []

    def answer(route: Route) -> None:
        asked.append(route.request.url.partition("/v1/classify")[2])
        route.fulfill(body="", content_type="application/x-ndjson")

    def before(page: Page) -> None:
        who = {"name": "alice", "role": "user", "expires": None, "sites": limited}
        page.route("**/v1/whoami", lambda route: route.fulfill(json=who))
        page.route("**/v1/sites", lambda route: route.fulfill(json={"sites": [site_now("shop-1"), site_now("shop-2")]}))
        page.route("**/v1/classify?*", answer)

    page = open_page(f"{watched_url}/ui/try", before=before)
    place = page.get_by_label("Site")
    expect(place.locator("option")).to_have_text(offered)
    for name in offered:
        place.select_option(label=name)
        page.get_by_test_id("upload").set_input_files(pictures(1))
        expect(page.locator(".done")).to_have_count(1)
        page.get_by_role("button", name="Clear").click()
    sites = ["" if name == "any" else f"&site={name}" for name in offered]
    assert asked == [f"?on_bad_input=skip{each}" for each in sites]


def many(count: int, number: int) -> list[dict[str, Any]]:
    """Sites of which a tenth is in trouble, other ones at each update."""
    return [
        site_now(f"shop-{each}", "degraded" if (each * 7 + number) % 10 == 0 else "ok", images_per_s=each + number)
        for each in range(count)
    ]


def test_of_a_thousand_sites_those_in_sight_are_drawn(plays: Plays) -> None:
    fleet = plays([])
    page = fleet.page
    fleet.tell(snapshot(many(1000, 0)))
    expect(page.get_by_test_id("site").first).to_contain_text("degraded")
    assert page.get_by_test_id("site").count() == 1000
    drawn = page.locator("[data-testid=site]:has(.health)")
    assert drawn.count() < 120
    page.locator("[data-site=shop-999] a").focus()
    expect(page.locator("[data-site=shop-999] .health")).to_have_count(1)
    expect(page.get_by_test_id("site").first.locator(".health")).to_have_count(0)
    assert drawn.count() < 120
    fleet.tell(snapshot(many(1000, 1)))
    assert page.evaluate("document.activeElement.closest('li').dataset.site") == "shop-999"


def test_of_more_sites_the_worst_are_shown_and_all_are_found(plays: Plays) -> None:
    fleet = plays([])
    page = fleet.page
    sites = many(1500, 0)
    fleet.tell(snapshot(sites))
    expect(page.get_by_test_id("site")).to_have_count(1000)
    expect(page.get_by_test_id("sites")).to_contain_text("1,000 of 1,500 sites are shown")
    last = max(each["site"] for each in sites if each["health"] == "ok" and each["site"].startswith("shop-14"))
    expect(page.locator(f"[data-site={last}]")).to_have_count(0)
    page.get_by_label("Find").fill(last)
    expect(page.locator(f"[data-site={last}]")).to_have_count(1)
    expect(page.get_by_test_id("site")).to_have_count(1)
    page.get_by_label("Find").fill("nowhere")
    expect(page.get_by_test_id("site")).to_have_count(0)
    expect(page.get_by_test_id("sites")).to_contain_text("No site has such a name.")


@pytest.mark.benchmark
def test_speed_of_updates_of_a_thousand_sites(plays: Plays, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = plays([])
    fleet.tell(snapshot(many(1000, 0)))
    took = fleet.page.evaluate(
        """(all) => all.map((data) => {
          const began = performance.now();
          streams.at(-1).dispatchEvent(new MessageEvent("snapshot", { data }));
          document.body.getBoundingClientRect();
          return performance.now() - began;
        })""",
        [json.dumps(snapshot(many(1000, number))) for number in range(20)],
    )
    with capsys.disabled():
        spread = f"median {sorted(took)[10]:.0f} ms, at most {max(took):.0f} ms"
        sys.stdout.write(f"\n1,000 sites, 20 updates, 200 changed each time: {spread}\n")
    assert max(took) <= 100
