"""What axe finds on the pages, in light and dark, on a phone and on a desk; and that nothing is wider than a phone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import httpx
import pytest
from playwright.sync_api import Page, expect

from models.data import read_sample
from tests.browser.conftest import Fleet, OpenPage, faults
from tests.browser.watching import PlayedNode, history, jpeg
from tests.training_runs import report, start, worker
from tierkit.client import Client
from tierkit.wire.api import Job

LONG = "<img src=x onerror=alert(1)> " + "an-unbroken-name-that-is-far-too-long" * 4
NARROW, WIDE = 360, 1440

Scheme = Literal["light", "dark"]


@pytest.fixture(scope="module")
def job(fleet: Fleet) -> Iterator[Job]:
    """One that all pages have something to show of."""
    with Client(fleet.url) as client:
        yield client.wait(client.submit(read_sample().images[:100], scheme="end-cloud", name=LONG))


@pytest.fixture(scope="module")
def run(fleet: Fleet) -> str:
    """A training run whose host has reported something."""
    wanted = start(network=LONG, strategy=LONG, config={"name": LONG})
    httpx.post(f"{fleet.url}/v1/runs", json=wanted).raise_for_status()
    workers = [worker(f"worker-{number}-{'w' * 50}") for number in range(3)]
    for done in (100, 200, 300):
        said = report(done=done, loss=1 / done, accuracy=done / 1000, workers=workers, result={"name": LONG})
        httpx.put(f"{fleet.url}/v1/runs/{wanted['id']}/report", json=said).raise_for_status()
    return str(wanted["id"])


@pytest.fixture
def source(watched_url: str, node: PlayedNode) -> str:
    """The address of a source whose texts are all as long as they may be."""
    name = "s" * 63
    bad = {"source": name, "sequence": 2, "age_s": 1.0, "reason": LONG, "name": LONG}
    node.send(node.seen(1, "trees", 0.2, source=name, name=LONG, reason=LONG), bad, node.seen(1))
    node.send_picture(1, jpeg(1), source=name)
    node.says((name, "waiting"), ("gate", "running"), reason=LONG, waiting_pictures=10**6, bytes_per_day=10**9)
    return history(watched_url, node, name)


@pytest.mark.parametrize(("width", "scheme"), [(NARROW, "light"), (NARROW, "dark"), (WIDE, "light"), (WIDE, "dark")])
def test_no_page_of_sources_has_a_serious_fault(
    watched_url: str, source: str, open_page: OpenPage, width: int, scheme: Scheme
) -> None:
    page = open_page(f"{watched_url}/ui/live", width=width, scheme=scheme)
    page.get_by_label("Find").fill("s" * 63)
    expect(page.get_by_test_id("tile").last).to_contain_text("1,000,000 pictures wait")
    wrong = {"tiles": faults(page)}
    page.goto(source)
    expect(page.get_by_test_id("observation")).to_have_count(2)
    wrong["a source"] = faults(page)
    page.get_by_role("button", name="Pause").click()
    wrong["a question"] = faults(page)
    assert {name: found for name, found in wrong.items() if found} == {}


def show(page: Page, fleet: Fleet, path: str, job: Job) -> None:
    """Open a page, until it is filled."""
    page.goto(f"{fleet.url}{path}")
    shown = {
        "/ui": "[data-testid=node] >> nth=3",
        "/ui/try": "#upload, [data-testid=upload]",
        "/ui/training": "[data-testid=run]",
        "/ui/releases": "[data-testid=network]",
        "/ui/timeline": "[data-testid=event][data-kind=ended]",
        "/ui/privacy": f'[data-job="{job.id}"]',
    }.get(path, "main > :not(h1, noscript):visible")
    expect(page.locator(shown).first).to_be_visible()


@pytest.mark.parametrize(("width", "scheme"), [(NARROW, "dark"), (WIDE, "light")])
def test_no_page_has_a_serious_fault(
    fleet: Fleet, job: Job, run: str, open_page: OpenPage, width: int, scheme: Scheme
) -> None:
    page = open_page(f"{fleet.url}/ui", width=width, scheme=scheme)
    wrong = {}
    pages = (
        "/ui",
        "/ui/try",
        "/ui/jobs",
        f"/ui/jobs/{job.id}",
        "/ui/training",
        f"/ui/training/{run}",
        "/ui/timeline",
        "/ui/releases",
    )
    for path in (*pages, "/ui/privacy"):
        show(page, fleet, path, job)
        wrong[path] = faults(page)
    page.locator("details").first.locator("summary").click()
    wrong["more of an audit"] = faults(page)
    show(page, fleet, "/ui/try", job)
    page.get_by_role("button", name="sample").first.click()
    expect(page.locator("[data-testid=card][data-fine]").first).to_be_visible()
    expect(page.locator("[data-testid=card]:not([data-fine])")).to_have_count(0)
    wrong["cards"] = faults(page)
    show(page, fleet, "/ui", job)
    page.get_by_role("button", name="Remove end-1").click()
    expect(page.get_by_test_id("confirm")).to_be_visible()
    wrong["a question"] = faults(page)
    assert {name: found for name, found in wrong.items() if found} == {}
