"""Intent lasts: what an operator says of a node holds over restarts of the node and of the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from tierkit.testing import wait_for


async def health(scheduler: Any) -> dict[str, tuple[str, str]]:
    devices = (await scheduler.http.get("/v1/devices")).json()["devices"]
    return {device["node_id"]: (device["health"], device["reason"]) for device in devices}


async def test_drains_and_removals_outlast_the_node_and_the_scheduler(kit, settings):
    async with kit.scheduler(settings) as scheduler:
        async with kit.end(scheduler, "end-0"), kit.end(scheduler, "end-1"), kit.end(scheduler, "end-2"):
            assert (await scheduler.http.post("/v1/devices/end-0/drain")).status_code == 204
            assert (await scheduler.http.delete("/v1/devices/end-1")).status_code == 204
            assert (await health(scheduler))["end-1"][0] == "removed"
        await wait_for(lambda: is_now(scheduler, "end-0", "dead"), what="the end of end-0")
        async with kit.end(scheduler, "end-0"):
            assert (await health(scheduler))["end-0"][0] == "draining"
    async with kit.scheduler(settings) as scheduler:
        now = await health(scheduler)
        assert {name: value for name, (value, _) in now.items()} == {
            "end-0": "dead",
            "end-1": "removed",
            "end-2": "dead",
        }
        assert "has not come back since the scheduler started" in now["end-2"][1]
        async with kit.end(scheduler, "end-0"):
            assert (await health(scheduler))["end-0"][0] == "draining"
            refused = await scheduler.http.post("/v1/devices", json=kit.registration("end-1"))
            assert refused.status_code == 403
            assert "terrace devices resume end-1" in refused.json()["error"]
            for name in ("end-0", "end-1"):
                assert (await scheduler.http.delete(f"/v1/devices/{name}/drain")).status_code == 204
            await wait_for(lambda: is_now(scheduler, "end-0", "alive"), what="end-0")
            async with kit.end(scheduler, "end-1"):
                job = await scheduler.submit(kit.images(50), scheme="end")
                assert (await scheduler.finished(job["id"]))["answered_coarse"] == 50


async def is_now(scheduler: Any, name: str, wanted: str) -> bool:
    return (await health(scheduler))[name][0] == wanted


async def test_nodes_that_are_gone_are_listed_until_they_are_forgotten(kit, settings):
    async with (
        kit.scheduler(settings) as scheduler,
        kit.end(scheduler, "end-0"),
        kit.end(scheduler, "end-1", beating=False) as leaving,
    ):
        assert (await scheduler.http.delete("/v1/devices/end-0?forget=true")).status_code == 409
        left = await scheduler.http.delete(f"/v1/devices/end-1?incarnation={leaving.incarnation}")
        assert left.status_code == 204
        assert "end-1" not in await health(scheduler)
    async with kit.scheduler(settings) as scheduler:
        assert set(await health(scheduler)) == {"end-0"}
        assert (await scheduler.http.delete("/v1/devices/end-0?forget=true")).status_code == 204
        assert (await scheduler.http.delete("/v1/devices/end-0?forget=true")).status_code == 404
    async with kit.scheduler(settings) as scheduler:
        assert await health(scheduler) == {}


@pytest.mark.parametrize(("setting", "said", "status"), [("end,edge", "yes", 202), ("end,edge,cloud", "no", 403)])
async def test_trust_is_said_of_a_node_and_lasts(kit, settings, setting, said, status):
    settings = settings.model_copy(update={"trusted": tuple(setting.split(","))})
    for number in range(2):
        async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0"), kit.uppers(scheduler, "cloud-0"):
            if number == 0:
                told = await scheduler.http.put(f"/v1/devices/cloud-0/trust?trusted={said}")
                assert told.status_code == 204
            answer = await scheduler.try_submit(kit.images(3), scheme="end-cloud", privacy="none")
            assert answer.status_code == status, answer.text
            if number:
                await scheduler.http.put("/v1/devices/cloud-0/trust?trusted=default")
                answer = await scheduler.try_submit(kit.images(3), scheme="end-cloud", privacy="none")
                assert answer.status_code == {202: 403, 403: 202}[status]
    async with kit.scheduler(settings) as scheduler:
        assert (await scheduler.http.put("/v1/devices/nobody/trust?trusted=yes")).status_code == 404
        assert (await scheduler.http.put("/v1/devices/cloud-0/trust?trusted=perhaps")).status_code == 400
