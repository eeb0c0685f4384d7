"""The page to try the fleet with: pictures of one's own, their first answers and their finer ones."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import FilePayload, Page, expect

from models.data import read_sample
from models.hierarchy import bundled_hierarchy
from tests.browser.conftest import Fleet, OpenPage

_ORDER = """
() => {
  window.order = [];
  new MutationObserver((changes) => {
    for (const change of changes) {
      const value = change.target.getAttribute(change.attributeName);
      if (value !== null) window.order.push([change.attributeName, change.target.dataset.name, value]);
    }
  }).observe(document.body, { subtree: true, attributes: true, attributeFilter: ["data-coarse", "data-fine"] });
}
"""
"""Notes in which order the answers come to the cards."""


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def pictures(count: int) -> list[FilePayload]:
    images = read_sample().images[:count]
    return [
        {"name": f"picture-{number}.png", "mimeType": "image/png", "buffer": png(image)}
        for number, image in enumerate(images)
    ]


@pytest.fixture
def page(fleet: Fleet, open_page: OpenPage) -> Page:
    page = open_page(f"{fleet.url}/ui/try")
    expect(page.get_by_test_id("upload")).to_be_visible()
    return page


def test_every_card_shows_the_first_answer_before_the_finer_one(page: Page) -> None:
    page.evaluate(_ORDER)
    page.get_by_test_id("upload").set_input_files(pictures(10))
    expect(page.locator("[data-testid=card][data-coarse][data-fine]")).to_have_count(10)
    hierarchy = bundled_hierarchy()
    order: list[list[str]] = page.evaluate("window.order")
    for number in range(10):
        steps = [(kind, value) for kind, name, value in order if name == f"picture-{number}.png"]
        assert next(kind for kind, _ in steps) == "data-coarse"
        assert {kind for kind, _ in steps} == {"data-coarse", "data-fine"}
        values = dict(steps)
        assert values["data-coarse"] in hierarchy.coarse
        assert values["data-fine"] in hierarchy.fine
    expect(page.get_by_role("status").last).to_contain_text("10 of 10")
    card = page.locator("[data-testid=card]").first
    expect(card).to_contain_text("edge-1")
    expect(card).to_contain_text("pixels")


def test_several_hundred_pictures_are_answered_and_cleared(page: Page) -> None:
    page.get_by_test_id("upload").set_input_files(pictures(300))
    expect(page.locator("[data-testid=card][data-fine]")).to_have_count(300)
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_test_id("card")).to_have_count(0)


def test_pictures_that_are_dropped_are_answered(page: Page) -> None:
    transfer = page.evaluate_handle(
        """(bytes) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
          return transfer;
        }""",
        list(png(np.zeros((40, 30, 3), np.uint8))),
    )
    page.dispatch_event(".drop", "drop", {"dataTransfer": transfer})
    expect(page.locator('[data-testid=card][data-name="dropped.png"][data-fine]')).to_have_count(1)


def test_samples_are_answered(page: Page) -> None:
    page.get_by_role("button", name="Choose samples").click()
    expect(page.locator("[data-testid=card][data-fine]")).to_have_count(6)


@pytest.mark.parametrize("others", [0, 1])
def test_what_is_no_picture_says_why_and_the_others_are_answered(
    fleet: Fleet, open_page: OpenPage, others: int
) -> None:
    page = open_page(f"{fleet.url}/ui/try", allowed=r"status of 4\d\d")
    broken: FilePayload = {
        "name": "broken.png",
        "mimeType": "image/png",
        "buffer": png(np.zeros((9, 9, 3), np.uint8))[:40],
    }
    page.get_by_test_id("upload").set_input_files([broken, *pictures(others * 30)])
    card = page.locator('[data-testid=card][data-name="broken.png"]')
    expect(card).to_have_class("picture done failed")
    expect(card).to_contain_text("damaged")
    expect(page.locator("[data-testid=card][data-fine]")).to_have_count(others * 30)


def test_names_of_files_are_text(page: Page) -> None:
    names = ["<img src=x onerror=window.ran=1>.png", "‮gnp.exe", "n" * 300 + ".png", "../../etc/passwd.png"]
    pixels = png(np.zeros((8, 8, 3), np.uint8))
    page.get_by_test_id("upload").set_input_files(
        [FilePayload(name=name, mimeType="image/png", buffer=pixels) for name in names]
    )
    expect(page.locator("[data-testid=card][data-fine]")).to_have_count(len(names))
    assert page.evaluate("window.ran") is None
    expect(page.locator(".picture .name", has_text="onerror")).to_have_count(1)
    width = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert width == 0
