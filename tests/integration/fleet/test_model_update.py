"""The networks of a set are replaced while a fleet serves them, and nodes start while the scheduler is away."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from models.manifest import load_manifest
from terrace.cli import run
from tests.model_sets import colour_network, colour_set, coloured
from tierkit.client import AsyncClient
from tierkit.errors import TerraceError
from tierkit.http.address import free_port
from tierkit.testing import ServiceProcess, service_process, wait_for
from tierkit.types import Health

RED = np.stack([coloured("red")] * 12)


@asynccontextmanager
async def scheduler(port: int, models: Path, place: Path, *more: str) -> AsyncIterator[ServiceProcess]:
    state = str(place / "state")
    command = ["-m", "terrace", "scheduler", "--port", str(port), "--models", str(models), "--state", state, *more]
    async with service_process(command, ready_file=place / "scheduler.ready") as service:
        yield service


def end(name: str, port: int, place: Path, *more: str) -> Sequence[str]:
    url, cache = f"http://127.0.0.1:{port}", str(place / f"cache-{name}")
    return ["-m", "terrace", "end", "--port", "0", "--scheduler", url, "--node-id", name, "--cache", cache, *more]


async def serving(client: AsyncClient) -> dict[str, str]:
    """sha256 of the network of each live node; nothing while the scheduler is away."""
    with contextlib.suppress(TerraceError):
        return {
            device.node_id: device.models[0]["sha256"]
            for device in await client.devices()
            if device.health is Health.ALIVE
        }
    return {}


async def test_a_running_fleet_changes_to_the_networks_of_its_scheduler_s_set(tmp_path: Path) -> None:
    models, port = colour_set(tmp_path / "set", {"end": colour_network(tmp_path / "first.onnx")}), free_port()
    first = load_manifest(models).default_for("end")
    blind = colour_network(tmp_path / "second.onnx", weights=(0.1, 1.0, 1.0))
    async with AsyncClient(f"http://127.0.0.1:{port}") as client, contextlib.AsyncExitStack() as stack:

        async def all_serve(sha256: str, *names: str) -> None:
            async def do() -> bool:
                return await serving(client) == dict.fromkeys(names, sha256)

            await wait_for(do, what=f"{names} with {sha256[:8]}")

        async def start(name: str) -> ServiceProcess:
            service = service_process(end(name, port, tmp_path), ready_file=tmp_path / name)
            return await stack.enter_async_context(service)

        async with scheduler(port, models, tmp_path) as running:
            old = await start("end-1")
            await all_serve(first.sha256, "end-1")
            colour_set(models, {"end": blind})  # as `terrace models import` does it
            second = load_manifest(models).default_for("end")
            assert second.sha256 != first.sha256
            assert (models / first.file).is_file(), "the scheduler still offers it"
            await start("end-2")
            await all_serve(first.sha256, "end-1", "end-2")
            running.terminate()
            assert await running.exit_code() == 0
        async with scheduler(port, models, tmp_path):
            # Other content in the same folder is a release that waits.
            await start("end-3")
            await all_serve(first.sha256, "end-1", "end-2", "end-3")
            known = await client.releases()
            assert [(each.release, each.state) for each in known.releases] == [
                ("set@2", "ready"),
                ("set@1", "in force"),
            ]
            await client.promote_release("set@2")
            await all_serve(second.sha256, "end-1", "end-2", "end-3")
            assert old.process.returncode is None, "the same process, for whoever watches it"
            job = await client.wait(await client.submit(RED, scheme="end", batch_size=1))
            results = [result async for result in client.results(job)]
            assert len({result.label for result in results}) == 1
            assert {(r.coarse.model, r.coarse.sha256) for r in results if r.coarse} == {("of-end", second.sha256)}
            async with httpx.AsyncClient(base_url=client.url, trust_env=False) as http:
                table = (await http.get(f"/v1/jobs/{job.id}/results?format=csv")).text.splitlines()
                column = table[0].split(",").index("coarse_sha256")
                assert {line.split(",")[column] for line in table[1:]} == {second.sha256}

                async def counted() -> bool:
                    figures = (await http.get("/metrics")).text
                    nodes = f'terrace_scheduler_network_nodes{{model="of-end",sha256="{second.sha256}",tier="end"}} 3.0'
                    answers = f'terrace_scheduler_answers_total{{label="{results[0].label}",tier="end"}} 12.0'
                    return nodes in figures and answers in figures

                await wait_for(counted, what="nodes and classes in the metrics")


async def test_a_node_of_another_version_gets_no_work_and_doctor_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, port = colour_set(tmp_path / "set", {"end": colour_network(tmp_path / "net.onnx")}), free_port()
    old = colour_set(tmp_path / "old", {"end": colour_network(tmp_path / "old.onnx", factor=5.0)})
    url = f"http://127.0.0.1:{port}"
    stranger = end("end-1", port, tmp_path, "--models", str(old))
    async with scheduler(port, models, tmp_path), service_process(stranger, ready_file=tmp_path / "ready") as node:
        async with AsyncClient(url) as client:

            async def shown() -> bool:
                return any("is refused" in device.reason for device in await client.devices())

            await wait_for(shown, what="the refusal")
            (device,) = await client.devices()
            assert (device.node_id, device.health) == ("end-1", Health.DEAD)
            async with httpx.AsyncClient(trust_env=False) as http:
                figures = (await http.get(f"{url}/metrics")).text
                assert (await http.get(f"{node.url}/readyz")).status_code == 503
        counted = 'terrace_scheduler_refused_registrations_total{reason="networks",tier="end"} '
        assert float(figures.split(counted)[1].split()[0]) >= 1
        assert run(["doctor", "--scheduler", url, "--models", str(old), "--json"]) == 1
        said = capsys.readouterr().out
        assert "of-end: sha256" in said
        # Its folder is brought up to date, and the node takes the new network by itself.
        colour_set(old, {"end": tmp_path / "net.onnx"})
        async with AsyncClient(url) as client:

            async def alive() -> bool:
                return list(await serving(client)) == ["end-1"]

            await wait_for(alive, what="the node")


async def test_a_node_starts_without_its_scheduler_from_what_it_had_last(tmp_path: Path) -> None:
    models, port = colour_set(tmp_path / "set", {"end": colour_network(tmp_path / "net.onnx")}), free_port()
    sha256 = load_manifest(models).default_for("end").sha256
    command = end("end-1", port, tmp_path, "--model", "of-end")
    async with service_process(command, ready_file=tmp_path / "ready", wait_ready=False) as node:
        await wait_for(lambda: "no model set from the scheduler yet" in node.log, what="a word about it")
        async with scheduler(port, models, tmp_path):
            await wait_for((tmp_path / "ready").exists, what="the node, once the scheduler is there")
        node.kill()
        await node.exit_code()
    (tmp_path / "ready").unlink()
    async with service_process(command, ready_file=tmp_path / "ready") as node:
        async with httpx.AsyncClient(trust_env=False) as http:
            served = (await http.get(f"{node.url}/v2/models/of-end")).json()
        assert served["versions"] == [sha256]
        async with scheduler(port, models, tmp_path), AsyncClient(f"http://127.0.0.1:{port}") as client:

            async def alive() -> bool:
                return await serving(client) == {"end-1": sha256}

            await wait_for(alive, what="the node on the list")
