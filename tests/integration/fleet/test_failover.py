"""A fleet that knows two schedulers goes on at the second one when the first is killed, or stopped: nodes, clients, and
jobs."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from models.data import read_sample
from tests.followed import Followed
from tests.postgres import PostgresServer
from tierkit.client import AsyncClient, Backoff, Job, JobState
from tierkit.fleet import FleetPlan, launch, local_plan
from tierkit.http.address import free_port
from tierkit.testing import service_process, wait_for
from tierkit.types import Health, Tier

IMAGES = read_sample().take(np.arange(400)).images
# A busy machine's database may be long in coming back to the standby.
PATIENT = Backoff(failover_s=120.0)
POLICY = {"batch_size": 5, "scheme": "end-edge", "on_upstream_loss": "wait"}


@pytest.mark.timeout(300)
async def test_a_fleet_and_its_clients_go_over_to_the_standby(postgres: PostgresServer, tmp_path: Path) -> None:
    """The leader is stopped: its connections stay open, and only time tells that it is away."""
    ports = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    shared = [f"--database={postgres.database()}", "--leader-lease-s=1"]
    commands = [
        ["-m", "terrace", "scheduler", f"--port={port}", f"--state={tmp_path / str(port)}", *shared] for port in ports
    ]

    async with (
        service_process(commands[0], ready_file=tmp_path / "first.ready") as first,
        service_process(commands[1], ready_file=tmp_path / "second.ready"),
    ):
        plan = FleetPlan(services=local_plan({Tier.END: 1, Tier.EDGE: 1}).nodes, scheduler_url=",".join(urls))
        async with (
            launch(plan, tmp_path),
            AsyncClient(",".join(urls), timeout_s=6, backoff=PATIENT) as client,
            AsyncClient(urls[1]) as new,
        ):

            async def both_alive(client: AsyncClient) -> bool:
                return [device.health for device in await client.devices()] == [Health.ALIVE] * 2

            await wait_for(lambda: both_alive(client), what="both nodes")
            told = Followed(job=await client.submit(IMAGES, **POLICY))  # type: ignore[arg-type]  # the fields of a policy
            async with asyncio.TaskGroup() as group:
                group.create_task(told.follow(client, budget_s=120.0))
                await wait_for(lambda: bool(told.fine), what="the first fine answer")
                os.kill(first.process.pid, signal.SIGSTOP)
                assert told.fine.total() < len(IMAGES)
                other = await _submit(",".join(urls))  # by a client that still believes in the first one
            await wait_for(lambda: both_alive(new), what="both nodes at the new one")
            done = await new.wait(other, budget_s=120)
    assert (told.job.state, done.state) == (JobState.COMPLETED, JobState.COMPLETED)
    assert told.coarse == Counter(range(400)), "each coarse answer exactly once"
    assert told.fine == Counter(range(400)), "each fine answer exactly once"
    assert done.answered_fine == 20


async def _submit(urls: str) -> Job:
    async with AsyncClient(urls, timeout_s=6, backoff=PATIENT) as client:
        return await client.submit(IMAGES[:20], **POLICY)  # type: ignore[arg-type]  # the fields of a policy
