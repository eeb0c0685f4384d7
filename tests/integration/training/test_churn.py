"""A run whose workers come and go, against the same run whose workers stay: four real processes with a quarter of a
core each.

On demand, on a machine with nothing else to do, with MNIST below TERRACE_DATA:
`pytest -m benchmark tests/integration/training/test_churn.py`. TERRACE_PAIRS says how often both are run (3),
TERRACE_EPOCHS how long (16).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tierkit.testing import service_process, wait_for

pytestmark = [pytest.mark.train, pytest.mark.benchmark, pytest.mark.anyio, pytest.mark.timeout(3600)]

WORKERS, SHARE, STAY_S, PUSH = 4, 0.25, 20.0, 5
MOST, POINT = 1.3, 0.01
_START_S = 6.0
"""What it takes a worker to be there. The next one is started so long before the other is killed."""
_BUDGET_S = 600.0


class Place:
    """One of the four: somebody who works, and after a while somebody else."""

    def __init__(self, number: int, url: str, http: httpx.AsyncClient, gate: Path) -> None:
        self._number, self._url, self._http, self._gate = number, url, http, gate
        self._worker: asyncio.subprocess.Process | None = None
        self._came = 0.0
        self.count = 0
        self.stays: list[float] = []

    async def change(self) -> None:
        """Start a worker; as soon as it has brought an update it takes the place of the one before, which is killed
        without a word."""
        self.count += 1
        name = f"w{self._number}-{self.count}"
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "experiments.training.paced", self._url, f"--name={name}"),
            *(f"--share={SHARE}", f"--period={PUSH}", f"--gate={self._gate}", "--give-way=no"),
            f"--data={os.environ['TERRACE_DATA']}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:

            async def contributes() -> bool:
                status = (await self._http.get("/v1/run")).raise_for_status().json()["status"]
                if worker.returncode is not None:
                    assert status["state"] != "running", f"{name} has ended with exit code {worker.returncode}"
                    return True
                return any(each["name"] == name and each["updates"] for each in status["workers"])

            await wait_for(contributes, timeout_s=120, what=name)
        except BaseException:
            await _kill(worker)
            raise
        before, self._worker = self._worker, worker
        if before is not None:
            await _kill(before)
            self.stays.append(time.monotonic() - self._came)
        self._came = time.monotonic()

    async def come_and_go(self, chance: random.Random) -> None:
        with contextlib.suppress(httpx.TransportError):  # the host has ended
            while True:
                await asyncio.sleep(chance.expovariate(1 / (STAY_S - _START_S)))
                await self.change()

    async def end(self) -> None:
        if self._worker is not None:
            await _kill(self._worker)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


@contextlib.asynccontextmanager
async def owned(tasks: list[asyncio.Task[None]]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def trained(folder: Path, strategy: Path, seed: int, epochs: int, *, churn: bool) -> dict[str, Any]:
    """The host's result, and how long workers stayed."""
    command = ["-m", "terrace", "train", "host", "--network=mnist-64-64", f"--strategy={strategy}", "--port=0"]
    command += [f"--epochs={epochs}", f"--seed={seed}", "--lease-s=5", f"--folder={folder}"]
    async with (
        service_process(command, ready_file=folder.with_suffix(".ready")) as host,
        httpx.AsyncClient(base_url=host.url, timeout=10, trust_env=False) as http,
    ):
        places = [Place(number, host.url, http, strategy) for number in range(WORKERS)]
        try:
            await asyncio.gather(*(place.change() for place in places))
            chance = random.Random(seed)
            going = [asyncio.create_task(place.come_and_go(chance)) for place in places] if churn else []
            async with owned(going):
                assert await host.exit_code(timeout_s=_BUDGET_S) == 0
        finally:
            await asyncio.gather(*(place.end() for place in places))
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return {**result, "stays": [stay for place in places for stay in place.stays]}


async def test_a_run_ends_in_little_more_time_although_its_workers_stay_twenty_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "TERRACE_DATA" not in os.environ:
        pytest.skip("needs MNIST, in the folder that TERRACE_DATA names")
    epochs = int(os.environ.get("TERRACE_EPOCHS", "16"))
    strategy = tmp_path / "strategy.toml"
    strategy.write_text(f'family = "server"\nrule = "adagrad"\nrate = 0.05\nperiod = {PUSH}\n')
    ratios, losses = [], []
    for seed in range(int(os.environ.get("TERRACE_PAIRS", "3"))):
        found = {}
        for churn in (False, True) if seed % 2 else (True, False):
            found[churn] = await trained(tmp_path / f"{seed}-{churn}", strategy, seed, epochs, churn=churn)
        calm, stormy = found[False], found[True]
        ratios.append(stormy["seconds"] / calm["seconds"])
        losses.append(calm["accuracy"] - stormy["accuracy"])
        stays = stormy["stays"]
        with capsys.disabled():
            sys.stdout.write(
                f"\nseed {seed}: {calm['seconds']:.1f} s calm, {stormy['seconds']:.1f} s with {len(stays)} workers "
                f"killed after {statistics.fmean(stays) if stays else 0:.1f} s on average, {ratios[-1]:.3f} of it; "
                f"accuracy {calm['accuracy']:.4f} and {stormy['accuracy']:.4f}; {stormy['faults']} faults; "
                f"load {os.getloadavg()[0]:.1f}\n"
            )
        assert stormy["updates"] == calm["updates"]
    assert statistics.median(ratios) <= MOST
    assert statistics.fmean(losses) <= POINT
