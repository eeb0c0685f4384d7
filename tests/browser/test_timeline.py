"""The timeline: what happened, on one axis with the figures of those seconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from models.data import read_sample
from tests.browser.conftest import Fleet, OpenPage, pid_of
from tierkit.client import Client


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[Client]:
    with Client(fleet.url) as client:
        yield client


@pytest.fixture
def page(fleet: Fleet, open_page: OpenPage) -> Page:
    page = open_page(f"{fleet.url}/ui/timeline")
    expect(page.locator(".u-over")).to_have_count(2)
    return page


def test_a_job_and_a_death_come_to_the_page_as_they_happen(fleet: Fleet, page: Page, client: Client) -> None:
    expect(page.locator("[data-testid=event][data-kind=joined]")).to_have_count(4)
    job = client.wait(client.submit(read_sample().images[:200], name="<b>bold</b>"))
    expect(page.locator("[data-testid=event][data-kind=began]")).to_contain_text("<b>bold</b>")
    ended = page.locator("[data-testid=event][data-kind=ended]")
    expect(ended.get_by_role("link")).to_have_attribute("href", f"/ui/jobs/{job.id}")
    os.kill(pid_of(fleet, "cloud-1"), signal.SIGKILL)
    expect(page.locator("[data-testid=event][data-kind=dead]")).to_contain_text("cloud-1")
    assert page.locator("[data-testid=timeline] .mark[data-kind=fault]").count() >= 1


def test_events_are_chosen_by_kind_and_by_dragging_over_a_chart(page: Page) -> None:
    events = page.get_by_test_id("event")
    expect(events.first).to_be_visible()
    page.get_by_label("Which").select_option("good")
    expect(page.locator("[data-testid=event]:not([data-kind=joined])")).to_have_count(0)
    page.get_by_label("Which").select_option("")
    chart = page.locator(".u-over").first
    box = chart.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    # The first event is the arrival of a node, at the left; the newest seconds have none.
    page.mouse.move(box["x"] + box["width"] - 30, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 5, y, steps=4)
    page.mouse.up()
    expect(page.get_by_role("button", name="Show all")).to_be_visible()
    expect(page.locator("[data-testid=event][data-kind=joined]")).to_have_count(0)
    page.get_by_role("button", name="Show all").click()
    expect(page.locator("[data-testid=event][data-kind=joined]")).to_have_count(4)


def test_a_day_is_shown_by_the_minute(page: Page) -> None:
    with page.expect_response("**/v1/history?minutes=1440") as answer:
        page.get_by_label("The last").select_option("1440")
    assert answer.value.json()["step_s"] == 60
    expect(page.get_by_test_id("event").first).to_be_visible()
