"""Four shops and a cloud, each in a network of its own: connections between shops are counted in the kernel.

Each shop has an edge node and two end nodes, and another rule on where its pictures may go. Nodes are killed and come
back while jobs run.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from models.data import read_sample
from tests.followed import Followed
from tests.netns.conftest import PORT, url_of
from tests.netns.network import Host, Network
from tierkit.client import AsyncClient
from tierkit.testing import ServiceProcess, service_process, wait_for
from tierkit.types import Health

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("iptables") is None, reason="needs iptables"),
]

SHOPS = {"shop-1": "none", "shop-2": "cloud", "shop-3": "sites", "shop-4": "cloud"}
"""The rule of each site."""
CLOUD = "cloud-1"
NODES = {"edge": ("edge", 8072), "end-1": ("end", 8071), "end-2": ("end", 8074)}
BUDGET_S = 120.0
FEW = read_sample().images[:60]
MANY = np.concatenate([read_sample().images[:300]] * 2)


def _iptables(host: Host, *arguments: str) -> str:
    command = [*host.inside, "iptables", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


@dataclass(kw_only=True)
class Shops:
    """The fleet, with a counter in each shop for the connections that it opens to each other place."""

    network: Network
    folder: Path
    client: AsyncClient
    stack: AsyncExitStack
    processes: dict[str, ServiceProcess] = field(default_factory=dict)

    def count_connections(self) -> None:
        """Count the connections that each shop opens to the other shops and to the cloud."""
        for shop in SHOPS:
            for other in {*SHOPS, CLOUD} - {shop}:
                rule = ["-p", "tcp", "--syn", "-d", self.network[other].address, "-m", "comment", "--comment", other]
                _iptables(self.network[shop], "-A", "OUTPUT", *rule, "-j", "ACCEPT")

    def opened(self, shop: str) -> dict[str, int]:
        """Connections that a shop has opened, by the place; only places with some."""
        listed = _iptables(self.network[shop], "-L", "OUTPUT", "-nvx")
        found = re.findall(r"^\s*(\d+) .*/\* (\S+) \*/", listed, re.MULTILINE)
        return {other: int(count) for count, other in found if int(count)}

    async def start(self, *names: str) -> None:
        """Start nodes such as "shop-1-edge", or the cloud node."""
        for name in names:
            if name == CLOUD:
                place, service, port, site = name, "cloud", 8073, []
            else:
                place, _, kind = name.partition("-e")
                (service, port), site = NODES[f"e{kind}"], ["--site", place]
            command = ["-m", "terrace", service, "--host", "0.0.0.0", "--port", str(port), "--insecure", *site]
            command += ["--node-id", name, "--scheduler", url_of(self.network["hub-3"]), "--threads", "1"]
            process = service_process(
                [*command, "--cache", str(self.folder / "cache")],
                ready_file=self.folder / f"{name}.ready",
                inside=self.network[place].inside,
                wait_ready=False,
            )
            self.processes[name] = await self.stack.enter_async_context(process)

    async def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].kill()
            await self.processes[name].exit_code()
        await self.until(names, alive=False)

    async def until(self, names: Iterable[str], *, alive: bool) -> None:
        wanted = set(names)

        async def so() -> bool:
            health = {device.node_id: device.health for device in await self.client.devices()}
            return all((health.get(name) is Health.ALIVE) is alive for name in wanted)

        await wait_for(so, timeout_s=BUDGET_S, what=f"{sorted(wanted)} to be {'there' if alive else 'gone'}")

    @contextlib.asynccontextmanager
    async def running(self, *sites: str | None, begun: bool = False) -> AsyncIterator[dict[str | None, Followed]]:
        """A job in each of these sites, None for anywhere; on exit they are done and checked.

        Args:
            begun: long jobs, which have their first fine answers on entry.
        """
        images = MANY if begun else FEW
        jobs: dict[str | None, Followed] = {}
        for site in sites:
            policy = {} if site is None else {"site": site}
            job = await self.client.submit(images, batch_size=5, **policy)  # type: ignore[arg-type]
            jobs[site] = Followed(job=job)

        async def all_begun() -> bool:
            return all([(await self.client.job(each.job)).answered_fine for each in jobs.values()])

        if begun:
            await wait_for(all_begun, timeout_s=BUDGET_S, what="the first fine answers")
        yield jobs
        for site, followed in jobs.items():
            await followed.follow(self.client, budget_s=BUDGET_S)
            everything = Counter(range(len(images)))
            assert (followed.coarse, followed.fine + followed.fallback) == (everything, everything), site
            # If a device dies after its coarse answer, another site may give the fine answer of a job that names no
            # site: the scheduler sends the picture there, and it does not leave the first site.
            await self._check_places(site, followed, may_move=begun and site is None)

    async def _check_places(self, site: str | None, followed: Followed, *, may_move: bool) -> None:
        """By the results, too, each picture was where it may be."""
        async for result in self.client.results(followed.job):
            assert result.coarse is not None
            shop = result.coarse.node.partition("-e")[0]
            assert shop == result.site
            assert site in (None, shop)
            if result.fine is not None and not may_move:
                place = result.fine.node.partition("-e")[0]
                rule = SHOPS[shop]
                assert place == shop or (place == CLOUD and rule != "none") or rule == "sites", (shop, place)


@pytest.fixture
async def shops(network: Network, tmp_path: Path) -> AsyncIterator[Shops]:
    hosts = {name: network.add(name) for name in ("user-3", "hub-3", CLOUD, *SHOPS)}
    hub = hosts["hub-3"]
    rules = ",".join(["cloud", *(f"{shop}={rule}" for shop, rule in SHOPS.items() if rule != "cloud")])
    scheduler = ["-m", "terrace", "scheduler", "--host", "0.0.0.0", "--port", str(PORT), "--insecure"]
    scheduler += ["--state", str(tmp_path / "state"), "--trusted", "end,edge,cloud", "--share", rules]
    async with AsyncExitStack() as stack:
        stack.enter_context(network.here(hosts["user-3"]))
        ready = tmp_path / "hub.ready"
        await stack.enter_async_context(service_process(scheduler, ready_file=ready, inside=hub.inside))
        client = await stack.enter_async_context(AsyncClient(url_of(hub)))
        shops = Shops(network=network, folder=tmp_path, client=client, stack=stack)
        shops.count_connections()
        everything = [CLOUD, *(f"{shop}-{node}" for shop in SHOPS for node in NODES)]
        await shops.start(*everything)
        await shops.until(everything, alive=True)
        yield shops


async def test_pictures_stay_where_the_rule_of_their_shop_says(shops: Shops) -> None:
    # All is well: edge nodes answer, and the cloud takes what it may.
    async with shops.running(None, *SHOPS) as jobs:
        pass
    assert all(not followed.fallback for followed in jobs.values())
    assert not shops.opened("shop-1")
    for shop in SHOPS:
        assert shops.opened(shop).keys() <= {CLOUD}, shop

    # An end node of each shop dies, and comes back.
    async with shops.running(None, *SHOPS, begun=True):
        await shops.kill(*(f"{shop}-end-1" for shop in SHOPS))
    await shops.start(*(f"{shop}-end-1" for shop in SHOPS))
    await shops.until((f"{shop}-end-1" for shop in SHOPS), alive=True)

    # Edge nodes die. Only the shop that may ask others does so.
    async with shops.running(None, *SHOPS, begun=True):
        await shops.kill("shop-1-edge", "shop-2-edge", "shop-3-edge")
    async with shops.running("shop-1", "shop-2") as jobs:
        pass
    assert (len(jobs["shop-1"].fallback), len(jobs["shop-2"].fine)) == (len(FEW), len(FEW))

    # Without the cloud as well, it gets its fine answers from the edge node that is left.
    await shops.kill(CLOUD)
    before = shops.opened("shop-3")
    async with shops.running("shop-1", "shop-2", "shop-3", "shop-4") as jobs:
        pass
    assert [len(jobs[shop].fine) for shop in ("shop-1", "shop-2", "shop-3", "shop-4")] == [0, 0, len(FEW), len(FEW)]
    assert shops.opened("shop-3").get("shop-4", 0) > before.get("shop-4", 0)
    for shop in ("shop-2", "shop-4"):
        assert shops.opened(shop).keys() <= {CLOUD}, shop

    # All come back.
    back = (CLOUD, "shop-1-edge", "shop-2-edge", "shop-3-edge")
    await shops.start(*back)
    await shops.until(back, alive=True)
    borrowed = shops.opened("shop-3")
    async with shops.running(None, *SHOPS) as jobs:
        pass
    assert all(not followed.fallback for followed in jobs.values())
    borrowed[CLOUD] = shops.opened("shop-3").get(CLOUD, 0)
    assert shops.opened("shop-3") == {place: count for place, count in borrowed.items() if count}, (
        "with its own edge node it asks no other shop"
    )
    assert not shops.opened("shop-1"), "no picture ever left this shop"
    for shop in ("shop-2", "shop-4"):
        assert shops.opened(shop).keys() <= {CLOUD}, shop
