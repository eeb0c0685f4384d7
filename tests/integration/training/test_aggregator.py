"""Hosts that are workers of another host: what goes up is what their workers have changed, whoever is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tests.integration.training.conftest import StartHost
from tierkit.errors import SetupError
from tierkit.settings import load_settings
from tierkit.testing import ServiceProcess, serve_app, service_process, wait_for
from training.host.aggregator import open_aggregator
from training.host.app import create_app
from training.host.settings import HostSettings
from training.payloads import unpack
from training.worker.finding import at
from training.worker.node import WorkerOptions, work

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(300)]

TERRACE = (sys.executable, "-P", "-m", "terrace")
Network = Callable[[int], Path]


@contextlib.asynccontextmanager
async def workers(*urls: str, shapes: Path) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """A process for each; those that have not ended at last are killed."""
    started = [
        await asyncio.create_subprocess_exec(
            *(*TERRACE, "train", "work", url, "--name", f"w{number}", "--dataset", str(shapes), "--threads", "1"),
            stderr=asyncio.subprocess.DEVNULL,
        )
        for number, url in enumerate(urls)
    ]
    try:
        yield started
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
            await process.wait()


def host(folder: Path, shapes: Path, *flags: str) -> list[str]:
    """A command; its own folder beside those of others."""
    return ["-m", "terrace", "train", "host", f"--folder={folder}", f"--dataset={shapes}", "--port=0", *flags]


async def status(server: ServiceProcess) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=10, trust_env=False) as http:
        found: dict[str, Any] = (await http.get("/v1/run")).raise_for_status().json()["status"]
        return found


async def test_a_run_ends_although_one_of_two_aggregators_is_killed(
    network: Network, shapes: Path, tmp_path: Path
) -> None:
    outer, inner = tmp_path / "outer.toml", tmp_path / "inner.toml"
    outer.write_text('family = "outer"\nperiod = 20\nworkers = 2\nrate = 0.7\nmomentum = 0.5\n')
    inner.write_text('family = "outer"\nperiod = 5\n')
    top = host(tmp_path / "top", shapes, f"--network={network(200)}", f"--strategy={outer}", "--lease-s=3")
    below = [f"--strategy={inner}", "--workers=2", "--lease-s=3"]
    async with service_process(top, ready_file=tmp_path / "t") as parent:
        below += [f"--parent={parent.url}"]
        first = host(tmp_path / "a", shapes, "--parent-name=a", *below)
        second = host(tmp_path / "b", shapes, "--parent-name=b", *below)
        async with (
            service_process(first, ready_file=tmp_path / "1") as one,
            service_process(second, ready_file=tmp_path / "2") as two,
            workers(one.url, one.url, two.url, two.url, shapes=shapes) as crew,
        ):

            async def contribute(server: ServiceProcess, *names: str) -> bool:
                brought = {each["name"]: each["updates"] for each in (await status(server))["workers"]}
                return all(brought.get(name) for name in names)

            for server, *names in ((parent, "a", "b"), (one, "w0", "w1"), (two, "w2", "w3")):
                await wait_for(partial(contribute, server, *names), timeout_s=120, what=f"updates of {names}")
            two.kill()
            await two.exit_code()
            assert await parent.exit_code(timeout_s=200) == 0
            assert await one.exit_code() == 0
            assert [await asyncio.wait_for(process.wait(), 60) for process in crew[:2]] == [0, 0]
    result = json.loads((tmp_path / "top" / "result.json").read_text())
    # Each of the 1,000 steps is in the weights once: 50 updates of 20.
    assert (result["updates"], result["strategy"]) == (50, "outer")
    assert result["accuracy"] > 2 / 3


async def test_one_aggregator_with_one_worker_changes_the_weights_as_the_worker_alone_would(
    start_host: StartHost, shapes: Path, tmp_path: Path
) -> None:
    average = tmp_path / "average.toml"
    average.write_text('family = "outer"\nperiod = 10\nworkers = 1\n')
    found = []
    for between in (False, True):
        async with start_host(epochs=8, folder=f"run-{between}", strategy=str(average)) as top:
            below = HostSettings(
                parent=top.url,
                parent_name="a",
                strategy=str(average),
                workers=1,
                dataset=str(shapes),
                folder=tmp_path / "below",
                drain_s=1.0,
            )
            async with contextlib.AsyncExitStack() as stack:
                url = top.url
                if between:
                    aggregator = await asyncio.to_thread(open_aggregator, below)
                    serving = serve_app(partial(create_app, aggregator), below)
                    url = (await stack.enter_async_context(serving)).url
                done = await work(WorkerOptions(find_host=at(url), name="w", dataset=str(shapes), threads=1))
                assert (done.updates, done.faults) == (4, 0)
                _, body = await top.host.weights()
                spec = top.host.spec
                found.append(unpack(body, values=spec.values, buffers=spec.buffers)[0])
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)


async def test_a_parent_that_adds_up_gradients_is_refused(start_host: StartHost, shapes: Path, tmp_path: Path) -> None:
    async with start_host(strategy="downpour") as top:
        below = HostSettings(parent=top.url, dataset=str(shapes), folder=tmp_path / "below")
        with pytest.raises(SetupError, match="changes of the weights"):
            await asyncio.to_thread(open_aggregator, below)


@pytest.mark.parametrize("strategy", ["tournament", "lbfgs"])
async def test_an_aggregator_has_a_strategy_that_gives_one_change(
    start_host: StartHost, shapes: Path, tmp_path: Path, strategy: str
) -> None:
    async with start_host() as top:
        below = HostSettings(parent=top.url, dataset=str(shapes), folder=tmp_path / "below", strategy=strategy)
        with pytest.raises(SetupError, match="other than tournament and lbfgs"):
            await asyncio.to_thread(open_aggregator, below)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"network": "mnist-100", "parent": "http://127.0.0.1:9"},
        {"parent": "http://127.0.0.1:9", "share_data": "true"},
    ],
)
def test_a_host_has_either_a_network_or_a_parent(flags: dict[str, str]) -> None:
    with pytest.raises(SetupError, match="--parent"):
        load_settings(HostSettings, flags=flags)
