"""What a worker beside a serving node costs the node's requests, with `--while-idle`.

On demand, on a machine with nothing else to do, with MNIST below TERRACE_DATA:
`pytest -m benchmark tests/integration/training/test_while_idle.py`. TERRACE_WINDOW_S says how long each of the windows
is (60 s).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from benchmarks.peers.measuring import loaded
from benchmarks.peers.requests import infer_target
from experiments.bench.load import LoadPlan, Open
from experiments.bench.summary import OK, percentile
from experiments.bench.targets import Target
from models.manifest import load_manifest, weights_folder
from tierkit.testing import service_process, wait_for
from tierkit.types import Tier

pytestmark = [pytest.mark.train, pytest.mark.benchmark, pytest.mark.anyio, pytest.mark.timeout(3600)]

ROUNDS = 3
RATES = (3.0, 30.0)
"""Requests a second of one image: so few that the worker works between them, and so many that it stands back."""
MOST = 1.1


async def latencies_ms(target: Target, rate: float, window_s: float, seed: int) -> list[float]:
    level = await loaded(target, Open(rate), LoadPlan(window_s=window_s, warmup_s=2.0, seed=seed))
    assert {sample.outcome for sample in level.samples} == {OK}
    return [1000 * (sample.done - sample.due) for sample in level.samples]


async def test_a_worker_beside_a_node_costs_a_tenth_of_its_p99_at_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "TERRACE_DATA" not in os.environ:
        pytest.skip("needs MNIST, in the folder that TERRACE_DATA names")
    window_s = float(os.environ.get("TERRACE_WINDOW_S", "60"))
    node = ["-m", "terrace", "edge", "--port=0", "--log-level=warning"]
    host = ["-m", "terrace", "train", "host", "--network=mnist-100", "--strategy=fedavg", "--port=0", "--workers=1"]
    host += ["--epochs=100000", f"--folder={tmp_path / 'run'}"]
    model = load_manifest(weights_folder()).default_for(Tier.EDGE).name
    async with (
        service_process(node, ready_file=tmp_path / "node") as serving,
        service_process(host, ready_file=tmp_path / "host") as training,
        httpx.AsyncClient(base_url=training.url, timeout=30, trust_env=False) as http,
    ):

        async def updates() -> int:
            status: dict[str, Any] = (await http.get("/v1/run")).raise_for_status().json()["status"]
            return int(status["updates"])

        async def begun() -> bool:
            return await updates() > 3

        target = infer_target(serving.url, model, 1, (32, 32, 3))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "terrace", "train", "work", training.url, "--name", "idle"),
            *("--while-idle", str(tmp_path / "node")),
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await wait_for(begun, timeout_s=120, what="updates of the worker")
            found: dict[tuple[float, bool], list[float]] = {}
            done: dict[float, int] = {}
            for number in range(ROUNDS):
                for rate in RATES:
                    for works in (True, False) if number % 2 else (False, True):
                        # Only to have windows without it: a worker stands back by itself.
                        process.send_signal(signal.SIGCONT if works else signal.SIGSTOP)
                        before = await updates()
                        found.setdefault((rate, works), []).extend(
                            await latencies_ms(target, rate, window_s, seed=number)
                        )
                        if works:
                            done[rate] = done.get(rate, 0) + await updates() - before
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
            await process.wait()
    ratios = {}
    with capsys.disabled():
        sys.stdout.write("\n")
        for rate in RATES:
            with_it, without = (sorted(found[rate, works]) for works in (True, False))
            p99 = [percentile(each, 99) for each in (with_it, without)]
            ratios[rate] = p99[0] / p99[1]
            sys.stdout.write(
                f"{model}, {rate:g} requests/s: p50 {percentile(with_it, 50):.2f} ms beside a worker, "
                f"{percentile(without, 50):.2f} ms without; p99 {p99[0]:.2f} and {p99[1]:.2f} ms, "
                f"{ratios[rate]:.3f} of it; "
                f"n = {len(with_it):,} and {len(without):,}; {done[rate]:,} updates meanwhile; "
                f"load {os.getloadavg()[0]:.1f}\n"
            )
    assert max(ratios.values()) <= MOST
