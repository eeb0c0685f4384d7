"""The page `Learn`: people label disagreements with keys, and see what devices keep and what became of improvements."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.from_thread import BlockingPortal
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import OpenPage, faults
from tests.browser.watching import HOSTILE, PlayedNode, jpeg
from tierkit.testing import service_process

GONE = r"status of 404"
FEW = ("oak_tree", "rocket", "shark")


@pytest.fixture(scope="module")
def url(portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("learning")
    options = ["-m", "terrace", "scheduler", f"--state={folder / 'state'}", "--port=0"]
    with portal.wrap_async_context_manager(service_process(options, ready_file=folder / "ready")) as process:
        yield process.url


_numbers = itertools.count(1)


class Camera(PlayedNode):
    """A node with three disagreements, of which the second one is the most useful."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "pi-1")
        self.numbers = [next(_numbers) for _ in range(3)]
        for number, confidence in zip(self.numbers, (0.5, 0.9, 0.2), strict=True):
            self.send(self.seen(number, "fish", confidence, finer=self.finer("rocket", 0.8)))
            self.send_picture(number, jpeg(number))


@pytest.fixture
def camera(url: str) -> Iterator[Camera]:
    """It leaves no disagreement at the end."""
    with contextlib.closing(Camera(url)) as node:
        yield node
    for each in to_label(url):
        httpx.put(f"{url}/v1/observations/pi-1/gate/{each}/label", json={"label": "rocket"}).raise_for_status()


def to_label(url: str) -> list[int]:
    found = httpx.get(f"{url}/v1/learning/pictures").json()["observations"]
    return [each["sequence"] for each in found]


def labels(url: str) -> dict[int, str]:
    found = httpx.get(f"{url}/v1/learning/pictures?which=labelled").json()["observations"]
    return {each["sequence"]: each["person"] for each in found}


def shows(page: Page, number: int) -> Locator:
    return page.locator(f'[data-testid=to-label][data-shown="pi-1/gate/{number}"]')


def test_pictures_are_labelled_with_keys_and_a_label_is_taken_back(
    url: str, camera: Camera, open_page: OpenPage
) -> None:
    one, two, three = camera.numbers
    page = open_page(f"{url}/ui/learn", allowed=GONE)
    expect(shows(page, two)).to_be_visible()
    for words in ("fish 90 %", "vehicles 2: rocket 80 %"):
        expect(page.get_by_test_id("to-label")).to_contain_text(words)
    assert page.locator(".sight img").evaluate("(img) => img.decode().then(() => img.naturalWidth)") == 320
    offered = page.get_by_test_id("offers").get_by_role("button")
    expect(offered.first).to_have_text("1 rocket")
    expect(offered).to_have_count(9)
    page.keyboard.press("1")
    expect(shows(page, one)).to_be_visible()
    assert labels(url)[two] == "rocket"
    page.keyboard.press("Backspace")
    expect(shows(page, two)).to_be_visible()
    assert two not in labels(url)
    page.keyboard.press("ArrowRight")
    expect(shows(page, one)).to_be_visible()
    # A class that has no key is searched.
    page.keyboard.type("oak t")
    expect(page.get_by_label("Another class")).to_have_value("oak t")
    page.keyboard.press("Enter")
    expect(shows(page, three)).to_be_visible()
    assert labels(url)[one] == "oak_tree"
    page.get_by_label("Label with keys").uncheck()
    page.keyboard.press("1")
    page.get_by_role("button", name="rocket").click()
    expect(page.get_by_test_id("nothing")).to_be_visible()
    assert (labels(url)[three], to_label(url)) == ("rocket", [two]), "a picture that was skipped stays for later"
    expect(page.locator(f'[data-testid=labelled][data-number="{one}"]')).to_contain_text("oak tree")


def test_few_classes_have_a_key_each(url: str, camera: Camera, open_page: OpenPage) -> None:
    one, two, _ = camera.numbers

    def with_few(page: Page) -> None:
        content = json.dumps({"hierarchy": {"name": "few", "fine": FEW, "superclasses": {}}})
        page.route("**/v1/models", lambda route: route.fulfill(body=content, content_type="application/json"))

    page = open_page(f"{url}/ui/learn", before=with_few)
    expect(shows(page, two)).to_be_visible()
    expect(page.get_by_test_id("offers").get_by_role("button")).to_have_text(
        [f"{i + 1} {n.replace('_', ' ')}" for i, n in enumerate(FEW)]
    )
    page.keyboard.press("3")
    expect(shows(page, one)).to_be_visible()
    assert labels(url)[two] == "shark"


def test_a_picture_that_is_gone_is_named_and_the_list_is_read_again(
    url: str, camera: Camera, open_page: OpenPage
) -> None:
    one, two, _ = camera.numbers
    asked: list[str] = []

    def without_one(page: Page) -> None:
        page.route(f"**/{two}/picture**", lambda route: route.fulfill(status=404))
        page.on("request", lambda request: asked.append(request.url))

    page = open_page(f"{url}/ui/learn", before=without_one, allowed=GONE)
    expect(shows(page, one)).to_be_visible()
    expect(page.get_by_test_id("said")).to_contain_text(f"picture {two} of gate")
    assert sum("which=disagree" in each for each in asked) >= 2


def test_an_improvement_that_nothing_is_heard_of_says_so(url: str, open_page: OpenPage) -> None:
    told_at = (datetime.now(UTC) - timedelta(minutes=12)).isoformat()
    facts = {"release": "flowers@7", "tier": "end", "devices": 3, "figures": {}, "reason": "", "created_at": told_at}
    each = [
        {**facts, "id": str(number) * 32, "state": state, "told_at": told_at}
        for number, state in enumerate(("training", "paused"))
    ]

    def with_two(page: Page) -> None:
        content = json.dumps({"improvements": each})
        page.route("**/v1/improvements", lambda route: route.fulfill(body=content, content_type="application/json"))

    page = open_page(f"{url}/ui/learn", before=with_two)
    rows = page.get_by_test_id("improvement")
    expect(rows.nth(0)).to_contain_text("training, silent for 12 min")
    expect(rows.nth(1)).not_to_contain_text("silent")


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1200, "light"), (1440, "light")])
def test_figures_and_improvements_are_shown_without_faults(
    url: str, camera: Camera, open_page: OpenPage, width: int, scheme: Any, tmp_path: Path
) -> None:
    kept = {
        "pictures": 120,
        "differs": 80,
        "unsure": 30,
        "sure": 10,
        "bytes": 10**6,
        "size_bytes": 10**7,
        "reason": HOSTILE,
    }
    camera.send(device={"kept": kept})
    improvement = {
        "id": "3" * 32,
        "release": "flowers@7",
        "tier": "end",
        "state": "refused",
        "devices": 3,
        "figures": {
            "share": 0.6,
            "above_pictures": 400,
            "above_old_right": 212,
            "above_new_right": 284,
            "above_old": 0.53,
            "above_new": 0.71,
            "above_gained": 80,
            "above_lost": 8,
            "validation_pictures": 0,
            "validation_old": 0,
            "validation_new": 0,
            "loss": 0.8125,
        },
        "reason": HOSTILE,
    }
    httpx.put(f"{url}/v1/improvements/{'3' * 32}", json=improvement).raise_for_status()
    page = open_page(f"{url}/ui/learn", width=width, scheme=scheme)
    expect(page.get_by_test_id("learning-node")).to_contain_text("80 differ, 30 unsure, 10 sure")
    expect(page.get_by_test_id("improvement")).to_contain_text("flowers@7")
    figures = "newest pictures: 53.0 % → 71.0 % of 400 (80 gained, 8 lost) · 60 % of the way · loss 0.81"
    expect(page.get_by_test_id("improvement")).to_contain_text(figures)
    table = page.get_by_role("region", name="Improvements")
    assert table.evaluate("(table) => table.scrollWidth <= table.clientWidth"), "nothing is cut off"
    expect(page.get_by_test_id("to-label").get_by_role("img")).to_be_visible()
    assert faults(page) == []
    page.screenshot(path=tmp_path / "learn.png", full_page=True)
