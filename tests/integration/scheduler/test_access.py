"""The scheduler behind its gate: who may use which route, as whom, how often, and until when."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.routing import APIRoute

from scheduler.api.about import about
from scheduler.api.devices import devices
from scheduler.api.history import history
from scheduler.api.jobs import jobs
from scheduler.api.mapping import mapping
from scheduler.api.networks import networks
from scheduler.api.offers import offers
from scheduler.api.privacy import privacy
from scheduler.api.routing import (
    for_admins,
    for_nodes,
    for_operators,
    for_users,
    for_users_and_nodes,
    for_users_and_workers,
)
from scheduler.api.runs import runs
from scheduler.api.sessions import sessions
from scheduler.api.tokens import tokens as tokens_routes
from scheduler.settings import SchedulerSettings
from tierkit.access import TokenEntry, TokenFile, digest_of, new_token, write_book
from tierkit.client import AsyncClient, Backoff
from tierkit.errors import Forbidden, LimitReached, SetupError, Unauthenticated
from tierkit.testing import connected, wait_for
from tierkit.wire.messages import NODE_HEADER

ALICE, BOB, DAVE, PI, ANY, OLD, OLGA, ROOT, EVE, LAPTOP, CAMERA = TOKENS = [new_token() for _ in range(11)]


def entry(token: str, **fields: Any) -> TokenEntry:
    return TokenEntry.model_validate({"sha256": digest_of(token.encode()).hex(), **fields})


ENTRIES = (
    entry(ALICE, name="alice", role="user"),
    entry(BOB, name="bob", role="user", upload_bytes_per_minute=5000, unfinished_jobs=1),
    entry(EVE, name="eve", role="user", uploads=1, streams=1),
    entry(OLGA, name="olga", role="operator"),
    entry(ROOT, name="root", role="admin"),
    entry(PI, name="pi", role="node", tiers=("end",)),
    entry(ANY, name="any", role="node", nodes=("*",)),
    entry(LAPTOP, name="laptop", role="worker"),
    entry(CAMERA, name="camera", role="node", observations_per_minute=60),
    entry(DAVE, name="dave", role="user", requests_per_minute=2),
    entry(OLD, name="pi", role="node", expires=datetime.now(UTC) - timedelta(hours=3)),
)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def replace(path: Path, *entries: TokenEntry) -> None:
    path.touch(mode=0o600)
    path.write_text(write_book(entries))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    replace(path, *ENTRIES)
    return path


@pytest.fixture
async def closed(kit: Any, settings: SchedulerSettings, tokens: Path) -> AsyncIterator[Any]:
    """A scheduler with a file of tokens; its client shows none by itself."""
    async with kit.scheduler(settings.model_copy(update={"tokens": tokens})) as running:
        yield running


def registration(node_id: str, tier: str = "end", **changes: Any) -> dict[str, Any]:
    name, digit = {"end": ("small", "0"), "cloud": ("large", "2")}[tier]
    offer = {"name": name, "sha256": digit * 64, "ms_per_image": 1.0}
    return {
        "node_id": node_id,
        "incarnation": secrets.token_hex(8),
        "tier": tier,
        "url": "http://127.0.0.1:9",
        "models": [offer],
        "version": "0",
        **changes,
    }


ROUTES = """GET /v1/jobs, POST /v1/jobs, POST /v1/classify, GET /v1/devices, POST /v1/devices, DELETE /v1/devices/pi,
GET /v1/models, GET /v1/models/small/file, GET /v1/info, GET /v1/runs, GET /v1/whoami, GET /metrics, GET /docs,
GET /openapi.json, GET /no/such/route, OPTIONS /v1/jobs"""


async def test_every_route_asks_for_a_token(closed: Any) -> None:
    for method, path in (route.split() for route in ROUTES.split(",")):
        for headers in ({}, bearer(new_token()), bearer(OLD)):
            answer = await closed.http.request(method, path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == 'Bearer realm="terrace"'
            assert list(answer.json()) == ["error"]
            assert OLD not in answer.text


async def test_health_is_open_and_tells_strangers_no_more_than_the_state(closed: Any) -> None:
    assert (await closed.http.get("/livez")).json() == {"status": "alive"}
    assert (await closed.http.get("/readyz")).json() == {"status": "ready"}
    assert "checks" in (await closed.http.get("/readyz", headers=bearer(ALICE))).json()
    for method in ("POST", "DELETE"):
        assert set((await closed.http.request(method, "/readyz")).json()) == {"status"}


async def test_paths_that_only_look_open_are_not(closed: Any) -> None:
    for path in ("/livez/", "//livez", "/livez/../v1/jobs", "/readyz%2f..%2fv1%2fjobs", "/LIVEZ", "/livez;/v1/jobs"):
        request = closed.http.build_request("GET", "/")
        request.url = request.url.copy_with(raw_path=path.encode())
        assert (await closed.http.send(request)).status_code == 401, path


ROLES = (  # what a user, an operator, an admin, a node and a worker get
    ("GET", "/v1/jobs", 200, 200, 200, 403, 403),
    ("POST", "/v1/classify", 400, 400, 400, 403, 403),
    ("DELETE", "/v1/jobs/0", 404, 404, 404, 403, 403),
    ("GET", "/v1/jobs/0/images/0", 404, 404, 404, 403, 403),
    ("GET", "/v1/runs", 200, 200, 200, 403, 200),
    ("GET", "/v1/offers", 200, 200, 200, 403, 403),
    ("POST", "/v1/matches", 422, 422, 422, 403, 422),
    ("GET", "/v1/devices", 200, 200, 200, 403, 403),
    ("GET", "/v1/mapping", 200, 200, 200, 403, 403),
    ("POST", "/v1/devices/x/drain", 403, 404, 404, 403, 403),
    ("DELETE", "/v1/devices/x/drain", 403, 404, 404, 403, 403),
    ("DELETE", "/v1/devices/x", 403, 404, 404, 403, 403),
    ("DELETE", "/v1/devices/x?forget=true", 403, 404, 404, 403, 403),
    ("DELETE", "/v1/devices/x?incarnation=1", 403, 403, 403, 404, 403),
    ("PUT", "/v1/devices/x/trust?trusted=yes", 403, 403, 404, 403, 403),
    ("GET", "/v1/devices/x/route", 403, 403, 403, 404, 403),
    ("GET", "/v1/devices/x/sources", 404, 404, 404, 403, 403),
    ("POST", "/v1/devices/x/sources", 403, 404, 404, 403, 403),
    ("DELETE", "/v1/devices/x/sources/y", 403, 404, 404, 403, 403),
    ("POST", "/v1/devices/x/sources/y/pause", 404, 404, 404, 403, 403),
    ("DELETE", "/v1/devices/x/sources/y/pause", 404, 404, 404, 403, 403),
    ("GET", "/v1/sources", 200, 200, 200, 403, 403),
    ("PUT", "/v1/sources/x/y/rights", 422, 422, 422, 403, 403),
    ("GET", "/v1/observations", 200, 200, 200, 403, 403),
    ("GET", "/v1/observations/export", 200, 200, 200, 403, 403),
    ("POST", "/v1/observations", 403, 403, 403, 400, 403),
    ("PUT", "/v1/observations/x/y/1/picture", 403, 403, 403, 415, 403),
    ("GET", "/v1/observations/x/y/1/picture", 404, 404, 404, 403, 403),
    ("GET", "/v1/sinks", 403, 403, 200, 403, 403),
    ("POST", "/v1/sinks", 403, 403, 422, 403, 403),
    ("DELETE", "/v1/sinks/hook", 403, 403, 404, 403, 403),
    ("POST", "/v1/sinks/hook/pause", 403, 403, 404, 403, 403),
    ("POST", "/v1/sinks/hook/test", 403, 403, 404, 403, 403),
    ("GET", "/v1/sinks/hook/dead", 403, 403, 404, 403, 403),
    ("POST", "/v1/sinks/hook/replay", 403, 403, 422, 403, 403),
    ("GET", "/v1/tokens", 403, 403, 200, 403, 403),
    ("POST", "/v1/tokens", 403, 403, 422, 403, 403),
    ("POST", "/v1/tokens/nobody/rotate", 403, 403, 422, 403, 403),
    ("DELETE", "/v1/tokens/nobody", 403, 403, 404, 403, 403),
    ("GET", "/v1/models", 200, 200, 200, 200, 403),
    ("GET", "/v1/models/small/file", 404, 404, 404, 404, 403),
    ("GET", "/v1/info", 200, 200, 200, 403, 403),
    ("GET", "/v1/fleet", 200, 200, 200, 403, 403),
    ("GET", "/v1/whoami", 200, 200, 200, 200, 200),
    ("GET", "/metrics", 200, 200, 200, 200, 403),
)


async def test_roles(closed: Any) -> None:
    callers = ((ALICE, "user"), (OLGA, "operator"), (ROOT, "admin"), (ANY, "node"), (LAPTOP, "worker"))
    for method, path, *expected in ROLES:
        for (token, role), status in zip(callers, expected, strict=True):
            answer = await closed.http.request(method, path, headers=bearer(token))
            assert answer.status_code == status, (method, path, role, answer.text)
            if status == 403:
                assert f"has the role {role}; this takes " in answer.json()["error"]


async def test_a_node_sends_observations_and_asks_for_a_route_under_its_own_name_only(closed: Any) -> None:
    own, other = registration("pi", spool="5" * 16), registration("pi2", spool="5" * 16)
    assert (await closed.http.post("/v1/devices", json=own, headers=bearer(PI))).status_code == 200
    assert (await closed.http.post("/v1/devices", json=other, headers=bearer(ANY))).status_code == 200
    for place, code in ((own, 200), (other, 403)):
        name = place["node_id"]
        seen = {"source": "gate", "sequence": 1, "age_s": 1.0}
        batch = {"node_id": name, "incarnation": place["incarnation"], "spool": "a" * 16, "observations": [seen]}
        sent = await closed.http.post("/v1/observations", json=batch, headers=bearer(PI))
        route = await closed.http.get(f"/v1/devices/{name}/route", headers=bearer(PI))
        put = await closed.http.put(f"/v1/observations/{name}/gate/1/picture", content=b"", headers=bearer(PI))
        assert (sent.status_code, route.status_code, put.status_code) == (code, code, 415 if code == 200 else 403)
    assert (await closed.http.get("/v1/observations/export?node=pi2", headers=bearer(OLGA))).text == ""


async def test_the_observations_of_a_node_are_limited_by_its_token(closed: Any) -> None:
    """A batch may overdraw the limit; the next one is refused until the device has waited."""

    async def send(place: dict[str, Any], token: str, *numbers: int) -> Any:
        seen = [{"source": "gate", "sequence": number, "age_s": 1.0} for number in numbers]
        own = {"node_id": place["node_id"], "incarnation": place["incarnation"], "spool": "5" * 16}
        return await closed.http.post("/v1/observations", json={**own, "observations": seen}, headers=bearer(token))

    places = registration("camera", spool="5" * 16), registration("pi", spool="5" * 16)
    for place, token in zip(places, (CAMERA, PI), strict=True):
        assert (await closed.http.post("/v1/devices", json=place, headers=bearer(token))).status_code == 200
    assert (await send(places[0], CAMERA, *range(1, 101))).json() == {"stored": 100, "known": 0}
    refused = await send(places[0], CAMERA, 101)
    assert (refused.status_code, refused.json()) == (
        429,
        {"error": "'camera' has used up its 60 observations a minute"},
    )
    assert 30 <= int(refused.headers["retry-after"]) <= 41
    assert (await send(places[1], PI, 1)).status_code == 200


async def test_users_see_the_sources_that_they_own_or_may_read(closed: Any) -> None:
    place = registration("any-1", spool="5" * 16, lease_s=600.0)
    assert (await closed.http.post("/v1/devices", json=place, headers=bearer(ANY))).status_code == 200
    seen = [{"source": source, "sequence": 1, "age_s": 1.0} for source in ("gate", "hall", "yard")]
    device = {"sources": [{"name": source, "state": "running"} for source in ("gate", "hall", "yard", "roof")]}
    batch = {"node_id": "any-1", "incarnation": place["incarnation"], "spool": "a" * 16, "observations": seen}

    async def call(method: str, path: str, token: str, **content: Any) -> Any:
        return await closed.http.request(method, path, headers=bearer(token), **content)

    async def rights(source: str, token: str, owner: str | None, *readers: str) -> Any:
        wanted = {"owner": owner, "readers": readers}
        return (await call("PUT", f"/v1/sources/any-1/{source}/rights", token, json=wanted)).status_code

    assert await rights("gate", ALICE, "alice") == 404, "it is not hers yet"
    assert await rights("gate", OLGA, "alice", "bob") == 200, "it has sent nothing yet"
    assert await rights("hall", OLGA, None, "alice") == 200
    assert (await call("POST", "/v1/observations", ANY, json={**batch, "device": device})).status_code == 200

    async def sight(token: str) -> set[str]:
        listed = (await call("GET", "/v1/sources", token)).json()["sources"]
        page = (await call("GET", "/v1/observations", token)).json()["observations"]
        lines = (await call("GET", "/v1/observations/export", token)).text.splitlines()
        shown = {each["source"] for each in listed}
        assert {each["source"] for each in page} == {json.loads(line)["source"] for line in lines} == shown - {"roof"}
        for source in ("gate", "hall", "yard"):
            paths = [f"/v1/observations?node=any-1&source={source}", f"/v1/observations/any-1/{source}/1/picture"]
            answers = [await call("GET", path, token) for path in paths]
            unseen = source not in shown
            assert [each.status_code for each in answers] == [404 if unseen else 200, 404]
            assert ("has no source" in answers[1].text) == unseen
        return shown

    assert await sight(OLGA) == await sight(ROOT) == {"gate", "hall", "yard", "roof"}
    assert await sight(ALICE) == {"gate", "hall"}
    assert await sight(BOB) == {"gate"}
    assert await sight(EVE) == set()
    assert await rights("gate", BOB, "alice") == 403, "a reader changes nothing"
    assert await rights("gate", ALICE, "bob") == 403, "only operators give a source to somebody else"
    assert await rights("gate", ALICE, "alice", "eve") == 200
    assert (await sight(BOB), await sight(EVE)) == (set(), {"gate"})
    for token, source, codes in ((ALICE, "gate", {502, 504}), (ALICE, "hall", {403}), (EVE, "yard", {404})):
        pause = await call("POST", f"/v1/devices/any-1/sources/{source}/pause", token)
        assert pause.status_code in codes, (source, pause.text)
    assert (await call("GET", "/v1/devices/any-1/sources", BOB)).status_code == 404
    assert (await call("GET", "/v1/devices/any-1/sources", EVE)).status_code in (502, 504)
    refused: tuple[Any, ...] = ({"owner": "Ä"}, {"readers": ["a"] * 101}, {"owner": "a", "color": 1}, [])
    for wanted in refused:
        assert (await call("PUT", "/v1/sources/any-1/gate/rights", OLGA, json=wanted)).status_code == 422


async def test_a_stream_of_observations_shows_nothing_more_when_the_right_to_it_ends(closed: Any) -> None:
    place = registration("any-1", spool="5" * 16, lease_s=600.0)
    assert (await closed.http.post("/v1/devices", json=place, headers=bearer(ANY))).status_code == 200
    batch = {"node_id": "any-1", "incarnation": place["incarnation"], "spool": "a" * 16}

    async def send(number: int) -> None:
        seen = [{"source": "gate", "sequence": number, "age_s": 1.0}]
        sent = await closed.http.post("/v1/observations", json={**batch, "observations": seen}, headers=bearer(ANY))
        assert sent.status_code == 200

    async def share(*readers: str) -> None:
        rights = {"owner": None, "readers": readers}
        reply = await closed.http.put("/v1/sources/any-1/gate/rights", json=rights, headers=bearer(OLGA))
        assert reply.status_code == 200

    async def next_number(lines: AsyncIterator[str]) -> int:
        async for line in lines:
            if line.startswith("data: ") and "sequence" in (seen := json.loads(line.removeprefix("data: "))):
                return int(seen["sequence"])
        return 0

    path = "/v1/observations/events?node=any-1&source=gate"
    await share("eve")
    async with (
        closed.http.stream("GET", path, headers=bearer(EVE)) as of_eve,
        closed.http.stream("GET", path, headers=bearer(OLGA)) as of_olga,
    ):
        eves, olgas = of_eve.aiter_lines(), of_olga.aiter_lines()
        await send(1)
        assert (await next_number(eves), await next_number(olgas)) == (1, 1)
        await share()
        for number in (2, 3, 4):
            await send(number)
            assert await next_number(olgas) == number
        assert (await closed.http.delete("/v1/tokens/eve", headers=bearer(ROOT))).status_code == 204
        assert await next_number(eves) == 0, "the stream ends with the token, and showed nothing more"


async def test_users_see_and_cancel_their_own_jobs_alone(closed: Any, kit: Any) -> None:
    body, headers = kit.tensor_body(kit.images(3))
    jobs: dict[str, str] = {}
    for token in (ALICE, DAVE, OLGA):
        sent = await closed.http.post(
            "/v1/jobs?name=theirs", content=body, headers={**headers, **bearer(token), "Idempotency-Key": "the same"}
        )
        assert sent.status_code == 202, "a key is one's own"
        jobs[token] = sent.json()["id"]
        assert sent.json()["owner"] == {ALICE: "alice", DAVE: "dave", OLGA: "olga"}[token]

    async def seen(token: str) -> set[str]:
        listed = (await closed.http.get("/v1/jobs", headers=bearer(token))).json()["jobs"]
        fleet = (await closed.http.get("/v1/fleet", headers=bearer(token))).json()["jobs"]
        history = (await closed.http.get("/v1/history", headers=bearer(token))).json()["events"]
        shown = [{job["id"] for job in listed}, {job["id"] for job in fleet}, {event["job"] for event in history}]
        assert shown[0] == shown[1] == shown[2]
        return shown[0]

    assert await seen(ALICE) == {jobs[ALICE]}
    assert await seen(OLGA) == await seen(ROOT) == set(jobs.values())
    for rest in ("", "/results", "/attempts", "/explain", "/events", "/images/0"):
        theirs = await closed.http.get(f"/v1/jobs/{jobs[DAVE]}{rest}", headers=bearer(ALICE))
        none = await closed.http.get(f"/v1/jobs/{'0' * 20}{rest}", headers=bearer(ALICE))
        assert (theirs.status_code, theirs.json()["error"]) == (404, f"no job '{jobs[DAVE]}'")
        assert none.status_code == 404
    assert (await closed.http.delete(f"/v1/jobs/{jobs[DAVE]}", headers=bearer(ALICE))).status_code == 404
    assert (await closed.http.delete(f"/v1/jobs/{jobs[ALICE]}", headers=bearer(ALICE))).status_code == 200
    assert (await closed.http.delete(f"/v1/jobs/{jobs[DAVE]}", headers=bearer(OLGA))).status_code == 200


async def test_a_live_stream_of_the_fleet_shows_no_jobs_of_others(closed: Any, kit: Any) -> None:
    body, headers = kit.tensor_body(kit.images(3))
    own = (await closed.http.post("/v1/jobs", content=body, headers={**headers, **bearer(ALICE)})).json()["id"]
    async with closed.http.stream("GET", "/v1/fleet/events", headers=bearer(ALICE)) as stream:
        sent = await closed.http.post("/v1/jobs", content=body, headers={**headers, **bearer(OLGA)})
        other = sent.json()["id"]
        await closed.http.delete(f"/v1/jobs/{own}", headers=bearer(ALICE))
        text = ""
        async for line in stream.aiter_lines():
            text += line
            if '"kind":"ended"' in line:
                break
    assert own in text
    assert other not in text


async def test_uploads_and_streams_at_a_time_are_limited(closed: Any, kit: Any) -> None:
    async with closed.http.stream("GET", "/v1/fleet/events", headers=bearer(EVE)) as stream:
        assert stream.status_code == 200
        second = await closed.http.get("/v1/fleet/events", headers=bearer(EVE))
        assert (second.status_code, second.headers["retry-after"]) == (429, "5")
        assert "'eve' may have 1 event streams open" in second.json()["error"]

    async def again() -> bool:
        async with closed.http.stream("GET", "/v1/fleet/events", headers=bearer(EVE)) as stream:
            return bool(stream.status_code == 200)

    await wait_for(again, what="the end of the stream")
    for _ in range(3):  # a HEAD is over with its answer, and leaves the stream to others
        head = await closed.http.head("/v1/fleet/events", headers=bearer(EVE))
        assert head.status_code in (200, 429)
        await wait_for(again, what="the end of the HEAD")
    body, headers = kit.tensor_body(kit.images(1))

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:1000]
        await asyncio.Event().wait()

    async def refused() -> bool:
        answer = await closed.http.post("/v1/jobs", content=body, headers={**headers, **bearer(EVE)})
        return "uploads under way" in answer.text and answer.status_code == 429

    upload = asyncio.create_task(closed.http.post("/v1/jobs", content=slowly(), headers={**headers, **bearer(EVE)}))
    await wait_for(refused, what="the upload to be counted")
    upload.cancel()


async def test_streams_and_uploads_end_with_their_token(closed: Any, kit: Any, tokens: Path) -> None:
    body, headers = kit.tensor_body(kit.images(1))
    job = (await closed.http.post("/v1/jobs", content=body, headers={**headers, **bearer(ALICE)})).json()["id"]
    address = urlsplit(closed.url)
    reading, writing = await asyncio.open_connection(address.hostname, address.port)
    large, _ = kit.tensor_body(kit.images(200))
    lines = {**headers, **bearer(OLGA), "Host": "localhost", "Content-Length": str(len(large))}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writing.write(f"POST /v1/jobs HTTP/1.1\r\n{head}\r\n".encode() + large[:1000])
    async with (
        closed.http.stream("GET", "/v1/fleet/events", headers=bearer(OLGA)) as fleet,
        closed.http.stream("GET", f"/v1/jobs/{job}/events", headers=bearer(OLGA)) as events,
    ):
        done = await closed.http.delete("/v1/tokens/olga", headers=bearer(ROOT))
        assert done.status_code == 204
        for stream in (fleet, events):
            async for _ in stream.aiter_bytes():
                pass  # until its end
        writing.write(large[1000:-1000])  # the upload is not complete
        assert (await asyncio.wait_for(reading.readline(), 30)).startswith(b"HTTP/1.1 401 ")
        writing.close()
    assert (await closed.http.get(f"/v1/jobs/{job}", headers=bearer(ALICE))).json()["state"] == "queued"


async def test_interactive_requests_count_among_the_unfinished_jobs(closed: Any, kit: Any) -> None:
    gate = asyncio.Event()

    async def wait(end: Any, task_id: str, upstreams: Any, lines: Any) -> Any:
        await gate.wait()
        return lines

    body, headers = kit.tensor_body(kit.images(1))
    bobs = {**headers, **bearer(BOB)}
    end = kit.fake_end("pi", script=wait)
    async with kit.serving(end, []) as url:
        place = registration("pi", url=url, key="key-of-the-pi")
        assert (await closed.http.post("/v1/devices", json=place, headers=bearer(PI))).status_code == 200
        first = asyncio.create_task(closed.http.post("/v1/classify?scheme=end", content=body, headers=bobs))
        await wait_for(lambda: bool(end.tasks), what="the task")
        second = await closed.http.post("/v1/classify?scheme=end", content=body, headers=bobs)
        assert (second.status_code, "unfinished jobs" in second.text) == (429, True)
        gate.set()
        assert '"event":"done"' in (await first).text


async def test_unfinished_jobs_count_over_a_restart(kit: Any, settings: SchedulerSettings, tokens: Path) -> None:
    settings = settings.model_copy(update={"tokens": tokens})
    body, headers = kit.tensor_body(kit.images(1))
    bobs = {**headers, **bearer(BOB)}
    async with kit.scheduler(settings) as running:
        assert (await running.http.post("/v1/jobs", content=body, headers=bobs)).status_code == 202
    async with kit.scheduler(settings) as running:
        second = await running.http.post("/v1/jobs", content=body, headers=bobs)
        assert (second.status_code, "unfinished jobs" in second.text) == (429, True)


FOR_BOTH = {
    ("DELETE", "/v1/devices/{node_id}"),  # a node its own place; operators others
    ("GET", "/v1/whoami"),
    ("POST", "/v1/session"),  # open; it looks at the token itself
    ("DELETE", "/v1/session"),
}


def test_every_route_has_said_whose_it_is() -> None:
    """A route that is added later is not open to nodes because nobody has thought of it."""
    routes = [
        route
        for router in (jobs, runs, offers, devices, mapping, history, privacy, tokens_routes, networks, about, sessions)
        for route in router.routes
        if isinstance(route, APIRoute)
    ]
    assert len(routes) > 15
    said = {for_users, for_users_and_nodes, for_users_and_workers, for_operators, for_admins, for_nodes}
    for_both = {
        (method, route.path)
        for route in routes
        if not said & {dependency.call for dependency in route.dependant.dependencies}
        for method in route.methods or ()
    }
    assert for_both == FOR_BOTH


async def test_users_are_no_nodes(closed: Any) -> None:
    answer = await closed.http.post("/v1/devices", json=registration("pi"), headers=bearer(ALICE))
    assert (answer.status_code, answer.json()["error"]) == (
        403,
        "the token of 'alice' has the role user; this takes node",
    )


@pytest.mark.parametrize(
    ("token", "node_id", "tier", "status", "why"),
    [
        (PI, "pi", "end", 200, ""),
        (PI, "pi-end-1", "end", 200, ""),
        (PI, "other", "end", 403, "not for the node id 'other'; it is for pi and pi-*"),
        (PI, "pi", "cloud", 403, "not for cloud nodes, only for end"),
        (ANY, "other", "cloud", 200, ""),
        (OLD, "pi", "end", 401, "the token of 'pi' has expired"),
        ("x" * 51, "pi", "end", 401, "the token is unknown here"),
    ],
    # Tokens are made anew by each worker of pytest-xdist, and names of tests must not differ between them.
    ids=lambda value: "token" if value in TOKENS else None,
)
async def test_registration(token: str, node_id: str, tier: str, status: int, why: str, closed: Any) -> None:
    answer = await closed.http.post("/v1/devices", json=registration(node_id, tier), headers=bearer(token))
    assert answer.status_code == status, answer.text
    assert why in answer.json().get("error", "")
    listed = (await closed.http.get("/v1/devices", headers=bearer(ALICE))).json()["devices"]
    assert [device["node_id"] for device in listed] == ([node_id] if status == 200 else [])


async def test_a_node_cannot_beat_for_another_or_strike_it_off(closed: Any) -> None:
    place = registration("door", key="a-key-that-nobody-may-see")
    assert (await closed.http.post("/v1/devices", json=place, headers=bearer(ANY))).status_code == 200
    load = {"incarnation": place["incarnation"], "in_flight": 0, "queued_images": 0, "images_done": 0}
    beat = await closed.http.post("/v1/devices/door/heartbeat", json=load, headers=bearer(PI))
    gone = await closed.http.delete("/v1/devices/door", headers=bearer(PI))
    assert (beat.status_code, gone.status_code) == (403, 403)
    assert "not for the node id 'door'" in beat.json()["error"]
    assert (await closed.http.post("/v1/devices/door/heartbeat", json=load, headers=bearer(ANY))).status_code == 204


async def test_the_list_says_of_a_dead_node_why_it_is_refused(closed: Any, tokens: Path) -> None:
    place = registration("pi")
    assert (await closed.http.post("/v1/devices", json=place, headers=bearer(PI))).status_code == 200
    replace(tokens, *(each for each in ENTRIES if each.name != "pi"))

    async def reason() -> str:
        (device,) = (await closed.http.get("/v1/devices", headers=bearer(ALICE))).json()["devices"]
        return str(device["reason"]) if device["health"] == "dead" else ""

    async def told() -> bool:
        for name in ("pi", "not-on-the-list"):
            await closed.http.post("/v1/devices", json=place, headers={**bearer(PI), NODE_HEADER: name})
        return "is refused: the token is unknown here" in await reason()

    await wait_for(told, what="the refusal on the list")
    replace(tokens, *ENTRIES)
    other = registration("pi")

    async def back() -> bool:
        answer = await closed.http.post("/v1/devices", json=other, headers=bearer(PI))
        return bool(answer.status_code == 200)  # the file of tokens is read again within seconds

    await wait_for(back, what="the node to be let in")
    assert "refused" not in await reason()


async def test_the_keys_of_nodes_are_shown_to_nobody(closed: Any) -> None:
    key = secrets.token_urlsafe(32)
    await closed.http.post("/v1/devices", json=registration("door", key=key), headers=bearer(ANY))
    broken = await closed.http.post("/v1/devices", json=registration("door", key=key + "\r\n"), headers=bearer(ANY))
    assert broken.status_code == 422
    texts = [broken.text]
    for path in ("/v1/devices", "/v1/mapping", "/metrics", "/v1/info", "/readyz"):
        texts.append((await closed.http.get(path, headers=bearer(ALICE))).text)
    assert all(key not in text for text in texts)


async def test_the_job_of_a_user_runs_on_nodes_with_keys(closed: Any, kit: Any) -> None:
    shown: list[str | None] = []

    async def script(end: Any, task_id: str, upstreams: Any, lines: Any) -> Any:
        keys.extend(upstream.key for upstream in upstreams)
        return lines

    keys: list[str] = []
    end = kit.fake_end("pi", script=script)
    async with kit.serving(end, shown) as url:
        for token, place in (
            (PI, registration("pi", url=url, key="key-of-the-pi")),
            (ANY, registration("rack", "cloud", key="key-of-the-rack")),
        ):
            assert (await closed.http.post("/v1/devices", json=place, headers=bearer(token))).status_code == 200
        body, headers = kit.tensor_body(kit.images(3))
        answer = await closed.http.post(
            "/v1/classify?scheme=end-cloud", content=body, headers={**headers, **bearer(ALICE)}
        )
    assert '"event":"done"' in answer.text
    assert shown == ["Bearer key-of-the-pi"]
    assert keys == ["key-of-the-rack"]


async def test_uploads_and_unfinished_jobs_are_limited_by_name(closed: Any, kit: Any) -> None:
    body, headers = kit.tensor_body(kit.images(3))  # 9 kB: more than bob may send in a minute
    bobs = {**headers, **bearer(BOB)}
    first = await closed.http.post("/v1/jobs", content=body, headers={**bobs, "Idempotency-Key": "one"})
    assert first.status_code == 202
    second = await closed.http.post("/v1/jobs", content=body, headers=bobs)
    assert second.status_code == 429
    assert "'bob' may have 1 unfinished jobs" in second.json()["error"]
    assert int(second.headers["retry-after"]) >= 1
    job = first.json()["id"]
    assert (await closed.http.delete(f"/v1/jobs/{job}", headers=bearer(BOB))).status_code == 200
    third = await closed.http.post("/v1/jobs", content=body, headers=bobs)
    assert third.status_code == 429
    assert "5000 bytes of uploads a minute" in third.json()["error"]
    assert 40 <= int(third.headers["retry-after"]) <= 60
    assert (await closed.http.post("/v1/jobs", content=body, headers={**headers, **bearer(ALICE)})).status_code == 202


async def test_an_upload_under_way_counts_among_the_jobs_of_its_sender(closed: Any, kit: Any) -> None:
    body, headers = kit.tensor_body(kit.images(1))
    bobs = {**headers, **bearer(BOB)}

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:1000]
        await asyncio.Event().wait()

    async def asked() -> int:
        return int((await closed.http.post("/v1/jobs", content=b"", headers=bearer(BOB))).status_code)

    async def refused() -> bool:
        return await asked() == 429

    async def heard() -> bool:
        return await asked() == 400  # an upload without images

    upload = asyncio.create_task(closed.http.post("/v1/jobs", content=slowly(), headers=bobs))
    await wait_for(refused, what="the upload to be counted")
    upload.cancel()
    await wait_for(heard, what="the end of the upload")


async def test_requests_are_limited(closed: Any) -> None:
    for _ in range(2):
        assert (await closed.http.get("/v1/whoami", headers=bearer(DAVE))).status_code == 200
    answer = await closed.http.get("/v1/whoami", headers=bearer(DAVE))
    assert (answer.status_code, answer.json()) == (429, {"error": "'dave' has used up its 2 requests a minute"})
    assert 20 <= int(answer.headers["retry-after"]) <= 30
    assert (await closed.http.get("/v1/whoami", headers=bearer(ALICE))).status_code == 200
    async with AsyncClient(closed.url, token=DAVE, backoff=Backoff(attempts=1)) as client:
        with pytest.raises(LimitReached, match="2 requests a minute") as caught:
            await client.jobs()
    assert 20 <= caught.value.retry_after_s <= 30


async def test_the_client_shows_its_token_and_names_what_is_wrong(closed: Any) -> None:
    async with AsyncClient(closed.url, token=f" {ALICE}\n") as client:
        assert (await client.whoami())["name"] == "alice"
    for token, error in ((None, Unauthenticated), (new_token(), Unauthenticated), (ANY, Forbidden)):
        async with AsyncClient(closed.url, token=token) as client:
            with pytest.raises(error):
                await client.info()
    with pytest.raises(SetupError, match="the argument token holds no token") as caught:
        AsyncClient(closed.url, token="not a token\r\nX: y")
    assert "X: y" not in str(caught.value)


async def test_an_admin_makes_exchanges_and_revokes_tokens(closed: Any, tokens: Path) -> None:
    async def ask(method: str, path: str, body: Any = None) -> Any:
        return await closed.http.request(method, f"/v1/tokens{path}", headers=bearer(ROOT), json=body)

    async def who(token: str) -> Any:
        return (await closed.http.get("/v1/whoami", headers=bearer(token))).json().get("name")

    made = await ask("POST", "", {"name": "carl", "role": "user", "expires_s": 3600, "unfinished_jobs": 2})
    assert made.status_code == 201
    first = made.json()["token"]
    assert await who(first) == "carl", "at once"
    assert first not in await asyncio.to_thread(tokens.read_text)
    listed = {each["name"]: each for each in (await ask("GET", "")).json()["tokens"]}
    assert (listed["carl"]["role"], listed["carl"]["unfinished_jobs"], "sha256" in listed["carl"]) == ("user", 2, False)
    assert set(listed) == {each.name for each in ENTRIES} | {"carl"}
    assert (await ask("POST", "", {"name": "carl", "role": "user"})).status_code == 409
    second = (await ask("POST", "/carl/rotate", {"grace_s": 0})).json()["token"]
    assert (await who(first), await who(second)) == (None, "carl")
    assert (await ask("DELETE", "/carl")).status_code == 204
    assert await who(second) is None
    assert (await ask("POST", "/carl/rotate", {})).status_code == 404
    for wrong in (
        {"name": "No Name", "role": "user"},
        {"name": "a", "role": "root"},
        {"name": "a", "role": "user", "expires_s": 0},
        {"name": "a", "role": "user", "more": 1},
    ):
        assert (await ask("POST", "", wrong)).status_code == 422
    assert (await ask("POST", "", {"name": "a", "role": "user", "tiers": ["end"]})).status_code == 422
    for limit in (10**400, -1, 0):
        content = f'{{"name": "a", "role": "user", "requests_per_minute": {limit}}}'
        answer = await closed.http.post(
            "/v1/tokens", content=content, headers={**bearer(ROOT), "Content-Type": "application/json"}
        )
        assert answer.status_code in (400, 422)
    aside = tokens.with_name("aside")
    await asyncio.to_thread(tokens.rename, aside)
    assert (await ask("POST", "", {"name": "a", "role": "user"})).status_code == 409
    assert (await ask("DELETE", "/alice")).status_code == 409
    await asyncio.to_thread(aside.rename, tokens)
    left = (await ask("GET", "")).json()["tokens"]
    assert {each["name"] for each in left} == {each.name for each in ENTRIES}
    await asyncio.to_thread(tokens.chmod, 0o644)
    refused = await ask("DELETE", "/alice")
    assert (refused.status_code, "chmod" in refused.json()["error"]) == (409, True)
    assert await who(ALICE) == "alice"


async def test_an_open_scheduler_has_no_tokens_to_change(scheduler: Any) -> None:
    for method, path in (("GET", ""), ("DELETE", "/alice")):
        assert (await scheduler.http.request(method, f"/v1/tokens{path}")).status_code == 409


async def test_the_client_reads_its_file_again(closed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "own.token"
    file.touch(mode=0o600)
    file.write_text(ALICE)
    async with AsyncClient(closed.url, token=TokenFile(file)) as client:
        assert (await client.whoami())["name"] == "alice"
        file.write_text(f"{OLGA}\n")
        assert (await client.whoami())["name"] == "olga"
        file.write_text("no token")
        for _ in range(2):
            assert (await client.whoami())["name"] == "olga", "what cannot be used changes nothing"
    assert sum("holds no token" in message for message in caplog.messages) == 1
    assert OLGA not in caplog.text


async def test_tokens_are_read_again_while_it_runs(closed: Any, tokens: Path) -> None:
    new = new_token()
    replace(tokens, entry(new, name="alice", role="user", expires=datetime(2100, 1, 1, tzinfo=UTC)))

    async def known(token: str) -> bool:
        return bool((await closed.http.get("/v1/whoami", headers=bearer(token))).status_code == 200)

    await wait_for(lambda: known(new), what="the new token")
    assert not await known(ALICE)
    answer = await closed.http.get("/v1/whoami", headers=bearer(new))
    assert answer.json() == {"name": "alice", "role": "user", "expires": "2100-01-01T00:00:00Z", "sites": []}


async def test_an_open_scheduler_asks_nobody(scheduler: Any) -> None:
    assert (await scheduler.http.get("/v1/whoami")).json() == {"name": None, "role": None, "expires": None, "sites": []}
    assert (await scheduler.http.get("/v1/jobs", headers=bearer(ALICE))).status_code == 200


async def test_a_refused_upload_is_answered_before_it_has_come(closed: Any) -> None:
    async with connected(closed.url) as (reader, writer):
        writer.write(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 500000000\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
