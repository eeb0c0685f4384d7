"""A client that follows a job does not notice, but for a pause, that the scheduler was killed and started again."""

import asyncio
from collections import Counter
from pathlib import Path

from models.data import read_sample
from tests.followed import Followed
from tierkit.client import AsyncClient, JobState
from tierkit.fleet import FleetPlan, launch, local_plan
from tierkit.http.address import free_port
from tierkit.testing import service_process, wait_for
from tierkit.types import Health, Tier

IMAGES = 400


async def test_events_go_on_over_a_restart_of_the_scheduler(tmp_path: Path) -> None:
    command = ["-m", "terrace", "scheduler", "--port", str(free_port()), "--state", str(tmp_path / "state")]
    async with service_process(command, ready_file=tmp_path / "first.ready") as first:
        nodes = FleetPlan(services=local_plan({Tier.END: 1, Tier.EDGE: 1}).nodes, scheduler_url=first.url)
        async with launch(nodes, tmp_path), AsyncClient(first.url) as client:

            async def both_alive() -> bool:
                return [device.health for device in await client.devices()] == [Health.ALIVE] * 2

            await wait_for(both_alive, what="both nodes")
            # On a busy machine the edge node may come back later than the scheduler is ready to wait for it by itself.
            policy = {"batch_size": 5, "scheme": "end-edge", "on_upstream_loss": "wait"}
            images = read_sample().images[:IMAGES]
            told = Followed(job=await client.submit(images, **policy))  # type: ignore[arg-type]  # the fields of a policy
            async with asyncio.TaskGroup() as group:
                following = group.create_task(told.follow(client, budget_s=60.0))
                await wait_for(lambda: bool(told.fine), what="the first fine answer")
                first.kill()
                await first.exit_code()
                assert told.fine.total() < IMAGES
                async with service_process(command, ready_file=tmp_path / "second.ready"):
                    await following
    assert told.job.state is JobState.COMPLETED
    assert told.coarse == Counter(range(IMAGES)), "each coarse answer exactly once"
    assert told.fine == Counter(range(IMAGES)), "each fine answer exactly once"
