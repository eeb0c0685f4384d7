"""The page below a path of a site with TLS in front of it: every link, stream and action goes through the proxy."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from anyio.from_thread import BlockingPortal
from playwright.sync_api import expect

from models.data import read_sample
from scheduler.api.pages import PAGES
from tests.browser.conftest import OpenPage
from tests.browser.hub import ALICE, JOB, NODE, Hub
from tests.browser.test_sign_in import UNSIGNED, sign_in
from tierkit.client import Client

PATH = "/vision"


@asynccontextmanager
async def _proxy(upstream: str) -> AsyncIterator[tuple[str, bytes]]:
    """What nginx does with `location /vision/ { proxy_pass http://UPSTREAM/; }` and three headers; yields the URL below
    which it serves, and the authority of its certificate."""
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    port = int(upstream.rpartition(":")[2])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line, *fields = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        method, target, version = line.split(b" ")
        if not target.startswith(f"{PATH}/".encode()):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()
            return
        kept = [field for field in fields if field and not field.lower().startswith((b"connection:", b"host:"))]
        added = [
            f"Host: 127.0.0.1:{port}",
            f"X-Forwarded-Prefix: {PATH}",
            "X-Forwarded-Proto: https",
            f"X-Forwarded-Host: localhost:{own_port}",
            "Connection: close",
        ]
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        passed_on = b" ".join([method, target[len(PATH) :], version])
        up_writer.write(b"\r\n".join([passed_on, *kept, *(field.encode() for field in added), b"", b""]))
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    own_port = server.sockets[0].getsockname()[1]
    try:
        yield f"https://localhost:{own_port}{PATH}", authority.cert_pem.bytes()
    finally:
        server.close()


@pytest.fixture(scope="module")
def site(portal: BlockingPortal, hub: Hub) -> Iterator[tuple[str, bytes]]:
    with portal.wrap_async_context_manager(_proxy(hub.url)) as found:
        yield found


def test_the_client_works_through_the_path(site: tuple[str, bytes], tmp_path: Path) -> None:
    url, authority = site
    (tmp_path / "ca.pem").write_bytes(authority)
    with Client(url, token=ALICE, tls_ca=tmp_path / "ca.pem") as client:
        job = client.wait(client.submit(read_sample().images[:50], scheme="end", name=JOB))
        assert job.answered_coarse == 50
        assert len(list(client.results(job.id))) == 50


def test_the_page_works_below_the_path(site: tuple[str, bytes], open_page: OpenPage) -> None:
    url, _ = site
    page = open_page(f"{url}/ui", allowed=UNSIGNED, any_certificate=True)
    sign_in(page, ALICE)
    row = page.locator(f'[data-testid=node][data-node="{NODE}"]')
    expect(row).to_have_attribute("data-health", "alive")  # by the event stream
    page.get_by_label(f"Drain {NODE}").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Drain").click()
    expect(row).to_have_attribute("data-health", "draining")
    page.get_by_label(f"Undrain {NODE}").click()
    expect(row).to_have_attribute("data-health", "alive")
    for title in PAGES.values():
        page.locator("nav").get_by_role("link", name=title, exact=True).click()
        expect(page.locator("h1")).to_have_text(title)
        assert page.url.startswith(f"{url}/ui")
    page.goto(f"{url}/ui/jobs")
    page.get_by_role("link", name=JOB).first.click()
    expect(page.locator("#main")).to_contain_text("completed")
    assert page.url.startswith(f"{url}/ui/jobs/")
    with page.expect_download() as download:
        page.get_by_test_id("download-csv").click()
    assert download.value.url.startswith(f"{url}/v1/jobs/")


def test_the_api_page_asks_below_the_path(site: tuple[str, bytes], open_page: OpenPage) -> None:
    url, _ = site
    page = open_page(f"{url}/ui", allowed=UNSIGNED, any_certificate=True)
    sign_in(page, ALICE)
    expect(page.locator(f'[data-testid=node][data-node="{NODE}"]')).to_have_count(1)
    page.goto(f"{url}/docs")
    expect(page.locator(".servers select")).to_have_value(PATH)
