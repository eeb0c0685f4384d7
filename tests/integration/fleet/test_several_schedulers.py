"""Two schedulers, each with an end node, that share one cloud node: real processes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from models.data import read_sample
from tests.model_sets import colour_network, colour_set
from tierkit.client import AsyncClient
from tierkit.testing import ServiceProcess, service_process, wait_for
from tierkit.types import Health

IMAGES = read_sample().images[:100]


@dataclass(kw_only=True)
class Side:
    """A scheduler and its end node."""

    name: str
    folder: Path
    port: str = "0"
    models: Path | None = None
    scheduler: ServiceProcess | None = None

    @contextlib.asynccontextmanager
    async def schedules(self) -> AsyncIterator[ServiceProcess]:
        """The scheduler runs within this context, each time at the same port."""
        command = ["-m", "terrace", "scheduler", "--port", self.port, "--state", str(self.folder / self.name)]
        command += ["--trusted", "end,edge,cloud", *(["--models", str(self.models)] if self.models else [])]
        ready = self.folder / f"{self.name}.ready"
        ready.unlink(missing_ok=True)  # of one that was killed
        async with service_process(command, ready_file=ready) as self.scheduler:
            self.port = str(urlsplit(self.url).port)
            yield self.scheduler

    @property
    def url(self) -> str:
        assert self.scheduler is not None
        return self.scheduler.url

    async def is_there(self, node: str) -> None:
        async with AsyncClient(self.url) as client:

            async def alive() -> bool:
                return any(
                    device.node_id == node and device.health is Health.ALIVE for device in await client.devices()
                )

            await wait_for(alive, what=f"{node} at {self.name}")

    async def classify(self) -> tuple[str, int]:
        """A job that is to be answered by the cloud node: its state, and the images with a fine answer."""
        async with AsyncClient(self.url) as client:
            job = await client.wait(await client.submit(IMAGES, scheme="end-cloud"), budget_s=90)
        return job.state, job.answered_fine


@contextlib.asynccontextmanager
async def node(service: str, name: str, folder: Path, *more: str) -> AsyncIterator[ServiceProcess]:
    command = ["-m", "terrace", service, "--port", "0", "--node-id", name, *more]
    async with service_process(command, ready_file=folder / f"{name}.ready") as process:
        yield process


async def shares(cloud: ServiceProcess, *, metric: str = "terrace_share_images_total") -> dict[str, float]:
    async with httpx.AsyncClient(trust_env=False) as http:
        lines = (await http.get(f"{cloud.url}/metrics")).text.splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith(metric + "{"))
    return {name.partition('"')[2].rstrip('"}'): float(value) for name, _, value in found}


@pytest.mark.timeout(180)
async def test_one_cloud_node_serves_two_fleets_and_outlives_a_scheduler(tmp_path: Path) -> None:
    one, two = Side(name="one", folder=tmp_path), Side(name="two", folder=tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(one.schedules())
        scheduler = contextlib.AsyncExitStack()
        await scheduler.enter_async_context(two.schedules())
        stack.push_async_callback(lambda: scheduler.aclose())
        for side in (one, two):
            await stack.enter_async_context(node("end", f"end-{side.name}", tmp_path, "--scheduler", side.url))
        both = ["--scheduler", one.url, "--also", f"two={two.url}"]
        cloud = await stack.enter_async_context(node("cloud", "shared", tmp_path, *both))
        for side in (one, two):
            await side.is_there("shared")
            await side.is_there(f"end-{side.name}")
            assert await side.classify() == ("completed", len(IMAGES))
        first = urlsplit(one.url).netloc
        assert await shares(cloud) == {first: len(IMAGES), "two": len(IMAGES), "others": 0}

        assert two.scheduler is not None
        two.scheduler.kill()
        await scheduler.aclose()
        assert await one.classify() == ("completed", len(IMAGES))
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{cloud.url}/readyz")).status_code == 200

        scheduler = contextlib.AsyncExitStack()
        await scheduler.enter_async_context(two.schedules())
        await two.is_there("shared")
        await two.is_there("end-two")
        assert await two.classify() == ("completed", len(IMAGES))
        assert await shares(cloud) == {first: 2 * len(IMAGES), "two": 2 * len(IMAGES), "others": 0}
        cloud.terminate()
        assert await cloud.exit_code() == 0
        for side in (one, two):
            async with AsyncClient(side.url) as client:
                assert all(device.node_id != "shared" or device.health.gone for device in await client.devices())


async def test_a_scheduler_with_another_model_set_refuses_the_node_and_the_first_one_keeps_it(tmp_path: Path) -> None:
    colours = colour_network(tmp_path / "colours.onnx")
    models = colour_set(tmp_path / "set", {"end": colours, "cloud": colours})
    one, other = Side(name="one", folder=tmp_path), Side(name="other", folder=tmp_path, models=models)
    async with one.schedules(), other.schedules():
        both = ["--scheduler", one.url, "--also", f"other={other.url}"]
        async with (
            node("end", "end-one", tmp_path, "--scheduler", one.url),
            node("cloud", "shared", tmp_path, *both) as cloud,
        ):
            await one.is_there("shared")
            await one.is_there("end-one")

            def checks() -> dict[str, str]:
                answer = httpx.get(f"{cloud.url}/readyz", trust_env=False)
                assert answer.status_code == 200
                return dict(answer.json()["checks"])

            await wait_for(lambda: checks()["scheduler other"] != "ok", what="the refusal in the readiness")
            assert "answers other classes than this fleet" in checks()["scheduler other"]
            assert checks()["scheduler"] == "ok"
            assert "the scheduler other refuses this node" in cloud.log
            assert await one.classify() == ("completed", len(IMAGES))
