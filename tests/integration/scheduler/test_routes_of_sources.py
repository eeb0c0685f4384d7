"""Nodes with sources at a scheduler: their route, and leases that they ask for."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import Any

from tests.integration.scheduler.test_escalation import tuned as tuned
from tierkit.testing import wait_for
from tierkit.wire.messages import ROUTE_HEADER, DeviceRoute


async def register(running: Any, kit: Any, node_id: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """Return the incarnation and the lease."""
    place = {**kit.registration(node_id), **changes}
    reply = await running.http.post("/v1/devices", json=place)
    assert reply.status_code == 200, reply.text
    return place["incarnation"], dict(reply.json())


async def route_of(running: Any, node_id: str) -> DeviceRoute:
    reply = await running.http.get(f"/v1/devices/{node_id}/route")
    assert reply.status_code == 200, reply.text
    return DeviceRoute.model_validate_json(reply.content)


async def test_a_heartbeat_names_the_version_of_the_route(kit: Any, tuned: Any) -> None:
    async with kit.scheduler(tuned) as running:
        incarnation, _ = await register(running, kit, "end-0", spool="5" * 16, lease_s=600.0)
        batch = {"node_id": "end-0", "incarnation": incarnation, "spool": "5" * 16}
        sent = await running.http.post("/v1/observations", json=batch)
        reply = await running.beat("end-0", incarnation)
        assert reply.status_code == 204
        assert sent.headers[ROUTE_HEADER] == reply.headers[ROUTE_HEADER]
        assert parsedate_to_datetime(reply.headers["date"])
        before = await route_of(running, "end-0")
        assert (before.version, before.upstreams) == (reply.headers[ROUTE_HEADER], ())
        await running.register("edge-0", "edge")
        changed = (await running.beat("end-0", incarnation)).headers[ROUTE_HEADER]
        route = await route_of(running, "end-0")
        assert (route.version, [each.node_id for each in route.upstreams]) == (changed, ["edge-0"])
        assert changed != before.version
        assert [stage.tier for stage in route.stages] == ["edge", "cloud"]
        other = await running.register("end-1", "end")
        assert ROUTE_HEADER not in (await running.beat("end-1", other)).headers
        assert (await running.http.get("/v1/devices/end-9/route")).status_code == 404


async def test_a_lease_is_granted_and_its_node_gets_no_tasks(kit: Any, scheduler: Any) -> None:
    _, lease = await register(scheduler, kit, "end-0", spool="5" * 16, lease_s=600.0)
    assert lease == {"lease_s": 600.0, "heartbeat_s": 200.0}
    _, usual = await register(scheduler, kit, "end-9", spool="5" * 16)
    assert usual == {"lease_s": 1.0, "heartbeat_s": 0.1}
    assert (await scheduler.http.post("/v1/devices/end-9/drain")).status_code == 204
    waiting = await scheduler.submit(kit.images(10), scheme="end")
    body, headers = kit.tensor_body(kit.images(1))
    refused = await scheduler.http.post("/v1/classify", content=body, headers=headers)
    assert (refused.status_code, "takes no tasks" in refused.json()["error"]) == (503, True)

    async def explained() -> bool:
        return "takes no tasks" in (await scheduler.job(waiting["id"]))["reason"]

    await wait_for(explained, what="the job to say why it waits")
    async with kit.end(scheduler, "end-1") as end:
        job = await scheduler.finished(waiting["id"])
        assert (job["state"], set(job["by_node"]), len(end.tasks)) == ("completed", {"end-1"}, 1)
        # Nor was it probed.
        listed = (await scheduler.http.get("/v1/devices")).json()["devices"]
        gate = next(each for each in listed if each["node_id"] == "end-0")
        assert (gate["health"], gate["reached"]) == ("alive", False)
        assert "takes no tasks" in gate["reason"]
