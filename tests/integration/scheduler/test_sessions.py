"""Signing in with a browser: a token becomes a session, which opens the scheduler to its own pages alone."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.api.app import create_app
from scheduler.settings import SchedulerSettings
from tierkit.access import SESSION_COOKIE, Authenticator, Sessions, TokenEntry, digest_of, new_token, write_book
from tierkit.http.lifecycle import Lifecycle
from tierkit.testing import wait_for

ALICE, PI, BRIEF = TOKENS = [new_token() for _ in range(3)]
SOON = datetime.now(UTC) + timedelta(hours=1)


def entry(token: str, **fields: Any) -> TokenEntry:
    return TokenEntry.model_validate({"sha256": digest_of(token.encode()).hex(), **fields})


ENTRIES = (
    entry(ALICE, name="alice", role="operator"),
    entry(BRIEF, name="brief", role="user", expires=SOON),
    entry(PI, name="pi", role="node"),
)


@pytest.fixture
def shut(settings: SchedulerSettings, tmp_path: Path) -> SchedulerSettings:
    """Settings with a file of tokens."""
    path = tmp_path / "tokens.toml"
    path.touch(mode=0o600)
    path.write_text(write_book(ENTRIES))
    return settings.model_copy(update={"tokens": path})


@pytest.fixture
async def closed(kit: Any, shut: SchedulerSettings) -> AsyncIterator[Any]:
    async with kit.scheduler(shut) as running:
        yield running


async def sign_in(running: Any, token: str, **headers: str) -> httpx.Response:
    answer = await running.http.post("/v1/session", json={"token": token}, headers=headers)
    running.http.cookies.clear()  # what a test sends it sends by itself
    return answer  # type: ignore[no-any-return]


def session(answer: httpx.Response) -> dict[str, str]:
    """The header that a browser sends from then on."""
    found = SimpleCookie(answer.headers["set-cookie"])[SESSION_COOKIE]
    return {"Cookie": f"{SESSION_COOKIE}={found.value}"}


async def status(running: Any, method: str, path: str, *headers: dict[str, str]) -> int:
    together = {name: value for each in headers for name, value in each.items()}
    return int((await running.http.request(method, path, headers=together)).status_code)


async def test_a_token_becomes_a_session(closed: Any) -> None:
    answer = await sign_in(closed, ALICE)
    who: dict[str, object] = {"name": "alice", "role": "operator", "expires": None, "sites": []}
    assert (answer.status_code, answer.json()) == (200, who)
    assert ALICE not in answer.headers["set-cookie"]
    found = SimpleCookie(answer.headers["set-cookie"])[SESSION_COOKIE]
    assert (found["httponly"], found["samesite"].lower(), found["path"]) == (True, "strict", "/")
    assert (int(found["max-age"]), found["secure"]) == (12 * 3600, "")
    whoami = await closed.http.get("/v1/whoami", headers=session(answer))
    assert whoami.json() == answer.json()
    assert await status(closed, "GET", "/v1/jobs", session(answer)) == 200
    assert await status(closed, "GET", "/v1/jobs") == 401


async def test_a_session_ends_with_its_token(closed: Any, shut: SchedulerSettings) -> None:
    answer = await sign_in(closed, BRIEF)
    lasts = int(SimpleCookie(answer.headers["set-cookie"])[SESSION_COOKIE]["max-age"])
    assert 0 < lasts <= 3600
    assert await status(closed, "GET", "/v1/jobs", session(answer)) == 200
    assert shut.tokens is not None
    shut.tokens.write_text(write_book([ENTRIES[0]]))

    async def revoked() -> bool:
        return await status(closed, "GET", "/v1/jobs", session(answer)) == 401

    await wait_for(revoked, what="the end of the session of a token that was revoked")


async def test_who_gets_no_session(closed: Any) -> None:
    for token, code in ((new_token(), 401), ("", 401), ("x\r\nX: y", 401), (PI, 403), ("x" * 513, 422)):
        answer = await sign_in(closed, token)
        assert answer.status_code == code, answer.text
        assert "set-cookie" not in answer.headers
        assert not token or token not in answer.text
    for body in (b"", b'{"token": "\\ud800"}', b"[]", b'{"token": 1}', b'{"token": "x", "name": "y"}', b"{" * 100_000):
        answer = await closed.http.post("/v1/session", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (413, 422)
        assert list(answer.json()) == ["error"]


FOREIGN = {"Origin": "http://evil.example"}


def own(running: Any) -> dict[str, str]:
    return {"Origin": running.url}


CHANGES = (("POST", "/v1/classify", 400), ("DELETE", "/v1/jobs/0", 404), ("POST", "/v1/devices/x/drain", 404))


async def test_with_a_session_only_pages_of_the_scheduler_change_something(closed: Any) -> None:
    cookie = session(await sign_in(closed, ALICE))
    for method, path, passed in CHANGES:
        assert await status(closed, method, path, cookie, own(closed)) == passed
        assert await status(closed, method, path, cookie, own(closed), {"Sec-Fetch-Site": "same-origin"}) == passed
        for wrong in ({}, FOREIGN, {"Origin": "null"}, own(closed) | {"Sec-Fetch-Site": "cross-site"}):
            assert await status(closed, method, path, cookie, wrong) == 403
        # A token counts before a cookie, whatever that is, and needs no origin; but a page of another site may not.
        bearer = {"Authorization": f"Bearer {ALICE}"}
        assert await status(closed, method, path, cookie, bearer) == passed
        assert await status(closed, method, path, bearer, FOREIGN) == 403
        assert await status(closed, method, path, cookie, {"Authorization": "Bearer x"}) == 401
    assert await status(closed, "GET", "/v1/jobs", cookie, FOREIGN) == 200
    assert (await sign_in(closed, ALICE, **FOREIGN)).status_code == 403


async def test_a_session_opens_no_route_of_nodes(closed: Any) -> None:
    cookie = session(await sign_in(closed, ALICE))
    assert await status(closed, "POST", "/v1/devices", cookie, own(closed)) == 403


def secret_of(state: Path) -> bytes:
    with contextlib.closing(sqlite3.connect(state / "scheduler.db")) as database:
        return bytes.fromhex(
            database.execute("SELECT value FROM terrace_properties WHERE name = 'secret'").fetchone()[0]
        )


def expired(state: Path) -> str:
    past = datetime.now(UTC) - timedelta(hours=13)
    return Sessions(secret_of(state)).issue(ENTRIES[0], past.timestamp())[0]


def of_a_node(state: Path) -> str:
    return Sessions(secret_of(state)).issue(ENTRIES[2], datetime.now(UTC).timestamp())[0]


def forged(state: Path) -> str:
    return Sessions(bytes(32)).issue(ENTRIES[0], datetime.now(UTC).timestamp())[0]


@pytest.mark.parametrize(
    ("made", "code"),
    [(expired, 401), (forged, 401), (of_a_node, 403), (lambda state: "x", 401), (lambda state: ALICE, 401)],
)
async def test_other_cookies(made: Callable[[Path], str], code: int, closed: Any) -> None:
    cookie = {"Cookie": f"{SESSION_COOKIE}={made(closed.settings.state)}"}
    assert await status(closed, "GET", "/v1/jobs", cookie) == code
    assert await status(closed, "POST", "/v1/classify", cookie, own(closed)) == code
    # It does not stand in the way of another one.
    again = await closed.http.post("/v1/session", json={"token": ALICE}, headers=cookie)
    assert again.status_code == 200


async def test_a_session_survives_the_scheduler(kit: Any, shut: SchedulerSettings) -> None:
    async with kit.scheduler(shut) as running:
        cookie = session(await sign_in(running, ALICE))
    async with kit.scheduler(shut) as running:
        assert await status(running, "GET", "/v1/jobs", cookie) == 200


async def test_signing_out_forgets_the_cookie(closed: Any) -> None:
    answer = await closed.http.delete("/v1/session", headers=own(closed))
    assert answer.status_code == 204
    found = SimpleCookie(answer.headers["set-cookie"])[SESSION_COOKIE]
    assert (found.value, found["max-age"], found["path"]) == ("", "0", "/")
    assert await status(closed, "DELETE", "/v1/session", FOREIGN) == 403


async def test_an_open_scheduler_gives_no_session_and_obeys_its_own_pages_alone(scheduler: Any) -> None:
    answer = await scheduler.http.post("/v1/session", json={"token": ALICE}, headers=own(scheduler))
    assert (answer.status_code, answer.json()) == (200, {"name": None, "role": None, "expires": None, "sites": []})
    assert "set-cookie" not in answer.headers
    for method, path, passed in CHANGES:
        assert await status(scheduler, method, path) == passed
        assert await status(scheduler, method, path, own(scheduler)) == passed
        assert await status(scheduler, method, path, FOREIGN) == 403


async def test_a_scheduler_with_tokens_has_any_name(closed: Any) -> None:
    named = {"Host": "hub.example", "Authorization": f"Bearer {ALICE}"}
    assert await status(closed, "GET", "/v1/jobs", named) == 200


async def test_an_open_scheduler_is_not_found_by_public_names(scheduler: Any) -> None:
    port = httpx.URL(scheduler.url).port
    for host, code in (("evil.example", 403), (f"evil.example:{port}", 403), ("localhost", 200), ("x", 200)):
        assert await status(scheduler, "GET", "/v1/jobs", {"Host": host}) == code
        assert await status(scheduler, "GET", "/livez", {"Host": host}) == 200


async def test_with_tls_in_front_of_it_the_cookie_is_secure(closed: Any) -> None:
    host = httpx.URL(closed.url).netloc.decode()
    answer = await sign_in(closed, ALICE, Origin=f"https://{host}")
    assert SimpleCookie(answer.headers["set-cookie"])[SESSION_COOKIE]["secure"] is True


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_with_tls_the_cookie_is_secure(scheme: str, shut: SchedulerSettings) -> None:
    lifecycle = Lifecycle()
    lifecycle.authenticator = Authenticator(shut.tokens, roles=shut.callers)
    lifecycle.authenticator.sessions = Sessions(bytes(32))
    transport = httpx.ASGITransport(create_app(shut, lifecycle))
    async with httpx.AsyncClient(transport=transport, base_url=f"{scheme}://hub.example") as http:
        answer = await http.post("/v1/session", json={"token": ALICE})
    assert bool(SimpleCookie(answer.headers["set-cookie"])[SESSION_COOKIE]["secure"]) is (scheme == "https")


async def test_who_opens_an_address_without_a_session_is_led_to_the_page_that_asks_for_a_token(closed: Any) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for path in ("/docs", "/openapi.json", "/v1/jobs"):
        answer = await closed.http.get(path, headers=browser)
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui")
        assert await status(closed, "GET", path, {"Accept": "*/*"}) == 401
    assert await status(closed, "POST", "/v1/jobs", browser) == 401
    assert await status(closed, "GET", "/v1/jobs", browser, {"Authorization": f"Bearer {PI}"}) == 403
    assert await status(closed, "GET", "/docs", browser, session(await sign_in(closed, ALICE))) == 200
