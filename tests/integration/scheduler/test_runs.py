"""Training runs over HTTP: a scheduler process with tokens, and hosts, workers and people as plain HTTP clients."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from terrace.cli import run as terrace
from tests.training_runs import report, start, worker
from tierkit.access import Tickets, TokenEntry, digest_of, invitation_of, new_token, write_book
from tierkit.client import AsyncClient, Run
from tierkit.testing import ServiceProcess, service_process, wait_for

ALICE, BOB, OLGA, NODE, LAPTOP, CARL, LONG_A, LONG_B, MAC, MONA = (new_token() for _ in range(10))
NAMES = {"alice": ("user", ALICE), "bob": ("user", BOB), "olga": ("operator", OLGA), "pi": ("node", NODE)}
NAMES |= {"laptop": ("worker", LAPTOP), "mac": ("worker", MAC), "mona": ("user", MONA)}
NAMES |= {"someone-with-a-long-name-a": ("user", LONG_A), "someone-with-a-long-name-b": ("user", LONG_B)}


@asynccontextmanager
async def serving(folder: Path, *flags: str, ready: str = "ready") -> AsyncIterator[ServiceProcess]:
    command = ["-m", "terrace", "scheduler", "--state", str(folder / "state"), *flags]
    async with service_process(command, ready_file=folder / ready) as process:
        yield process


@pytest.fixture(scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Of a scheduler that asks for tokens."""
    folder = tmp_path_factory.mktemp("runs")
    async with serving(folder, "--port=0", f"--tokens={tokens_in(folder)}") as process:
        yield process.url


def tokens_in(folder: Path) -> Path:
    """A file of the tokens of all callers here."""
    tokens = folder / "tokens.toml"
    tokens.touch(mode=0o600)
    entries = [
        TokenEntry.model_validate({"name": name, "role": role, "sha256": digest_of(token.encode()).hex()})
        for name, (role, token) in NAMES.items()
    ]
    limits = {"sha256": digest_of(CARL.encode()).hex(), "unfinished_jobs": 1}
    entries.append(TokenEntry.model_validate({"name": "carl", "role": "user", **limits}))
    tokens.write_text(write_book(entries))
    return tokens


class Caller:
    """Somebody with a token, or nobody with a scheduler that asks for none."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url, self.token = url, token
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def __call__(self, method: str, path: str, **given: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False) as http:
            return await http.request(method, path, headers={**self.headers, **given.pop("headers", {})}, **given)

    async def begin(self, **changes: Any) -> str:
        answer = await self("POST", "/v1/runs", json=start(**changes))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def report(self, run: str, **changes: Any) -> bool:
        answer = await self("PUT", f"/v1/runs/{run}/report", json=report(**changes))
        assert answer.status_code == 200, answer.text
        return bool(answer.json()["stop"])

    async def match(self, name: str = "laptop", **offer: Any) -> httpx.Response:
        return await self("POST", "/v1/matches", json={"name": name, **offer})

    async def run(self, run: str) -> dict[str, Any]:
        answer = await self("GET", f"/v1/runs/{run}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def listed(self) -> list[str]:
        return [run["id"] for run in (await self("GET", "/v1/runs?limit=200")).json()["runs"]]

    @asynccontextmanager
    async def following(self, run: str, kit: Any) -> AsyncIterator[AsyncIterator[tuple[str, int, dict[str, Any]]]]:
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False) as http,
            http.stream("GET", f"/v1/runs/{run}/events", headers=self.headers) as response,
        ):
            assert response.status_code == 200
            yield kit.read_events(response)


@pytest.fixture
def alice(url: str) -> Caller:
    return Caller(url, ALICE)


@pytest.fixture
def laptop(url: str) -> Caller:
    return Caller(url, LAPTOP)


async def test_a_run_from_its_beginning_to_its_end(alice: Caller, laptop: Caller) -> None:
    wanted = start()
    begun = await alice("POST", "/v1/runs", json=wanted)
    run = wanted["id"]
    assert (begun.status_code, begun.headers["location"]) == (201, f"/v1/runs/{run}")
    assert begun.json()["state"] == "running"
    assert await alice.report(run, done=100, version=90, loss=2.0, workers=[worker("a"), worker("b")]) is False
    assert await alice.report(run, done=200, version=180, loss=1.0, accuracy=0.5) is False
    view = await alice.run(run)
    assert (view["owner"], view["network"], view["steps"], view["config"]) == (
        "alice",
        "mnist-100",
        1000,
        {"epochs": 3},
    )
    assert (view["done"], view["version"], view["loss"], view["accuracy"]) == (200, 180, 1.0, 0.5)
    assert [(point["done"], point["loss"], point["accuracy"]) for point in view["curve"]] == [
        (100, 2.0, None),
        (200, 1.0, 0.5),
    ]
    first = {"left": False, "score": 0.5, "standing": "active", "wish": None, "copies": None}
    assert view["workers"] == [{**worker("laptop"), **first}]
    found = await laptop.match(run=run)
    assert {name: value for name, value in found.json().items() if not name.startswith("ticket")} == {
        "run": run,
        "urls": [wanted["url"]],
        "network": "mnist-100",
        "strategy": "downpour",
        "config": wanted["config"],
    }
    for _ in range(2):  # the answer to the last report may be lost
        await alice.report(run, state="finished", done=1000, accuracy=0.97, result={"accuracy": 0.97})
    view = await alice.run(run)
    assert (view["state"], view["done"], view["result"]) == ("finished", 1000, {"accuracy": 0.97})
    assert view["finished_at"] is not None
    assert await alice.report(run, done=7) is True
    assert await alice.run(run) == view
    for method, path, body in (
        ("DELETE", f"/v1/runs/{run}", None),
        ("POST", "/v1/matches", {"name": "laptop", "run": run}),
        ("POST", "/v1/runs", wanted),
    ):
        refused = await alice(method, path, json=body)
        assert (refused.status_code, "finished already" in refused.text) == (409, True)


async def test_the_secret_of_a_run_is_its_hosts_and_tickets_are_made_by_it(alice: Caller, laptop: Caller) -> None:
    wanted, other = start(), start()
    begun = [(await alice("POST", "/v1/runs", json=each)).json() for each in (wanted, other)]
    run, secret = wanted["id"], begun[0]["secret"]
    assert secret != begun[1]["secret"]
    assert (await alice("POST", "/v1/runs", json={**wanted, "incarnation": "2" * 16})).json()["secret"] == secret
    answers = [
        await caller(method, path, json=body)
        for caller in (alice, Caller(alice.url, OLGA), laptop)
        for method, path, body in (
            ("GET", f"/v1/runs/{run}", None),
            ("GET", "/v1/runs", None),
            ("PUT", f"/v1/runs/{run}/report", report(incarnation="2" * 16)),
            ("POST", "/v1/matches", {"name": "laptop", "run": run}),
        )
    ]
    assert not any(secret in answer.text or "secret" in answer.text for answer in answers)
    assert (await alice.match("alice", run=run)).json()["ticket"] == ""
    tickets = Tickets(run)
    tickets.secret = secret
    ticket = (await laptop.match("laptop-7", run=run)).json()["ticket"]
    caller = tickets.holder(ticket, time.time())
    assert (caller.name, caller.entry and caller.entry.nodes) == ("laptop", ("laptop-7",))
    # It is worth nothing at the scheduler.
    for headers in ({"Terrace-Ticket": ticket}, {"Authorization": f"Bearer {ticket}"}):
        assert (await Caller(alice.url)("GET", "/v1/whoami", headers=headers)).status_code == 401
    # The host hears of tokens that are valid no more, and of no others.
    ids = [*tickets.seen, digest_of(ALICE.encode()).hex()[:8], "0" * 8]
    told = await alice("PUT", f"/v1/runs/{run}/report", json=report(incarnation="2" * 16, tickets=ids))
    assert told.json()["revoked"] == ids[1:]


async def test_runs_count_as_unfinished_jobs_of_their_token(alice: Caller) -> None:
    carl, wanted = Caller(alice.url, CARL), start()
    await carl.begin(**wanted)
    assert (await carl("POST", "/v1/runs", json=start())).status_code == 429
    assert (await carl("POST", "/v1/classify", files={"files": b""})).status_code == 429
    assert (await carl("POST", "/v1/runs", json={**wanted, "incarnation": "2" * 16})).status_code == 200
    await carl.report(wanted["id"], state="finished", incarnation="2" * 16)
    await carl.report(await carl.begin(), state="finished")


async def test_an_invitation_is_for_one_run_and_a_number_of_workers(
    alice: Caller, laptop: Caller, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = await alice.begin(wants={"workers": 9}, config={"share_data": True}), await alice.begin()
    file = tmp_path / "alice.token"
    file.touch(mode=0o600)
    file.write_text(ALICE)
    flags = [f"--scheduler={alice.url}", f"--token-file={file}"]
    assert await asyncio.to_thread(terrace, ["train", "invite", run, "--uses=2", "--expires=1h", "--json", *flags]) == 0
    made = json.loads(capsys.readouterr().out)
    token, name = made["token"], made["name"]
    assert invitation_of(token) == name
    address, _, fragment = made["link"].partition("#")
    assert (address, token in fragment) == (f"{alice.url}/ui/join", True)
    assert (await Caller(alice.url)("GET", "/ui/join")).status_code == 200
    assert (token in made["command"], made["command"].endswith("--fetch own")) == (True, True)
    guest = Caller(alice.url, token)
    assert await guest.listed() == [run]
    for path in (f"/v1/runs/{other}", f"/v1/runs/{other}/events"):
        assert (await guest("GET", path)).status_code == 404
    assert (await guest.match(f"{name}-a", run=other)).status_code == 404
    assert (await guest.match("laptop")).status_code == 403
    for worker_name in ("a", "b", "a"):
        found = (await guest.match(f"{name}-{worker_name}")).json()
        assert (found["run"], found["ticket"].split(":")[2:4]) == (run, [name, f"{name}-{worker_name}"])
    refused = await guest.match(f"{name}-c")
    assert (refused.status_code, f"{name}-a" in refused.text) == (403, False)
    assert (await guest.match(f"{name}-b")).status_code == 200
    for method, path, body in (
        ("GET", "/v1/jobs", None),
        ("GET", "/metrics", None),
        ("POST", "/v1/runs", start()),
        ("POST", f"/v1/runs/{run}/invitations", {}),
        ("DELETE", f"/v1/runs/{run}", None),
    ):
        assert (await guest(method, path, json=body)).status_code == 403
    # Who may invite: the run's owner, and operators.
    for caller, status in (
        (Caller(alice.url, BOB), 404),
        (laptop, 403),
        (Caller(alice.url, OLGA), 201),
        (Caller(alice.url), 401),
    ):
        assert (await caller("POST", f"/v1/runs/{run}/invitations", json={})).status_code == status
    for ended in (run, other):
        await alice.report(ended, state="finished")
    assert (await guest.match(f"{name}-a")).status_code == 404
    assert (await alice("POST", f"/v1/runs/{run}/invitations", json={})).status_code == 409


async def test_invitations_to_runs_that_have_ended_make_room(alice: Caller) -> None:
    mona = Caller(alice.url, MONA)
    first, second = await mona.begin(), await mona.begin()
    asked = [(first, 999), (second, 1), (second, 1)]
    made = [await mona("POST", f"/v1/runs/{run}/invitations", json={"uses": uses}) for run, uses in asked]
    assert [each.status_code for each in made] == [201, 201, 429]
    await mona.report(first, state="finished")
    assert (await mona("POST", f"/v1/runs/{second}/invitations", json={})).status_code == 201
    guests = [Caller(alice.url, each.json()["token"]) for each in made[:2]]
    assert [(await guest("GET", "/v1/runs")).status_code for guest in guests] == [401, 200]
    await mona.report(second, state="finished")


async def test_who_may_invite_may_end_an_invitation(
    alice: Caller, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = await alice.begin(), await alice.begin()
    made = [(await alice("POST", f"/v1/runs/{run}/invitations", json={})).json() for _ in range(2)]
    guests = [Caller(alice.url, each["token"]) for each in made]
    path = f"/v1/runs/{run}/invitations/{made[0]['name']}"
    for caller, status in ((Caller(alice.url, BOB), 404), (guests[0], 403), (Caller(alice.url), 401)):
        assert (await caller("DELETE", path)).status_code == status
    for wrong in (f"/v1/runs/{other}/invitations/{made[0]['name']}", f"/v1/runs/{run}/invitations/alice"):
        assert (await alice("DELETE", wrong)).status_code == 404
    assert (await Caller(alice.url, OLGA)("DELETE", path)).status_code == 204
    assert [(await guest("GET", "/v1/runs")).status_code for guest in guests] == [401, 200]
    file = tmp_path / "alice.token"
    file.touch(mode=0o600)
    file.write_text(ALICE)
    command = ["train", "uninvite", run, made[1]["name"], f"--scheduler={alice.url}", f"--token-file={file}"]
    assert [await asyncio.to_thread(terrace, command) for _ in range(2)] == [0, 2]
    assert "no invitation" in capsys.readouterr().err
    assert (await guests[1]("GET", "/v1/runs")).status_code == 401
    for each in (run, other):
        await alice.report(each, state="finished")


async def test_invitations_end_and_are_few(alice: Caller) -> None:
    bob = Caller(alice.url, BOB)
    run = await bob.begin()
    made = [await bob("POST", f"/v1/runs/{run}/invitations", json={"uses": 1, "expires_s": 1}) for _ in range(21)]
    tokens = [each.json()["token"] for each in made if each.status_code == 201]
    assert tokens

    async def refused() -> bool:
        return (await Caller(alice.url, tokens[-1])("GET", "/v1/runs")).status_code == 401

    await wait_for(refused, what="the end of the last invitation")
    made = [await bob("POST", f"/v1/runs/{run}/invitations", json={}) for _ in range(21)]
    assert [each.status_code for each in made] == [201] * 20 + [429]
    for wrong in ({"uses": 0}, {"expires_s": 0}, {"expires_s": 1e12}, {"name": "x"}):
        assert (await bob("POST", f"/v1/runs/{run}/invitations", json=wrong)).status_code == 422
    await bob.report(run, state="finished")


async def test_invitations_of_somebody_with_the_same_beginning_of_their_name_do_not_count(alice: Caller) -> None:
    one, other = (Caller(alice.url, token) for token in (LONG_A, LONG_B))
    for caller, count in ((one, 20), (other, 1)):
        run = await caller.begin()
        made = [await caller("POST", f"/v1/runs/{run}/invitations", json={}) for _ in range(count)]
        assert [each.status_code for each in made] == [201] * count
        await caller.report(run, state="finished")


async def test_workers_of_one_token_that_bring_nothing_keep_no_others_out(tmp_path: Path) -> None:
    async with serving(tmp_path, "--port=0", f"--tokens={tokens_in(tmp_path)}") as process:
        alice, laptop, mac = (Caller(process.url, token) for token in (ALICE, LAPTOP, MAC))
        run = await alice.begin(wants={"workers": 4})
        crowd = [f"laptop-{number}" for number in range(4)]
        for name in crowd:
            assert (await laptop.match(name, run=run)).status_code == 200
        await alice.report(run, workers=[worker(name, updates=0) for name in crowd])
        assert (await mac.match("mac")).status_code == 200
        await alice.report(run, workers=[worker(name, updates=1) for name in crowd])
        assert (await mac.match("mac-2")).status_code == 503


async def test_who_has_come_by_https_is_sent_to_https_alone(alice: Caller, laptop: Caller) -> None:
    plain = await alice.begin(url="http://10.0.0.5:8090", more_urls=["http://10.0.0.6:8090"])
    mixed = await alice.begin(url="http://10.0.0.5:8090", more_urls=["https://10.0.0.6:8090"])
    safe = {"X-Forwarded-Proto": "https"}  # TLS that ends in front of the scheduler
    refused = await laptop("POST", "/v1/matches", json={"name": "laptop", "run": plain}, headers=safe)
    assert (refused.status_code, "--tls-cert" in refused.text) == (409, True)
    found = await laptop("POST", "/v1/matches", json={"name": "laptop", "run": mixed}, headers=safe)
    assert found.json()["urls"] == ["https://10.0.0.6:8090"]
    assert len((await laptop.match(run=mixed)).json()["urls"]) == 2
    for run in (plain, mixed):
        await alice.report(run, state="finished")


async def test_a_host_that_was_restarted_takes_its_run_over(alice: Caller, laptop: Caller) -> None:
    wanted = start()
    run = await alice.begin(**wanted)
    again = {**wanted, "url": "https://10.0.0.6:8090", "incarnation": "2" * 16}
    other = await Caller(alice.url, BOB)("POST", "/v1/runs", json=again)
    assert other.status_code == 409
    assert (await alice("POST", "/v1/runs", json=again)).status_code == 200
    assert (await alice("PUT", f"/v1/runs/{run}/report", json=report())).status_code == 409
    assert await alice.report(run, incarnation="2" * 16) is False
    assert (await laptop.match(run=run)).json()["urls"] == ["https://10.0.0.6:8090"]


@pytest.mark.parametrize(
    ("last", "state"),
    [({"state": "finished", "done": 500}, "stopped"), ({"state": "finished", "done": 1000}, "finished")],
)
async def test_a_run_is_stopped_by_the_answer_to_its_next_report(
    alice: Caller, laptop: Caller, last: dict[str, Any], state: str
) -> None:
    run = await alice.begin()
    for _ in range(2):
        asked = await alice("DELETE", f"/v1/runs/{run}")
        assert (asked.status_code, asked.json()["state"]) == (200, "stopping")
    assert (await laptop.match(run=run)).status_code == 409
    assert await alice.report(run, done=500) is True
    assert (await alice.run(run))["state"] == "stopping"
    await alice.report(run, **last)
    assert (await alice.run(run))["state"] == state


async def test_what_an_operator_wants_with_a_worker_is_in_the_answer_to_the_next_report(
    alice: Caller, laptop: Caller
) -> None:
    run = await alice.begin()
    workers = [worker("a"), worker("b", standing="quarantined", score=0.1)]
    await alice.report(run, workers=workers)
    path = f"/v1/runs/{run}/workers"
    asked = await alice("PUT", f"{path}/b", json={"order": "trust"})
    shown = [(each["standing"], each["score"], each["wish"]) for each in asked.json()["workers"]]
    assert (asked.status_code, shown) == (200, [("active", 0.5, None), ("quarantined", 0.1, "trust")])
    answer = await alice("PUT", f"/v1/runs/{run}/report", json=report(workers=workers))
    assert answer.json()["workers"] == {"b": "trust"}
    for caller, name, content, code in (
        (laptop, "b", {"order": "trust"}, 403),
        (Caller(alice.url, BOB), "b", {"order": "trust"}, 404),
        (alice, "nobody", {"order": "trust"}, 404),
        (alice, "b", {"order": "shoot"}, 422),
        (alice, "b", {}, 422),
        (alice, "x" * 64, {"order": "trust"}, 400),
    ):
        answer = await caller("PUT", f"{path}/{name}", json=content)
        assert (answer.status_code, bool(answer.json()["error"])) == (code, True)


async def test_events_tell_of_the_whole_run_then_of_each_report_and_end_with_it(
    alice: Caller, laptop: Caller, kit: Any
) -> None:
    run = await alice.begin()
    await alice.report(run, done=100)
    async with alice.following(run, kit) as events, laptop.following(run, kit) as workers_events:
        kind, _, data = await anext(events)
        assert (kind, data["done"], len(data["curve"]), data["config"]) == ("state", 100, 1, {"epochs": 3})
        for done in (200, 300):
            await alice.report(run, done=done, loss=1.0)
            kind, _, data = await anext(events)
            assert (kind, data["done"], data["loss"], len(data["workers"])) == ("report", done, 1.0, 1)
            assert (data["point"]["done"], data["point"]["loss"], data["point"]["accuracy"]) == (done, 1.0, None)
            assert not {"config", "curve", "result"} & data.keys()
        await alice("DELETE", f"/v1/runs/{run}")
        assert [(kind, data["state"]) for kind, _, data in [await anext(events)]] == [("state", "stopping")]
        await alice.report(run, state="finished", done=400, result={"x": 1})
        rest = [(kind, data["state"], data["result"]) async for kind, _, data in events]
        assert rest == [("state", "stopped", {"x": 1})]
        seen = [data async for _, _, data in workers_events]
        assert (seen[0]["state"], seen[-1]["state"]) == ("running", "stopped")


async def test_who_may_do_what(alice: Caller, laptop: Caller) -> None:
    bob, olga, node = (Caller(alice.url, token) for token in (BOB, OLGA, NODE))
    run, ended = await alice.begin(), await alice.begin()
    await alice.report(ended, state="failed", error="no disk")
    assert {run, ended} <= set(await alice.listed())
    assert {run, ended} <= set(await olga.listed())
    assert {run, ended}.isdisjoint(await bob.listed())
    assert run in (found := await laptop.listed())
    assert ended not in found
    expected = {
        ("GET", ""): (200, 200, 404, 200, 403),
        ("GET", "/events"): (200, 200, 404, 200, 403),
        ("POST", "/v1/matches"): (200, 200, 404, 200, 403),
        ("PUT", "/report"): (200, 404, 404, 403, 403),
        ("DELETE", ""): (200, 200, 404, 403, 403),
    }
    for (method, rest), statuses in expected.items():
        for caller, status in zip((alice, olga, bob, laptop, node), statuses, strict=True):
            path, body = f"/v1/runs/{run}{rest}", report() if method == "PUT" else None
            if method == "POST":
                path, body = rest, {"name": "laptop", "run": run}
            async with (
                httpx.AsyncClient(base_url=alice.url, timeout=30, trust_env=False) as http,
                http.stream(method, path, headers=caller.headers, json=body) as answer,
            ):
                assert answer.status_code == status, (method, rest, caller.token == LAPTOP)
    assert (await laptop("GET", f"/v1/runs/{ended}")).status_code == 404
    assert (await laptop("POST", "/v1/runs", json=start())).status_code == 403
    for rest in ("", "/events"):
        assert (await alice("GET", f"/v1/runs/{'0' * 32}{rest}")).status_code == 404
    assert (await alice.match(run="0" * 32)).status_code == 404


async def test_a_worker_speaks_for_itself_alone_and_a_flood_is_held_up(alice: Caller, laptop: Caller) -> None:
    run = await alice.begin()
    assert (await laptop.match("laptop-2", run=run)).status_code == 200
    assert (await laptop.match("pi", run=run)).status_code == 403
    assert (await laptop.match("../x", run=run)).status_code == 422

    async def ask(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post("/v1/matches", headers=laptop.headers, json={"name": "laptop", "run": run})

    async with httpx.AsyncClient(base_url=alice.url, timeout=60, trust_env=False) as http:
        answers = [answer for _ in range(10) for answer in await asyncio.gather(*(ask(http) for _ in range(50)))]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
    assert (await alice.match("alice", run=run)).status_code == 200


async def test_pages(alice: Caller) -> None:
    made = [await alice.begin() for _ in range(3)][::-1]
    first = (await alice("GET", "/v1/runs?limit=2")).json()
    assert [run["id"] for run in first["runs"]] == made[:2]
    assert not {"config", "curve", "workers"} & first["runs"][0].keys()
    second = (await alice("GET", f"/v1/runs?limit=2&cursor={first['next_cursor']}")).json()
    assert second["runs"][0]["id"] == made[2]
    for query in ("cursor=1", f"cursor={made[0]}", "limit=0", "limit=201", "state=running"):
        assert (await alice("GET", f"/v1/runs?{query}")).status_code in (400, 422), query


BODIES = {
    "no JSON": b"{",
    "no object": b"[]",
    "NaN": json.dumps(start(config={"x": float("nan")})).encode(),
    "deep": b'{"config": ' + b'{"x":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
    "a long number": json.dumps(start()).replace('"epochs": 3', '"epochs": 3' + "0" * 5000).encode(),
    "half a character": json.dumps(start(config={"x": "\ud800"})).encode(),
    "half a character in a name": json.dumps(start(network="\ud800")).encode(),
    "too much": json.dumps(start(config={"x": "y" * 600_000})).encode(),
}


@pytest.mark.parametrize("what", BODIES)
async def test_wrong_bodies_are_refused_in_a_sentence(alice: Caller, what: str) -> None:
    before = await alice.listed()
    answer = await alice("POST", "/v1/runs", content=BODIES[what], headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 413, 422), answer.text
    assert list(answer.json()) == ["error"]
    assert await alice.listed() == before


async def test_a_thousand_workers_are_one_report_and_one_more_is_too_many(alice: Caller) -> None:
    run = await alice.begin()
    many = [worker(f"volunteer-{number:04}", bytes_sent=2**52, bytes_received=2**52) for number in range(1001)]
    assert (await alice("PUT", f"/v1/runs/{run}/report", json=report(workers=many))).status_code == 422
    await alice.report(run, workers=many[:1000], result={"x": "y" * 60_000})
    assert (await alice.run(run))["worker_count"] == 1000


async def test_runs_survive_a_scheduler_that_is_killed(tmp_path: Path) -> None:
    wanted = start()
    async with serving(tmp_path, "--port=0") as process:
        host = Caller(process.url)
        run = await host.begin(**wanted)
        ended, stopping = await host.begin(), await host.begin()
        await host.report(run, done=100)
        await host.report(ended, state="finished", done=1000, result={"accuracy": 0.97})
        await host("DELETE", f"/v1/runs/{stopping}")
        process.kill()
        await process.exit_code()
    port = process.url.rpartition(":")[2]
    async with serving(tmp_path, f"--port={port}", ready="again"):
        assert {ended, stopping, run} == set(await host.listed())
        assert (await host.run(ended))["result"] == {"accuracy": 0.97}
        assert await host.report(stopping) is True
        assert await host.report(run, done=200) is False
        view = await host.run(run)
        assert (view["state"], view["done"], view["owner"]) == ("running", 200, None)


async def test_a_host_that_falls_silent(alice: Caller, laptop: Caller, kit: Any) -> None:
    silent, stopping = await alice.begin(), await alice.begin()
    await alice("DELETE", f"/v1/runs/{stopping}")
    async with alice.following(silent, kit) as events, alice.following(stopping, kit) as others:
        assert [data["state"] for data in [(await anext(events))[2]]] == ["running"]
        assert [data["state"] async for _, _, data in others] == ["stopping", "stopped"]
        assert (await anext(events))[2]["state"] == "interrupted"
        where = await laptop.match(run=silent)
        assert (where.status_code, int(where.headers["retry-after"]) > 0) == (503, True)
        await alice.report(silent)
        assert (await anext(events))[2]["state"] == "running"
    assert (await laptop.match(run=silent)).status_code == 200
    assert await alice.report(stopping) is True


async def test_the_client_follows_a_run_over_a_restart_of_the_scheduler(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with serving(tmp_path, "--port=0") as process:
            host = Caller(process.url)
            run = await host.begin()
            client = await stack.enter_async_context(AsyncClient(process.url))
            events = client.run_events(run)
            first = await anext(events)
            assert isinstance(first, Run)
            process.kill()
            await process.exit_code()

        async def rest() -> list[str]:
            return [event.state async for event in events]

        following = asyncio.create_task(rest())
        await stack.enter_async_context(serving(tmp_path, f"--port={process.url.rpartition(':')[2]}", ready="again"))
        await host.report(run, state="finished", done=1000)
        assert (await following)[-1] == "finished"
        assert (await client.runs()).runs[0].id == run
        assert (await client.run(first)).done == 1000


@pytest.fixture
def command(alice: Caller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """`terrace train ...` as alice: exit code, output, errors."""
    monkeypatch.setenv("TERRACE_SCHEDULER", alice.url)
    monkeypatch.setenv("TERRACE_TOKEN", ALICE)
    monkeypatch.setenv("COLUMNS", "200")

    async def call(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(terrace, ["train", *arguments])
        return code, *capsys.readouterr()

    return call


async def test_train_list(alice: Caller, command: Any) -> None:
    run = await alice.begin(network="a\x1b[31mb")
    await alice.report(run, done=500, loss=1.5, accuracy=0.25)
    code, out, _ = await command("list", "--limit", "1")
    assert (code, run in out, "50.0 %" in out, "25.0 %" in out, "\x1b" in out) == (0, True, True, True, False)
    assert "--cursor" in out
    code, out, _ = await command("list", "--json", "--limit", "1")
    page = json.loads(out)
    assert (code, page["runs"][0]["id"], page["runs"][0]["done"]) == (0, run, 500)
    code, out, _ = await command("list", "--json", "--limit", "1", "--cursor", page["next_cursor"])
    assert (code, json.loads(out)["runs"][0]["id"] != run) == (0, True)


@pytest.mark.parametrize(("said", "code"), [("finished", 0), ("failed", 1)])
async def test_train_watch(alice: Caller, command: Any, said: str, code: int) -> None:
    run = await alice.begin()
    watching = asyncio.create_task(command("watch", run, "--json"))
    await alice.report(run, state=said, done=1000, accuracy=0.97, error="no disk" if said == "failed" else None)
    exit_code, out, _ = await watching
    events = [json.loads(line) for line in out.splitlines()]
    assert (exit_code, events[-1]["event"], events[-1]["data"]["state"]) == (code, "state", said)
    exit_code, out, _ = await command("watch", run)
    assert (exit_code, said in out, "97.0 %" in out, "no disk" in out) == (code, True, True, said == "failed")


async def test_train_watch_shows_who_is_missing(alice: Caller, command: Any) -> None:
    run = await alice.begin(wants={"workers": 4, "start_at": 3})
    await alice.report(run, done=0, missing=2)
    assert (await alice.run(run))["missing"] == 2
    watching = asyncio.create_task(command("watch", run, "--json"))
    await alice.report(run, state="finished", done=0, missing=2)
    _, out, _ = await watching
    last = json.loads(out.splitlines()[-1])["data"]
    assert (last["wants"]["start_at"], last["missing"]) == (3, None)  # it waits no longer


async def test_train_worker(alice: Caller, command: Any) -> None:
    run = await alice.begin()
    await alice.report(run, workers=[worker("a")])
    code, out, _ = await command("worker", run, "a", "pause")
    assert (code, "told to pause" in out) == (0, True)
    code, out, _ = await command("worker", run, "a", "drop", "--json")
    assert (code, json.loads(out)["wish"]) == (0, "drop")
    for arguments in (("b", "pause"), ("../a", "pause"), ("a", "shoot")):
        code, _, err = await command("worker", run, *arguments)
        assert (code, bool(err)) == (2, True)


async def test_train_stop(alice: Caller, command: Any) -> None:
    run = await alice.begin()
    code, out, _ = await command("stop", run, "--json")
    assert (code, json.loads(out)["state"]) == (0, "stopping")
    await alice.report(run, state="finished", done=5)
    code, _, err = await command("stop", run)
    assert (code, "stopped already" in err) == (1, True)
    code, _, err = await command("watch", secrets.token_hex(16))
    assert (code, "no training run" in err) == (2, True)
