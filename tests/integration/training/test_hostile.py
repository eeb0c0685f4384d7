"""Hosts that would exhaust or break their workers: each gets a sentence, before anything large is read or built."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tests.integration.training.conftest import StartHost
from tests.integration.training.hostile import LEASE, STATUS, VALUES, Answer, answer, played, told
from tierkit.access import Tickets
from tierkit.errors import SetupError, TerraceError
from tierkit.testing import serve_app
from training.host.aggregator import open_aggregator
from training.host.app import create_app
from training.host.reporting import HostReports, report_to_scheduler
from training.host.settings import HostSettings
from training.messages import LEASE_HEADER
from training.payloads import compress, pack
from training.worker.finding import at
from training.worker.node import WorkerOptions, work

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(120)]

NOTHING = np.zeros(0, np.float32)
WEIGHTS = pack(np.full(VALUES, 0.01, np.float32), NOTHING, "fp32")


def lease(**changes: Any) -> Answer:
    return answer(WEIGHTS, 200, {LEASE_HEADER: json.dumps({**LEASE, **changes})})


def weights(body: bytes, **headers: str) -> Answer:
    return answer(body, 200, {LEASE_HEADER: json.dumps(LEASE), **headers})


def changed(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy in which a value is another one; the parts of its path have dots between them."""
    copy = json.loads(json.dumps(spec))
    *parts, last = path.split(".")
    place = copy
    for part in parts:
        place = place[part]
    place[last] = value
    return dict(copy)


SPECS: list[tuple[str, Any]] = [
    ("values", 10**9),
    ("values", VALUES + 1),
    ("values", VALUES - 1),
    ("buffers", 1),
    ("network.network.options.hidden", [10**6, 10**6]),
    ("network.network.options.hidden", [10**9]),
    ("network.network.options.hidden", [1] * 100_000),
    ("network.network.options.inputs", 10**10),
    ("network.network.options.hidden", "many"),
    ("network.network", {"kind": "wide-resnet", "options": {"depth": 10**6, "width": 1}}),
    ("network.network", {"kind": "wide-resnet", "options": {"depth": 10, "width": 10**5}}),
    ("network.network", {"kind": "mobilenet-v1", "options": {"alpha": 1e6}}),
    ("network.network", {"kind": "early-exit", "options": {"blocks": 10**7}}),
    ("network.network.kind", "x" * 10_000),
    ("network.crop_padding", 10**9),
    ("network.crop_padding", 1_000),
    ("network.early_side", 4_000),
    ("network.batch_size", 10**9),
    ("network.epochs", 10**18),
    ("network.seed", 10**19),
    ("network.mixup", 1e308),
    ("network.held_out_per_class", 10**400),
    ("strategy.period", 10**9),
    ("lease_s", 1e400),
    ("workers", 10**30),
]


@pytest.mark.parametrize(("path", "value"), SPECS, ids=[f"{number}-{path}" for number, (path, _) in enumerate(SPECS)])
async def test_a_run_that_asks_for_too_much_is_refused_before_a_lease(shapes: Path, path: str, value: Any) -> None:
    run = told(shapes)
    async with played(run) as host:
        host.instead["GET /v1/run"] = answer({"spec": changed(run.spec, path, value), "status": STATUS})
        tracemalloc.start()
        try:
            with pytest.raises(TerraceError) as caught:
                await work(WorkerOptions(find_host=at(host.url), name="w", dataset=str(shapes), patience_s=1.0))
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()
    assert len(str(caught.value)) < 1_000
    assert "POST /v1/leases" not in host.seen


async def test_a_step_that_does_not_fit_in_memory_is_refused(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 28 images at most, and some thousand numbers of 4 bytes for each.
    for free, leases in ((28 * 103 * 4, False), (28 * 4 * 10_000, True)):
        monkeypatch.setattr("training.learner.free_bytes", lambda device, free=free: free)
        async with played(told(shapes)) as host:
            host.leases = 0
            host.told.spec["network"]["batch_size"] = 60_000
            working = work(WorkerOptions(find_host=at(host.url), name="w", dataset=str(shapes), patience_s=1.0))
            if leases:
                await working
            else:
                with pytest.raises(TerraceError, match="free"):
                    await working
        assert ("POST /v1/leases" in host.seen) is leases


DEEP = b"[" * 200_000

ANSWERS: dict[str, dict[str, Answer]] = {
    "a description that is deep": {"GET /v1/run": answer(b'{"spec":' + DEEP)},
    "a description that is a list": {"GET /v1/run": answer([])},
    "no work, as a list": {"POST /v1/leases": answer([], 202)},
    "no work, as HTML": {"POST /v1/leases": answer(b"<html>", 202)},
    "no work, deep": {"POST /v1/leases": answer(DEEP, 202)},
    "1e12 steps": {"POST /v1/leases": lease(push=10**12)},
    "steps beyond the period": {"POST /v1/leases": lease(push=2)},
    "steps beyond the end": {"POST /v1/leases": lease(first=100)},
    "a number beyond 64 bits": {"POST /v1/leases": lease(number=2**63)},
    "a number of 400 digits": {"POST /v1/leases": lease(number=10**400)},
    "a segment twice": {"POST /v1/leases": lease(segments=[1, 1])},
    "push of nothing": {"POST /v1/leases": lease(push=0)},
    "few weights": {"POST /v1/leases": weights(pack(NOTHING, NOTHING, "fp32"))},
    "many weights": {"POST /v1/leases": weights(pack(np.zeros(2 * VALUES, np.float32), NOTHING, "fp32"))},
    "a bomb": {"POST /v1/leases": weights(compress(bytes(1 << 30)), **{"Content-Encoding": "zstd"})},
    "an odd verdict": {"POST /v1/updates": answer(b'{"verdict":"taken","version":1e400,"finished":false}')},
    "a long wait": {"POST /v1/leases": answer({"error": "x"}, 503, {"Retry-After": "9" * 20})},
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_an_answer_that_is_none_ends_a_worker_with_a_sentence(shapes: Path, case: str) -> None:
    async with played(told(shapes)) as host:
        host.instead |= ANSWERS[case]
        host.leases = 0
        options = WorkerOptions(find_host=at(host.url), name="w", dataset=str(shapes), patience_s=0.3)
        if case == "a long wait":
            assert (await work(options)).updates == 0  # it waits no longer than its patience lasts
            return
        host.leases = case == "an odd verdict"
        with pytest.raises(TerraceError) as caught:
            await work(options)
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value)) < 1_000


MANIFESTS: list[tuple[str, Any]] = [
    ("hierarchy.fine", 5),
    ("hierarchy.fine", [f"c{number}" for number in range(100_000)]),
    ("hierarchy", {}),
    ("steps_per_epoch", 10**30),
    ("chunk_bytes", 10**12),
    ("segments.0.images", 10**12),
]


@pytest.mark.parametrize(("path", "value"), MANIFESTS, ids=[path for path, _ in MANIFESTS])
async def test_a_manifest_of_images_that_cannot_be_is_refused(
    start_host: StartHost, shapes: Path, tmp_path: Path, path: str, value: Any
) -> None:
    async with start_host(share_data=True) as running:
        manifest = running.host.shared.manifest.model_dump(mode="json")
    if path.startswith("segments.0."):
        manifest["segments"][0][path.rpartition(".")[2]] = value
    else:
        manifest = changed(manifest, path, value)
    async with played(told(shapes)) as host:
        host.instead["GET /v1/segments"] = answer(manifest)
        options = WorkerOptions(find_host=at(host.url), name="w", fetch="own", cache=tmp_path, patience_s=0.3)
        with pytest.raises(TerraceError) as caught:
            await work(options)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize(
    "said",
    [
        {"key": "k", "wanted": [1_000], "segment": None},
        {"key": "k", "wanted": [0], "segment": 1_000},
        {"key": "a\r\nb", "wanted": [0]},
        {"key": "k", "wanted": [0] * 5_000},
        {"key": "k", "wanted": [0], "segment": 0, "source": "file:///etc/passwd"},
    ],
)
async def test_images_that_no_manifest_has_are_not_copied(
    start_host: StartHost, shapes: Path, tmp_path: Path, said: dict[str, Any]
) -> None:
    async with start_host(share_data=True) as running:
        manifest = running.host.shared.manifest.model_dump(mode="json")
    async with played(told(shapes)) as host:
        host.told.spec["data_sha256"] = manifest["data_sha256"]
        host.instead |= {"GET /v1/segments": answer(manifest), "POST /v1/data": answer(said)}
        options = WorkerOptions(find_host=at(host.url), name="w", fetch="own", cache=tmp_path, patience_s=0.3)
        with pytest.raises(TerraceError):
            await work(options)


@pytest.mark.parametrize(
    ("path", "value"),
    [("values", 10**9), ("network.network.options.hidden", [10**6, 10**6]), ("network.crop_padding", 1_000)],
)
async def test_an_aggregator_refuses_a_parent_that_asks_for_too_much(
    shapes: Path, tmp_path: Path, path: str, value: Any
) -> None:
    run = told(shapes, strategy="fedavg")
    async with played(run) as host:
        host.instead["GET /v1/run"] = answer({"spec": changed(run.spec, path, value), "status": STATUS})
        settings = HostSettings(parent=host.url, folder=tmp_path / "agg", dataset=str(shapes), port=0, patience_s=0.3)
        with pytest.raises(SetupError):
            await asyncio.to_thread(open_aggregator, settings)


@pytest.mark.parametrize("said", [lease(push=10**4), lease(first=100), answer([], 202), weights(b"")])
async def test_an_aggregator_ends_when_its_parent_grants_what_cannot_be(
    shapes: Path, tmp_path: Path, said: Answer
) -> None:
    async with played(told(shapes, strategy="fedavg")) as host:
        settings = HostSettings(parent=host.url, folder=tmp_path / "agg", dataset=str(shapes), port=0, patience_s=0.3)
        aggregator = await asyncio.to_thread(open_aggregator, settings)
        host.instead["POST /v1/leases"] = said
        async with serve_app(lambda lifecycle: create_app(aggregator, lifecycle), settings) as lifecycle:
            await asyncio.wait_for(lifecycle.wait_draining(), 30)
    assert aggregator.state == "failed"


async def test_an_aggregator_does_not_go_on_with_another_run_of_its_parent(shapes: Path, tmp_path: Path) -> None:
    async with played(told(shapes, strategy="fedavg")) as host:
        settings = HostSettings(parent=host.url, folder=tmp_path / "agg", dataset=str(shapes), port=0, patience_s=0.3)
        aggregator = await asyncio.to_thread(open_aggregator, settings)
        host.told.spec["values"] = 200_000_000
        async with serve_app(lambda lifecycle: create_app(aggregator, lifecycle), settings) as lifecycle:
            await asyncio.wait_for(lifecycle.wait_draining(), 30)
    assert (aggregator.state, host.seen.count("POST /v1/leases")) == ("failed", 0)


async def test_a_report_that_is_too_large_says_how_far_the_run_is(start_host: StartHost, shapes: Path) -> None:
    async with start_host() as running, played(told(shapes)) as scheduler:
        running.host.result = {"accuracy": 0.5, "more": "x" * 100_000}
        running.host.over.set()
        run = {"id": running.host.spec.id, "network": "net", "strategy": "sgd", "state": "running", "steps": 1}
        scheduler.instead["POST /v1/runs"] = answer(
            {**run, "created_at": TIME, "heard_at": TIME, "url": "http://x"}, 201
        )
        scheduler.instead[f"PUT /v1/runs/{running.host.spec.id}/report"] = answer({"stop": False})
        settings = HostSettings(network="mnist-100", scheduler=(scheduler.url,), port=0)
        tickets = Tickets(running.host.spec.id)
        reports = HostReports(running.host, settings, running.url, tickets)
        await asyncio.wait_for(report_to_scheduler(reports, (scheduler.url,), tickets=tickets), 30)
    assert scheduler.seen[-1].endswith("/report")


TIME = "2026-01-01T00:00:00Z"
