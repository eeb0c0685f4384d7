"""What the scheduler remembers of nodes that are not on the device list any more."""

from __future__ import annotations

import re

from tierkit.testing import wait_for


async def known_nodes(scheduler) -> set[str]:
    page = (await scheduler.http.get("/metrics")).text
    return set(re.findall(r'^terrace_scheduler_outstanding_tasks\{node="(.*)"\}', page, re.MULTILINE))


async def test_what_is_known_of_nodes_that_have_left_is_forgotten(kit, settings):
    async def answer(scheduler) -> None:
        job = await scheduler.submit(kit.images(20), scheme="adaptive", batch_size=10)
        assert (await scheduler.finished(job["id"]))["answered_fine"] == 20

    async def samples(scheduler) -> dict[str, int]:
        report = (await scheduler.http.get("/v1/mapping", params={"scheme": "adaptive"})).json()
        return {node["node_id"]: node["samples"] for node in report["adaptive"]["nodes"]}

    async with kit.scheduler(settings) as scheduler, kit.uppers(scheduler, "edge-0"):
        for name in ("end-a", "end-b", "end-c"):
            async with kit.end(scheduler, name) as end:
                await answer(scheduler)
                assert name in await known_nodes(scheduler)
                assert (await samples(scheduler))[name] > 0
            await scheduler.http.delete(f"/v1/devices/{name}", params={"incarnation": end.incarnation})
        async with kit.end(scheduler, "end-d"):
            await answer(scheduler)

            async def forgotten() -> bool:
                return not await known_nodes(scheduler) & {"end-a", "end-b", "end-c"}

            await wait_for(forgotten, what="the nodes that have left to be forgotten")
            assert "end-d" in await known_nodes(scheduler)
        async with kit.end(scheduler, "end-a"):
            assert (await samples(scheduler))["end-a"] == 0
