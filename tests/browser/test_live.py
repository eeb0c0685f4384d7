"""The pages of sources: their tiles, and what one source saw."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Fleet, OpenPage
from tests.browser.watching import PLAYS_EVENTS, PlayedNode, jpeg, row, shown_number, streams, tile, turn


def test_a_tile_shows_the_last_picture_its_answer_and_what_waits(
    watched_url: str, node: PlayedNode, open_page: OpenPage
) -> None:
    node.send(
        node.seen(1, "trees", 0.3, finer=node.finer("oak_tree", 0.912)),
        device={
            "sources": [{"name": "gate", "state": "running"}, {"name": "door", "state": "paused"}],
            "waiting_answers": 2,
            "waiting_pictures": 1,
            "spent_bytes": 3_000_000,
            "bytes_per_day": 100_000_000,
        },
    )
    node.send_picture(1, jpeg(7))
    node.send(node.seen(1, "fish", 0.35, source="door"))
    page = open_page(f"{watched_url}/ui/live")
    page.get_by_label("Find").fill(node.node_id)
    gate, door = tile(page, node), tile(page, node, "door")
    for words in (
        "running",
        "oak tree",
        "91.2 % sure",
        "by the cloud",
        "2 answers and 1 picture wait",
        "97 MB left today",
    ):
        expect(gate).to_contain_text(words)
    expect(gate.locator("img")).to_be_visible()
    assert shown_number(gate) == 1
    assert 0 < gate.locator("img").evaluate("(image) => image.naturalWidth") <= 320
    expect(door).to_contain_text("no picture sent")
    expect(door).to_contain_text("paused")
    expect(door.locator("img")).to_be_hidden()
    expect(door.locator(".unsure")).to_have_text("fish")
    expect(gate.locator(".unsure")).to_have_count(0)
    node.send(node.seen(2, "people", 0.8))
    expect(gate).to_contain_text("people")
    expect(gate).to_contain_text("an earlier picture")
    assert shown_number(gate) == 1


def test_a_tile_loads_a_picture_in_two_seconds_and_shows_its_own_answer_with_it(
    watched_url: str, node: PlayedNode, open_page: OpenPage
) -> None:
    asked: list[str] = []
    start = time.time()

    def before(page: Page) -> None:
        page.clock.install(time=start)
        page.on("request", lambda request: asked.append(request.url) if node.node_id in request.url else None)

    def sees(number: int) -> None:
        node.send(
            node.seen(number, "fish" if number % 2 else "trees"),
            device={"sources": [{"name": "gate", "state": "running"}], "waiting_answers": number},
        )
        node.send_picture(number, jpeg(number))

    sees(1)
    page = open_page(f"{watched_url}/ui/live", before=before)
    page.get_by_label("Find").fill(node.node_id)
    gate = tile(page, node)
    expect(gate.locator("img")).to_be_visible()
    page.clock.pause_at(start + 60)
    number = 1
    for _ in range(2):
        for _ in range(3):
            number += 1
            sees(number)
            expect(gate).to_contain_text(f"{number} answers wait")
        page.clock.run_for(1900)
        first = shown_number(gate)
        # An answer whose picture has not come yet is shown at once, and says that the picture is an earlier one.
        expect(gate).to_contain_text(re.compile("an earlier picture|fish" if first % 2 else "an earlier picture|trees"))
        page.clock.run_for(2100)
        expect(gate.locator("img")).to_have_attribute("src", re.compile(f"/{number}/picture"))
        expect(gate).to_contain_text("fish" if number % 2 else "trees")
        expect(gate.locator(".note")).to_be_empty()
    numbers = [int(found[1]) for each in asked if (found := re.search(r"/(\d+)/picture", each))]
    assert numbers == sorted(set(numbers))
    assert len(numbers) <= 1 + 60 / 2
    assert len(numbers) < number


def test_a_hidden_page_asks_for_nothing_until_it_is_seen_again(
    watched_url: str, node: PlayedNode, open_page: OpenPage
) -> None:
    asked: list[str] = []
    node.send(node.seen(1))
    node.send_picture(1, jpeg(1))

    def before(page: Page) -> None:
        page.clock.install()

    page = open_page(f"{watched_url}/ui/live", before=before)
    page.get_by_label("Find").fill(node.node_id)
    expect(tile(page, node).locator("img")).to_be_visible()

    turn(page, hidden=True)
    page.on("request", lambda request: asked.append(request.url))
    node.send(node.seen(2, "trees"))
    node.send_picture(2, jpeg(2))
    page.clock.run_for(30_000)
    assert asked == []
    expect(tile(page, node)).to_contain_text("fish")
    turn(page, hidden=False)
    expect(tile(page, node)).to_contain_text("trees")
    assert len(asked) >= 1


def test_sources_in_trouble_are_told_in_words_and_chosen(
    watched_url: str, node: PlayedNode, open_page: OpenPage
) -> None:
    node.send(*(node.seen(1, source=source) for source in ("attic", "barn", "cellar", "door")))
    node.says(
        ("attic", "running"), ("barn", "waiting"), ("cellar", "paused"), ("door", "running"), reason="no route to it"
    )

    def before(page: Page) -> None:
        page.clock.install()

    page = open_page(f"{watched_url}/ui/live", before=before)
    page.get_by_label("Find").fill(node.node_id)
    names = page.locator("[data-testid=tile]:visible .name")
    expect(names).to_have_text(["attic", "barn", "cellar", "door"])
    expect(tile(page, node, "barn")).to_contain_text("waiting after a failure")
    expect(tile(page, node, "barn")).to_contain_text("no route to it")
    page.get_by_test_id("show-trouble").click()
    expect(names).to_have_text(["barn"])
    page.clock.fast_forward("15:01")
    expect(names).to_have_text(["attic", "barn", "door"])
    expect(tile(page, node, "attic")).to_contain_text("silent for 15 min")
    expect(tile(page, node, "attic")).to_have_attribute("data-trouble", "suspect")
    page.get_by_test_id("show-unsure").click()
    expect(page.get_by_test_id("none-like-that")).to_be_visible()
    node.send(node.seen(2, "fish", 0.2, source="attic"))
    expect(names).to_have_text(["attic"])
    expect(page.get_by_test_id("none-like-that")).to_be_hidden()


def test_the_focus_stays_on_a_tile_that_changes_and_leads_to_its_history(
    watched_url: str, node: PlayedNode, open_page: OpenPage
) -> None:
    node.send(node.seen(1, "fish"), node.seen(1, "fish", source="door"))
    page = open_page(f"{watched_url}/ui/live")
    page.get_by_label("Find").fill(node.node_id)
    expect(tile(page, node)).to_contain_text("fish")
    page.get_by_label("Find").focus()
    focused = "document.activeElement.closest('[data-testid=tile]')?.dataset.source"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "door"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "gate"
    outline = "getComputedStyle(document.activeElement, '::after').outlineStyle"
    assert page.evaluate(outline) == "solid"
    node.send(node.seen(2, "trees"))
    expect(tile(page, node)).to_contain_text("trees")
    assert page.evaluate(focused) == "gate"
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("gate")
    expect(row(page, 2)).to_contain_text("trees 75 %")


def source_now(number: int, sequence: int) -> dict[str, Any]:
    """A source of a large fleet, as the scheduler tells of it."""
    place = {"node": f"pi-{number // 10:03}", "source": f"cam-{number:04}"}
    answer = {"label": "fish", "confidence": 0.8, "node": place["node"], "model": "m", "sha256": ""}
    last = {
        **place,
        "sequence": sequence,
        "revision": 0,
        "taken_at": "2026-01-01T00:00:00Z",
        "name": None,
        "label": "fish",
        "confidence": 0.8,
        "coarse": answer,
        "fine": None,
        "answered_by": "end",
        "fallback": None,
        "damaged": None,
        "unsure": False,
        "waits": False,
        "picture": True,
    }
    unknown = ("owner", "waiting_answers", "waiting_pictures", "spool_bytes", "spool_size_bytes", "spent_bytes")
    state = {"readers": [], "state": "running", "reason": "", "health": "alive", "heard_s": 1.0, "bytes_per_day": None}
    return {**place, **state, **dict.fromkeys(unknown), "last": last, "last_picture": sequence}


def sees_many(page: Page, count: int, sequence: int) -> None:
    sources = [source_now(number, sequence) for number in range(count)]
    page.evaluate("(sources) => tell('/v1/sources/events', 'snapshot', { sources })", sources)


@pytest.fixture
def crowd(watched_url: str, open_page: OpenPage) -> Callable[[], tuple[Page, list[str]]]:
    """Opens the page of a large fleet; also returns the pictures that it asks for."""

    def opened() -> tuple[Page, list[str]]:
        asked: list[str] = []
        content = jpeg(3)

        def before(page: Page) -> None:
            page.clock.install()
            page.add_init_script(PLAYS_EVENTS)
            page.route("**/picture?size=320", lambda route: route.fulfill(body=content, content_type="image/jpeg"))
            page.on("request", lambda request: asked.append(request.url) if "/picture" in request.url else None)

        page = open_page(f"{watched_url}/ui/live", before=before)
        streams(page, "/v1/sources/events")
        return page, asked

    return opened


def test_of_a_thousand_tiles_those_in_sight_are_drawn_and_load_pictures(
    crowd: Callable[[], tuple[Page, list[str]]],
) -> None:
    page, asked = crowd()
    sees_many(page, 1000, 1)
    drawn = page.locator("[data-testid=tile]:has(.shot)")
    first, last = (page.locator(f"[data-source=cam-{number}]") for number in ("0000", "0999"))
    expect(first.locator("img")).to_be_visible()
    assert page.get_by_test_id("tile").count() == 1000
    assert drawn.count() < 60
    assert len(set(asked)) < 60
    last.locator("a").focus()
    expect(last.locator("img")).to_be_visible()
    expect(first.locator(".shot")).to_have_count(0)
    assert drawn.count() < 60
    assert len(set(asked)) < 120
    place = last.bounding_box()
    sees_many(page, 1000, 2)
    page.clock.run_for(3000)
    expect(last.locator("img")).to_have_attribute("src", re.compile("/2/picture"))
    assert last.bounding_box() == place
    assert page.evaluate("document.activeElement.parentElement.dataset.source") == "cam-0999"


@pytest.mark.benchmark
def test_speed_of_updates_of_a_thousand_tiles(
    crowd: Callable[[], tuple[Page, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    page, _ = crowd()
    sees_many(page, 1000, 1)
    took = page.evaluate(
        """(count) => {
          const sources = JSON.parse(count);
          const took = [];
          for (let sequence = 2; sequence < 22; sequence += 1) {
            for (const each of sources) each.last.sequence = each.last_picture = sequence;
            const data = JSON.stringify({ sources });
            const began = performance.timeOrigin + new Event("x").timeStamp;
            tell("/v1/sources/events", "snapshot", JSON.parse(data));
            took.push(performance.timeOrigin + new Event("x").timeStamp - began);
          }
          return took;
        }""",
        json.dumps([source_now(number, 1) for number in range(1000)]),
    )
    with capsys.disabled():
        spread = f"median {sorted(took)[10]:.0f} ms, at most {max(took):.0f} ms"
        sys.stdout.write(f"\n1,000 tiles, 20 updates: {spread}\n")
    assert max(took) <= 100


@pytest.mark.benchmark
def test_cost_of_a_hundred_tiles_at_two_pictures_a_second(
    watched_url: str, open_page: OpenPage, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the page itself costs: the snapshots and the pictures are made here."""
    seconds, asked, content = 20, 0, jpeg(3)

    def before(page: Page) -> None:
        def answer(route: Route) -> None:
            nonlocal asked
            asked += 1
            route.fulfill(body=content, content_type="image/jpeg")

        page.add_init_script(PLAYS_EVENTS)
        page.route("**/picture?size=320", answer)

    page = open_page(f"{watched_url}/ui/live", before=before, width=1920, height=1080)
    streams(page, "/v1/sources/events")
    sees_many(page, 100, 1)
    metrics = page.context.new_cdp_session(page)
    metrics.send("Performance.enable")

    def busy_s() -> float:
        found = metrics.send("Performance.getMetrics")["metrics"]
        return next(float(each["value"]) for each in found if each["name"] == "TaskDuration")

    page.wait_for_timeout(2000)
    began, asked = busy_s(), 0
    for second in range(seconds):
        sees_many(page, 100, 3 + 2 * second)
        page.wait_for_timeout(1000)
    share, tiles = (busy_s() - began) / seconds, page.locator("[data-testid=tile]:has(.shot)").count()
    with capsys.disabled():
        said = f"{share:.1%} of a core for the page; {asked / seconds:.1f} pictures a second by {tiles} tiles in sight"
        sys.stdout.write(f"\n100 tiles, 2 pictures a second each: {said}\n")
    assert asked <= tiles * (seconds / 2 + 1)


def test_a_fleet_without_sources_is_told_how_to_add_one(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui/live")
    expect(page.get_by_test_id("no-sources")).to_contain_text("terrace end --scheduler URL --source gate=rtsp://CAMERA")
    expect(page.get_by_label("Find")).to_be_hidden()
