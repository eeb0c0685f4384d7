"""A scheduler behind a reverse proxy: below a path of a site, and where TLS ends in front of it."""

from __future__ import annotations

import re
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import urljoin

import pytest

from scheduler.api.pages import PAGES
from tierkit.access import SESSION_COOKIE, TokenEntry, digest_of, new_token, write_book

SITE = "https://vision.example"
FORWARDED = {
    "X-Forwarded-Prefix": "/terrace",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "vision.example",
}
ALICE = new_token()


@pytest.fixture(params=["header", "setting"])
async def below(request: pytest.FixtureRequest, kit: Any, settings: Any) -> Any:
    """A scheduler that is served below /terrace, and the headers that its proxy sends."""
    given: dict[str, str] = FORWARDED
    if request.param == "setting":
        settings, given = settings.model_copy(update={"root_path": "/terrace"}), {}
    async with kit.scheduler(settings) as running:
        running.http.headers.update(given)
        yield running


def links(page: str, text: str) -> list[str]:
    """Paths on the site to which a page leads, as a browser has them."""
    found = re.findall(r'(?:href|src)="([^"#]+)"', text)
    return [urljoin(f"{SITE}/terrace{page}", link).removeprefix(SITE) for link in found]


async def test_every_link_of_every_page_lies_below_the_path(below: Any) -> None:
    shown = [
        "/ui",
        *(f"/ui/{name}" for name in list(PAGES)[1:]),
        "/ui/live/a/b",
        "/ui/jobs/abc",
        "/ui/training/abc",
        "/docs",
    ]
    for page in shown:
        text = (await below.http.get(page)).text
        assert 'data-root="/terrace"' in text
        for link in links(page, text):
            assert link.startswith("/terrace/"), (page, link)
            passed_on = link.removeprefix("/terrace")
            for path in (passed_on, link):  # a proxy may leave the path as it is
                assert (await below.http.get(path)).status_code == 200, (page, path)


async def test_addresses_in_answers_lie_below_the_path(below: Any, kit: Any) -> None:
    assert (await below.http.get("/", headers={"Accept": "text/html"})).headers["location"] == "/terrace/ui"
    assert (await below.http.get("/terrace", headers={"Accept": "text/html"})).headers["location"] == "/terrace/ui"
    described = (await below.http.get("/openapi.json")).json()
    assert described["servers"] == [{"url": "/terrace"}]
    async with kit.end(below, "end-0"):
        answer = await below.try_submit(kit.images(2), scheme="end")
        assert answer.headers["location"] == f"/terrace/v1/jobs/{answer.json()['id']}"
        await below.finished(answer.json()["id"])
    run = {"id": "0" * 32, "network": "n", "strategy": "s", "url": "http://127.0.0.1:9", "steps": 1}
    begun = await below.http.post("/v1/runs", json={**run, "incarnation": "1" * 16})
    assert (begun.status_code, begun.headers["location"]) == (201, f"/terrace/v1/runs/{run['id']}")


async def test_without_a_proxy_nothing_changes(kit: Any, settings: Any) -> None:
    async with kit.scheduler(settings) as running:
        assert (await running.http.get("/", headers={"Accept": "text/html"})).headers["location"] == "/ui"
        assert 'href="/ui/jobs"' in (await running.http.get("/ui")).text
        assert "servers" not in (await running.http.get("/openapi.json")).json()


async def test_a_proxy_that_is_not_trusted_is_not_believed(kit: Any, settings: Any) -> None:
    async with kit.scheduler(settings.model_copy(update={"trusted_proxies": ("10.0.0.0/8",)})) as running:
        assert 'href="/ui/jobs"' in (await running.http.get("/ui", headers=FORWARDED)).text
        own = {"Origin": SITE, **FORWARDED}
        answer = await running.http.delete("/v1/devices/end-0", headers=own)
        assert (answer.status_code, "--trusted-proxies" in answer.json()["error"]) == (403, True)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (SITE, 404),  # let in: there is no such node
        ("https://evil.example", 403),
        ("http://vision.example", 403),
        ("https://vision.example:8443", 403),
        ("null", 403),
    ],
)
async def test_the_pages_own_origin_is_that_of_the_site(kit: Any, settings: Any, origin: str, status: int) -> None:
    async with kit.scheduler(settings) as running:
        answer = await running.http.delete("/v1/devices/end-0", headers={"Origin": origin, **FORWARDED})
        assert answer.status_code == status


async def test_a_session_is_that_of_the_site_and_the_path(kit: Any, settings: Any, tmp_path: Any) -> None:
    book = tmp_path / "tokens.toml"
    book.touch(0o600)
    book.write_text(write_book([TokenEntry(name="alice", role="operator", sha256=digest_of(ALICE.encode()).hex())]))
    own = {"Origin": SITE, "Sec-Fetch-Site": "same-origin", **FORWARDED}
    async with kit.scheduler(settings.model_copy(update={"tokens": book})) as running:
        led = await running.http.get("/v1/jobs", headers={"Accept": "text/html", **FORWARDED})
        assert (led.status_code, led.headers["location"]) == (303, "/terrace/ui")
        answer = await running.http.post("/v1/session", json={"token": ALICE}, headers=own)
        running.http.cookies.clear()
        cookie = SimpleCookie(answer.headers["set-cookie"])[SESSION_COOKIE]
        assert (cookie["path"], cookie["secure"], cookie["samesite"].lower()) == ("/terrace", True, "strict")
        session = {"Cookie": f"{SESSION_COOKIE}={cookie.value}"}
        for origin, status in ((SITE, 404), ("https://evil.example", 403)):
            headers = {**own, **session, "Origin": origin}
            assert (await running.http.delete("/v1/devices/end-0", headers=headers)).status_code == status
