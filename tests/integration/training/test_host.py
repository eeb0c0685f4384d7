"""A host on a real socket: what a worker does to the end of a run, and what hostile callers get."""

import asyncio
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.dataset import Dataset
from models.training.checkpoint import load_checkpoint
from models.training.data import TrainingData
from models.training.learner import averaged_network, predict
from models.training.record import Reached, TrainingRecord, read_record, unfinished
from tests.integration.training.conftest import RunningHost, StartHost
from tests.shapes import write_shapes
from tierkit.errors import Conflict, DeadlineExceeded, SetupError
from tierkit.testing import wait_for
from training.host.curves import Curves
from training.host.journal import Journal
from training.host.run import TrainingRun
from training.host.settings import HostSettings
from training.learner import FlatLearner
from training.messages import LEASE_HEADER, UPDATE_HEADER
from training.payloads import compress, pack, packed_bytes, unpack
from training.strategies.build import build_strategy
from training.strategies.protocol import Strategy
from training.units import Flat, Update, Verdict
from training.virtual import SimulatedWorker, simulate
from training.worker.finding import at
from training.worker.node import WorkerOptions, work

pytestmark = [pytest.mark.train, pytest.mark.anyio]

A, B = "a" * 16, "b" * 16


def options(running: RunningHost, shapes: Path, name: str = "w", **given: Any) -> WorkerOptions:
    return WorkerOptions(find_host=at(running.url), name=name, dataset=str(shapes), threads=1, **given)


async def status(http: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get("/v1/run")).raise_for_status().json()["status"]
    return found


async def reaches(running: RunningHost, *, updates: int) -> None:
    """Wait until the run has so many updates."""

    async def enough() -> bool:
        return (await running.host.status()).updates >= updates

    await wait_for(enough, what="updates")


async def joined(running: RunningHost, name: str = "w", incarnation: str = A) -> None:
    join = {"name": name, "incarnation": incarnation, "data_sha256": running.host.spec.data_sha256}
    (await running.http.post("/v1/workers", json=join)).raise_for_status()


async def leased(running: RunningHost, name: str = "w", incarnation: str = A) -> tuple[dict[str, Any], bytes]:
    answer = await running.http.post("/v1/leases", params={"worker": name, "incarnation": incarnation})
    assert answer.status_code == 200
    return json.loads(answer.headers[LEASE_HEADER]), answer.content


def head(lease: dict[str, Any], changes: dict[str, Any] | None = None) -> dict[str, str]:
    stop = lease["first"] + lease["push"]
    told = {"worker": "w", "incarnation": A, "lease": lease["number"], "first": lease["first"], "stop": stop}
    return {UPDATE_HEADER: json.dumps({**told, "loss": 1.0, **(changes or {})})}


def body(running: RunningHost, value: float = 0.001, **changes: Any) -> bytes:
    spec = running.host.spec
    values = np.full(changes.get("values", spec.values), value, np.float32)
    return pack(values, np.zeros(changes.get("buffers", spec.buffers), np.float32), changes.get("format", "fp32"))


async def test_workers_train_to_the_end_and_every_step_counts_once(start_host: StartHost, shapes: Path) -> None:
    async with start_host(epochs=8, strategy="sgd", wire="bf16") as running:
        done = await asyncio.gather(*(work(options(running, shapes, name)) for name in ("w1", "w2")))
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
        found = running.host.result
    assert found is not None
    assert sum(each.updates for each in done) == found["updates"] == 40
    assert (found["strategy"], found["network"], found["faults"]) == ("sgd", "net", 0)
    assert found["accuracy"] > 2 / 3
    spec = running.host.spec
    dense = 40 * packed_bytes(spec.values, spec.buffers, "bf16")
    assert found["bytes_received"] == dense
    # Gradients of pixels without any spread are zero, and left out.
    assert 0.5 * dense < found["bytes_sent"] < dense
    assert set(found["times"]) == {"load", "forward", "backward", "step", "send", "wait", "apply"}


@pytest.mark.parametrize("strategy", ["sgd", "fedavg"])
async def test_one_worker_over_http_is_one_worker_in_this_process_to_the_bit(
    start_host: StartHost, shapes: Path, strategy: str
) -> None:
    async with start_host(epochs=3, strategy=strategy, workers=1) as running:
        await work(options(running, shapes))
        _, body = await running.host.weights()
        spec = running.host.spec
    dataset = Dataset.open(str(shapes), None)
    learner = FlatLearner(spec.network, TrainingData(spec.network, dataset.read("train"), dataset.hierarchy))
    start = learner.weights(), learner.buffers()
    alone = build_strategy(spec.strategy, start, learner, workers=1, lease_s=100.0)
    simulate(alone, learner, [SimulatedWorker(name="w", step_s=1.0)])
    assert body == pack(alone.weights, alone.buffers, "fp32")


async def test_the_last_update_is_counted_before_the_run_is_summed_up(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The host is in its first evaluation until the last update is in, and looks then whether the run is over.
    evaluating, taken, summed_up = threading.Event(), threading.Event(), threading.Event()
    evaluated, take = FlatLearner.evaluated, Strategy.take

    def evaluate(*given: Any) -> tuple[float, float]:
        evaluating.set()
        taken.wait(30)
        return evaluated(*given)

    def slow_at_the_end(strategy: Strategy, update: Update, now: float) -> Verdict:
        verdict = take(strategy, update, now)
        if strategy.finished:
            taken.set()
            summed_up.wait(0.5)  # in vain: that is for after the update
        return verdict

    def staleness(run: TrainingRun) -> float:
        summed_up.set()
        return run.totals.staleness

    monkeypatch.setattr(FlatLearner, "evaluated", evaluate)
    monkeypatch.setattr(Strategy, "take", slow_at_the_end)
    monkeypatch.setattr("training.host.host._EVALUATION_SHARE", 100.0)
    async with start_host(epochs=1, strategy="sgd") as running:
        await joined(running)
        for _ in range(5):
            lease, _ = await leased(running)
            if lease["first"] == 4:
                assert await asyncio.to_thread(evaluating.wait, 30)
                monkeypatch.setattr(TrainingRun, "staleness", property(staleness))
            await running.http.post("/v1/updates", content=body(running), headers=head(lease))
        await wait_for(lambda: running.host.result is not None, what="the result")
        assert running.host.result is not None
        assert running.host.result["updates"] == 5


async def test_a_lease_is_the_weights_of_its_version_and_an_update_counts_once(start_host: StartHost) -> None:
    async with start_host(strategy="sgd") as running:
        await joined(running)
        lease, weights = await leased(running)
        before, _ = unpack(weights, values=running.host.spec.values, buffers=running.host.spec.buffers)
        for verdict in ("taken", "duplicate"):
            answer = await running.http.post("/v1/updates", content=body(running), headers=head(lease))
            assert (answer.status_code, answer.json()["verdict"], answer.json()["version"]) == (200, verdict, 1)
        answer = await running.http.get("/v1/weights", params={"version": 1})
        after, _ = unpack(answer.content, values=running.host.spec.values, buffers=running.host.spec.buffers)
        assert 0 < (before - after).max() < 0.001
        assert (await running.http.get("/v1/weights", params={"version": 0})).status_code == 404
        assert (await status(running.http))["done"] == 1


async def test_a_host_that_comes_back_has_all_that_it_acknowledged(start_host: StartHost) -> None:
    async with start_host(strategy="dc-adaptive") as running:
        await joined(running)
        for _ in range(3):
            lease, _ = await leased(running)
            await running.http.post("/v1/updates", content=body(running), headers=head(lease))
        lease, _ = await leased(running)
        weights, before = (await running.http.get("/v1/weights")).content, await status(running.http)
    async with start_host(strategy="dc-adaptive") as running:
        after = await status(running.http)
        assert (await running.http.get("/v1/weights")).content == weights
        for figure in ("id", "done", "version", "updates", "bytes_sent", "bytes_received", "faults"):
            assert after[figure] == before[figure]
        answer = await running.http.post("/v1/updates", content=body(running), headers=head(lease))
        said = answer.json()
        assert 0 < said.pop("host_s") < 60
        assert said == {"verdict": "taken", "version": 4, "finished": False}


async def test_a_folder_with_another_run_is_refused(start_host: StartHost) -> None:
    async with start_host(strategy="sgd"):
        pass
    with pytest.raises(SetupError, match="values of seed:"):
        async with start_host(strategy="sgd", seed=7):
            pass
    with pytest.raises(SetupError, match="strategy"):
        async with start_host(strategy="fedavg"):
            pass


@pytest.mark.parametrize(
    ("changes", "code", "verdict"),
    [
        ({"value": float("nan")}, 200, "refused"),
        ({"value": float("inf")}, 200, "refused"),
        ({"value": float("nan"), "format": "int8"}, 200, "refused"),
        ({"value": float("-inf"), "format": "int8"}, 200, "refused"),
        ({"values": 3}, 400, None),
        ({"buffers": 5}, 400, None),
        ({"head": {"first": 1, "stop": 2}}, 200, "refused"),
        ({"head": {"lease": 99}}, 200, "late"),
        ({"head": {"lease": -1}}, 400, None),
        ({"head": {"loss": "x"}}, 400, None),
        ({"head": {"loss": 1.7e308}}, 400, None),
        ({"head": {"times": {"forward": 1.7e308}}}, 400, None),
        ({"head": {"times": {"forward": -1}}}, 400, None),
        ({"head": {"times": {f"t{'x' * n}": 1.0 for n in range(30)}}}, 400, None),
        ({"head": {"more": 1}}, 400, None),
        ({"head": {"worker": "nobody"}}, 404, None),
        ({"head": {"incarnation": B}}, 409, None),
        ({"head": {"incarnation": "?"}}, 400, None),
    ],
)
async def test_an_update_that_is_wrong_changes_nothing(
    start_host: StartHost, changes: dict[str, Any], code: int, verdict: str | None
) -> None:
    async with start_host(strategy="sgd") as running:
        await joined(running)
        lease, _ = await leased(running)
        weights = (await running.http.get("/v1/weights")).content
        answer = await running.http.post(
            "/v1/updates", content=body(running, **changes), headers=head(lease, changes.get("head"))
        )
        assert (answer.status_code, answer.json().get("verdict")) == (code, verdict)
        if code != 200:
            assert answer.json()["error"]
        assert (await running.http.get("/v1/weights")).content == weights
        again, _ = await leased(running)
        assert again["first"] == 0


@pytest.mark.parametrize(
    ("content", "headers", "code"),
    [
        (b"", {}, 400),
        (b"\xff" * 100, {}, 400),
        (b"x" * 1_000_000, {}, 413),
        (b"no zstd", {"Content-Encoding": "zstd"}, 400),
        (compress(bytes(100_000_000)), {"Content-Encoding": "zstd"}, 400),
        (b"x", {"Content-Encoding": "br"}, 400),
    ],
    ids=["empty", "noise", "large", "no zstd", "bomb", "other encoding"],
)
async def test_a_body_that_is_no_update_is_refused(
    start_host: StartHost, content: bytes, headers: dict[str, str], code: int
) -> None:
    async with start_host(strategy="sgd") as running:
        await joined(running)
        lease, _ = await leased(running)
        answer = await running.http.post("/v1/updates", content=content, headers=head(lease) | headers)
        assert (answer.status_code, "error" in answer.json()) == (code, True)
        answer = await running.http.post(
            "/v1/updates", content=compress(body(running)), headers=head(lease) | {"Content-Encoding": "zstd"}
        )
        assert answer.json()["verdict"] == "taken"


@pytest.mark.parametrize(
    ("method", "path", "content", "code"),
    [
        ("POST", "/v1/workers", b"", 400),
        ("POST", "/v1/workers", b"[" * 10_000, 400),
        ("POST", "/v1/workers", json.dumps({"name": "../x", "incarnation": A, "data_sha256": ""}).encode(), 400),
        ("POST", "/v1/workers", json.dumps({"name": "w", "incarnation": A, "data_sha256": "0" * 64}).encode(), 409),
        ("POST", "/v1/workers", b"x" * 20_000, 413),
        ("DELETE", "/v1/workers/w", b"", 404),
        ("POST", f"/v1/leases?worker=w&incarnation={A}", b"", 404),
        ("PUT", "/v1/leases/0", b"{}", 400),
        ("PUT", "/v1/leases/x", b"{}", 400),
        *(
            ("PUT", f"/v1/leases/{number}", json.dumps({"worker": "w", "incarnation": A, "shown": 1}).encode(), 400)
            for number in ("x", "-1", "9" * 20, "9" * 5_000)
        ),
        ("POST", "/v1/updates", b"", 400),
        ("GET", "/v1/updates", b"", 405),
    ],
)
async def test_bad_requests_get_a_sentence(
    start_host: StartHost, method: str, path: str, content: bytes, code: int
) -> None:
    async with start_host(strategy="sgd") as running:
        answer = await running.http.request(method, path, content=content)
        assert (answer.status_code, bool(answer.json()["error"])) == (code, True)


@pytest.mark.parametrize(
    ("path", "content", "named"),
    [
        ("/v1/workers", b'{"name": ' + b"1" * 5_000 + b"}", "number"),
        ("/v1/workers", b"\xff", "JSON"),
        ("/v1/workers", b"{}", "incarnation is missing"),
        ("/v1/leases", b"[]", "worker=NAME"),
        ("/v1/leases?worker=w", b"", "incarnation="),
        (f"/v1/leases?incarnation={A}", b"{}", "worker=NAME"),
    ],
)
async def test_what_is_wrong_with_a_request_is_told_in_our_words(
    start_host: StartHost, path: str, content: bytes, named: str
) -> None:
    async with start_host(strategy="sgd") as running:
        answer = await running.http.post(path, content=content)
    assert answer.status_code == 400
    assert named in answer.json()["error"]
    assert not any(word in answer.json()["error"] for word in ("sys.", "codec", "''"))


@pytest.mark.parametrize("worker", ["w", "stranger"])
async def test_a_body_is_not_unpacked_for_who_holds_no_such_lease(start_host: StartHost, worker: str) -> None:
    async with start_host(strategy="sgd") as running:
        await joined(running)
        lease, _ = await leased(running)
        told = head({**lease, "number": 10**6}, {"worker": worker})
        answer = await running.http.post(
            "/v1/updates", content=b"no zstd", headers={**told, "Content-Encoding": "zstd"}
        )
        assert (answer.status_code, answer.json().get("verdict")) == ((200, "late") if worker == "w" else (404, None))


async def test_words_that_are_not_known_are_left_out_of_the_times_and_their_update_counts(
    start_host: StartHost,
) -> None:
    async with start_host(strategy="sgd") as running:
        await joined(running)
        lease, _ = await leased(running)
        told = head(lease, {"times": {"step": 2.0, "newer": 1.0}})
        answer = await running.http.post("/v1/updates", content=body(running), headers=told)
        assert answer.json()["verdict"] == "taken"
        found = await status(running.http)
    assert {name: found["times"].get(name) for name in ("step", "newer")} == {"step": 2.0, "newer": None}


async def test_the_newer_of_two_workers_with_one_name_goes_on(start_host: StartHost) -> None:
    async with start_host(strategy="sgd") as running:
        await joined(running)
        lease, _ = await leased(running)
        await joined(running, incarnation=B)
        answer = await running.http.post("/v1/updates", content=body(running), headers=head(lease))
        assert answer.status_code == 409
        newer, _ = await leased(running, incarnation=B)
        assert (newer["first"], newer["number"]) != (lease["first"], lease["number"])
        assert newer["first"] == lease["first"]


async def test_what_a_silent_worker_had_is_somebody_elses_after_its_lease(start_host: StartHost) -> None:
    async with start_host(strategy="fedavg", workers=1, lease_s=0.3) as running:
        await joined(running)
        lost, _ = await leased(running)
        await joined(running, "other")
        # The only place of the round is taken until the lease expires, which is waited for.
        lease, _ = await leased(running, "other")
        assert lease["first"] == lost["first"]
        answer = await running.http.post("/v1/updates", content=body(running), headers=head(lost))
        assert answer.json()["verdict"] == "late"
        progress = {"worker": "w", "incarnation": A, "shown": 1}
        answer = await running.http.put(f"/v1/leases/{lost['number']}", json=progress)
        assert answer.status_code == 404
        assert (await status(running.http))["faults"] == 2


async def test_a_worker_with_other_images_is_told(
    start_host: StartHost, shapes: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = write_shapes(tmp_path_factory.mktemp("other"), seed=1)
    async with start_host(strategy="sgd") as running:
        with pytest.raises(Conflict, match="images"):
            await work(options(running, other))


async def test_a_run_that_is_stopped_lets_its_workers_go_and_goes_on_later(start_host: StartHost, shapes: Path) -> None:
    async with start_host(epochs=2_000, strategy="sgd") as running:
        working = asyncio.create_task(work(options(running, shapes)))
        await reaches(running, updates=3)
        assert (await running.http.delete("/v1/run")).json() == {"state": "stopped"}
        assert (await asyncio.wait_for(working, 20)).updates >= 3
        assert (await running.http.delete("/v1/run")).status_code in (409, 503)
        done = (await running.host.status()).done
    async with start_host(epochs=2_000, strategy="sgd") as running:
        found = await status(running.http)
        assert (found["state"], found["done"]) == ("running", done)


async def test_a_group_starts_together_also_after_a_restart_of_the_host(start_host: StartHost, shapes: Path) -> None:
    async def missing(number: int | None) -> None:
        async def so() -> bool:
            return (await running.host.status()).missing == number

        await wait_for(so, what="the group")

    async def asked(name: str) -> int:
        return (await running.http.post("/v1/leases", params={"worker": name, "incarnation": A})).status_code

    given = {"strategy": "sgd", "workers": 3, "start_at": 3, "max_lease_wait_s": 0.2, "epochs": 8}
    async with start_host(**given) as running:
        for name in ("w1", "w2"):
            await joined(running, name)
        await missing(1)
        assert await asked("w1") == 202
        (await running.http.delete("/v1/workers/w2", params={"incarnation": A})).raise_for_status()
        await missing(2)
    async with start_host(**given) as running:
        await missing(2)
        assert await asked("w1") == 202
        (await running.http.delete("/v1/workers/w1", params={"incarnation": A})).raise_for_status()
        done = await asyncio.gather(*(work(options(running, shapes, name)) for name in ("a", "b", "c")))
        assert min(each.updates for each in done) > 0
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
    assert running.host.result is not None
    assert running.host.result["updates"] == 40


async def test_a_group_that_never_comes_is_stopped(start_host: StartHost) -> None:
    async with start_host(workers=2, start_at=2) as running:
        await joined(running)
        assert (await running.http.delete("/v1/run")).json() == {"state": "stopped"}
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
        assert (running.host.error, running.host.result) == ("", None)


@pytest.mark.parametrize(
    "wrong", [{"start_at": 5}, {"start_at": 0}, {"start_at": 1, "network": None, "parent": "http://127.0.0.1:1"}]
)
def test_a_group_that_cannot_come_together_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"start.at"):
        HostSettings(**{"network": "mnist-100", "workers": 4, **wrong})


async def test_a_worker_that_joins_in_mid_run_contributes_beside_the_first(start_host: StartHost, shapes: Path) -> None:
    async with start_host(epochs=2_000, strategy="sgd") as running:
        first = asyncio.create_task(work(options(running, shapes, "first")))
        await reaches(running, updates=3)
        joiner = asyncio.create_task(work(options(running, shapes, "joiner")))

        async def contributes() -> bool:
            return any(each.name == "joiner" and each.updates >= 3 for each in (await running.host.status()).workers)

        await wait_for(contributes, what="updates of the joiner")
        running.host.stop()
        assert all(each.updates >= 3 for each in await asyncio.wait_for(asyncio.gather(first, joiner), 20))


async def test_a_host_that_is_away_is_waited_for_and_not_for_ever(start_host: StartHost, shapes: Path) -> None:
    async with start_host(strategy="sgd") as running:
        away = options(running, shapes, patience_s=0.5)
    with pytest.raises(DeadlineExceeded, match="away"):
        await work(away)


async def test_a_worker_that_is_to_stand_back_does_nothing_meanwhile(start_host: StartHost, shapes: Path) -> None:
    asked, free = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def may_work() -> bool:
        loop.call_soon_threadsafe(asked.set)
        return free.is_set()

    async with start_host(epochs=2, strategy="fedavg", workers=1) as running:
        working = asyncio.create_task(work(options(running, shapes, may_work=may_work)))
        await asyncio.wait_for(asked.wait(), 30)
        assert (await running.host.status()).done == 0
        free.set()
        done = await asyncio.wait_for(working, 30)
        assert (done.updates, done.faults) == (1, 0)


async def test_a_worker_that_stands_back_in_mid_unit_ends_when_it_is_told(start_host: StartHost, shapes: Path) -> None:
    steps, stood = iter(range(1_000)), asyncio.Event()
    loop = asyncio.get_running_loop()

    def may_work() -> bool:
        if next(steps) < 4:
            return True
        loop.call_soon_threadsafe(stood.set)
        return False

    async with start_host(epochs=20, strategy="fedavg", workers=1) as running:
        working = asyncio.create_task(work(options(running, shapes, may_work=may_work)))
        await asyncio.wait_for(stood.wait(), 30)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(working, 30)
        # What it had is somebody else's.
        assert (await work(options(running, shapes, "w2"))).updates == 2


async def test_a_full_disk_ends_the_host_with_a_sentence_and_workers_are_told_to_wait(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_host(strategy="sgd") as running:
        await joined(running)
        lease, _ = await leased(running)

        def full(journal: Journal, *given: Any, **named: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Journal, "add", full)
        answer = await running.http.post("/v1/updates", content=body(running), headers=head(lease))
        assert answer.status_code == 503
        assert float(answer.headers["retry-after"]) > 0
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
        assert isinstance(running.lifecycle.crash, SetupError)
        assert os.strerror(errno.ENOSPC) in str(running.lifecycle.crash)
    assert "Traceback" not in caplog.text


async def test_a_run_ends_with_the_weights_that_were_measured_when_they_are_good_enough(
    start_host: StartHost, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.host.host._EVALUATION_SHARE", 100.0)  # measures all the time
    measured: list[Flat] = []
    ahead = threading.Event()
    evaluated, take = FlatLearner.evaluated, Strategy.take

    def evaluate(learner: FlatLearner, weights: Flat, *rest: Any) -> tuple[float, float]:
        found = evaluated(learner, weights, *rest)
        if found[0] >= 0.8 and not measured:
            measured.append(weights.copy())
            assert ahead.wait(30)  # the worker brings another update before the host knows that it has enough
        return found

    def taken(strategy: Strategy, update: Update, now: float) -> Verdict:
        verdict = take(strategy, update, now)
        if measured:
            ahead.set()
        return verdict

    monkeypatch.setattr(FlatLearner, "evaluated", evaluate)
    monkeypatch.setattr(Strategy, "take", taken)
    async with start_host(epochs=4_000, strategy="sgd", until=0.8) as running:
        done = await work(options(running, shapes))
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
        found, steps = running.host.result, running.host.steps
        assert (await running.host.status()).computed
    assert found is not None
    reached = found["reached"]
    assert found["until"] == 0.8
    assert reached["accuracy"] >= 0.8
    assert (reached["updates"], reached["seconds"]) == (found["updates"], found["seconds"])
    assert 0 < reached["updates"] == reached["steps"] <= done.updates < steps
    folder = tmp_path / "run"
    record = read_record(TrainingRecord, folder)
    assert (record.steps, record.planned_steps) == (reached["steps"], steps)
    assert record.fleet is not None
    assert record.fleet.reached == Reached(**reached)
    assert unfinished(folder) is None
    # What is kept has the accuracies that were told, although the workers were ahead of them.
    dataset = Dataset.open(str(shapes), None)
    data = TrainingData(running.host.spec.network, dataset.read("train"), dataset.hierarchy)
    learner = FlatLearner(running.host.spec.network, data)
    network, _, _ = averaged_network(load_checkpoint(folder, dataset.hierarchy))
    logits = predict(network, data.held_out.images, data.batches.statistics, learner.config, data.device)
    assert float(np.mean(logits.argmax(1) == data.held_out.fine)) == reached["accuracy"]
    kept = np.concatenate([each.detach().numpy().ravel() for each in network.parameters()])
    np.testing.assert_array_equal(kept, measured[0])
    last = Curves(folder, found["updates"]).points[-1]
    assert (last.accuracy, last.updates) == (reached["accuracy"], reached["updates"])
    # A host that comes back to it has nothing to do.
    async with start_host(epochs=4_000, strategy="sgd", until=0.9) as running:
        assert running.host.finished
        assert running.host.result == found


async def test_a_run_that_never_is_good_enough_says_so(
    start_host: StartHost, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlatLearner, "evaluated", lambda *given: (0.5, 1.0))
    async with start_host(epochs=1, strategy="sgd", until=1.0) as running:
        await work(options(running, shapes))
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
        found = running.host.result
    assert found is not None
    assert (found["until"], found["reached"], found["updates"]) == (1.0, None, 5)


async def test_curves_of_a_run_end_with_its_last_update(start_host: StartHost, shapes: Path, tmp_path: Path) -> None:
    async with start_host(epochs=2, strategy="sgd") as running:
        await work(options(running, shapes))
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
        found = running.host.result
    assert found is not None
    assert "reached" not in found
    last = Curves(tmp_path / "run", 10).points[-1]
    counted = {name: found[name] for name in ("seconds", "updates", "loss", "bytes_sent", "bytes_received")}
    assert last.model_dump(include=set(counted)) == counted
    assert (last.steps, last.accuracy is None) == (10, False)
