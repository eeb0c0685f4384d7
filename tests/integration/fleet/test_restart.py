"""A client that follows a job does not notice, but for a pause, that the scheduler was killed and started again."""

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from models.data import read_sample
from tierkit.client import AsyncClient, CoarseResults, FineResults, JobState, StateChange
from tierkit.fleet import FleetPlan, launch, local_plan
from tierkit.http.address import free_port
from tierkit.testing import ServiceProcess, service_process, wait_for
from tierkit.types import Health, Tier


@pytest.fixture
def scheduler_command(tmp_path: Path) -> list[str]:
    return ["-m", "terrace", "scheduler", "--port", str(free_port()), "--state", str(tmp_path / "state")]


async def test_events_go_on_over_a_restart_of_the_scheduler(scheduler_command: list[str], tmp_path: Path) -> None:
    sample = read_sample().take(np.arange(400))
    coarse, fine = Counter[int](), Counter[int]()
    killed = asyncio.Event()

    async def follow(client: AsyncClient, first: ServiceProcess) -> JobState:
        # On a busy machine the edge node may come back later than the scheduler is ready to wait for it by itself.
        job = await client.submit(sample.images, batch_size=5, scheme="end-edge", on_upstream_loss="wait")
        async for event in client.events(job):
            match event:
                case CoarseResults(results=results):
                    coarse.update(result.index for result in results)
                case FineResults(results=results):
                    fine.update(result.index for result in results)
                    if not killed.is_set():
                        first.kill()
                        await first.exit_code()
                        killed.set()
                case StateChange(job=seen) if seen.done:
                    return seen.state
        raise AssertionError("the stream has ended without a final state")

    async def run_again() -> None:
        await killed.wait()
        async with service_process(scheduler_command, ready_file=tmp_path / "second.ready"):
            await asyncio.Event().wait()

    async with service_process(scheduler_command, ready_file=tmp_path / "first.ready") as first:
        nodes = FleetPlan(services=local_plan({Tier.END: 1, Tier.EDGE: 1}).nodes, scheduler_url=first.url)
        async with launch(nodes, tmp_path), AsyncClient(first.url) as client:

            async def both_alive() -> bool:
                return [device.health for device in await client.devices()] == [Health.ALIVE] * 2

            await wait_for(both_alive, what="both nodes")
            second = asyncio.create_task(run_again())
            try:
                state = await follow(client, first)
            finally:
                second.cancel()
                await asyncio.gather(second, return_exceptions=True)
    assert state is JobState.COMPLETED
    assert coarse == Counter(range(400)), "each coarse answer exactly once"
    assert fine == Counter(range(400)), "each fine answer exactly once"
    assert killed.is_set()
