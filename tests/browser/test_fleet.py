"""The page of the fleet: its map and table, and what an operator does to nodes, by mouse and by keyboard."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Fleet, OpenPage, pid_of, started


def health(fleet: Fleet, node_id: str) -> str:
    devices = httpx.get(f"{fleet.url}/v1/devices").json()["devices"]
    return next(str(device["health"]) for device in devices if device["node_id"] == node_id)


def test_a_browser_is_led_to_the_map_and_a_program_is_not(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(fleet.url)
    assert page.url == f"{fleet.url}/ui"
    for node_id in ("end-1", "end-2", "edge-1", "cloud-1"):
        for place in ("node", "map-node"):
            expect(page.locator(f'[data-testid={place}][data-node="{node_id}"][data-health=alive]')).to_have_count(1)
    for node_id, network in (("end-1", "mobilenet-v1-0.5 (79.0 %)"), ("cloud-1", "wrn-16-4 (74.7 %)")):
        expect(page.locator(f'[data-testid=node][data-node="{node_id}"]')).to_contain_text(network)
    names = page.locator("nav a").all_inner_texts()
    assert names[:8] == ["Fleet", "Live", "Try it", "Learn", "Jobs", "Timeline", "Releases", "Privacy"]
    assert set(names[8:]) == {"Training", "Hosts", "Sinks"}
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


def test_a_killed_node_shows_on_the_map_until_it_is_forgotten(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui")
    row = page.locator('[data-testid=node][data-node="end-3"]')
    start = [sys.executable, "-m", "terrace", "end", "--node-id", "end-3", "--port", "0", "--scheduler", fleet.url]
    with subprocess.Popen(start, stderr=subprocess.DEVNULL) as node:
        expect(row).to_have_attribute("data-health", "alive")
        node.kill()
    expect(row).to_have_attribute("data-health", "dead")
    expect(page.locator('[data-testid=map-node][data-node="end-3"]')).to_have_attribute("data-health", "dead")
    row.get_by_role("button", name="Forget end-3").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Forget").click()
    expect(row).to_have_count(0)
    expect(page.locator('[data-testid=map-node][data-node="end-3"]')).to_have_count(0)


def test_a_removed_node_stays_away_until_it_is_let_in(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui")
    row = page.locator('[data-testid=node][data-node="end-2"]')
    row.get_by_role("button", name="Remove end-2").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Remove").click()
    expect(row).to_have_attribute("data-health", "removed")
    expect(page.locator('[data-testid=map-node][data-node="end-2"]')).to_have_attribute("data-health", "removed")
    row.get_by_role("button", name="Let in end-2").click()
    expect(row).to_have_attribute("data-health", "alive")


@pytest.mark.parametrize(
    ("count", "letters", "width", "whole"),
    [
        (3, 11, 960, True),
        (14, 11, 960, True),
        (14, 24, 960, True),
        (4, 11, 320, True),
        (1, 63, 960, True),
        (14, 63, 960, False),
    ],
)
def test_names_on_the_map_are_whole_where_there_is_room(
    fleet: Fleet, open_page: OpenPage, count: int, letters: int, width: int, whole: bool
) -> None:
    page = open_page(f"{fleet.url}/ui")
    names = [f"{'a' * (letters - 2)}{number:02}" for number in range(count)]
    shown = page.evaluate(
        """async ([names, width]) => {
          const file = document.querySelector("script[type=module]").src.replace("fleet.js", "map.js");
          const { arranged, shortened } = await import(file);
          const { places } = arranged(names.map((node_id) => ({ node_id, tier: "end" })), width);
          return names.map((name) => {
            const { x, y, letters } = places.get(name);
            return [x, y, shortened(name, letters)];
          });
        }""",
        [names, width],
    )
    texts = [text for _, _, text in shown]
    assert (texts == names) is whole
    assert len(set(texts)) == count  # told apart, even where they are cut
    for one, (x, y, text) in enumerate(shown):
        for x2, y2, text2 in shown[one + 1 :]:
            assert y != y2 or abs(x - x2) >= 7 * (len(text) + len(text2)) / 2


@pytest.mark.benchmark
def test_speed_of_a_death_on_the_map(
    tmp_path_factory: pytest.TempPathFactory, open_page: OpenPage, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the detector's verdict to the mark on the map, on one clock."""
    folder = tmp_path_factory.mktemp("dying")
    nodes = [f"end-{number}" for number in range(1, 9)]
    with started("--end", str(len(nodes)), "--edge", "1", "--cloud", "0", folder=folder) as fleet:
        page = open_page(f"{fleet.url}/ui")
        marks = page.locator("[data-testid=map-node][data-health=alive]")
        expect(marks).to_have_count(len(nodes) + 1)
        page.evaluate(
            """() => {
              window.died = {};
              new MutationObserver((changes) => {
                for (const { target } of changes)
                  if (target.dataset.health === "dead") window.died[target.dataset.node] ??= Date.now() / 1000;
              }).observe(document.querySelector(".nodes"), { subtree: true, attributeFilter: ["data-health"] });
            }"""
        )
        for node_id in nodes:
            os.kill(pid_of(fleet, node_id), signal.SIGKILL)
            mark = page.locator(f'[data-testid=map-node][data-node="{node_id}"]')
            expect(mark).to_have_attribute("data-health", "dead")
        events = httpx.get(f"{fleet.url}/v1/history").json()["events"]
        verdicts = {event["node"]: event["at"] for event in events if event["kind"] == "dead"}
        seconds = [at - verdicts[node_id] for node_id, at in page.evaluate("window.died").items()]
    with capsys.disabled():
        spread = f"median {statistics.median(seconds) * 1000:.0f} ms, at most {max(seconds) * 1000:.0f} ms"
        sys.stdout.write(f"\nfrom the verdict to the map: {spread}, n = {len(seconds)}\n")
    assert len(seconds) == len(nodes)
    assert max(seconds) <= 1
