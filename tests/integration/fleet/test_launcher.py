"""The launcher with real services: all start, all stop, and whatever goes wrong in between is told and survived."""

import os
import select
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tierkit.client import AsyncClient
from tierkit.errors import ServiceFailed, SetupError
from tierkit.fleet import Exit, FleetPlan, LaunchOptions, launch, local_plan
from tierkit.testing import wait_for
from tierkit.types import Health, Tier


def plan(tmp_path: Path, *, end: int = 2, edge: int = 1, **node: str) -> FleetPlan:
    counts = {Tier.END: end, Tier.EDGE: edge}
    return local_plan(counts, scheduler={"port": 0, "state": tmp_path / "state"}, node=node)


def ended(pidfd: int, *, within_s: float = 10.0) -> bool:
    return bool(select.select([pidfd], [], [], within_s)[0])


class Ears:
    """What the launcher says."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.exits: list[Exit] = []

    def on_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def on_exit(self, end: Exit) -> None:
        self.exits.append(end)


@pytest.fixture
def ears() -> Ears:
    return Ears()


async def test_a_fleet_comes_up_whole_goes_on_without_a_node_that_dies_and_goes_down_whole(
    tmp_path: Path, ears: Ears
) -> None:
    async with launch(plan(tmp_path), tmp_path, LaunchOptions(on_line=ears.on_line, on_exit=ears.on_exit)) as fleet:
        await fleet.join(budget_s=20)
        processes = [os.pidfd_open(service.process.pid) for service in fleet.services.values()]
        async with AsyncClient(fleet.scheduler_url) as client:
            devices = {device.node_id: device for device in await client.devices()}
            assert list(fleet.services) == ["scheduler", "end-1", "end-2", "edge-1"]
            assert {name: device.url for name, device in devices.items()} == {
                node.name: fleet.services[node.name].url for node in fleet.plan.nodes
            }
            assert len({service.url for service in fleet.services.values()}) == 4
            assert {name for name, _ in ears.lines} == {"scheduler", "end-1", "end-2", "edge-1"}
            assert ears.exits == []

            fleet.services["end-1"].process.kill()
            await wait_for(lambda: bool(ears.exits), what="the report of the death")
            assert [str(end) for end in ears.exits] == ["end-1 was killed by SIGKILL"]
            assert [service.name for service in fleet.alive] == ["scheduler", "end-2", "edge-1"]

            async def noticed() -> bool:
                health = {device.node_id: device.health for device in await client.devices()}
                return health["end-1"] is Health.DEAD and health["end-2"] is Health.ALIVE

            await wait_for(noticed, what="the scheduler to give the node up")
    assert all(ended(process, within_s=0) for process in processes)
    assert [service.process.returncode for service in fleet.services.values()] == [0, -signal.SIGKILL, 0, 0]
    assert len(ears.exits) == 1


async def test_a_scheduler_that_dies_before_its_nodes_have_joined_is_named_at_once(tmp_path: Path) -> None:
    async with launch(plan(tmp_path, end=1, edge=0), tmp_path) as fleet:
        scheduler = fleet.services["scheduler"].process
        scheduler.kill()
        await scheduler.wait()
        with pytest.raises(ServiceFailed, match="scheduler was killed by SIGKILL"):
            await fleet.join(budget_s=20)


async def test_a_service_that_cannot_start_stops_all_and_says_why(tmp_path: Path) -> None:
    processes: list[int] = []
    wrong = plan(tmp_path, end=1, edge=0, threads="many")
    with pytest.raises(SetupError, match=r"end-1 stopped with exit code 2: .*--threads is 'many'"):
        async with launch(wrong, tmp_path, LaunchOptions(on_line=lambda name, line: processes.append(len(line)))):
            pytest.fail("the fleet must not come up")
    assert processes, "the sentence of the service is passed on, too"


async def test_a_node_gets_the_tables_of_its_plan(tmp_path: Path) -> None:
    good = plan(tmp_path, end=1, edge=0)
    node = replace(good.nodes[0], tables={"learn": {"size": "plenty"}})
    wrong = replace(good, services=(good.services[0], node))
    with pytest.raises(ServiceFailed, match=r"table \[learn\], the key size"):
        async with launch(wrong, tmp_path):
            pytest.fail("the fleet must not come up")


async def test_an_error_in_the_block_still_stops_the_fleet(tmp_path: Path) -> None:
    processes: list[int] = []

    async def stumble() -> None:
        async with launch(local_plan({}, scheduler={"port": 0, "state": tmp_path / "state"}), tmp_path) as fleet:
            processes.extend(os.pidfd_open(service.process.pid) for service in fleet.services.values())
            raise LookupError

    with pytest.raises(LookupError):
        await stumble()
    assert all(ended(process, within_s=0) for process in processes)


async def test_a_service_that_does_not_listen_to_reason_is_killed(tmp_path: Path) -> None:
    async with launch(plan(tmp_path, end=1, edge=0), tmp_path, LaunchOptions(stop_s=1.0)) as fleet:
        stuck = fleet.services["end-1"]
        stuck.process.send_signal(signal.SIGSTOP)
    assert stuck.process.returncode == -signal.SIGKILL
    assert not fleet.alive
