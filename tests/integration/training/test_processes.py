"""Host and workers as processes: `terrace train run`, what kills leave of a run, and a host with tokens and TLS."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.cli import run
from tests.integration.access.conftest import Certificates, certificates
from tierkit.access import client_context
from tierkit.client import AsyncClient, Run, RunState
from tierkit.errors import TerraceError
from tierkit.http.address import free_port
from tierkit.testing import service_process, wait_for
from training.local import LocalRun, run_here
from training.messages import RunStatus
from training.worker.finding import at
from training.worker.node import WorkerOptions, work

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(300)]

__all__ = ["certificates"]  # the fixture

TERRACE = (sys.executable, "-P", "-m", "terrace")
Network = Callable[[int], Path]
CONVOLUTIONS = """
name = "fleet-net"
tier = "end"
target = "fine"
epochs = 2
batch_size = 6
held_out_per_class = 2
precision = "fp32"
crop_padding = 0

[network]
kind = "wide-resnet"
options = { depth = 10, width = 1 }
"""


def test_train_run_ends_with_one_object(network: Network, shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--strategy", "downpour", "--workers", "2", "--dataset", str(shapes), "--seed", "3", "--json"]
    assert run(["train", "run", str(network(8)), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"strategy", "workers", "accuracy", "seconds", "updates", "bytes_sent", "bytes_received", "faults"} <= set(
        found
    )
    assert (found["strategy"], found["workers"], found["seed"], found["faults"]) == ("downpour", 2, 3, 0)
    assert found["accuracy"] > 1 / 3


def test_train_run_with_a_group(network: Network, shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--strategy", "sgd", "--workers", "2", "--start-at", "2", "--dataset", str(shapes), "--json"]
    assert run(["train", "run", str(network(2)), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["updates"] == 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mnist-100", "--start-at", "5"], "--workers"),
        (["mnist-100", "--start-at", "2", "--strategy", "allreduce"], "ranks"),
        (["no-such"], "no bundled configuration"),
        (["mnist-100", "--strategy", "no-such"], "no strategy"),
        (["mnist-100", "--workers", "0"], "workers"),
    ],
)
def test_what_cannot_be_trained_is_told(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "run", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_host_without_its_images_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "run", "mnist-100", "--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert "--data" in said


def test_a_run_that_diverges_ends_and_says_so(
    network: Network, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = network(4_000)
    path.write_text(path.read_text().replace("peak_rate = 0.05", "peak_rate = 1e30"))
    flags = ["--strategy", "sgd", "--workers", "1", "--dataset", str(shapes)]
    assert run(["train", "run", str(path), *flags]) == 2
    assert "learning rate" in capsys.readouterr().err


async def test_whoever_is_killed_the_run_goes_on(network: Network, shapes: Path, tmp_path: Path) -> None:
    pids: dict[str, int] = {}
    to_kill = ["worker-1", "host", "worker-2", "host"]
    seen: list[RunStatus] = []

    def start(name: str, pid: int) -> None:
        pids[name] = pid

    def watch(status: RunStatus) -> None:
        # The next one is killed when there has been progress since the last.
        if to_kill and status.updates >= 40 * (5 - len(to_kill)):
            os.kill(pids[to_kill.pop(0)], signal.SIGKILL)
        assert not seen or (status.version >= seen[-1].version and status.updates >= seen[-1].updates)
        seen.append(status)

    images = {"dataset": shapes}
    result = await run_here(
        LocalRun(
            host={"network": network(100), "strategy": "sgd", "folder": tmp_path / "run", "lease_s": 5, **images},
            worker={"threads": 1, **images},
            workers=2,
            on_start=start,
        ),
        watch,
    )
    assert to_kill == []
    # Whatever came twice, and whoever had forgotten what it had: each of the 500 steps is in the weights once.
    assert result["updates"] == 500
    assert result["faults"] >= 4
    assert result["accuracy"] > 2 / 3
    assert (tmp_path / "run" / "checkpoint.pt").is_file()


async def test_a_host_that_is_killed_before_it_is_ready_is_started_again(
    network: Network, shapes: Path, tmp_path: Path
) -> None:
    to_kill = ["host", "host"]

    def start(name: str, pid: int) -> None:
        if name in to_kill:
            to_kill.remove(name)
            os.kill(pid, signal.SIGKILL)

    images = {"dataset": shapes}
    host = {"network": network(2), "strategy": "sgd", "folder": tmp_path / "run", **images}
    worker = {"threads": 1, **images}
    result = await run_here(LocalRun(host=host, worker=worker, workers=1, on_start=start))
    assert (to_kill, result["updates"], result["faults"]) == ([], 10, 2)


def test_the_folder_of_a_run_serves_the_commands_for_trained_networks(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx", reason="needs the extra 'train'")
    config = tmp_path / "fleet-net.toml"
    config.write_text(CONVOLUTIONS)
    folder, weights = tmp_path / "runs" / "fleet-net", tmp_path / "weights"
    data = ["--dataset", str(shapes)]

    def terrace(*arguments: str) -> Any:
        capsys.readouterr()
        assert run([*arguments, *data, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    train = ["train", "run", str(config), "--strategy", "fedavg", "--workers", "2", "--folder", str(folder)]
    result = terrace(*train)
    record = json.loads((folder / "record.json").read_text())
    fleet = {"strategy": "fedavg", "workers": 2, "updates": result["updates"], "reached": None}
    assert record["fleet"] == fleet
    assert (record["steps"], record["planned_steps"], record["epochs"]) == (10, 10, [])
    assert record["data"] == "shapes"
    runs = ["--runs", str(folder.parent)]
    (measured,) = terrace("models", "eval", "fleet-net", *runs)
    assert measured["fine_accuracy"] == pytest.approx(result["accuracy"])
    assert Path(terrace("models", "export", "fleet-net", *runs)["file"]).is_file()
    entry = terrace("models", "quantize", "fleet-net", "--out", str(weights), *runs)
    assert (entry["training"]["epochs"], entry["training"]["record"]) == (2, "fleet-net.json")
    assert "2 workers of a fleet, strategy fedavg" in entry["training"]["hardware"]
    assert json.loads((weights / "records" / "fleet-net.json").read_text()) == record
    # Training it alone would have to go on from a state that it never had.
    kept = (folder / "checkpoint.pt").read_bytes()
    assert run(["models", "train", "fleet-net", "--config", str(config), *data, *runs]) != 0
    assert (folder / "checkpoint.pt").read_bytes() == kept
    assert json.loads((folder / "record.json").read_text()) == record


async def test_a_worker_needs_the_hosts_token_and_certificate(
    network: Network, shapes: Path, tmp_path: Path, certificates: Certificates
) -> None:
    book = tmp_path / "tokens.toml"
    for name, role in (("pi", "worker"), ("mallory", "worker"), ("ann", "user")):
        out = ["--tokens", str(book), "--out", str(tmp_path / name)]
        assert run(["token", "create", "--name", name, "--role", role, *out]) == 0
    secured = [f"--{name.replace('_', '-')}={path}" for name, path in certificates.issue("host").items()]
    command = ["-m", "terrace", "train", "host", f"--network={network(4)}", f"--dataset={shapes}", "--strategy=sgd"]
    command += [f"--folder={tmp_path / 'run'}", f"--tokens={book}", "--port=0", *secured]
    async with service_process(command, ready_file=tmp_path / "ready") as host:
        ca = certificates.ca
        for token, trusted, reason in (("pi", None, "certificate"), ("mallory", ca, "not for"), ("ann", ca, "role")):
            options = WorkerOptions(
                find_host=at(host.url),
                name="pi-1",
                dataset=str(shapes),
                token=lambda token=token: (tmp_path / token).read_text().strip(),  # type: ignore[misc]
                tls_ca=trusted,
                patience_s=0.0,
            )
            with pytest.raises(TerraceError, match=reason):
                await work(options)
        async with httpx.AsyncClient(verify=client_context(certificates.ca), base_url=host.url) as http:
            assert (await http.get("/v1/run")).status_code == 401
            worker = {"Authorization": f"Bearer {(tmp_path / 'pi').read_text().strip()}"}
            assert (await http.delete("/v1/run", headers=worker)).status_code == 403
            drop = {"order": "drop"}
            assert (await http.put("/v1/workers/pi-1/order", headers=worker, json=drop)).status_code == 403
        words = ["--dataset", str(shapes), "--threads", "1", "--token-file", str(tmp_path / "pi"), "--name", "pi-1"]
        worker_command = [*TERRACE, "train", "work", host.url, *words, f"--tls-ca={ca}"]
        process = await asyncio.create_subprocess_exec(*worker_command)
        assert await asyncio.wait_for(process.wait(), 120) == 0
        assert await host.exit_code() == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["updates"] == 20


async def test_a_scheduler_shows_a_run_to_people_and_workers_and_stops_it(
    network: Network, shapes: Path, tmp_path: Path
) -> None:
    scheduler_command = ["-m", "terrace", "scheduler", "--port=0", f"--state={tmp_path / 'state'}"]
    async with service_process(scheduler_command, ready_file=tmp_path / "s") as scheduler:
        command = ["-m", "terrace", "train", "host", f"--network={network(4_000)}", f"--dataset={shapes}"]
        command += [f"--folder={tmp_path / 'run'}", "--strategy=sgd", f"--scheduler={scheduler.url}"]
        command += ["--min-gflops=0.001", "--min-memory-mb=1", "--share-data"]

        def at(port: int) -> list[str]:
            # Nobody listens at the first address.
            addresses = f"http://127.0.0.1:{free_port()},http://127.0.0.1:{port}"
            return [*command, f"--port={port}", f"--advertise-url={addresses}"]

        flags = ["--scheduler", scheduler.url, "--dataset", str(shapes), "--threads", "1"]
        async with AsyncClient(scheduler.url) as client:
            async with service_process(at(free_port()), ready_file=tmp_path / "h") as host:
                work = await asyncio.create_subprocess_exec(*TERRACE, "train", "work", "--name", "w", *flags)
                try:
                    run = await until(client, lambda run: run.done > 20)
                    assert (run.network, run.strategy, run.state) == ("net", "sgd", RunState.RUNNING)
                    assert [worker.name for worker in run.workers] == ["w"]
                    # From which the page tells how to join, and whether scores mean anything.
                    assert (run.config["share_data"], run.config["strategy"]["trust"]) == (True, None)
                    await client.order_worker(run, "w", "pause")
                    run = await until(client, lambda run: run.workers[0].standing == "paused")
                    assert run.workers[0].wish is None
                    await client.order_worker(run, "w", "trust")
                    run = await until(client, lambda run: run.workers[0].standing == "trusted")
                    host.kill()
                    await host.exit_code()
                    before = run.version
                    async with service_process(at(free_port()), ready_file=tmp_path / "again") as second:
                        # The worker finds it at its new address.
                        run = await until(client, lambda run: run.version > before + 20)
                        assert (await client.stop_run(run.id)).state is RunState.STOPPING
                        assert await second.exit_code() == 0
                        assert await asyncio.wait_for(work.wait(), 60) == 0
                finally:
                    if work.returncode is None:
                        work.kill()
                        await work.wait()
            run = await until(client, lambda run: run.state.final)
            assert run.state is RunState.STOPPED


async def until(client: AsyncClient, condition: Callable[[Run], bool]) -> Run:
    """The only run, as soon as `condition` holds for it."""
    found: list[Run] = []

    async def holds() -> bool:
        runs = (await client.runs()).runs
        found[:] = [await client.run(runs[0].id)] if runs else []
        return bool(found) and condition(found[0])

    await wait_for(holds, timeout_s=90, what="the run")
    return found[0]
