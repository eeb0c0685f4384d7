"""What a worker beside a serving node costs the node's requests, with `--while-idle`.

On demand, on a machine with nothing else to do, with MNIST below TERRACE_DATA:
`pytest -m benchmark tests/integration/training/test_while_idle.py`. TERRACE_WINDOW_S says how long each of the windows
is (60 s).
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import time
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
from models.data import read_sample
from models.kept.store import KeptStore
from models.manifest import load_manifest, weights_folder
from tests.own_networks import kept_picture, png
from tierkit.testing import service_process, wait_for
from tierkit.types import Tier
from training.improve.plan import Plan, training_of, write_plan
from training.own_data import OwnData
from training.strategies.config import OuterConfig

pytestmark = [pytest.mark.train, pytest.mark.benchmark, pytest.mark.anyio, pytest.mark.timeout(3600)]

ROUNDS = 3
RATES = (3.0, 30.0)
"""Requests a second of one image: so few that the worker works between them, and so many that it stands back."""
MOST = 1.1
MOST_CORES = 0.1 * 1.1
"""A tenth of a core, over three windows in which nobody stops the worker."""


async def latencies_ms(target: Target, rate: float, window_s: float, seed: int) -> list[float]:
    level = await loaded(target, Open(rate), LoadPlan(window_s=window_s, warmup_s=2.0, seed=seed))
    assert {sample.outcome for sample in level.samples} == {OK}
    return [1000 * (sample.done - sample.due) for sample in level.samples]


def learning_plan(folder: Path) -> tuple[Path, Path]:
    """The plan of a run that improves the end network that ships, and pictures for it: those of the sample."""
    manifest = load_manifest(weights_folder())
    entry, classes = manifest.default_for(Tier.END), manifest.hierarchy
    content = (weights_folder() / entry.file).read_bytes()
    own = OwnData.of(entry, content, classes, release=f"{entry.name}@1")
    plan = folder / "plan"
    plan.mkdir()
    write_plan(
        plan, Plan(own=own, network=training_of(entry, steps=1_000_000), strategy=OuterConfig(period=8)), content
    )
    sample = read_sample()
    assert sample.fine is not None
    store = KeptStore(folder / "kept", 10_000_000)
    for number, (pixels, label) in enumerate(zip(sample.images[:300], sample.fine[:300].tolist(), strict=True), 1):
        file = png(pixels)
        coarse = classes.parent[label]
        picture = kept_picture(number, 0, file, coarse_label=coarse, local=coarse, classes=classes.digest)
        store.keep(dataclasses.replace(picture, label=label), file)
    store.close()
    return plan, folder / "kept"


def cpu_s(process: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("kind", ["a data set", "kept pictures"])
async def test_a_worker_beside_a_node_costs_a_tenth_of_its_p99_at_most(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "TERRACE_DATA" not in os.environ:
        pytest.skip("needs MNIST, in the folder that TERRACE_DATA names")
    learns = kind == "kept pictures"
    window_s = float(os.environ.get("TERRACE_WINDOW_S", "60"))
    tier = Tier.END if learns else Tier.EDGE
    host = ["-m", "terrace", "train", "host", "--port=0", f"--folder={tmp_path / 'run'}"]
    worker: list[str] = []
    if learns:
        plan, kept = learning_plan(tmp_path)
        host += ["--workers=1", f"--base={plan}"]
        worker = ["--kept", str(kept)]
    else:
        host += ["--network=mnist-100", "--strategy=fedavg", "--workers=1", "--epochs=100000"]
    node = ["-m", "terrace", tier, "--port=0", "--log-level=warning"]
    model = load_manifest(weights_folder()).default_for(tier).name
    async with (
        service_process(node, ready_file=tmp_path / "node") as serving,
        service_process(host, ready_file=tmp_path / "host") as training,
        httpx.AsyncClient(base_url=training.url, timeout=30, trust_env=False) as http,
    ):

        async def updates() -> int:
            status: dict[str, Any] = (await http.get("/v1/run")).raise_for_status().json()["status"]
            return sum(each["updates"] for each in status["workers"])

        async def begun() -> bool:
            return await updates() > (0 if learns else 3)

        target = infer_target(serving.url, model, 1, (32, 32, 3))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "terrace", "train", "work", training.url, "--name", "idle", *worker),
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
            # While a worker is stopped, its debt goes down, and it may work ahead. So its share is taken later.
            process.send_signal(signal.SIGCONT)
            await latencies_ms(target, RATES[0], window_s, seed=ROUNDS)
            start, used_before_s = time.monotonic(), cpu_s(process.pid)
            await latencies_ms(target, RATES[0], ROUNDS * window_s, seed=ROUNDS + 1)
            cores = (cpu_s(process.pid) - used_before_s) / (time.monotonic() - start)
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
                f"{model}, {rate:g} requests/s: p50 {percentile(with_it, 50):.2f} ms beside a worker on {kind}, "
                f"{percentile(without, 50):.2f} ms without; p99 {p99[0]:.2f} and {p99[1]:.2f} ms, "
                f"{ratios[rate]:.3f} of it; "
                f"n = {len(with_it):,} and {len(without):,}; {done[rate]:,} updates meanwhile; "
                f"load {os.getloadavg()[0]:.1f}\n"
            )
        sys.stdout.write(f"the worker used {cores:.3f} of a core at {RATES[0]:g} requests/s\n")
    assert not learns or cores <= MOST_CORES
    assert max(ratios.values()) <= MOST
