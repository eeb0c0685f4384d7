"""Ranks that `terrace train run`, torchrun and Ray Train start, and their reports to a scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.cli import run
from tests.integration.training.test_processes import until
from tests.rank_processes import rank_processes
from tierkit.client import AsyncClient, RunState
from tierkit.errors import Conflict, ServiceFailed
from tierkit.http.address import free_port
from tierkit.testing import service_process
from tierkit.wire.runs import WorkerOffer
from training.parallel.rank import RankOptions
from training.parallel.reporting import ReportsTo
from training.parallel.starting import LocalRanks, run_ranks_here

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(120)]

Network = Callable[[int], Path]


def test_train_run_starts_ranks_and_ends_with_one_object(
    network: Network, shapes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--strategy", "gossip", "--workers", "2", "--dataset", str(shapes), "--folder", str(tmp_path / "net")]
    assert run(["train", "run", str(network(8)), *flags, "--seed", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["strategy"], found["workers"], found["seed"], found["faults"]) == ("gossip", 2, 3, 0)
    assert found["accuracy"] > 1 / 3
    assert found["updates"] == 40
    assert json.loads((tmp_path / "net" / "result.json").read_bytes()) == found
    assert run(["models", "eval", "net", "--runs", str(tmp_path), "--dataset", str(shapes)]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategy", "gossip", "--wire", "int8"], "exchange in fp32"),
        (["--strategy", "sgd", "--device", "cuda:1"], "ranks also take cuda:N"),
        (["--strategy", "gossip", "--device", "tpu"], "no device 'tpu'"),
    ],
)
def test_options_that_do_not_fit_ranks_are_told(
    arguments: list[str], said: str, network: Network, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "run", str(network(1)), *arguments, "--dataset", str(shapes)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


async def test_a_rank_that_is_killed_ends_the_run(network: Network, shapes: Path, tmp_path: Path) -> None:
    pids: dict[str, int] = {}

    def kill(progress: Mapping[str, Any]) -> None:
        if progress["step"] > 20:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids["rank-1"], signal.SIGKILL)

    settings = {"strategy": "allreduce", "dataset": shapes, "folder": tmp_path / "run", "threads": 1}
    long = LocalRanks(network=str(network(4_000)), settings=settings, ranks=2, on_start=pids.__setitem__)
    with pytest.raises(ServiceFailed, match="rank-1 was killed by SIGKILL") as failure:
        await run_ranks_here(long, kill)
    assert failure.value.code == -9
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_rank_that_hangs_ends_the_run_after_the_budget(network: Network, shapes: Path) -> None:
    """Rank 0 keeps the store of the ranks, and torch itself would wait for it without end."""
    pids: dict[str, int] = {}

    def stop(progress: Mapping[str, Any]) -> None:
        if progress["step"] > 20:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids["rank-0"], signal.SIGSTOP)

    settings = {"strategy": "gossip", "dataset": shapes, "threads": 1, "patience_s": 3.0}
    long = LocalRanks(network=str(network(4_000)), settings=settings, ranks=2, on_start=pids.__setitem__)
    began = time.monotonic()
    with pytest.raises(ServiceFailed) as failure:
        await run_ranks_here(long, stop)
    assert failure.value.code == os.EX_TEMPFAIL
    assert time.monotonic() - began < 60


async def test_a_port_where_nothing_answers_ends_a_rank_after_the_budget(network: Network, shapes: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(silent.getsockname()[1]),
        }
        words = ["-m", "training.parallel", str(network(1)), f"--dataset={shapes}", "--patience-s=1"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", *words, env={**os.environ, **place}, stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
    assert process.returncode == os.EX_TEMPFAIL
    assert "another program listens there" in said.decode()


async def test_torchrun_starts_the_same_ranks(network: Network, shapes: Path, tmp_path: Path) -> None:
    words = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "training.parallel"]
    flags = [str(network(8)), f"--dataset={shapes}", "--strategy=allreduce"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", *words, *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    found = json.loads(out)
    assert (found["strategy"], found["workers"], found["updates"]) == ("allreduce", 2, 40)


async def test_a_scheduler_shows_ranks_and_stops_them(network: Network, shapes: Path, tmp_path: Path) -> None:
    scheduler_command = ["-m", "terrace", "scheduler", "--port=0", f"--state={tmp_path / 'state'}"]
    async with (
        service_process(scheduler_command, ready_file=tmp_path / "s") as scheduler,
        AsyncClient(scheduler.url) as client,
    ):
        options = RankOptions(
            network=str(network(20_000)),
            dataset=str(shapes),
            folder=tmp_path / "run",
            patience_s=20.0,
            scheduler=ReportsTo(urls=(scheduler.url,)),
        )
        with rank_processes(options, 2) as ranks:
            shown = await until(client, lambda run: run.done > 20)
            assert (shown.network, shown.strategy, shown.state) == ("net", "allreduce", RunState.RUNNING)
            assert [worker.name for worker in shown.workers] == ["rank-0", "rank-1"]
            assert shown.workers[0].bytes_sent > 0
            with pytest.raises(Conflict, match="takes no workers"):
                await client.match(WorkerOffer(name="w", run=shown.id))
            with pytest.raises(Conflict, match="take no orders"):
                await client.order_worker(shown.id, "rank-0", "pause")
            with pytest.raises(Conflict, match="takes no workers"):
                await client.invite(shown.id)
            assert (await client.stop_run(shown.id)).state is RunState.STOPPING
            for each in ranks:
                error = await asyncio.to_thread(each.ended)
                assert isinstance(error, Conflict)
                assert "the run was stopped after" in str(error)
        ended = await until(client, lambda run: run.state.final)
        assert ended.state is RunState.STOPPED
        assert list((tmp_path / "run").glob("rank-1-*"))


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_ray_train_starts_the_same_ranks(network: Network, shapes: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra 'ray'")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False)
    try:
        TorchTrainer(
            _train,
            train_loop_config={"network": str(network(8)), "dataset": str(shapes), "folder": tmp_path / "run"},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    found = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert (found["strategy"], found["workers"], found["updates"]) == ("allreduce", 2, 40)


def _train(options: dict[str, Any]) -> None:
    from training.parallel.running import run_rank

    run_rank(RankOptions(**options))
