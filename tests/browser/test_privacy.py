"""The page of privacy: what was sent in which form, and what attacks on the encoders got back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from models.data import read_sample
from tests.browser.conftest import Fleet, OpenPage
from tierkit.client import Client
from tierkit.wire.api import Job


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[Client]:
    with Client(fleet.url) as client:
        yield client


def done(client: Client, **policy: Any) -> Job:
    return client.wait(client.submit(read_sample().images[:100], **policy))


@pytest.fixture(scope="module")
def features(client: Client) -> Job:
    """A job whose pictures went to a node that may not see them."""
    return done(client, scheme="end-cloud", name="<img src=x onerror=alert(1)>")


def says(page: Page, job: Job, words: str) -> None:
    page.get_by_label("Job").select_option(job.id)
    expect(page.locator(f'[data-testid=privacy-job][data-job="{job.id}"]')).to_be_visible()
    expect(page.get_by_test_id("verdict")).to_contain_text(words)


def test_the_newest_job_that_sent_something_is_shown_with_what_it_sent(
    fleet: Fleet, client: Client, features: Job, open_page: OpenPage
) -> None:
    at_home = done(client, scheme="end")
    page = open_page(f"{fleet.url}/ui/privacy")
    expect(page.get_by_test_id("rule").locator("dd").last).to_have_text("cloud-1")
    expect(page.get_by_test_id("rule").locator("dd").first).to_contain_text("edge-1")
    expect(page.locator(f'[data-testid=privacy-job][data-job="{features.id}"]')).to_be_visible()
    expect(page.get_by_test_id("verdict")).to_contain_text("No pixels left the trusted tiers")
    expect(page.get_by_test_id("sent")).to_have_attribute("data-form", "bottleneck")
    expect(page.get_by_role("region", name="Upstream nodes that answered")).to_contain_text("not trusted")
    says(page, at_home, "Nothing left the end devices")
    expect(page.get_by_test_id("sent")).to_have_count(0)


def test_a_job_says_what_it_proves(fleet: Fleet, client: Client, features: Job, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui/privacy")
    expect(page.get_by_test_id("verdict")).not_to_be_empty()
    trusted = done(client, scheme="end-edge")
    # The list is loaded again when the fleet tells of a job.
    expect(page.locator(f'option[value="{trusted.id}"]')).to_have_count(1)
    says(page, trusted, "all nodes that answered are trusted")
    expect(page.locator("[data-testid=sent][data-form=pixels]")).to_have_count(1)
    encoded = done(client, scheme="end-cloud", privacy="conv1")
    expect(page.locator(f'option[value="{encoded.id}"]')).to_have_count(1)
    says(page, encoded, "No pixels left the end devices")
    relayed = done(client, scheme="end-cloud", privacy="conv1", encode_on="edge")
    expect(page.locator(f'option[value="{relayed.id}"]')).to_have_count(1)
    says(page, relayed, "trusted edge nodes that encoded")


def test_an_audit_that_is_weak_outdated_or_missing_is_told_as_such(
    fleet: Fleet, features: Job, open_page: OpenPage
) -> None:
    answer = httpx.get(f"{fleet.url}/v1/privacy/audit").json()
    assert (answer["source"], answer["outdated"]) == ("bundled", [])
    page = open_page("about:blank", allowed=f"request: {fleet.url}")
    told = {**answer, "source": "models", "quick": True, "outdated": ["resnet-34.conv1"]}
    page.route("**/v1/privacy/audit", lambda route: route.fulfill(json=told))
    page.goto(f"{fleet.url}/ui/privacy")
    expect(page.get_by_test_id("audit")).to_contain_text("weak ones")
    expect(page.get_by_test_id("audit").locator(".trouble")).to_contain_text("resnet-34.conv1")
    page.unroute("**/v1/privacy/audit")
    info = httpx.get(f"{fleet.url}/v1/info").json()
    page.route("**/v1/info", lambda route: route.fulfill(json={**info, "audit": False}))
    page.reload()
    expect(page.get_by_text("terrace privacy audit --all")).to_be_visible()
    expect(page.get_by_test_id("verdict")).not_to_be_empty()


def test_the_audit_that_ships_is_shown_with_its_pictures(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui/privacy")
    rows = page.get_by_test_id("audited")
    expect(rows).to_have_count(8)
    expect(rows.first).to_contain_text("the picture itself")
    learned = page.locator("[data-testid=audited][data-encoder=bottleneck]")
    for network, verdict in (("resnet-34", "much of the picture"), ("wrn-16-4", "vague shapes")):
        expect(learned.filter(has_text=network)).to_contain_text(verdict)
    card = page.locator("[data-testid=encoder][data-encoder=bottleneck]").filter(has_text="resnet-34")
    card.scroll_into_view_if_needed()
    card.locator("summary").click()
    pictures = card.locator("img")
    expect(pictures).to_have_count(4)
    for number in range(4):
        expect(pictures.nth(number)).to_have_js_property("complete", value=True)
        width, height = pictures.nth(number).evaluate("(image) => [image.naturalWidth, image.naturalHeight]")
        assert width == 8 * height > 0
