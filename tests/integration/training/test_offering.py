"""Hosts that wait, as processes: a person starts a run over the scheduler, workers join it, and a host dies."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tests.integration.training.conftest import CONFIG
from tierkit.access import TokenEntry, digest_of, new_token, write_book
from tierkit.testing import service_process, wait_for

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(300)]

ANN, BOB, WORKER = (new_token() for _ in range(3))
BUDGET_S = 120.0


@pytest.fixture
def offered(tmp_path: Path) -> Path:
    path = tmp_path / "net.toml"
    path.write_text(CONFIG.format(epochs=2))
    return path


@asynccontextmanager
async def scheduler(folder: Path, *flags: str) -> AsyncIterator[httpx.AsyncClient]:
    words = ["-m", "terrace", "scheduler", "--port=0", f"--state={folder / 'state'}", *flags]
    async with (
        service_process(words, ready_file=folder / "scheduler.ready") as process,
        httpx.AsyncClient(base_url=process.url, timeout=30, trust_env=False) as http,
    ):
        yield http


@asynccontextmanager
async def process(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(sys.executable, "-P", "-m", "terrace", "train", *words)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
        await started.wait()


def host(http: httpx.AsyncClient, offered: Path, shapes: Path, *flags: str) -> Any:
    own = (f"--offer={offered}", f"--scheduler={http.base_url}".rstrip("/"), f"--folder={offered.parent / 'runs'}")
    return process("host", *own, "--offer-strategies=sgd,fedavg", "--port=0", f"--dataset={shapes}", *flags)


async def the_offer(http: httpx.AsyncClient, so: Callable[[dict[str, Any]], bool] = bool) -> dict[str, Any]:
    """The only offer, once it is so."""
    found: list[dict[str, Any]] = []

    async def there() -> bool:
        found[:] = (await http.get("/v1/offers")).raise_for_status().json()["offers"]
        return len(found) == 1 and so(found[0])

    await wait_for(there, what="the offer", timeout_s=BUDGET_S)
    return found[0]


def wish(**changes: Any) -> dict[str, Any]:
    return {"network": "net", "strategy": "sgd", "rate": 0.02, "epochs": 3, "batch": 10, **changes}


async def test_a_run_is_started_on_a_host_that_waits_and_a_group_trains_it(
    tmp_path: Path, offered: Path, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERRACE_HOST_OFFER", str(offered))  # which the host of the run has as well
    async with scheduler(tmp_path) as http, host(http, offered, shapes, "--share-data", "--workers=2") as waiting:
        offer = await the_offer(http)
        path = f"/v1/offers/{offer['id']}/runs"
        assert offer["networks"][0]["rate"] == {"lowest": 0.005, "highest": 0.5, "default": 0.05}
        refused = await http.post(path, json=wish(rate=5.0))
        assert (refused.status_code, "rate" in refused.json()["error"]) == (422, True)
        start = (await http.post(path, json=wish(start_at=2))).json()["id"]
        latest = (
            await the_offer(
                http, lambda each: bool(each["latest"] and (each["latest"]["run"] or each["latest"]["over"]))
            )
        )["latest"]
        assert (latest["start"], latest["over"]) == (start, False)

        async def run() -> dict[str, Any]:
            answer = await http.get(f"/v1/runs/{latest['run']}")
            return dict(answer.json()) if answer.status_code == 200 else {"missing": None, "state": "unknown"}

        async def misses(number: int) -> bool:
            return bool((await run())["missing"] == number)

        await wait_for(lambda: misses(2), what="the run", timeout_s=BUDGET_S)
        join = ("work", f"--scheduler={http.base_url}".rstrip("/"), f"--run={latest['run']}", "--fetch=own")
        cache = f"--cache={tmp_path / 'cache'}"
        async with process(*join, "--name=a", cache) as first:
            await wait_for(lambda: misses(1), what="the first worker", timeout_s=BUDGET_S)
            async with process(*join, "--name=b", cache) as second:
                codes = await asyncio.wait_for(asyncio.gather(first.wait(), second.wait()), BUDGET_S)
                assert list(codes) == [0, 0]
        ended = await the_offer(http, lambda each: bool(each["latest"]["over"]))
        assert ended["latest"]["error"] is None
        found = await run()
        assert (found["state"], found["missing"], found["result"]["epochs"]) == ("finished", None, 3)
        network = found["config"]["network"]
        assert (network["peak_rate"], network["batch_size"], found["strategy"]) == (0.02, 10, "sgd")
        waiting.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(waiting.wait(), BUDGET_S) == 0


async def test_a_host_that_dies_leaves_no_run_and_no_offer(tmp_path: Path, offered: Path, shapes: Path) -> None:
    async with scheduler(tmp_path) as http, host(http, offered, shapes) as waiting:
        offer = await the_offer(http)
        waiting.send_signal(signal.SIGSTOP)  # so that it dies after the start and before it hears of it
        answer = await http.post(f"/v1/offers/{offer['id']}/runs", json=wish())
        assert answer.status_code == 202
        waiting.kill()

        async def gone() -> bool:
            return not (await http.get("/v1/offers")).json()["offers"]

        await wait_for(gone, what="the end of the offer", timeout_s=BUDGET_S)
        assert (await http.get("/v1/runs")).json()["runs"] == []
        assert (await http.post(f"/v1/offers/{offer['id']}/runs", json=wish())).status_code == 404


async def test_why_a_run_did_not_come_about_is_told(tmp_path: Path, offered: Path) -> None:
    async with scheduler(tmp_path) as http, host(http, offered, tmp_path / "no-images"):
        offer = await the_offer(http)
        await http.post(f"/v1/offers/{offer['id']}/runs", json=wish())
        latest = (await the_offer(http, lambda each: bool(each["latest"] and each["latest"]["over"])))["latest"]
        assert (latest["run"], "no-images" in latest["error"]) == (None, True)


async def test_only_users_start_runs_and_on_their_own_hosts(tmp_path: Path, offered: Path, shapes: Path) -> None:
    entries = [
        TokenEntry(name="ann", role="user", sha256=digest_of(ANN.encode()).hex()),
        TokenEntry(name="bob", role="user", sha256=digest_of(BOB.encode()).hex()),
        TokenEntry(name="pi", role="worker", sha256=digest_of(WORKER.encode()).hex()),
    ]
    for name, text in (("tokens.toml", write_book(entries)), ("ann.token", ANN)):
        file = tmp_path / name
        file.touch(mode=0o600)
        file.write_text(text)
    tokens = f"--tokens={tmp_path / 'tokens.toml'}"
    async with (
        scheduler(tmp_path, tokens) as http,
        host(http, offered, shapes, f"--token-file={tmp_path / 'ann.token'}"),
    ):
        http.headers["Authorization"] = f"Bearer {ANN}"
        offer = await the_offer(http)
        path = f"/v1/offers/{offer['id']}/runs"
        for token, status in ((BOB, 404), (WORKER, 403), (new_token(), 401)):
            headers = {"Authorization": f"Bearer {token}"}
            assert (await http.post(path, json=wish(), headers=headers)).status_code == status
        assert (await http.get("/v1/offers", headers={"Authorization": f"Bearer {BOB}"})).json() == {"offers": []}
        for wrong in ({}, wish(rate="x"), wish(more=1), wish(epochs=0)):
            assert (await http.post(path, json=wrong)).status_code == 422
        assert (await http.put("/v1/offers/short", json={})).status_code in (400, 422)
