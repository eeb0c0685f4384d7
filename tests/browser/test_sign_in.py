"""Signing in, and a scheduler that goes and comes back while its page is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from playwright.sync_api import Page, Response, expect

from models.data import read_sample
from models.hierarchy import bundled_hierarchy
from scheduler.api.pages import PAGES
from tests.browser.conftest import BUDGET_MS, OpenPage, faults
from tierkit.access import TokenEntry, digest_of, new_token, write_book
from tierkit.client import Client
from tierkit.testing import ServiceProcess, service_process

ALICE, PI, BOB = (new_token() for _ in range(3))
NODE, JOB = "pi-of-alice", "job-of-alice"
UNSIGNED = r"status of 401|status of 403"
AWAY = r"ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE|status of 503"


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


class Hub:
    """A scheduler in a process of its own that can be killed and started again at the same address, and an end node.

    Args:
        folder: of the state and the tokens.
    """

    def __init__(self, portal: BlockingPortal, folder: Path) -> None:
        self._portal, self._folder = portal, folder
        self._starts = 0
        self._stack = ExitStack()
        book = [
            TokenEntry(name="alice", role="operator", sha256=digest_of(ALICE.encode()).hex()),
            TokenEntry(name="bob", role="user", sha256=digest_of(BOB.encode()).hex()),
            TokenEntry(name="pi", role="node", sha256=digest_of(PI.encode()).hex()),
        ]
        self._write("tokens.toml", write_book(book))
        self._write("pi.token", PI)

    def _write(self, name: str, text: str) -> None:
        path = self._folder / name
        path.touch(mode=0o600)
        path.write_text(text)

    def _started(self, module: str, *options: str) -> AbstractContextManager[ServiceProcess]:
        self._starts += 1
        ready = self._folder / f"ready-{self._starts}"
        return self._portal.wrap_async_context_manager(service_process(["-m", module, *options], ready_file=ready))

    def start(self, port: str = "0") -> None:
        options = [f"--state={self._folder / 'state'}", f"--port={port}", f"--tokens={self._folder / 'tokens.toml'}"]
        self._process = self._stack.enter_context(self._started("scheduler", *options))
        self.url = self._process.url

    def add_node(self) -> None:
        options = [
            f"--scheduler={self.url}",
            "--node-id",
            NODE,
            "--port=0",
            f"--token-file={self._folder / 'pi.token'}",
        ]
        self._stack.enter_context(self._started("end_node", *options))

    def kill(self) -> None:
        self._process.kill()
        self._portal.call(self._process.exit_code)

    def start_again(self) -> None:
        self.start(self.url.rpartition(":")[2])

    def close(self) -> None:
        self._stack.close()


@contextmanager
def hub_of(portal: BlockingPortal, folder: Path) -> Iterator[Hub]:
    hub = Hub(portal, folder)
    try:
        hub.start()
        hub.add_node()
        yield hub
    finally:
        hub.close()


@pytest.fixture(scope="module")
def hub(portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """With tokens, a node, and a job."""
    with hub_of(portal, tmp_path_factory.mktemp("hub")) as hub:
        with Client(hub.url, token=ALICE) as client:
            client.wait(client.submit(read_sample().images[:50], scheme="end", name=JOB))
        yield hub


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


ADDRESSES = ("", *(f"/{name}" for name in PAGES if name != "fleet"), "/jobs/some-job", "/training/some-run")


@pytest.mark.parametrize("address", [*(f"/ui{each}" for each in ADDRESSES), "/docs", "/openapi.json", "/v1/devices"])
def test_signed_out_no_page_shows_anything(hub: Hub, open_page: OpenPage, address: str) -> None:
    with Client(hub.url, token=ALICE) as client:
        (job,) = client.jobs().jobs
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


def test_the_page_says_when_the_scheduler_is_away_and_goes_on_by_itself(
    portal: BlockingPortal, tmp_path: Path, open_page: OpenPage
) -> None:
    with hub_of(portal, tmp_path) as hub:
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
