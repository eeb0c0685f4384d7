"""A node whose model an operator has unloaded gets no tasks until it is loaded again."""

from pathlib import Path

import tritonclient.http.aio as triton_aio

from models.data import read_sample
from tierkit.client import AsyncClient
from tierkit.fleet import RunningService, launch, local_plan
from tierkit.testing import wait_for
from tierkit.types import Health, Tier


def node_of(service: RunningService) -> triton_aio.InferenceServerClient:
    return triton_aio.InferenceServerClient(service.url.removeprefix("http://"))


async def test_tasks_go_around_a_node_that_lacks_its_model(tmp_path: Path) -> None:
    images = read_sample().images[:300]
    plan = local_plan({Tier.END: 2, Tier.EDGE: 1}, scheduler={"port": 0, "state": tmp_path / "state"})
    async with launch(plan, tmp_path) as fleet, AsyncClient(fleet.scheduler_url) as client:
        await fleet.join(budget_s=20)

        async def become(node_id: str, health: Health) -> None:
            async def is_so() -> bool:
                return {device.node_id: device.health for device in await client.devices()}[node_id] is health

            await wait_for(is_so, what=f"{node_id} to be {health}")

        async def served_by() -> set[str]:
            job = await client.wait(await client.submit(images, scheme="end-edge"), budget_s=60)
            assert (job.state, job.answered_fine) == ("completed", len(images))
            return {attempt.node for attempt in (await client.attempts(job)).attempts}

        for lacking, still in (("end-1", "end-2"), ("end-2", "end-1")):
            async with node_of(fleet.services[lacking]) as node:
                (model,) = [entry["name"] for entry in await node.get_model_repository_index()]
                await node.unload_model(model)
                await become(lacking, Health.DRAINING)
                assert await served_by() == {still}
                await node.load_model(model)
                await become(lacking, Health.ALIVE)
        async with node_of(fleet.services["edge-1"]) as node:
            for entry in await node.get_model_repository_index():  # one of them would do
                await node.unload_model(entry["name"])
            await become("edge-1", Health.DRAINING)
            assert [pair["upstream"] for pair in (await client.mapping())["pairs"]] == [[], []]
            for entry in await node.get_model_repository_index():
                await node.load_model(entry["name"])
            await become("edge-1", Health.ALIVE)
        assert await served_by() <= {"end-1", "end-2"}
