"""The page of the fleet: its map and table, and what an operator does to nodes, by mouse and by keyboard."""

from __future__ import annotations

import os
import signal

import httpx
from playwright.sync_api import expect

from tests.browser.conftest import Fleet, OpenPage, pid_of


def health(fleet: Fleet, node_id: str) -> str:
    devices = httpx.get(f"{fleet.url}/v1/devices").json()["devices"]
    return next(str(device["health"]) for device in devices if device["node_id"] == node_id)


def test_a_browser_is_led_to_the_map_and_a_program_is_not(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(fleet.url)
    assert page.url == f"{fleet.url}/ui"
    for node_id in ("end-1", "end-2", "edge-1", "cloud-1"):
        for place in ("node", "map-node"):
            expect(page.locator(f'[data-testid={place}][data-node="{node_id}"][data-health=alive]')).to_have_count(1)
    names = page.locator("nav a").all_inner_texts()
    assert names == ["Fleet", "Try it", "Jobs", "Timeline", "Privacy"]
    assert httpx.get(fleet.url).status_code == 404


def test_every_page_of_the_navigation_opens(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui")
    for name in page.locator("nav a").all_inner_texts():
        page.locator("nav").get_by_role("link", name=name, exact=True).click()
        expect(page.locator("h1")).to_have_text(name)
        expect(page.locator("nav a[aria-current=page]")).to_have_text(name)


def test_a_node_is_drained_and_undrained_by_keyboard_alone(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui")
    row = page.locator('[data-testid=node][data-node="end-2"]')
    expect(row).to_have_attribute("data-health", "alive")

    def tab_to(name: str) -> None:
        for _ in range(60):
            if page.evaluate("document.activeElement.getAttribute('aria-label')") == name:
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{name} is not reached by Tab")

    tab_to("Drain end-2")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("confirm")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("confirm")).to_have_count(0)
    assert health(fleet, "end-2") == "alive"
    tab_to("Drain end-2")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(row).to_have_attribute("data-health", "draining")
    expect(page.locator('[data-testid=map-node][data-node="end-2"]')).to_have_attribute("data-health", "draining")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Undrain end-2"
    page.keyboard.press("Enter")
    expect(row).to_have_attribute("data-health", "alive")


def test_a_killed_node_shows_on_the_map_and_a_removed_one_leaves_it(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui")
    row = page.locator('[data-testid=node][data-node="end-1"]')
    expect(row).to_have_attribute("data-health", "alive")
    os.kill(pid_of(fleet, "end-1"), signal.SIGKILL)
    expect(row).to_have_attribute("data-health", "dead")
    expect(page.locator('[data-testid=map-node][data-node="end-1"]')).to_have_attribute("data-health", "dead")
    row.get_by_role("button", name="Remove end-1").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Remove").click()
    expect(row).to_have_count(0)
    expect(page.locator('[data-testid=map-node][data-node="end-1"]')).to_have_count(0)
