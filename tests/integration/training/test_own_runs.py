"""Runs whose workers train a release's network on pictures which each of them has kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.training.onnx_network import OnnxNetwork
from tests.integration.training.conftest import RunningHost
from tests.own_networks import CONFIG, SIDE, keep, network, own
from tests.shapes import shape_images
from tierkit.errors import DataError, InvalidAnswer, InvalidInput, SetupError
from tierkit.testing import serve_app, wait_for
from training.host.aggregator import open_aggregator
from training.host.app import create_app
from training.host.own import open_own_host
from training.host.settings import HostSettings
from training.improve.base import IMPROVED
from training.improve.plan import IMPROVE, Plan, write_plan
from training.own_data import MOST_BASE_BYTES
from training.strategies.config import BatchConfig, HostedConfig, OuterConfig, TournamentConfig
from training.trust.config import TrustConfig
from training.worker.finding import at
from training.worker.kept_device import KeptDevice
from training.worker.node import Work, WorkerOptions, work

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(120)]

SKEWED = ({0, 1}, {1, 2}, {0, 2})
"""Classes of three devices."""


def settings(folder: Path, *, steps: int = 480, strategy: HostedConfig = IMPROVE, **given: Any) -> HostSettings:
    """Of a host whose plan is written beside its folder."""
    content, plan = network(), folder.parent / f"{folder.name}-plan"
    plan.mkdir(exist_ok=True)
    config = CONFIG.model_copy(update={"epochs": steps, "peak_rate": 0.5})
    write_plan(plan, Plan(own=own(content, 2), network=config, strategy=strategy), content)
    return HostSettings(base=plan, folder=folder, port=0, workers=3, drain_s=1.0, **given)


@contextlib.asynccontextmanager
async def started(wanted: HostSettings) -> AsyncIterator[RunningHost]:
    host = open_own_host(wanted) if wanted.parent is None else await asyncio.to_thread(open_aggregator, wanted)
    async with (
        serve_app(lambda lifecycle: create_app(host, lifecycle), wanted) as lifecycle,
        httpx.AsyncClient(base_url=lifecycle.url, timeout=30) as http,
    ):
        yield RunningHost(host=host, lifecycle=lifecycle, http=http)


def worker(url: str, name: str, kept: Path | KeptDevice | None, **given: Any) -> asyncio.Task[Work]:
    options = WorkerOptions(find_host=at(url), name=name, kept=kept, threads=1, patience_s=20.0, **given)
    return asyncio.create_task(work(options))


def right(content: bytes) -> float:
    """Accuracy of a file on pictures that no device has."""
    images = shape_images(SIDE, seed=9)
    return float(np.mean(OnnxNetwork(content).run(images.images).argmax(1) == images.fine))


async def result_of(folder: Path) -> dict[str, Any]:
    await wait_for((folder / "result.json").exists, what="the end of the run")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


async def test_three_devices_with_different_classes_improve_a_network(tmp_path: Path) -> None:
    kept = [keep(tmp_path / f"kept-{n}", labels, seed=n) for n, labels in enumerate(SKEWED)]
    async with started(settings(tmp_path / "run")) as running:
        base = await running.http.get("/v1/base")
        assert base.content == network()
        done = await asyncio.gather(*(worker(running.url, f"w{n}", folder) for n, folder in enumerate(kept)))
        result = await result_of(tmp_path / "run")
    assert all(each.updates for each in done)
    assert result["accuracy"] is None
    improved = (tmp_path / "run" / IMPROVED).read_bytes()
    assert right(improved) > max(0.9, right(network()))


async def test_a_host_goes_on_after_it_was_stopped(tmp_path: Path) -> None:
    kept = keep(tmp_path / "kept", {0, 1, 2})
    wanted = settings(tmp_path / "run", steps=400, strategy=OuterConfig(period=8, workers=1))
    async with started(wanted) as running:
        first = worker(running.url, "w", kept)

        async def enough() -> bool:
            return (await running.host.status()).updates >= 3

        await wait_for(enough, what="updates")
        before = running.host.spec.id
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    async with started(wanted) as running:
        assert running.host.spec.id == before
        assert (await running.host.status()).updates >= 3
        await worker(running.url, "w", kept)
        result = await result_of(tmp_path / "run")
    assert result["updates"] == 50


async def test_an_aggregator_serves_devices_with_the_network_of_its_parent(tmp_path: Path) -> None:
    kept = keep(tmp_path / "kept", {0, 1, 2})
    one = OuterConfig(period=8, workers=1)
    inner = tmp_path / "inner.toml"
    inner.write_text('family = "outer"\nperiod = 4\nworkers = 1\n')
    async with started(settings(tmp_path / "top", steps=80, strategy=one)) as top:
        below = HostSettings(
            parent=top.url,
            parent_name="edge-1",
            strategy=str(inner),
            workers=1,
            folder=tmp_path / "edge",
            port=0,
            drain_s=1.0,
        )
        async with started(below) as middle:
            done = await worker(middle.url, "w", kept)
        assert (await result_of(tmp_path / "top"))["updates"] == 10
    assert done.updates == 20
    assert (tmp_path / "top" / IMPROVED).read_bytes() != network()


async def test_an_aggregator_cannot_compute_updates_again(tmp_path: Path) -> None:
    inner = tmp_path / "inner.toml"
    inner.write_text('family = "outer"\nperiod = 4\nworkers = 3\n[trust]\nrecheck = 0.5\n')
    async with started(settings(tmp_path / "top")) as top:
        below = HostSettings(parent=top.url, strategy=str(inner), folder=tmp_path / "edge", port=0)
        with pytest.raises(SetupError, match="recheck"):
            await asyncio.to_thread(open_aggregator, below)


@pytest.mark.parametrize(
    "strategy",
    [BatchConfig(), TournamentConfig(), OuterConfig(trust=TrustConfig(recheck=0.1))],
    ids=["lbfgs", "tournament", "recheck"],
)
def test_a_strategy_that_needs_the_images_is_refused(strategy: HostedConfig, tmp_path: Path) -> None:
    with pytest.raises(SetupError):
        open_own_host(settings(tmp_path / "run", strategy=strategy))


async def test_workers_that_cannot_help_say_why(tmp_path: Path) -> None:
    few = keep(tmp_path / "few", {0, 1, 2}, most=3)
    unsure = keep(tmp_path / "unsure", {0, 1, 2}, confidence=0.1, coarse_confidence=0.1)
    async with started(settings(tmp_path / "run")) as running:
        for kept, error in ((few, DataError), (unsure, DataError), (None, InvalidInput)):
            with pytest.raises(error):
                await worker(running.url, "w", kept)
        assert (await running.host.status()).updates == 0


async def test_a_host_that_sends_another_network_gets_no_work(tmp_path: Path) -> None:
    kept = keep(tmp_path / "kept", {0, 1, 2})
    async with started(settings(tmp_path / "run")) as running:
        for content in (network(classes=2), network()[:100], b"", bytes(len(network()) + 100_000)):
            running.host._base = content
            with pytest.raises(InvalidAnswer):
                await worker(running.url, "w", kept)
        assert (await running.host.status()).updates == 0


def test_a_network_that_is_too_large_for_workers_is_refused_by_its_host(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "run")
    assert wanted.base is not None
    plan = json.loads((wanted.base / "plan.json").read_text())
    plan["own"]["size_bytes"] = MOST_BASE_BYTES + 1
    (wanted.base / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(SetupError, match="size_bytes"):
        open_own_host(wanted)
