"""A fleet with two sites on the page, with real nodes: one with an edge node, and one without any upstream node."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from anyio.from_thread import BlockingPortal
from playwright.sync_api import Page, expect

from models.data import read_sample
from terrace import Client
from tests.browser.conftest import OpenPage
from tests.browser.test_try import pictures
from tests.browser.watching import PlayedNode, tile
from tierkit.access import TokenEntry, digest_of, new_token, write_book
from tierkit.testing import service_process

_NODES = (("end", "a-end", "shop-1"), ("edge", "a-edge", "shop-1"), ("end", "b-end", "shop-2"))


@pytest.fixture(scope="module")
def shops(portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the scheduler."""
    folder = tmp_path_factory.mktemp("shops")
    with ExitStack() as stack:

        def started(service: str, *options: str) -> str:
            ready = folder / f"ready-{service}-{len(list(folder.iterdir()))}"
            process = service_process(["-m", "terrace", service, "--port=0", *options], ready_file=ready)
            return stack.enter_context(portal.wrap_async_context_manager(process)).url

        url = started("scheduler", f"--state={folder / 'state'}", "--scheme=mapping")
        for tier, name, site in _NODES:
            started(tier, f"--scheduler={url}", f"--node-id={name}", f"--site={site}")
        yield url


def health(page: Page, site: str, word: str) -> None:
    expect(page.locator(f"[data-testid=site][data-site={site}]")).to_have_attribute("data-site-health", word)


def test_an_operator_drains_and_resumes_a_site(shops: str, open_page: OpenPage) -> None:
    page = open_page(f"{shops}/ui")
    health(page, "shop-1", "ok")
    health(page, "shop-2", "coarse")
    page.get_by_role("link", name="shop-1").first.click()
    nodes = page.locator("[data-testid=map-node]")
    expect(nodes).to_have_count(2)
    page.get_by_role("button", name="Drain shop-1").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Drain").click()
    expect(page.locator("[data-testid=map-node][data-health=draining]")).to_have_count(2)
    expect(page.get_by_test_id("one-site")).to_have_attribute("data-site-health", "drained")
    expect(page.get_by_test_id("event").filter(has_text="drained")).to_have_count(2)
    page.get_by_role("button", name="Resume shop-1").click()
    expect(page.locator("[data-testid=map-node][data-health=alive]")).to_have_count(2)
    expect(page.get_by_test_id("one-site")).to_have_attribute("data-site-health", "ok")


def test_a_removed_site_is_let_in_again(shops: str, open_page: OpenPage) -> None:
    page = open_page(f"{shops}/ui#site=shop-2")
    page.get_by_role("button", name="Remove shop-2").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Remove").click()
    expect(page.locator("[data-testid=map-node][data-node=b-end]")).to_have_attribute("data-health", "removed")
    expect(page.get_by_test_id("one-site")).to_have_attribute("data-site-health", "down")
    page.get_by_role("button", name="Resume shop-2").click()
    expect(page.locator("[data-testid=map-node][data-node=b-end]")).to_have_attribute("data-health", "alive")
    expect(page.get_by_test_id("one-site")).to_have_attribute("data-site-health", "coarse")


def test_a_job_shows_its_site_and_where_its_answers_come_from(shops: str, open_page: OpenPage) -> None:
    with Client(shops) as client:
        anywhere = client.wait(client.submit(read_sample().images[:60], batch_size=10, name="anywhere"))
    form = [("images", (each["name"], each["buffer"])) for each in pictures(3)]
    answer = httpx.post(f"{shops}/v1/jobs", files=form, data={"site": "shop-2", "name": "there"})
    assert answer.status_code == 202, answer.text
    with Client(shops) as client:
        there = client.wait(answer.json()["id"])
    page = open_page(f"{shops}/ui/jobs")
    for job, words in ((anywhere, "any"), (there, "shop-2")):
        expect(page.locator(f"[data-job='{job.id}'] .site")).to_have_text(words)
    page.get_by_label("Find").fill("shop-2")
    expect(page.get_by_test_id("job")).to_have_count(1)
    page.get_by_role("link", name="there").click()
    expect(page.get_by_test_id("result").first.locator(".site")).to_have_text("shop-2")
    expect(page.get_by_test_id("result").first).to_contain_text("b-end")
    page.get_by_role("link", name="shop-2").click()
    expect(page.get_by_test_id("site-name")).to_have_text("shop-2")
    expect(page.get_by_test_id("event").filter(has_text="job ended")).to_have_count(1)
    page.goto(f"{shops}/ui/jobs/{anywhere.id}")
    expect(
        page.get_by_test_id("result").locator(".site").filter(has_text=re.compile(r"shop-[12]")).first
    ).to_be_visible()


def test_pictures_are_tried_in_the_site_that_is_chosen(shops: str, open_page: OpenPage) -> None:
    page = open_page(f"{shops}/ui/try")
    page.get_by_label("Site").select_option("shop-2")
    page.get_by_test_id("upload").set_input_files(pictures(1))
    card = page.get_by_test_id("card")
    expect(card).to_contain_text("b-end")
    expect(card).to_contain_text("The first answer stands")


def test_an_unknown_site_in_the_address(shops: str, open_page: OpenPage) -> None:
    page = open_page(f"{shops}/ui#site=shop-3", allowed="40[04]")
    expect(page.get_by_test_id("no-site")).to_contain_text("shop-3")
    expect(page.get_by_test_id("site")).to_have_count(2)


def test_a_source_shows_its_site(shops: str, open_page: OpenPage) -> None:
    with contextlib.closing(PlayedNode(shops, "camera", site="shop-4")) as node:
        node.send(node.seen(1), node.seen(1, source="door"))
    page = open_page(f"{shops}/ui")
    page.locator("[data-testid=site][data-site=shop-4] a").click()
    page.get_by_role("link", name="What its sources see").click()
    expect(page.get_by_label("Site")).to_have_value("shop-4")
    expect(tile(page, node)).to_contain_text("shop-4")
    tile(page, node).get_by_role("link").click()
    page.locator(".facts").get_by_role("link", name="shop-4").click()
    expect(page.get_by_test_id("site-name")).to_have_text("shop-4")
    expect(page.locator("[data-testid=map-node][data-node=camera]")).to_be_visible()


def test_a_user_limited_to_a_site_sees_only_that(portal: BlockingPortal, open_page: OpenPage, tmp_path: Path) -> None:
    carol, pi = new_token(), new_token()
    book = [
        TokenEntry(name="carol", role="user", sites=("shop-1",), sha256=digest_of(carol.encode()).hex()),
        TokenEntry(name="pi", role="node", sha256=digest_of(pi.encode()).hex()),
    ]
    tokens = tmp_path / "tokens.toml"
    tokens.touch(mode=0o600)
    tokens.write_text(write_book(book))
    options = ["-m", "terrace", "scheduler", f"--state={tmp_path / 'state'}", "--port=0", f"--tokens={tokens}"]
    with ExitStack() as stack:
        started = service_process(options, ready_file=tmp_path / "ready")
        url = stack.enter_context(portal.wrap_async_context_manager(started)).url
        for name, site in (("pi-1", "shop-1"), ("pi-2", "shop-2"), ("pi-3", "shop-2")):
            stack.enter_context(contextlib.closing(PlayedNode(url, name, pi, site)))
        page = open_page(f"{url}/ui", allowed="40[134]")
        page.get_by_label("Token").fill(carol)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_test_id("site")).to_have_count(1)
        expect(page.locator("[data-testid=node]")).to_have_count(1)
        page.locator("[data-site=shop-1] a").click()
        expect(page.locator("[data-testid=map-node][data-node=pi-1]")).to_be_visible()
        expect(page.get_by_role("button", name="Drain shop-1")).to_have_count(0)
        page.goto(f"{url}/ui/try")
        expect(page.get_by_label("Site").locator("option")).to_have_text(["shop-1"])
        page.goto(f"{url}/ui#site=shop-2")
        expect(page.get_by_test_id("no-site")).to_contain_text("shop-2")
        page.close()  # before its scheduler ends
