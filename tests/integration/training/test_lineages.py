"""A tournament over a host, with volunteers on real sockets."""

import asyncio
import contextlib
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tests.integration.training.conftest import StartHost
from tests.integration.training.test_host import joined, leased, options, reaches
from training.host.run import TrainingRun
from training.strategies.tournament import Tournament
from training.worker.node import work

pytestmark = [pytest.mark.train, pytest.mark.anyio]


@pytest.fixture
def strategy(tmp_path: Path) -> str:
    path = tmp_path / "meet.toml"
    path.write_text('family = "tournament"\nperiod = 5\nrates = [1e-6, 0.05]\n')
    return str(path)


def state(run: TrainingRun) -> tuple[object, object]:
    vectors, figures = run.state()
    return {name: each.tobytes() for name, each in vectors.items()}, figures


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


async def test_a_host_continues_to_the_bit_and_a_lineage_outlives_its_worker(
    start_host: StartHost, shapes: Path, strategy: str
) -> None:
    given = {"epochs": 40, "strategy": strategy, "workers": 2, "lease_s": 1.0, "max_lease_wait_s": 0.2}
    async with start_host(**given) as running:
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
        before = state(running.host._run)
    async with start_host(**given) as again:
        run = again.host._run
        assert isinstance(run.strategy, Tournament)
        if not run.strategy.to_measure():  # else it is measured at once
            assert state(run)[0] == before[0]
        await work(options(again, shapes, "w2"))
        await asyncio.wait_for(again.lifecycle.wait_draining(), 30)
        assert again.host.result is not None
        assert again.host.result["updates"] == 40
