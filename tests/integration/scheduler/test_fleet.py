"""The scheduler with real nodes: processes, the networks that ship, real images."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx
import numpy as np
import pytest

from models.data import read_sample
from models.manifest import load_manifest
from models.session import load_model
from tierkit.testing import ServiceProcess, service_process, wait_for

NODES = {"end-0": "end", "end-1": "end", "edge-0": "edge", "cloud-0": "cloud"}


class Fleet:
    def __init__(self, kit, settings) -> None:
        self.kit = kit
        self.settings = settings
        self.processes: dict[str, ServiceProcess] = {}

    async def start(self, stack: AsyncExitStack, tmp_path) -> None:
        command = [
            "-m",
            "terrace",
            "scheduler",
            "--port=0",
            f"--state={tmp_path / 'state'}",
            "--n-map=1",
            "--trusted=end,edge,cloud",
        ]
        scheduler = await stack.enter_async_context(service_process(command, ready_file=tmp_path / "scheduler"))
        started = [
            stack.enter_async_context(
                service_process(
                    ["-m", "terrace", service, "--port=0", f"--node-id={name}", f"--scheduler={scheduler.url}"],
                    ready_file=tmp_path / name,
                )
            )
            for name, service in NODES.items()
        ]
        self.processes = dict(zip(NODES, [await one for one in started], strict=True))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=scheduler.url, timeout=60, trust_env=False))
        self.running = self.kit.running(scheduler.url, http, self.settings)
        await wait_for(self.complete, what="all nodes on the device list")

    async def complete(self) -> bool:
        devices = (await self.running.http.get("/v1/devices")).json()["devices"]
        return [device["node_id"] for device in devices if device["health"] == "alive"] == sorted(NODES)


@pytest.mark.timeout(120)
async def test_a_real_fleet_answers_as_the_bare_networks_do_and_survives_killed_nodes(kit, settings, tmp_path):
    sample, manifest = read_sample(), load_manifest()
    assert sample.fine is not None
    labels, pixels = sample.fine[:300], sample.images[:300]
    async with AsyncExitStack() as stack:
        fleet = Fleet(kit, settings)
        await fleet.start(stack, tmp_path)
        running = fleet.running

        job = await running.submit(pixels, labels=labels)
        view = await running.finished(job["id"])
        results = await running.results(job["id"])
        assert view["state"] == "completed"
        assert view["answered_coarse"] == view["answered_fine"] == len(pixels)
        assert set(view["by_node"]) == set(NODES)
        assert view["mapping"] == {"end-0": "edge-0", "end-1": "cloud-0"}
        listed = (await running.http.get("/v1/devices")).json()["devices"]
        shown = (await running.http.get("/v1/fleet")).json()["nodes"]
        for tier in ("end", "edge", "cloud"):
            network = manifest.default_for(tier)
            for nodes in (listed, shown):
                has = {(each["network"], each["accuracy"]) for each in nodes if each["tier"] == tier}
                assert has == {(network.name, network.accuracy)}
        await asyncio.to_thread(check_against_bare_networks, results, pixels, manifest)
        assert view["fine_accuracy"] == pytest.approx(
            np.mean([result["fine"]["label"] == result["true_fine"] for result in results])
        )

        # A killed end node and a killed edge node, both with work under way.
        job = await running.submit(np.concatenate([pixels] * 4), batch_size=20)
        await wait_for(lambda: begun(running, job), what="the job to be under way")
        fleet.processes["end-1"].kill()
        fleet.processes["edge-0"].kill()
        view = await running.finished(job["id"])
        results = await running.results(job["id"])
        assert view["state"] == "completed"
        assert (view["answered_coarse"], view["failed_images"]) == (1200, 0)
        assert view["answered_fine"] + view["fallback"] == 1200
        assert [result["index"] for result in results] == list(range(1200))
        # What the edge node had is asked of the cloud by the end node: hardly anything falls back.
        assert view["answered_fine"] > 1050


async def begun(running, job) -> bool:
    return bool((await running.job(job["id"]))["answered_fine"] > 0)


def check_against_bare_networks(results, pixels, manifest) -> None:
    """Each prediction equals that of the same network run directly on the same batch of 50."""
    networks = {tier: load_model(manifest.default_for(tier)) for tier in ("end", "edge", "cloud")}
    for first in range(0, len(pixels), 50):
        batch = results[first : first + 50]
        tier = batch[0]["fine"]["tier"]
        images = pixels[first : first + 50]
        coarse = networks["end"].run({"images": images}, ["logits"])["logits"].argmax(axis=1)
        fine = networks[tier].run({"images": images}, ["logits"])["logits"].argmax(axis=1)
        assert [result["coarse"]["index"] for result in batch] == coarse.tolist()
        assert [result["fine"]["index"] for result in batch] == fine.tolist()
