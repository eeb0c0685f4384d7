"""Runs one after the other while host and workers are killed and stopped, and their connections break.

On demand: `pytest -m benchmark tests/integration/training/test_chaos.py`, with MNIST below TERRACE_DATA.
TERRACE_CHAOS_FAULTS and TERRACE_CHAOS_SEED say how many faults, and which.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from experiments.chaos.faults import LINK, Fault, Kind, plan_faults
from experiments.chaos.relay import Relay
from tierkit.http.address import free_port
from tierkit.testing import wait_for

pytestmark = [pytest.mark.train, pytest.mark.benchmark, pytest.mark.anyio, pytest.mark.timeout(1_500)]

FAULTS = int(os.environ.get("TERRACE_CHAOS_FAULTS", "100"))
SEED = int(os.environ.get("TERRACE_CHAOS_SEED", "0"))
WORKERS = ("worker-1", "worker-2", "worker-3")
NETWORK, STEPS, PUSH = "mnist-100", 11_000, 10
PROGRESS = 5
"""Updates between two faults: each meets a run that has got over the one before."""
_BUDGET_S = 90.0
_PASSES_S = 5.0
"""For a message to come by that a fault is to strike."""
_UPDATE_BYTES = 4_096

STRATEGY = f"""
family = "server"
rule = "sgd"
period = {PUSH}
momentum = 0.0
rate = 0.02
"""
"""A rate at which the order of the updates hardly matters. On virtual time without faults, 1 to 3 workers of different
speeds had accuracies from 0.9263 to 0.9268 (seven runs of 5 epochs). With the network's own rate they had 0.928 to
0.960, and a point would have said nothing about faults."""


@dataclass(kw_only=True)
class World:
    """One run: a host, and workers, each of which reaches it by a relay of its own."""

    folder: Path
    port: int
    relays: dict[str, Relay]
    http: httpx.AsyncClient
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    seen: list[tuple[int, int]] = field(default_factory=list)
    """Updates and version, each time that somebody looked."""

    async def start(self, name: str) -> None:
        """Start, or start again, the host or a worker."""
        if name == "host":
            strategy = self.folder.parent / "strategy.toml"
            command = ["host", f"--network={NETWORK}", f"--strategy={strategy}", f"--folder={self.folder}"]
            command += [f"--workers={len(WORKERS)}", f"--port={self.port}", "--lease-s=3", "--max-lease-wait-s=2"]
        else:
            command = ["work", self.relays[name].url, "--name", name, "--threads", "1"]
        with (self.folder.parent / f"{self.folder.name}-{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "terrace", "train", *command),
                stdout=log,
                stderr=log,
            )
        if name == "host":
            await wait_for(self.reachable, timeout_s=_BUDGET_S, what="the host")

    async def look(self) -> dict[str, Any] | None:
        """How the run is; None while the host cannot say it. What was seen before still holds."""
        try:
            status: dict[str, Any] = (await self.http.get("/v1/run")).raise_for_status().json()["status"]
        except httpx.HTTPError:
            return None
        now = status["updates"], status["version"]
        # An update is on disk before its answer, and so is what the host says of it.
        assert not self.seen or (now[0] >= self.seen[-1][0] and now[1] >= self.seen[-1][1])
        self.seen.append(now)
        return status

    async def reachable(self) -> bool:
        return self.over or await self.look() is not None

    @property
    def over(self) -> bool:
        """Whether the host has ended by itself. Raises AssertionError if that was no success, or a worker gave up."""
        code = self.processes["host"].returncode
        assert code in (None, 0, -signal.SIGKILL), f"the host has ended with {code}: {self.log('host')}"
        if code is None and not (self.folder / "result.json").exists():
            for name in WORKERS:
                found = self.processes[name].returncode if name in self.processes else None
                assert found in (None, -signal.SIGKILL), f"{name} has ended with {found}: {self.log(name)}"
        return code == 0

    def log(self, name: str) -> str:
        return (self.folder.parent / f"{self.folder.name}-{name}.log").read_text()[-2_000:]

    async def progress(self) -> bool:
        """Wait for some updates; False where the run has ended instead."""
        before: int | None = None

        async def enough() -> bool:
            nonlocal before
            if self.over:
                return True
            status = await self.look()
            if status is not None and before is None:
                before = status["updates"]
            return status is not None and before is not None and status["updates"] >= before + PROGRESS

        await wait_for(enough, timeout_s=_BUDGET_S, what="progress")
        return not self.over

    async def inflict(self, fault: Fault) -> bool:
        """Do a fault, and what mends it; whether it struck."""
        await asyncio.sleep(fault.after_s)
        process = self.processes[fault.target]
        relays = list(self.relays.values()) if fault.target == "host" else [self.relays[fault.target]]
        if fault.kind in LINK:
            return await relays[0].strike(fault.kind, fault.direction, fault.lasts_s, budget_s=_PASSES_S)
        if process.returncode is not None:
            return False
        match fault.kind:
            case Kind.KILL:
                process.kill()
                await process.wait()
                await asyncio.sleep(fault.lasts_s)
                await self.start(fault.target)
            case Kind.STOP:
                process.send_signal(signal.SIGSTOP)
                # Twice as long as elsewhere, so that some leases expire meanwhile.
                await asyncio.sleep(2 * fault.lasts_s)
                process.send_signal(signal.SIGCONT)
            case Kind.REFUSE:
                for relay in relays:
                    relay.refuse()
                await asyncio.sleep(fault.lasts_s)
                for relay in relays:
                    await relay.open()
        return True

    async def result(self) -> dict[str, Any]:
        """Of the run, at its end."""
        await wait_for(lambda: self.over, timeout_s=4 * _BUDGET_S, what="the end of the run")
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found


@contextlib.asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    port = free_port()
    relays = {name: Relay(("127.0.0.1", port), work_bytes=_UPDATE_BYTES) for name in WORKERS}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as http:
        there = World(folder=folder, port=port, relays=relays, http=http)
        try:
            for relay in relays.values():
                await relay.open()
            for name in ("host", *WORKERS):
                await there.start(name)
            yield there
        finally:
            for process in there.processes.values():
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            for relay in relays.values():
                await relay.close()


def plan() -> Iterator[Fault]:
    """Faults without end. Where a scheduler's database would be locked, the host is killed."""
    for fault in plan_faults(SEED, 10 * FAULTS, scheduler="host", nodes=[WORKERS], disk=False):
        yield replace(fault, kind=Kind.KILL) if fault.kind is Kind.LOCK else fault


async def test_no_run_is_lost_and_no_update_counts_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "TERRACE_DATA" not in os.environ:
        pytest.skip("needs MNIST, in the folder that TERRACE_DATA names")
    (tmp_path / "strategy.toml").write_text(STRATEGY)

    def tell(what: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{what}")
            sys.stdout.flush()

    began = time.monotonic()
    async with world(tmp_path / "quiet") as there:
        quiet = await there.result()
    tell(f"quiet: accuracy {quiet['accuracy']:.4f}, {quiet['updates']} updates, {time.monotonic() - began:.0f} s")
    assert (quiet["updates"], quiet["faults"]) == (STEPS // PUSH, 0)
    struck: Counter[str] = Counter()
    results: list[dict[str, Any]] = []
    faults = plan()
    while struck.total() < FAULTS:
        began, before = time.monotonic(), struck.total()
        async with world(tmp_path / f"run-{len(results)}") as there:
            while struck.total() < FAULTS and await there.progress():
                fault = next(faults)
                if await there.inflict(fault):
                    struck[f"{fault.kind} {fault.target.partition('-')[0]}"] += 1
            result = await there.result()
            # Of the last looks, none is of more than there was in the end.
            assert there.seen[-1][0] <= result["updates"]
        results.append(result)
        tell(
            f"run {len(results)}: accuracy {result['accuracy']:.4f}, {result['updates']} updates, "
            f"{struck.total() - before} faults, of which the host saw {result['faults']}, "
            f"{time.monotonic() - began:.0f} s"
        )
    tell(f"{struck.total()} faults: {dict(sorted(struck.items()))}\n")
    assert {result["updates"] for result in results} == {STEPS // PUSH}
    assert max(abs(result["accuracy"] - quiet["accuracy"]) for result in results) <= 0.01
