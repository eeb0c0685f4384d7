"""How soon a worker that joins in mid-run contributes.

On demand: `pytest -m benchmark tests/integration/training/test_joining.py`, with MNIST below TERRACE_DATA.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
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

pytestmark = [pytest.mark.train, pytest.mark.benchmark, pytest.mark.anyio, pytest.mark.timeout(600)]

NETWORK = "mnist-100"
JOINERS = 10
WITHIN_S = 5.0
_BUDGET_S = 60.0


@contextlib.asynccontextmanager
async def worker(url: str, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that works, and is told to end at last."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "terrace", "train", "work", url, "--name", name, "--threads", "1"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def knows_the_run(process: asyncio.subprocess.Process) -> None:
    """Return when the worker has the answer to its first request."""
    assert process.stderr is not None
    async with asyncio.timeout(_BUDGET_S):
        while b"the run is " not in (line := await process.stderr.readline()):
            assert line, f"the worker has ended with {await process.wait()}"


async def test_a_joiner_contributes_within_five_seconds_of_asking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "TERRACE_DATA" not in os.environ:
        pytest.skip("needs MNIST, in the folder that TERRACE_DATA names")
    since_start, since_request = list[float](), list[float]()
    command = ["-m", "terrace", "train", "host", f"--network={NETWORK}", "--strategy=downpour", "--port=0"]
    command += ["--epochs=1000", f"--folder={tmp_path / 'run'}"]
    async with (
        service_process(command, ready_file=tmp_path / "ready") as host,
        httpx.AsyncClient(base_url=host.url, timeout=10, trust_env=False) as http,
        worker(host.url, "first"),
    ):

        async def contributes(name: str) -> bool:
            status: dict[str, Any] = (await http.get("/v1/run")).raise_for_status().json()["status"]
            return any(each["name"] == name and each["updates"] for each in status["workers"])

        await wait_for(lambda: contributes("first"), timeout_s=_BUDGET_S, what="the first worker")
        for number in range(JOINERS):
            name, started = f"joiner-{number}", time.monotonic()
            async with worker(host.url, name) as process:
                await knows_the_run(process)
                asked = time.monotonic()
                await wait_for(lambda name=name: contributes(name), timeout_s=_BUDGET_S, what=name)  # type: ignore[misc]
                now = time.monotonic()
            since_start.append(now - started)
            since_request.append(now - asked)
    with capsys.disabled():
        for words, seconds in (("its start", since_start), ("its first request", since_request)):
            sys.stdout.write(
                f"\nfirst update of a joiner after {words}: median {statistics.median(seconds):.2f} s, "
                f"{min(seconds):.2f} to {max(seconds):.2f} s, n = {len(seconds)}; load {os.getloadavg()[0]:.1f}"
            )
        sys.stdout.write("\n")
    assert max(since_request) <= WITHIN_S
