"""Releases on a fleet of real processes: a change under load, canaries that fail, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest

from models.manifest import load_manifest
from tests.model_sets import COLOURS, colour_network, colour_set, coloured
from tierkit.client import AsyncClient
from tierkit.errors import Conflict, InvalidInput, TerraceError
from tierkit.http.address import free_port
from tierkit.testing import ServiceProcess, service_process, wait_for
from tierkit.types import Health, JobState
from tierkit.wire.api import ImageResult
from tierkit.wire.releases import ReleaseState, Rollout, RolloutState

PICTURES = np.stack([coloured(colour, strength=strength) for strength in (120, 160, 200) for colour in COLOURS])
BLIND = (0.1, 1.0, 0.2)
"""Weights of a network that takes every colour for green."""


@dataclass
class Fleet:
    """A scheduler and nodes, each a process."""

    folder: Path
    stack: AsyncExitStack
    port: int = field(default_factory=free_port)
    nodes: dict[str, ServiceProcess] = field(default_factory=dict)
    scheduler: ServiceProcess | None = None
    own_flags: dict[str, Sequence[str]] = field(default_factory=dict)
    """Flags of the scheduler and of the nodes ("scheduler", "node")."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def lead(self, models: Path) -> ServiceProcess:
        ready = self.folder / "scheduler.ready"
        ready.unlink(missing_ok=True)
        command = ["-m", "terrace", "scheduler", "--port", str(self.port), "--models", str(models)]
        command += self.own_flags.get("scheduler", ())
        process = service_process([*command, "--state", str(self.folder / "state")], ready_file=ready)
        self.scheduler = await self.stack.enter_async_context(process)
        return self.scheduler

    async def join(self, *names: str) -> None:
        await asyncio.gather(*map(self.join_with, names))

    async def join_with(self, name: str, *flags: str) -> None:
        tier, cache = name.split("-")[0], str(self.folder / f"cache-{name}")
        command = ["-m", "terrace", tier, "--port", "0", "--scheduler", self.url, "--node-id", name, "--cache", cache]
        command += [*self.own_flags.get("node", ()), *flags]
        process = service_process(command, ready_file=self.folder / name)
        self.nodes[name] = await self.stack.enter_async_context(process)


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[tuple[Fleet, AsyncClient]]:
    async with AsyncExitStack() as stack:
        running = Fleet(folder, stack)
        async with AsyncClient(running.url) as client:
            yield running, client


def make_set(folder: Path, *, end: Sequence[float] = (1.0, 1.0, 1.0), factor: float = 10.0) -> Path:
    """A model set with an end and an edge network; `factor` makes the end network another file of the same answers."""
    networks = {
        "end": colour_network(folder.parent / f"{folder.name}-end.onnx", weights=end, factor=factor),
        "edge": colour_network(folder.parent / "edge.onnx", factor=20.0),
    }
    return colour_set(folder, networks)


def end_of(models: Path) -> str:
    """sha256 of the end network of a set."""
    return load_manifest(models).default_for("end").sha256


async def held(client: AsyncClient, name: str) -> set[str]:
    """The networks that a live node holds."""
    with contextlib.suppress(TerraceError):
        for device in await client.devices():
            if device.node_id == name and device.health is Health.ALIVE:
                return {model["sha256"] for model in device.models}
    return set()


async def hold(client: AsyncClient, sha256: str, *names: str) -> None:
    """Wait until live nodes hold a network."""

    async def do() -> bool:
        return all([sha256 in await held(client, name) for name in names])

    await wait_for(do, what=f"{names} with {sha256[:8]}")


async def until(client: AsyncClient, is_so: Callable[[Rollout], bool], what: str) -> Rollout:
    """The latest roll-out once something is so."""
    found: list[Rollout] = []

    async def do() -> bool:
        with contextlib.suppress(TerraceError):
            now = await client.releases()
            found[:] = [now.rollout or now.history[0]]
            return is_so(found[0])
        return False

    await wait_for(do, what=what, timeout_s=60)
    return found[0]


async def in_force(client: AsyncClient, release: str) -> None:
    async def do() -> bool:
        now = await client.releases()
        return (now.in_force, now.rollout) == (release, None)

    await wait_for(do, what=f"{release} in force")


@asynccontextmanager
async def load(client: AsyncClient, **policy: object) -> AsyncIterator[list[list[ImageResult]]]:
    """Jobs one after the other, two at a time, within this context; their results so far."""
    done: list[list[ImageResult]] = []
    stop = asyncio.Event()

    async def work() -> None:
        while not stop.is_set():
            job = await client.submit(np.concatenate([PICTURES] * 10), batch_size=3, **policy)  # type: ignore[arg-type]
            ended = await client.wait(job)
            assert ended.state is JobState.COMPLETED, ended.reason
            done.append([result async for result in client.results(job)])

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(work())
        try:
            yield done
        finally:
            stop.set()


def networks_of(results: Sequence[ImageResult]) -> tuple[set[str], set[str]]:
    """The networks that gave the coarse and the fine answers of a job."""
    return {r.coarse.sha256 for r in results if r.coarse}, {r.fine.sha256 for r in results if r.fine}


async def test_networks_change_under_load_without_a_failure_and_never_within_a_job(tmp_path: Path) -> None:
    first, second = make_set(tmp_path / "flowers"), make_set(tmp_path / "next", factor=11.0)
    async with fleet(tmp_path) as (running, client):
        await running.lead(first)
        await running.join("end-1", "end-2", "edge-1")
        made = await client.create_release("flowers", second)
        assert (made.release, made.state) == ("flowers@2", ReleaseState.READY)
        processes = {name: node.process.pid for name, node in running.nodes.items()}
        async with load(client) as done:
            await wait_for(lambda: len(done) >= 3, what="the first jobs")
            await client.promote_release("flowers@2")
            await running.join("end-3")  # in the middle of it
            over = await until(client, lambda rollout: rollout.state.final, "the end of the roll-out")
            at = len(done)
            await hold(client, end_of(second), "end-1", "end-2", "end-3")
            await wait_for(lambda: len(done) >= at + 6, what="jobs after it")
        assert (over.release, over.state) == ("flowers@2", RolloutState.DONE)
        assert {name: node.process.pid for name, node in running.nodes.items() if name != "end-3"} == processes
        assert all(node.process.returncode is None for node in running.nodes.values())
        seen = [networks_of(results) for results in done]
        assert all(len(coarse) == 1 == len(fine) for coarse, fine in seen), "two versions in one job"
        assert seen[0][0] == {end_of(first)}
        assert seen[-1][0] == {end_of(second)}
        assert all(result.fine is not None for results in done for result in results)

        async def only_the_new_one() -> bool:
            return await held(client, "end-1") == {end_of(second)}

        await wait_for(only_the_new_one, what="the old network to be let go")
        back = await client.roll_back()
        assert (back.release, back.kind) == ("flowers@1", "rollback")
        await until(client, lambda rollout: rollout.kind == "rollback" and rollout.state.final, "the roll-back")
        job = await client.wait(await client.submit(PICTURES))
        assert networks_of([result async for result in client.results(job)])[0] == {end_of(first)}
        assert job.release == "flowers@1"


async def test_a_canary_that_answers_wrongly_is_rolled_back_and_no_other_device_ever_used_it(tmp_path: Path) -> None:
    good, bad = make_set(tmp_path / "flowers"), make_set(tmp_path / "blind", end=BLIND)
    async with fleet(tmp_path) as (running, client):
        leader = await running.lead(good)
        await running.join("end-1", "end-2", "end-3", "edge-1")
        await client.create_release("blind", bad)
        started = await client.start_release(
            "blind@2", canary=0.4, guards={"agreement": 0.97, "errors": 0.05}, for_s=60.0
        )
        canary = started.devices
        assert 1 <= len(canary) < 3, canary
        await hold(client, end_of(bad), *canary)
        # The scheduler dies in the middle of the trial, and the next one goes on with it.
        leader.kill()
        await leader.exit_code()
        await running.lead(good)
        again = await until(client, lambda rollout: rollout.devices == canary, "the canary")
        assert (again.state, again.release) == (RolloutState.CANARY, "blind@2")
        await hold(client, end_of(bad), *canary)
        async with load(client) as done:
            over = await until(client, lambda rollout: rollout.state.final, "the roll-back")
        assert (over.state, over.release) == (RolloutState.ROLLED_BACK, "blind@2")
        (guard,) = [guard for guard in over.guards if guard.name == "agreement"]
        assert guard.verdict == "fails"
        assert guard.samples >= 200
        assert guard.new is not None
        assert guard.old is not None
        assert guard.new < 0.5 < guard.old
        assert "agree" in over.reason
        answers = [r for results in done for r in results if r.coarse is not None]
        assert {r.coarse.node for r in answers if r.coarse and r.coarse.sha256 == end_of(bad)} <= set(canary)
        assert all(len(networks_of(results)[0]) == 1 for results in done)
        now = await client.releases()
        assert (now.in_force, now.rollout) == ("flowers@1", None)
        assert {each.release: each.state for each in now.releases} == {
            "flowers@1": ReleaseState.IN_FORCE,
            "blind@2": ReleaseState.ROLLED_BACK,
        }


async def test_a_trial_without_data_is_extended_once_and_then_rolled_back(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (running, client):
        await running.lead(make_set(tmp_path / "flowers"))
        await running.join("end-1", "end-2")
        await client.create_release("next", make_set(tmp_path / "next", factor=11.0))
        started = await client.start_release("next@2", canary=0.5, for_s=1.0)
        assert len(started.devices) == 1, "by their hashes, both would be in it"
        await until(client, lambda rollout: rollout.extended, "the extension")
        over = await until(client, lambda rollout: rollout.state.final, "the end")
        assert over.state is RolloutState.ROLLED_BACK
        assert "too little data" in over.reason


async def test_what_cannot_be_started_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    first, second = make_set(tmp_path / "flowers"), make_set(tmp_path / "next", factor=11.0)
    ends_only = colour_set(tmp_path / "ends", {"end": tmp_path / "next-end.onnx"})
    sizes = colour_set(
        tmp_path / "sizes",
        {tier: colour_network(tmp_path / f"large-{tier}.onnx", size=48) for tier in ("end", "edge")},
    )
    async with fleet(tmp_path) as (running, client):
        await running.lead(first)
        await running.join("end-1", "edge-1")
        for folder in (second, ends_only, sizes):
            await client.create_release(folder.name, folder)
        with pytest.raises(Conflict, match="no network for the tier edge, to which edge-1 belongs"):
            await client.start_release("ends@3")
        with pytest.raises(Conflict, match="pictures of another size"):
            await client.start_release("sizes@4")
        with pytest.raises(Conflict, match="in force already"):
            await client.promote_release("flowers@1")
        with pytest.raises(InvalidInput, match="does not answer now"):
            await client.submit(PICTURES, release="next@2")
        # Two operators at once: one of them wins.
        both = await asyncio.gather(
            client.start_release("next@2", for_s=60.0),
            client.start_release("next@2", for_s=60.0),
            return_exceptions=True,
        )
        assert sorted(type(each).__name__ for each in both) == ["Conflict", "Rollout"]
        # While a job runs, its pictures are needed in their form.
        nodes = list(running.nodes.values())
        await client.stop_release("next@2")
        for node in nodes:
            node.process.send_signal(signal.SIGSTOP)
        try:
            job = await client.submit(PICTURES)
            with pytest.raises(Conflict, match="unfinished jobs need the old ones"):
                await client.promote_release("sizes@4")
        finally:
            for node in nodes:
                node.process.send_signal(signal.SIGCONT)
        await client.wait(job)
        now = await client.releases()
        assert (now.in_force, now.rollout) == ("flowers@1", None)
        # Then the whole fleet changes, the processes included.
        await client.promote_release("sizes@4")
        await hold(client, end_of(sizes), "end-1")
        large = np.stack([coloured("blue", size=48)] * 3)
        ended = await client.wait(await client.submit(large))
        assert (ended.state, ended.release) == (JobState.COMPLETED, "sizes@4")


async def test_networks_that_are_not_here_make_no_release(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (running, client):
        await running.lead(make_set(tmp_path / "flowers"))
        content = load_manifest(make_set(tmp_path / "next", factor=11.0)).content()
        async with httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
            refused = await http.post("/v1/releases", json={"name": "next", "manifest": content})
            assert refused.status_code == 409
            assert content["models"][0]["sha256"] in refused.json()["error"]
            wrong = await http.put(f"/v1/networks/{'0' * 64}", content=b"something else")
            assert wrong.status_code == 400
            # A file that is no network, under its right digest.
            path = tmp_path / "next" / content["models"][0]["file"]
            path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(TerraceError):
            await client.create_release("next", tmp_path / "next")
        assert [each.release for each in (await client.releases()).releases] == ["flowers@1"]
        assert not list((tmp_path / "state" / "networks").glob("*.part"))


async def test_old_releases_and_their_files_are_pruned_once_that_was_shown(tmp_path: Path) -> None:
    sets = [make_set(tmp_path / name, factor=factor) for name, factor in (("a", 10.0), ("b", 11.0), ("c", 12.0))]
    async with fleet(tmp_path) as (running, client):
        await running.lead(sets[0])
        await running.join("end-1")
        for name, models in zip("bc", sets[1:], strict=True):
            made = await client.create_release(name, models)
            await client.promote_release(made.release)
            await in_force(client, made.release)
        shown = await client.prune_releases()
        assert (shown.releases, shown.dry_run) == (("a@1",), True)
        assert set(shown.files) == {end_of(sets[0])}, "the edge network is the same in all of them"
        assert len((await client.releases()).releases) == 3
        pruned = await client.prune_releases(dry_run=False)
        assert (pruned.releases, pruned.files) == (shown.releases, shown.files)
        now = await client.releases()
        assert ([each.release for each in now.releases], now.previous) == (["c@3", "b@2"], "b@2")
        assert not (tmp_path / "state" / "networks" / end_of(sets[0])).exists()
        cached = tmp_path / "cache-end-1" / end_of(sets[0])
        await wait_for(lambda: not cached.exists(), what="the node's cache to follow")
        assert (tmp_path / "cache-end-1" / end_of(sets[2])).exists()
