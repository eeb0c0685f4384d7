"""The page in a real browser, on a real fleet: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from models.data import read_sample
from tests.acceptance.fleets import Up, children_of, running
from tests.browser.hub import ALICE, JOB, Hub
from tests.browser.watching import PlayedNode
from tierkit.client import Client
from tierkit.testing import service_process

CHROMIUM = shutil.which("chromium")
BUDGET_MS = 30_000
"""For whatever a test waits for; far more than it takes."""

expect.set_options(timeout=BUDGET_MS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason="Chromium is not installed (Debian: apt-get install chromium)"))


_AXE = Axe()


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A running `terrace up`."""

    url: str
    up: Up


def _command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def pid_of(fleet: Fleet, node_id: str) -> int:
    """The process of a node."""
    return next(pid for pid in children_of(fleet.up.process.pid) if f"--node-id {node_id} " in _command_of(pid))


@contextmanager
def started(*options: str, folder: Path) -> Iterator[Fleet]:
    """A `terrace up` on a free port."""
    with running(*options, "--port", "0", "--state", str(folder / "state"), log=folder / "log") as up:
        found = re.search(r"scheduler  (http://\S+)", up.output)
        assert found is not None
        yield Fleet(url=found[1], up=up)


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two end devices, an edge node and an untrusted cloud node, shared by all files of this folder.

    A test leaves all four alive.
    """
    counts = ("--end", "2", "--edge", "1", "--cloud", "1")
    with started(*counts, "--untrusted", "cloud", folder=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="package")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="package")
def hub(portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A scheduler that asks for tokens, with a node and a job. A test leaves both alive."""
    with contextlib.closing(Hub(portal, tmp_path_factory.mktemp("hub"))) as hub:
        hub.start()
        hub.add_node()
        with Client(hub.url, token=ALICE) as client:
            client.wait(client.submit(read_sample().images[:50], scheme="end", name=JOB))
        yield hub


@pytest.fixture(scope="package")
def watched_url(portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scheduler for nodes that a test plays."""
    folder = tmp_path_factory.mktemp("watched")
    options = ["-m", "terrace", "scheduler", f"--state={folder / 'state'}", "--port=0"]
    with portal.wrap_async_context_manager(service_process(options, ready_file=folder / "ready")) as process:
        yield process.url


@pytest.fixture
def node(watched_url: str, request: pytest.FixtureRequest) -> Iterator[PlayedNode]:
    """A node named after the test."""
    name = re.sub(r"[^a-z0-9]+", "-", str(request.node.name))[-40:].strip("-")
    with contextlib.closing(PlayedNode(watched_url, name)) as node:
        yield node


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """One browser for this folder. While it is open, no asynchronous test can run in this process."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def faults(page: Page) -> list[str]:
    """Serious and critical findings, and what is wider than the window."""
    page.evaluate("document.getAnimations().forEach((each) => { try { each.finish() } catch { each.cancel() } })")
    found = _AXE.run(page).response["violations"]
    said = [
        f"{each['id']}: {json.dumps([node['target'] for node in each['nodes'][:3]])}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return said if wide <= 0 else [*said, f"{wide} px wider than the window"]


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[OpenPage]:
    """Opens pages; at the end of the test none of them may have had an error, a violation of its policy, or a request
    to another origin."""
    contexts: list[BrowserContext] = []
    wrong: list[str] = []

    def opened(
        url: str,
        *,
        width: int = 1440,
        height: int = 900,
        scheme: Literal["light", "dark"] = "light",
        allowed: str = r"(?!)",
        before: Callable[[Page], None] = lambda page: None,
        any_certificate: bool = False,
    ) -> Page:
        """`allowed`: errors that the test brings about, as a regular expression. `before`: called before it loads."""
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, ignore_https_errors=any_certificate
        )
        contexts.append(context)
        context.set_default_timeout(BUDGET_MS)
        page = context.new_page()
        origin = "/".join(url.split("/")[:3])

        def note(what: str) -> None:
            if not re.search(allowed, what):
                wrong.append(what)

        page.on("console", lambda message: note(f"console: {message.text}") if message.type == "error" else None)
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on(
            "request",
            lambda request: note(f"request: {request.url}") if not request.url.startswith((origin, "blob:")) else None,
        )
        before(page)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
