"""A fleet that follows releases, continuous work for it, and what its answers say about who answered with what."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from experiments.processes import ServerProcesses, serving
from experiments.testbed import wait_for_devices
from tierkit.client import AsyncClient, CoarseResults, FailedResults, FineResults, ImageResult
from tierkit.errors import ServiceFailed, TerraceError
from tierkit.tensors import Array

__all__ = ["FleetOfReleases", "Load", "Requests", "fleet_of_releases"]

_SINGLE_EVERY_S = 0.05
_BUDGET_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOfReleases:
    """Its services."""

    client: AsyncClient
    pids: dict[str, int]
    """Process ids by node id."""
    state: Path
    """Folder of the scheduler."""
    scheduler: ServerProcesses

    def check(self) -> None:
        """Raise ServiceFailed if the scheduler is not there any more."""
        if not self.scheduler.alive:
            raise ServiceFailed(f"the scheduler has ended: {self.scheduler.log_tail()}")


@asynccontextmanager
async def fleet_of_releases(
    folder: Path, models: Path | None, *, ends: int, edges: int, clouds: int
) -> AsyncIterator[FleetOfReleases]:
    """A scheduler with a model set, and nodes that get their networks from it; all trusted.

    Args:
        models: of the scheduler; None: the bundled set.
    """
    state, pids = folder / "state", dict[str, int]()
    async with AsyncExitStack() as stack:

        async def start(*command: str) -> tuple[str, ServerProcesses]:
            return await asyncio.to_thread(stack.enter_context, serving(command, core=None))

        own = [] if models is None else ["--models", str(models)]
        url, scheduler = await start("terrace", "scheduler", "--state", str(state), "--trusted", "end,edge,cloud", *own)
        for tier, count in (("end", ends), ("edge", edges), ("cloud", clouds)):
            for number in range(count):
                node_id = f"{tier}-{number + 1}"
                flags = ["--node-id", node_id, "--scheduler", url, "--threads", "1"]
                flags += ["--cache", str(folder / f"cache-{node_id}")]
                pids[node_id] = (await start("terrace", tier, *flags))[1].process.pid
        client = await stack.enter_async_context(AsyncClient(url))
        nodes = ends + edges + clouds
        await wait_for_devices(client, lambda found: "" if len(found) == nodes else "a node is missing")
        yield FleetOfReleases(client=client, pids=pids, state=state, scheduler=scheduler)


@dataclass(slots=True)
class Load:
    """Jobs, one after another in a few lanes, until `stop`; their answers are counted.

    Args:
        images: of a job.
        lanes: jobs at a time.
        batch_size: images of a task.
    """

    client: AsyncClient
    images: Array
    scheme: str
    lanes: int = 2
    batch_size: int = 5
    jobs: int = 0
    failed: list[str] = field(default_factory=list)
    """Faults, one sentence for each job or image."""
    mixed: list[str] = field(default_factory=list)
    """Jobs whose answers are of two networks of one tier."""
    by_network: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Images by node and by the sha256 of the network that gave the coarse answer."""
    _stopped: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """Works in the background."""
        self._stopped = False
        async with asyncio.TaskGroup() as group:
            for _ in range(self.lanes):
                group.create_task(self._lane())
            try:
                yield self
            finally:
                self._stopped = True

    async def _lane(self) -> None:
        while not self._stopped:
            try:
                await self._job()
            except TerraceError as exc:
                self.failed.append(f"a job: {exc}")
                await asyncio.sleep(_SINGLE_EVERY_S)

    async def _job(self) -> None:
        job = await self.client.submit(self.images, scheme=self.scheme, batch_size=self.batch_size)
        job = await self.client.wait(job, budget_s=_BUDGET_S)
        self.jobs += 1
        if job.state != "completed":
            self.failed.append(f"job {job.id} is {job.state}: {job.reason}")
        networks: defaultdict[str, set[str]] = defaultdict(set)
        async for result in self.client.results(job):
            self._take(result, networks)
        for tier, digests in networks.items():
            if len(digests) > 1:
                self.mixed.append(f"job {job.id}: {len(digests)} networks of the tier {tier}")

    def _take(self, result: ImageResult, networks: defaultdict[str, set[str]]) -> None:
        if result.error is not None:
            self.failed.append(f"image {result.index}: {result.error}")
        if result.coarse is not None:
            networks["end"].add(result.coarse.sha256)
            self.by_network[result.coarse.sha256][result.coarse.node] += 1
        if result.fine is not None:
            networks[str(result.fine.tier)].add(result.fine.sha256)


@dataclass(slots=True)
class Requests:
    """Single requests at a steady rate, whatever the answers do."""

    client: AsyncClient
    image: Array
    scheme: str
    done: list[tuple[float, float, float]] = field(default_factory=list)
    """Time when each was sent (monotonic), milliseconds to its first answer, and to its last."""
    failed: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Requests]:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send(group))
            try:
                yield self
            finally:
                sending.cancel()

    async def _send(self, group: asyncio.TaskGroup) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            due = time.monotonic()
            while True:
                group.create_task(self._one(due))
                due += _SINGLE_EVERY_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _one(self, due: float) -> None:
        first = last = None
        try:
            async for event in self.client.classify(self.image, scheme=self.scheme):
                now = 1000 * (time.monotonic() - due)
                if isinstance(event, FailedResults):
                    raise ServiceFailed(str(event.results[0].error))
                if isinstance(event, CoarseResults):
                    first = now
                elif isinstance(event, FineResults):
                    last = now
        except TerraceError as exc:
            self.failed.append(str(exc))
            return
        if first is None:
            self.failed.append("a request without an answer")
            return
        self.done.append((due, first, first if last is None else last))
