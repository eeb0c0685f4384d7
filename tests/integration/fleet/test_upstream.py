"""A fleet whose cloud node stands in front of another server, which is killed and comes back."""

import socket
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from models.data import read_sample
from tierkit.client import AsyncClient
from tierkit.fleet import launch, local_plan
from tierkit.testing import service_process, wait_for
from tierkit.types import Health, Tier


async def test_no_image_is_lost_with_the_server_and_work_goes_there_again(tmp_path: Path) -> None:
    images = read_sample().images[:100]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    plan = local_plan({Tier.END: 1}, scheduler={"port": 0, "state": tmp_path / "state"})
    server = ["-m", "terrace", "cloud", "--port", str(port), "--threads", "1"]
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(service_process(server, ready_file=tmp_path / "first"))
        fleet = await stack.enter_async_context(launch(plan, tmp_path))
        client = await stack.enter_async_context(AsyncClient(fleet.scheduler_url))
        front = ["-m", "terrace", "cloud", "--port", "0", "--node-id", "front", "--scheduler", fleet.scheduler_url]
        front += ["--engine", "oip", "--upstream", upstream.url]
        await stack.enter_async_context(service_process(front, ready_file=tmp_path / "front"))

        async def become(health: Health) -> None:
            async def is_so() -> bool:
                return {device.node_id: device.health for device in await client.devices()}.get("front") is health

            await wait_for(is_so, what=f"front to be {health}")

        await fleet.join(budget_s=20)
        await become(Health.ALIVE)
        job = await client.wait(await client.submit(images, scheme="end-cloud"), budget_s=60)
        assert (job.state, job.answered_fine) == ("completed", len(images))
        many = np.concatenate([images] * 10)
        begun = await client.submit(many, scheme="end-cloud")

        async def answers_come() -> bool:
            return (await client.job(begun)).answered_fine > 0

        await wait_for(answers_come)
        upstream.kill()
        job = await client.wait(begun, budget_s=60)
        assert (job.state, job.answered_coarse, job.failed_images) == ("completed", len(many), 0)
        await become(Health.DRAINING)
        await stack.enter_async_context(service_process(server, ready_file=tmp_path / "second"))
        await become(Health.ALIVE)
        job = await client.wait(await client.submit(images, scheme="end-cloud"), budget_s=60)
        assert (job.state, job.answered_fine) == ("completed", len(images))
