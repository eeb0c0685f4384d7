"""A tournament over a host, with volunteers on real sockets."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tests.integration.training.conftest import StartHost
from tests.integration.training.test_host import body, head, joined, leased, options, reaches
from tierkit.testing import wait_for
from training.host.opening import open_host
from training.host.run import TrainingRun
from training.host.settings import HostSettings
from training.strategies.tournament import Tournament
from training.worker.node import work

pytestmark = [pytest.mark.train, pytest.mark.anyio]


@pytest.fixture
def strategy(tmp_path: Path) -> str:
    path = tmp_path / "meet.toml"
    path.write_text('family = "exchange"\nrule = "tournament"\nperiod = 5\nrates = [1e-6, 0.05]\n')
    return str(path)


def state(run: TrainingRun) -> dict[str, bytes]:
    return {name: each.tobytes() for name, each in run.state()[0].items()}


async def test_lineages_meet_on_the_hosts_images_and_the_best_one_is_the_result(
    start_host: StartHost, shapes: Path, strategy: str
) -> None:
    async with start_host(epochs=20, strategy=strategy, workers=2, max_lease_wait_s=0.2) as running:
        done = await asyncio.gather(*(work(options(running, shapes, name)) for name in ("w1", "w2")))
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
        found = running.host.result
    assert found is not None
    assert sum(each.updates for each in done) == found["updates"] == 20
    assert found["accuracy"] > 0.9
    assert found["rate"] > 0.01


async def test_each_lineage_continues_from_its_own_weights(start_host: StartHost, strategy: str) -> None:
    names = "abcd"
    async with start_host(strategy=strategy, workers=4, epochs=8) as running:
        http, tournament = running.http, running.host._run.strategy
        assert isinstance(tournament, Tournament)
        for number, name in enumerate(names):
            await joined(running, name)
            lease, _ = await leased(running, name)
            headers = head(lease, {"worker": name})
            (
                await http.post("/v1/updates", headers=headers, content=body(running, 0.01 * (number + 1)))
            ).raise_for_status()

        async def met() -> bool:
            return not tournament.to_measure()

        await wait_for(met, what="two meetings")
        found = {(await leased(running, name))[1] for name in names}
    assert len(found) == 2


async def test_a_host_continues_to_the_bit_and_a_lineage_outlives_its_worker(
    start_host: StartHost, shapes: Path, strategy: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "workers": 2, "lease_s": 1.0, "max_lease_wait_s": 0.2}
    async with start_host(40, **settings) as running:
        await joined(running, "dead")
        await leased(running, "dead")
        working = asyncio.create_task(work(options(running, shapes, "w1")))
        await reaches(running, updates=8)
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        tournament = running.host._run.strategy
        assert isinstance(tournament, Tournament)
        assert tournament.version > 8  # an update each, and meetings
    before = state(running.host._run)  # which nothing changes any more
    kept = HostSettings(network=str(tmp_path / "net.toml"), folder=tmp_path / "run", dataset=str(shapes), **settings)
    opened = open_host(kept)
    assert state(opened._run) == before
    opened._journal.close()
    async with start_host(40, **settings) as again:
        await work(options(again, shapes, "w2"))
        await asyncio.wait_for(again.lifecycle.wait_draining(), 30)
        assert again.host.result is not None
        assert again.host.result["updates"] == 40
