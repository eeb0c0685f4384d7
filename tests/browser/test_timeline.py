"""The timeline: what happened, on one axis with the figures of those seconds."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from models.data import read_sample
from tests.browser.conftest import Fleet, OpenPage
from tierkit.client import Client


@pytest.fixture
def page(fleet: Fleet, open_page: OpenPage) -> Page:
    page = open_page(f"{fleet.url}/ui/timeline")
    expect(page.locator(".u-over")).to_have_count(2)
    return page


def test_events_are_chosen_by_kind_and_by_dragging_over_a_chart(fleet: Fleet, page: Page) -> None:
    events, joined = page.get_by_test_id("event"), page.locator("[data-testid=event][data-kind=joined]")
    expect(events.first).to_be_visible()
    page.get_by_label("Which").select_option("good")
    arrivals = "[data-kind=joined], [data-kind=recovered], [data-kind=resumed]"
    expect(page.locator(f"[data-testid=event]:not({arrivals})")).to_have_count(0)
    expect(joined.first).to_be_visible()
    page.get_by_label("Which").select_option("")
    chart = page.locator(".u-over").first
    box = chart.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    # The newest seconds, at the right, have no arrival of a node.
    history = httpx.get(f"{fleet.url}/v1/history?minutes=60").json()["events"]
    last = max(event["at"] for event in history if event["kind"] == "joined")
    page.wait_for_function("(last) => Date.now() / 1000 - last > 10", arg=last)
    page.mouse.move(box["x"] + box["width"] - 30, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 5, y, steps=4)
    page.mouse.up()
    expect(page.get_by_role("button", name="Show all")).to_be_visible()
    expect(joined).to_have_count(0)
    page.get_by_role("button", name="Show all").click()
    expect(joined.first).to_be_visible()


def test_a_day_is_shown_by_the_minute(page: Page) -> None:
    with page.expect_response("**/v1/history?minutes=1440") as answer:
        page.get_by_label("The last").select_option("1440")
    assert answer.value.json()["step_s"] == 60
    expect(page.get_by_test_id("event").first).to_be_visible()


def test_the_time_before_the_scheduler_began_is_shaded(page: Page) -> None:
    def of_20_seconds(route: Route) -> None:
        history = route.fetch().json()
        length = len(history["columns"]["first"])
        history["start"] += max(0, length - 20) * history["step_s"]
        history["columns"] = {name: column[-20:] for name, column in history["columns"].items()}
        route.fulfill(json=history)

    page.route("**/v1/history?*", of_20_seconds)
    page.reload()
    expect(page.get_by_test_id("before")).to_be_visible()
    page.unroute_all(behavior="wait")


def test_a_job_and_a_death_come_to_the_page_as_they_happen(fleet: Fleet, page: Page) -> None:
    start = [sys.executable, "-m", "terrace", "end", "--node-id", "end-4", "--port", "0", "--scheduler", fleet.url]
    with subprocess.Popen(start, stderr=subprocess.DEVNULL) as node:
        expect(page.locator("[data-testid=event][data-kind=joined]").filter(has_text="end-4")).to_have_count(1)
        with Client(fleet.url) as client:
            job = client.wait(client.submit(read_sample().images[:200], name="<b>bold</b>"))
        expect(page.locator("[data-testid=event][data-kind=began]").filter(has_text="<b>bold</b>")).to_have_count(1)
        ended = page.locator("[data-testid=event][data-kind=ended]").get_by_role("link")
        expect(ended.and_(page.locator(f'[href="/ui/jobs/{job.id}"]'))).to_have_count(1)
        node.kill()
    expect(page.locator("[data-testid=event][data-kind=dead]").filter(has_text="end-4")).to_have_count(1)
    assert page.locator("[data-testid=timeline] .mark[data-kind=fault]").count() >= 1
