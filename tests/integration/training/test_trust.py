"""A host on a real socket and workers that cheat: they are found and told, and operators have the last word."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.cli import run
from tests.integration.training.conftest import RunningHost, StartHost
from tests.integration.training.test_host import A, B, body, head, joined, leased, options, reaches, status
from tierkit.errors import Forbidden, SetupError
from tierkit.testing import wait_for
from training.host.chief import CHIEF, compute_as_chief
from training.messages import LEASE_HEADER
from training.trust.recheck import Recheck, Rechecks
from training.worker.node import work

pytestmark = [pytest.mark.train, pytest.mark.anyio]

ROUNDS = """family = "outer"
period = 1
workers = 4
[trust]
recheck = {recheck}
tolerance = 0.0
deviation = {deviation}
"""


@pytest.fixture
def strategy(tmp_path: Path) -> Any:
    """Writes a strategy that judges rounds of four."""

    def write(*, recheck: float = 0.0, deviation: float = 4.0) -> str:
        path = tmp_path / "rounds.toml"
        path.write_text(ROUNDS.format(recheck=recheck, deviation=deviation))
        return str(path)

    return write


async def cheats(running: RunningHost, value: float, name: str = "bad") -> httpx.Response:
    """Send updates of this number until the host has enough of it; what it says then."""
    await joined(running, name)
    while True:
        answer = await running.http.post("/v1/leases", params={"worker": name, "incarnation": A})
        if answer.status_code == 200:
            lease = json.loads(answer.headers[LEASE_HEADER])
            answer = await running.http.post(
                "/v1/updates", content=body(running, value), headers=head(lease, {"worker": name})
            )
        if answer.status_code not in (200, 202):
            return answer


async def standings(running: RunningHost) -> dict[str, str]:
    """Of those who are there, or were told to go."""
    found = (await status(running.http))["workers"]
    return {each["name"]: each["standing"] for each in found if not each["left"] or each["standing"] != "active"}


async def says(running: RunningHost, name: str, order: str) -> httpx.Response:
    return await running.http.put(f"/v1/workers/{name}/order", json={"order": order})


async def test_a_cheater_is_put_in_quarantine_and_told_and_the_run_learns(
    start_host: StartHost, shapes: Path, strategy: Any
) -> None:
    async with start_host(epochs=60, strategy=strategy(), workers=4) as running:
        honest = [asyncio.create_task(work(options(running, shapes, f"w{n}"))) for n in range(3)]

        async def all_there() -> bool:
            return len(await standings(running)) == len(honest)

        await wait_for(all_there, what="honest workers")  # one that is alone with the run is not judged
        answer = await asyncio.wait_for(cheats(running, 5.0), 30)
        assert answer.status_code == 403
        assert "bad" in answer.json()["error"]
        found = await status(running.http)
        scores = {each["name"]: each["score"] for each in found["workers"]}
        assert scores["bad"] < 0.2 < 0.5 < min(scores[f"w{n}"] for n in range(3))
        again = {"name": "bad", "incarnation": B, "data_sha256": running.host.spec.data_sha256}
        assert (await running.http.post("/v1/workers", json=again)).status_code == 403
        await asyncio.wait_for(asyncio.gather(*honest), 60)
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
        result = running.host.result
    assert result is not None
    assert result["accuracy"] > 2 / 3


async def test_scores_and_orders_outlast_a_host(start_host: StartHost, shapes: Path, strategy: Any) -> None:
    async with start_host(epochs=2_000, strategy=strategy(), workers=4) as running:
        honest = [asyncio.create_task(work(options(running, shapes, f"w{n}"))) for n in range(3)]
        await cheats(running, 5.0)
        assert (await says(running, "w2", "pause")).json()["standing"] == "paused"
        running.host.stop()
        await asyncio.wait_for(asyncio.gather(*honest, return_exceptions=True), 20)
        before = running.host.spec.id, (await running.host.weights())
    async with start_host(epochs=2_000, strategy=strategy(), workers=4) as running:
        assert (running.host.spec.id, await running.host.weights()) == before
        assert await standings(running) == {"bad": "quarantined", "w2": "paused"}
        again = {"name": "bad", "incarnation": B, "data_sha256": running.host.spec.data_sha256}
        assert (await running.http.post("/v1/workers", json=again)).status_code == 403
        assert (await says(running, "bad", "trust")).json()["score"] == 1.0
        assert (await running.http.post("/v1/workers", json=again)).status_code == 200


async def test_units_are_computed_again_and_who_has_not_computed_them_is_found(
    start_host: StartHost, shapes: Path, strategy: Any
) -> None:
    # No update lies too far from the others here: only computing it again can tell.
    flags = {"strategy": strategy(recheck=1.0, deviation=1e9), "workers": 4, "wire": "bf16"}
    async with start_host(epochs=16, **flags) as running:
        honest = [asyncio.create_task(work(options(running, shapes, f"w{n}"))) for n in range(3)]
        answer = await asyncio.wait_for(cheats(running, 0.0), 30)
        assert answer.status_code == 403
        await asyncio.wait_for(asyncio.gather(*honest), 60)
        left = await standings(running)
    assert left == {"bad": "quarantined"}


async def test_who_goes_before_the_answer_is_computed_again_all_the_same(
    start_host: StartHost, shapes: Path, strategy: Any
) -> None:
    flags = {"strategy": strategy(recheck=1.0, deviation=1e9), "workers": 4}
    async with start_host(epochs=16, **flags) as running:
        await joined(running, "bad")
        lease, _ = await leased(running, "bad")
        update = head(lease, {"worker": "bad"})
        _, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        sent = body(running, 1.0)
        lines = [
            "POST /v1/updates HTTP/1.1",
            "Host: x",
            f"Content-Length: {len(sent)}",
            *(f"{key}: {value}" for key, value in update.items()),
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + sent)
        await writer.drain()
        writer.close()

        async def found() -> bool:
            return await standings(running) == {"bad": "quarantined"}

        await wait_for(found, what="the quarantine")


async def test_updates_are_taken_while_a_unit_is_computed_again(
    start_host: StartHost, shapes: Path, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(rechecks: Rechecks, chosen: Recheck, *rest: Any) -> bool:
        begun.set()
        return go_on.wait(30)

    monkeypatch.setattr(Rechecks, "is_right", slowly)
    async with start_host(epochs=2_000, strategy=strategy(recheck=1.0, deviation=1e9), workers=4) as running:
        honest = [asyncio.create_task(work(options(running, shapes, f"w{n}"))) for n in range(4)]
        try:
            await reaches(running, updates=30)
            assert begun.is_set()
        finally:
            go_on.set()
        running.host.stop()
        await asyncio.wait_for(asyncio.gather(*honest), 20)


async def test_operators_pause_trust_and_drop_a_worker(start_host: StartHost, shapes: Path) -> None:
    async with start_host(epochs=20_000, strategy="sgd") as running:
        working = asyncio.create_task(work(options(running, shapes)))
        await reaches(running, updates=3)
        assert (await says(running, "w", "pause")).json()["standing"] == "paused"
        paused = (await running.host.status()).updates
        await joined(running, "other")
        lease, _ = await leased(running, "other")
        sent = await running.http.post("/v1/updates", content=body(running), headers=head(lease, {"worker": "other"}))
        assert sent.json()["verdict"] == "taken"
        assert (await running.host.status()).updates == paused + 1
        assert (await says(running, "w", "resume")).json()["standing"] == "active"
        await reaches(running, updates=paused + 4)
        assert (await says(running, "w", "trust")).json()["score"] == 1.0
        assert (await says(running, "w", "drop")).json()["standing"] == "dropped"
        with pytest.raises(Forbidden, match="operator"):
            await asyncio.wait_for(working, 20)
        assert await standings(running) == {"other": "active", "w": "dropped"}


@pytest.mark.parametrize("order", ["trust", "resume", "drop", "pause"])
async def test_an_order_for_a_worker_that_has_left_is_obeyed_and_the_host_goes_on(
    start_host: StartHost, order: str
) -> None:
    async with start_host(strategy="sgd") as running:
        await joined(running)
        assert (await says(running, "w", "drop")).status_code == 200
        await running.host.leave("w", A)
        answer = await asyncio.wait_for(says(running, "w", order), 10)
        assert answer.json()["standing"] == {"trust": "trusted", "resume": "active", "drop": "dropped"}.get(
            order, "paused"
        )
        await joined(running, "other")
        assert (await standings(running))["other"] == "active"


async def test_the_host_computes_no_more_while_it_is_told_so_itself_and_goes_on_afterwards(
    start_host: StartHost,
) -> None:
    async with start_host(epochs=20_000, strategy="sgd") as running:
        computing = asyncio.create_task(compute_as_chief(running.host, running.host.images))
        await reaches(running, updates=3)
        assert (await says(running, CHIEF, "drop")).json()["standing"] == "dropped"
        await joined(running, "other")
        assert (await says(running, CHIEF, "resume")).json()["standing"] == "active"
        await reaches(running, updates=(await running.host.status()).updates + 3)
        assert not computing.done()
        running.host.stop()
        await asyncio.wait_for(computing, 20)


async def test_train_worker_at_the_host(start_host: StartHost, capsys: pytest.CaptureFixture[str]) -> None:
    async def command(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run, ["train", "worker", running.url, *arguments])
        return code, *capsys.readouterr()

    async with start_host(strategy="sgd") as running:
        await joined(running)
        code, out, _ = await command("w", "pause", "--json")
        said = json.loads(out)
        assert (code, said["standing"], said["wish"]) == (0, "paused", None)
        code, out, _ = await command("w", "resume")
        assert (code, "active" in out) == (0, True)
        code, _, err = await command("nobody", "drop")
        assert (code, "nobody" in err) == (2, True)
        assert await standings(running) == {"w": "active"}


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("nobody", {"order": "drop"}, 404),
        ("w", {"order": "shoot"}, 400),
        ("w", {}, 400),
        ("w", {"order": "drop", "more": 1}, 400),
        ("..%2fw", {"order": "drop"}, 404),
    ],
)
async def test_orders_that_are_none(start_host: StartHost, name: str, content: dict[str, Any], code: int) -> None:
    async with start_host(strategy="sgd") as running:
        await joined(running)
        answer = await running.http.put(f"/v1/workers/{name}/order", json=content)
        assert (answer.status_code, bool(answer.json()["error"])) == (code, True)
        assert await standings(running) == {"w": "active"}


async def test_an_update_for_the_lease_of_another_is_refused_and_nothing_of_it_outlasts_the_host(
    start_host: StartHost,
) -> None:
    async with start_host(strategy="sgd") as running:
        await joined(running, "owner")
        await joined(running, "thief", B)
        owners, _ = await leased(running, "owner")
        thiefs, _ = await leased(running, "thief", B)
        told = {"worker": "thief", "incarnation": B, "lease": owners["number"]}
        for changes in (told, {**told, "lease": thiefs["number"], "first": 0, "stop": 1}):
            answer = await running.http.post("/v1/updates", content=body(running), headers=head(owners, changes))
            assert answer.json()["verdict"] in ("refused", "late")
        kept = {"worker": "owner"}
        answer = await running.http.post("/v1/updates", content=body(running), headers=head(owners, kept))
        assert answer.json()["verdict"] == "taken"
        weights = await running.host.weights()
    async with start_host(strategy="sgd") as running:
        assert await running.host.weights() == weights


async def test_a_run_that_cannot_be_judged_so_is_not_begun(start_host: StartHost, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    for text in ("workers = 2\n[trust]\n", "workers = 4\n[trust]\ncentre = 'mean'\n", "[trust]\ncheaters = 0.5\n"):
        bad.write_text(f'family = "outer"\n{text}')
        with pytest.raises(SetupError):
            async with start_host(strategy=str(bad)):
                pass
    # Nothing was kept of it.
    async with start_host(strategy="sgd"):
        pass


@pytest.mark.parametrize(
    ("rate", "state", "verdicts"),
    [(0.05, "running", ["refused"] * 5 + [403]), (1e30, "failed", ["refused"] * 5 + ["ended"])],
)
async def test_updates_that_are_none_are_the_end_of_their_worker_unless_the_run_gives_no_others(
    start_host: StartHost, tmp_path: Path, rate: float, state: str, verdicts: list[str | int]
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'rule = "sgd"\nrate = {rate}')

    async def brings(name: str, value: float) -> str | int:
        answer = await running.http.post("/v1/leases", params={"worker": name, "incarnation": A})
        if answer.status_code != 200:
            return "ended" if answer.json().get("finished") else answer.status_code
        lease = json.loads(answer.headers[LEASE_HEADER])
        content, headers = body(running, value), head(lease, {"worker": name})
        answer = await running.http.post("/v1/updates", content=content, headers=headers)
        return str(answer.json()["verdict"])

    async with start_host(epochs=2_000, strategy=str(path)) as running:
        for name in ("good", "bad"):
            await joined(running, name)
        for _ in range(3):
            assert await brings("good", 1e6) == "taken"
        assert [await brings("bad", float("nan")) for _ in range(6)] == verdicts
        assert (await status(running.http))["state"] == state
        assert ("learning rate" in running.host.error) == (state == "failed")
