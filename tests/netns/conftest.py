"""A fleet of five hosts on a network whose links can be cut, slowed down and moved."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from models.data import read_sample
from tests.followed import Followed
from tests.netns.network import Host, Network, missing
from tierkit.client import AsyncClient, Job
from tierkit.testing import ServiceProcess, service_process, wait_for
from tierkit.types import Health

PORT = 8070
SERVICES = {"end-1": "end", "end-2": "end", "edge-1": "edge", "cloud-1": "cloud"}
IMAGES = 200
_BUDGET_S = 90.0


@dataclass(kw_only=True)
class Fleet:
    """A scheduler, two end nodes, an edge and a cloud node, each on a host of its own; the test is on another one."""

    network: Network
    folder: Path
    stack: AsyncExitStack
    """What is to be ended with the fleet."""
    hub: Host
    """The scheduler's."""
    scheduler: ServiceProcess
    client: AsyncClient
    images: int = IMAGES

    async def submit(self, **policy: object) -> Job:
        """A job of many tasks."""
        return await self.client.submit(read_sample().images[:IMAGES], batch_size=5, **policy)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def under_way(self, **policy: object) -> AsyncIterator[Followed]:
        """A job that has its first fine answers on entry, and all of them on exit."""
        followed = Followed(job=await self.submit(**policy))
        async with asyncio.TaskGroup() as group:
            group.create_task(followed.follow(self.client, budget_s=_BUDGET_S))
            await wait_for(lambda: bool(followed.fine), timeout_s=_BUDGET_S, what="the first fine answer")
            yield followed

    async def follow(self, job: Job) -> Followed:
        """A job from its beginning to its end."""
        followed = Followed(job=job)
        await followed.follow(self.client, budget_s=_BUDGET_S)
        return followed

    async def incarnation(self, name: str) -> str:
        return next(device.incarnation for device in await self.client.devices() if device.node_id == name)

    async def until(self, health: Health, *names: str) -> None:
        """Until the device list says that of these nodes, and the scheduler has reached those that are there, each at
        the address that it has."""
        urls = {name: url_of(self.network[name]) for name in names}

        async def so() -> bool:
            devices = [device for device in await self.client.devices() if device.node_id in names]
            return len(devices) == len(names) and all(
                device.health is health
                and (health is Health.DEAD or (device.reached and device.url == urls[device.node_id]))
                for device in devices
            )

        await wait_for(so, timeout_s=_BUDGET_S, what=f"{', '.join(names)} to be {health}")

    async def start_scheduler(self, host: Host) -> None:
        """On this host, with the state of the one before."""
        self.scheduler = await self.stack.enter_async_context(scheduler_on(host, self.folder))
        self.hub = host


def url_of(host: Host) -> str:
    return f"http://{host.address}:{PORT}"


def scheduler_on(host: Host, folder: Path) -> contextlib.AbstractAsyncContextManager[ServiceProcess]:
    command = ["-m", "terrace", "scheduler", "--host", "0.0.0.0", "--port", str(PORT), "--insecure"]
    command += ["--state", str(folder / "state"), "--n-map", "1"]
    return service_process(command, ready_file=folder / f"{host.name}.ready", inside=host.inside)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if lack := missing():
        pytest.skip(lack)
    with Network() as network:
        yield network


@pytest.fixture(scope="module")
async def running_fleet(network: Network, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("netns")
    user, hub = network.add("user"), network.add("hub")
    async with AsyncExitStack() as stack:
        stack.enter_context(network.here(user))
        common = ["--host", "0.0.0.0", "--port", str(PORT), "--insecure", "--scheduler", url_of(hub)]
        for name, service in SERVICES.items():
            command = ["-m", "terrace", service, *common, "--node-id", name, "--cache", str(folder / "cache")]
            inside = network.add(name).inside
            node = service_process(command, ready_file=folder / f"{name}.ready", inside=inside, wait_ready=False)
            await stack.enter_async_context(node)
        scheduler = await stack.enter_async_context(scheduler_on(hub, folder))
        client = await stack.enter_async_context(AsyncClient(url_of(hub)))
        yield Fleet(network=network, folder=folder, stack=stack, hub=hub, scheduler=scheduler, client=client)


@pytest.fixture
async def fleet(running_fleet: Fleet) -> Fleet:
    """All nodes are well."""
    await running_fleet.until(Health.ALIVE, *SERVICES)
    return running_fleet
