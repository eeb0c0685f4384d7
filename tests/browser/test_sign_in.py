"""Signing in, and a scheduler that goes and comes back while its page is open."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, Response, expect

from models.hierarchy import bundled_hierarchy
from scheduler.api.pages import PAGES
from tests.browser.conftest import BUDGET_MS, OpenPage, faults
from tests.browser.hub import ALICE, BOB, JOB, NODE, PI, Hub
from tierkit.access import new_token
from tierkit.client import Client

UNSIGNED = r"status of 401|status of 403"
AWAY = r"ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE|status of 503"


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def signed_in(page: Page) -> None:
    expect(page.locator("#who")).to_contain_text("alice (operator)")
    expect(page.get_by_test_id("sign-in")).to_have_count(0)


def test_who_may_not_drain_nodes_has_no_button_for_it(hub: Hub, open_page: OpenPage) -> None:
    page = open_page(f"{hub.url}/ui", allowed=UNSIGNED)
    sign_in(page, BOB)
    expect(page.locator("#who")).to_contain_text("bob (user)")
    node = page.locator(f'[data-testid=node][data-node="{NODE}"]')
    expect(node).to_be_visible()
    expect(node.get_by_role("button")).to_have_count(0)
    page.locator("nav").get_by_role("link", name="Jobs").click()
    expect(page.get_by_text("No job", exact=False)).to_be_visible()
    expect(page.get_by_text(JOB)).to_have_count(0)


ADDRESSES = (
    "",
    *(f"/{name}" for name in PAGES if name != "fleet"),
    "/live/a/b",
    "/jobs/some-job",
    "/training/some-run",
)


@pytest.mark.parametrize("address", [*(f"/ui{each}" for each in ADDRESSES), "/docs", "/openapi.json", "/v1/devices"])
def test_signed_out_no_page_shows_anything(hub: Hub, open_page: OpenPage, address: str) -> None:
    with Client(hub.url, token=ALICE) as client:
        job = client.jobs().jobs[0]
    secrets = [NODE, JOB, job.id, *(name for name in bundled_hierarchy().fine if "_" in name)]
    answers: list[Response] = []
    page = open_page("about:blank", allowed=rf"{UNSIGNED}|request: {hub.url}")
    page.on("response", lambda answer: answers.append(answer))
    page.goto(f"{hub.url}{address}")
    expect(page.get_by_test_id("sign-in")).to_be_visible()
    expect(page.get_by_label("Token")).to_be_focused()
    assert page.url == f"{hub.url}{address if address.startswith('/ui') else '/ui'}"
    shown = page.content()
    bodies = [answer.text() for answer in answers if not 300 <= answer.status < 400]
    assert len(bodies) > 3
    assert [secret for secret in secrets for text in (shown, *bodies) if secret in text] == []


def test_only_the_token_of_a_person_opens_the_page_until_they_sign_out(hub: Hub, open_page: OpenPage) -> None:
    page = open_page(f"{hub.url}/ui", width=360, scheme="dark", allowed=UNSIGNED)
    wrong = page.get_by_test_id("sign-in").get_by_role("alert")
    sign_in(page, new_token())
    expect(wrong).to_contain_text("unknown")
    sign_in(page, PI)
    expect(wrong).to_contain_text("pi")
    assert faults(page) == []
    sign_in(page, f" {ALICE} ")
    signed_in(page)
    expect(page.locator(f'[data-testid=node][data-node="{NODE}"]')).to_be_visible()
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert kept == '[{},{},""]'
    for address in (*(f"/ui/{name}" for name in PAGES if name != "fleet"), "/ui"):
        page.goto(f"{hub.url}{address}")
        signed_in(page)
    page.goto(f"{hub.url}/docs")
    expect(page.get_by_text("Terrace scheduler").first).to_be_visible()
    page.goto(f"{hub.url}/ui")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_test_id("sign-in")).to_be_visible()
    expect(page.locator("#who")).to_be_empty()
    page.goto(f"{hub.url}/ui/jobs")
    expect(page.get_by_test_id("sign-in")).to_be_visible()


def test_the_page_says_when_the_scheduler_is_away_and_goes_on_by_itself(hub: Hub, open_page: OpenPage) -> None:
    page = open_page(f"{hub.url}/ui", allowed=f"{UNSIGNED}|{AWAY}")
    sign_in(page, ALICE)
    signed_in(page)
    node = page.locator(f'[data-testid=node][data-node="{NODE}"][data-health=alive]')
    expect(node).to_be_visible()
    hub.kill()
    expect(page.locator("#connection")).to_contain_text("as of")
    assert faults(page) == []
    expect(node).to_be_visible()
    page.evaluate("window.notLoadedAgain = true")
    hub.start_again()
    expect(page.locator("#connection")).to_be_empty(timeout=BUDGET_MS)
    node.get_by_role("button", name=f"Drain {NODE}").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Drain").click()
    expect(page.locator(f'[data-testid=node][data-node="{NODE}"][data-health=draining]')).to_be_visible()
    assert page.evaluate("window.notLoadedAgain") is True
    with Client(hub.url, token=ALICE) as client:
        client.resume(NODE)
