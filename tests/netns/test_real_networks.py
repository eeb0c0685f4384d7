"""A fleet on several hosts, and a network that parts, hears in one direction, is slow, and changes addresses.

Each job has a part of its answers when the network changes, and another job comes while it is so. Every image must be
answered exactly once.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.followed import Followed
from tests.netns.conftest import SERVICES, Fleet, url_of
from tierkit.client import Job
from tierkit.testing import wait_for
from tierkit.types import Health

pytestmark = pytest.mark.netns


def check_answered(told: Followed, images: int) -> None:
    """Each image has its coarse answer and its final one, once."""
    assert told.coarse == Counter(range(images))
    assert told.fine + told.fallback == Counter(range(images))


async def attempts(fleet: Fleet, job: Job, node: str) -> dict[tuple[int, int], str]:
    """What came of the attempts of a job on an end device, by task and attempt."""
    page = await fleet.client.attempts(job, limit=1000)
    return {(each.task, each.attempt): each.outcome for each in page.attempts if each.node == node}


async def test_a_node_that_is_cut_off_loses_its_tasks_and_comes_back(fleet: Fleet) -> None:
    async with fleet.under_way(on_upstream_loss="wait") as before:
        with fleet.network.cut(fleet.network["end-1"]):
            cut_off = await attempts(fleet, before.job, "end-1")
            await fleet.until(Health.DEAD, "end-1")
            await fleet.until(Health.ALIVE, "end-2", "edge-1", "cloud-1")
            during = await fleet.follow(await fleet.submit(on_upstream_loss="wait"))
    await fleet.until(Health.ALIVE, "end-1")
    for told in before, during:
        check_answered(told, fleet.images)
        assert not told.fallback
    ended = await attempts(fleet, before.job, "end-1")
    running = [attempt for attempt, outcome in cut_off.items() if outcome == "running"]
    assert {ended[attempt] for attempt in running} <= {"lost"}
    assert not await attempts(fleet, during.job, "end-1")


async def test_upstream_nodes_that_are_cut_off_are_waited_for_or_not_as_the_job_says(fleet: Fleet) -> None:
    async with fleet.under_way(scheme="end-edge", on_upstream_loss="wait") as before:
        with fleet.network.cut(fleet.network["edge-1"]):
            await fleet.until(Health.DEAD, "edge-1")
            patient = await fleet.submit(scheme="end-edge", on_upstream_loss="wait")
            hasty = await fleet.follow(await fleet.submit(scheme="end-edge"))
            assert not (await fleet.client.job(patient)).done
    for told in before, await fleet.follow(patient):
        check_answered(told, fleet.images)
        assert not told.fallback
    check_answered(hasty, fleet.images)
    assert not hasty.fine


@pytest.mark.parametrize("deaf", ["hub", "end-1"])
async def test_a_node_and_the_scheduler_of_which_one_does_not_hear_the_other(fleet: Fleet, deaf: str) -> None:
    """Each of the two needs to be heard for a connection, so the node is as good as cut off."""
    hub, end = fleet.hub, fleet.network["end-1"]
    heard, deaf_one = (end, hub) if deaf == "hub" else (hub, end)
    async with fleet.under_way(on_upstream_loss="wait") as before:
        with fleet.network.lost(heard, deaf_one):
            await fleet.until(Health.DEAD, "end-1")
            during = await fleet.follow(await fleet.submit(on_upstream_loss="wait"))
    await fleet.until(Health.ALIVE, "end-1")
    for told in before, during:
        check_answered(told, fleet.images)
        assert not told.fallback
    assert not await attempts(fleet, during.job, "end-1")


async def test_an_end_device_that_does_not_hear_its_edge_node_gives_it_up(fleet: Fleet) -> None:
    """The scheduler hears both. The end device's own connections tell it that the edge node is silent."""
    edge, end = fleet.network["edge-1"], fleet.network["end-1"]
    async with fleet.under_way(on_upstream_loss="wait") as before:
        with fleet.network.lost(edge, end):
            during = await fleet.follow(await fleet.submit(on_upstream_loss="wait"))
            await fleet.client.wait(before.job, budget_s=90)
            await fleet.until(Health.ALIVE, *SERVICES)
    for told in before, during:
        check_answered(told, fleet.images)
        assert not told.fallback
    # Either of the two jobs has given tasks to the end device meanwhile.
    results = [result for told in (before, during) async for result in fleet.client.results(told.job)]
    nodes = {(result.coarse.node, result.fine.node) for result in results if result.coarse and result.fine}
    assert ("end-1", "cloud-1") in nodes, "it asks the next node in its route"


async def test_a_link_of_one_megabit_per_second_only_takes_longer(fleet: Fleet) -> None:
    async with fleet.under_way(scheme="end-edge", on_upstream_loss="wait") as before:
        with fleet.network.slow(fleet.network["edge-1"], "1mbit"):
            began = time.monotonic()
            during = await fleet.follow(await fleet.submit(scheme="end-edge", on_upstream_loss="wait"))
            took_s = time.monotonic() - began
    assert took_s > fleet.images * 32 * 32 * 3 * 8 / 1e6, "pixels alone take longer"
    for told in before, during:
        check_answered(told, fleet.images)
        assert not told.fallback
    await fleet.until(Health.ALIVE, *SERVICES)


@pytest.mark.parametrize("name", ["end-1", "edge-1"])
async def test_a_node_is_found_at_its_new_address(fleet: Fleet, name: str) -> None:
    host = fleet.network[name]
    old = url_of(host)
    async with fleet.under_way(on_upstream_loss="wait") as before:
        incarnation = await fleet.incarnation(name)
        fleet.network.move(host)
        during = await fleet.submit(on_upstream_loss="wait")
        await fleet.until(Health.ALIVE, name)
        assert url_of(host) != old
    after = await fleet.follow(await fleet.submit(scheme="end-edge", on_upstream_loss="wait"))
    for told in before, await fleet.follow(during), after:
        check_answered(told, fleet.images)
        assert not told.fallback
    assert name in (await fleet.client.job(after.job)).by_node
    assert await fleet.incarnation(name) == incarnation


async def test_all_nodes_are_found_at_their_new_addresses(fleet: Fleet) -> None:
    """None is heard for a while, so the scheduler takes none for dead: nothing but their own word tells it."""
    async with fleet.under_way(on_upstream_loss="wait") as before:
        for name in SERVICES:
            fleet.network.move(fleet.network[name])
        during = await fleet.submit(on_upstream_loss="wait")
        await fleet.until(Health.ALIVE, *SERVICES)
    for told in before, await fleet.follow(during):
        check_answered(told, fleet.images)
        assert not told.fallback


async def test_the_scheduler_goes_on_at_another_host_that_takes_its_address(fleet: Fleet) -> None:
    """As after the end of a machine, with the state folder on a disk that another one has as well."""
    policy = {"scheme": "end-edge", "on_upstream_loss": "wait"}
    before, waiting = await fleet.submit(**policy), await fleet.submit(**policy)

    async def begun() -> bool:
        return (await fleet.client.job(before)).answered_fine > 0

    await wait_for(begun, what="the first fine answer")
    address = fleet.hub.address
    fleet.network.switch_off(fleet.hub)
    await fleet.scheduler.exit_code()
    await fleet.start_scheduler(fleet.network.add("hub-2", address=address))
    await fleet.until(Health.ALIVE, *SERVICES)
    after = await fleet.submit(**policy)
    for job in before, waiting, after:
        told = await fleet.follow(job)
        check_answered(told, fleet.images)
        assert not told.fallback
