"""Who is alive, with real processes: killed, stopped, stuck, and back again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tierkit.testing import ServiceProcess, listening, service_process, wait_for


@dataclass
class Pair:
    """A scheduler with default times and one end node."""

    running: Any
    node: ServiceProcess
    http: httpx.AsyncClient

    async def device(self) -> dict[str, Any]:
        (device,) = (await self.http.get("/v1/devices")).json()["devices"]
        return dict(device)

    async def is_(self, health: str) -> bool:
        devices = (await self.http.get("/v1/devices")).json()["devices"]
        return [device["health"] for device in devices] == [health]

    async def is_watched(self) -> bool:
        devices = (await self.http.get("/v1/devices")).json()["devices"]
        return [device["reached"] for device in devices] == [True]

    async def seconds_to(self, health: str, number: signal.Signals) -> float:
        """From the signal to the node until its health stands in the device list."""
        began = time.monotonic()
        os.kill(self.node.process.pid, number)
        await wait_for(lambda: self.is_(health), timeout_s=10, what=f"the node to be {health}")
        return time.monotonic() - began


@pytest.fixture
async def pair(tmp_path, kit, settings) -> AsyncIterator[Pair]:
    scheduler = ["-m", "scheduler", "--port=0", f"--state={tmp_path / 'state'}"]
    async with service_process(scheduler, ready_file=tmp_path / "scheduler") as hub:
        node = ["-m", "end_node", "--port=0", "--node-id=end-0", f"--scheduler={hub.url}"]
        async with (
            service_process(node, ready_file=tmp_path / "end") as end,
            httpx.AsyncClient(base_url=hub.url, timeout=30, trust_env=False) as http,
        ):
            pair = Pair(kit.running(hub.url, http, settings), end, http)
            await wait_for(pair.is_watched, what="the node to register and the scheduler to reach it")
            yield pair


# The bounds are those of the promise, with room for a machine that is busy with other tests. `terrace experiment chaos`
# measures the times themselves.


async def test_a_killed_node_is_dead_at_once_though_it_was_idle(pair):
    assert await pair.seconds_to("dead", signal.SIGKILL) < 0.4
    assert (await pair.device())["reason"] == "refuses connections: its process has ended"


async def test_a_stopped_node_is_dead_within_a_second_and_alive_when_it_goes_on(pair):
    assert await pair.seconds_to("dead", signal.SIGSTOP) < 1.3
    assert "does not answer the scheduler's probe" in (await pair.device())["reason"]
    assert await pair.seconds_to("alive", signal.SIGCONT) < 10


async def test_a_restarted_node_gets_its_id_back(pair, tmp_path):
    before = (await pair.device())["incarnation"]
    pair.node.kill()
    again = ["-m", "end_node", "--port=0", "--node-id=end-0", f"--scheduler={pair.running.url}"]
    async with service_process(again, ready_file=tmp_path / "again"):
        await wait_for(lambda: pair.is_("alive"), what="the node to be back")
        assert (await pair.device())["incarnation"] != before


async def test_a_second_node_with_the_same_id_is_refused_and_says_why(pair, tmp_path):
    before = (await pair.device())["incarnation"]
    second = ["-m", "end_node", "--port=0", "--node-id=end-0", f"--scheduler={pair.running.url}"]
    async with service_process(second, ready_file=tmp_path / "second") as process:
        await wait_for(lambda: "belongs to a node at" in process.log, what="the refusal in its log")
        assert (await pair.device())["incarnation"] == before
        assert await pair.is_("alive")


async def test_a_heartbeat_from_an_old_incarnation_is_refused(kit, scheduler):
    old = await scheduler.register("end-0", "end")
    new = await scheduler.register("end-0", "end")
    refused = await scheduler.beat("end-0", old)
    assert refused.status_code == 409
    assert "another incarnation" in refused.json()["error"]
    assert (await scheduler.beat("end-0", new)).status_code == 204


async def test_the_tasks_of_a_node_that_heartbeats_but_does_nothing_go_to_others(kit, settings):
    quick = settings.model_copy(update={"stall_s": 0.5})
    async with (
        kit.scheduler(quick) as scheduler,
        kit.end(scheduler, "end-0") as stuck,
        kit.end(scheduler, "end-1"),
    ):
        stuck.gate.clear()
        job = await scheduler.submit(kit.images(500), scheme="end")
        view = await scheduler.finished(job["id"])
        assert (view["state"], view["answered_coarse"]) == ("completed", 500)
        assert set(view["by_node"]) == {"end-1"}
        device = await first(scheduler)
        assert (device["health"], device["outstanding"]) == ("suspect", 0)
        assert device["reason"].startswith("no progress: ")
        assert (await scheduler.beat("end-0", stuck.incarnation, images_done=1)).status_code == 204
        assert (await first(scheduler))["health"] == "alive"


async def first(scheduler) -> dict[str, Any]:
    return dict((await scheduler.http.get("/v1/devices")).json()["devices"][0])


async def test_a_node_that_closes_its_connections_is_not_dead_and_not_asked_without_end(kit, scheduler):
    asked = 0

    async def answer_and_close(reader, writer) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        await writer.drain()

    async with listening(answer_and_close) as url:
        incarnation = await scheduler.register("end-0", "end", url=url)
        for beats in range(10):
            await wait_for(lambda: beat_due(scheduler), what="the next heartbeat to be due")
            assert (await scheduler.beat("end-0", incarnation, images_done=beats)).status_code == 204
            assert (await first(scheduler))["health"] == "alive"
    assert 1 <= asked <= 6


async def beat_due(scheduler) -> bool:
    return bool((await first(scheduler))["silent_s"] >= scheduler.settings.heartbeat_s)


async def test_a_node_that_swallows_what_it_is_sent_is_dead_when_its_heartbeats_end(kit, settings):
    """A path that swallows packets: no refused connection helps, and the lease is far away."""
    answers = asyncio.Event()
    answers.set()

    async def answer(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answers.is_set():
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()

    async with kit.scheduler(settings.model_copy(update={"lease_s": 600.0})) as scheduler, listening(answer) as url:
        await scheduler.register("end-0", "end", url=url)
        await wait_for(lambda: says(scheduler, "reached", True), what="the first probe")
        answers.clear()
        await wait_for(lambda: says(scheduler, "health", "dead"), timeout_s=5, what="the verdict")
        assert "does not answer" in (await first(scheduler))["reason"]


async def says(scheduler, name: str, value: object) -> bool:
    return bool((await first(scheduler))[name] == value)


async def test_a_power_budget_is_kept(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end:
        offer = [{"name": "small", "sha256": "0" * 64, "ms_per_image": 1.0}]
        registration = {"node_id": "end-0", "incarnation": end.incarnation, "tier": "end", "url": end.url}
        budget = {**registration, "models": offer, "version": "0", "images_per_minute": 6000}
        assert (await scheduler.http.post("/v1/devices", json=budget)).status_code == 200
        began = time.monotonic()
        job = await scheduler.submit(kit.images(150), scheme="end")
        await wait_for(lambda: rests(scheduler), what="the reason")
        view = await scheduler.finished(job["id"])
        # 100 images a second: the second task after 0.5 s, the third after 1 s.
        assert (view["answered_coarse"], time.monotonic() - began >= 1.0) == (150, True)


async def rests(scheduler) -> bool:
    return "to keep to 6000 images a minute" in str((await first(scheduler))["reason"])


async def test_a_live_node_under_full_load_is_not_given_up(kit, pair):
    """As many processes as the machine has cores keep it busy beside a job."""
    burners = [
        await asyncio.create_subprocess_exec("sh", "-c", "while :; do :; done") for _ in range(os.cpu_count() or 1)
    ]
    try:
        incarnation = (await pair.device())["incarnation"]
        for _ in range(20):
            device = await pair.device()
            assert device["health"] != "dead", device["reason"]
            assert device["incarnation"] == incarnation
            reply = await pair.running.try_submit(kit.images(200), scheme="end")
            await pair.running.finished(reply.json()["id"])
        assert float(str((await pair.device())["silent_s"])) < 1.0
    finally:
        for burner in burners:
            burner.kill()
            await burner.wait()
