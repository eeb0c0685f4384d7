"""How long the fleet takes to notice what happens to its network, and to be well again."""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict

import pytest

from tests.netns.conftest import SERVICES, Fleet
from tierkit.types import Health

pytestmark = [pytest.mark.netns, pytest.mark.benchmark, pytest.mark.timeout(600)]

TIMES = 5


async def test_how_long_it_takes(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    took = defaultdict[str, list[float]](list)
    network, end, edge = fleet.network, fleet.network["end-1"], fleet.network["edge-1"]

    def since(began: float, what: str) -> float:
        now = time.monotonic()
        took[what].append(now - began)
        return now

    for number in range(TIMES):
        for what, fault in (
            ("a node is cut off", network.cut(end)),
            ("the scheduler does not hear a node", network.lost(end, fleet.hub)),
            ("a node does not hear the scheduler", network.lost(fleet.hub, end)),
        ):
            began = time.monotonic()
            with fault:
                await fleet.until(Health.DEAD, "end-1")
                since(began, f"{what}: dead")
            began = time.monotonic()
            await fleet.until(Health.ALIVE, "end-1")
            since(began, f"{what}: alive after it is over")
        began = time.monotonic()
        network.move(end)
        await fleet.until(Health.ALIVE, "end-1")
        began = since(began, "a node gets another address: alive there")
        for name in SERVICES:
            network.move(network[name])
        await fleet.until(Health.ALIVE, *SERVICES)
        since(began, "all nodes get other addresses: alive there")
        async with fleet.under_way(scheme="end-edge", on_upstream_loss="wait") as job:
            began = time.monotonic()
            with network.lost(edge, end):
                await fleet.client.wait(job.job, budget_s=90)
                since(began, "an end device does not hear its edge node: the job that was under way is done")
        address = fleet.hub.address
        network.switch_off(fleet.hub)
        began = time.monotonic()
        await fleet.start_scheduler(network.add(f"hub{number}", address=address))
        began = since(began, "another machine takes the scheduler's place: ready")
        await fleet.until(Health.ALIVE, *SERVICES)
        since(began, "another machine takes the scheduler's place: all nodes alive after that")
    with capsys.disabled():
        sys.stdout.write("\n")
        for what, values in took.items():
            figures = f"median {statistics.median(values):.2f} s, {min(values):.2f} to {max(values):.2f} s"
            sys.stdout.write(f"{what}: {figures}, n = {len(values)}\n")


@pytest.mark.parametrize("queue_ms", [100, 400])
@pytest.mark.parametrize("slow", ["hub", "edge-1"])
async def test_what_a_slow_link_costs(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], slow: str, queue_ms: int
) -> None:
    """With the settings of the scheduler that the environment says."""
    fallback = []
    host = fleet.hub if slow == "hub" else fleet.network[slow]
    for _ in range(TIMES):
        with fleet.network.slow(host, "1mbit", queue_ms=queue_ms):
            told = await fleet.follow(await fleet.submit(scheme="end-edge"))
        fallback.append(sum(told.fallback.values()))
        await fleet.until(Health.ALIVE, *SERVICES)
    with capsys.disabled():
        what = f"1 Mbit/s and a queue of {queue_ms} ms before the link of {slow}, jobs of {fleet.images} images"
        sys.stdout.write(f"\n{what}: fallback {fallback}\n")
