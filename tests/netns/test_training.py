"""A training run on three hosts, with tokens and TLS: one of the two workers is cut off in mid-run, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.cli import run
from tests.integration.access.conftest import Certificates, certificates
from tests.integration.training.conftest import CONFIG
from tests.netns.network import Network
from tests.shapes import write_shapes
from tierkit.access import client_context
from tierkit.testing import ServiceProcess, service_process, wait_for

pytestmark = [pytest.mark.netns, pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(300)]

__all__ = ["certificates"]  # the fixture

PORT = 8074
EPOCHS, STEPS = 30, 150
LEASE_S = 4
_BUDGET_S = 90.0


def log_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


@contextlib.asynccontextmanager
async def working(
    network: Network,
    folder: Path,
    url: str,
    name: str,
    ca: Path,
    *images: str,
    program: Sequence[str] = ("-m", "terrace"),
    ends_well: bool = True,
) -> AsyncIterator[asyncio.Task[Any]]:
    """A worker on the host of its name; the task's result is what it has printed as JSON.

    Args:
        images: flags that say where it has its training images from.
        ends_well: whether its exit code has to be 0.
    """
    command = [*network[name].inside, sys.executable, "-P", *program, "train", "work", url, "--name", name, "--json"]
    command += ["--token-file", str(folder / name), "--tls-ca", str(ca), "--threads", "1", "--patience-s", "60"]
    with log_of(folder, name).open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, *images, stdout=asyncio.subprocess.PIPE, stderr=log)

    async def ends() -> Any:
        printed, _ = await process.communicate()
        if not ends_well:
            return None
        assert process.returncode == 0, log_of(folder, name).read_text()
        return json.loads(printed)

    ending = asyncio.create_task(ends())
    try:
        yield ending
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.wait([ending])


def prepare(folder: Path, certificates: Certificates, address: str) -> list[str]:
    """Images, a configuration and tokens; the host's command, with a certificate for this address."""
    shapes, network, book = write_shapes(folder / "shapes"), folder / "net.toml", folder / "tokens.toml"
    network.write_text(CONFIG.format(epochs=EPOCHS))
    for name, role in (("w1", "worker"), ("w2", "worker"), ("ann", "user")):
        out = ["--tokens", str(book), "--out", str(folder / name)]
        assert run(["token", "create", "--name", name, "--role", role, *out]) == 0
    flags = {
        "network": network,
        "dataset": shapes,
        "strategy": "sgd",
        "wire": "bf16",
        "folder": folder / "run",
        "lease-s": LEASE_S,
        "host": address,
        "port": PORT,
        "tokens": book,
        **{name.replace("_", "-"): path for name, path in certificates.issue("train-host", address).items()},
    }
    return ["-m", "terrace", "train", "host", *(f"--{name}={value}" for name, value in flags.items())]


async def test_a_worker_is_cut_off_and_every_step_counts_once(
    network: Network, certificates: Certificates, tmp_path: Path
) -> None:
    user, hub, cut_off, other = (network.add(name) for name in ("ann", "train-host", "w1", "w2"))
    command = prepare(tmp_path, certificates, hub.address)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(network.here(user))
        # An update takes about as long on any machine: what the link needs for it.
        for host in (cut_off, other):
            stack.enter_context(network.slow(host, "2mbit"))
        host_process: ServiceProcess = await stack.enter_async_context(
            service_process(command, ready_file=tmp_path / "ready", inside=hub.inside)
        )
        http = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=f"https://{hub.address}:{PORT}",
                verify=client_context(certificates.ca),
                headers={"Authorization": f"Bearer {(tmp_path / 'ann').read_text().strip()}"},
                timeout=30,
            )
        )
        working_there = [
            await stack.enter_async_context(
                working(
                    network,
                    tmp_path,
                    str(http.base_url),
                    name,
                    certificates.ca,
                    f"--dataset={tmp_path / 'shapes'}",
                )
            )
            for name in ("w1", "w2")
        ]

        async def status() -> dict[str, Any]:
            found: dict[str, Any] = (await http.get("/v1/run")).raise_for_status().json()["status"]
            return found

        async def updates(name: str) -> int:
            return sum(each["updates"] for each in (await status())["workers"] if each["name"] == name)

        async def more_of(name: str, than: int, how_many: int = 5) -> None:
            async def enough() -> bool:
                return await updates(name) >= than + how_many

            await wait_for(enough, timeout_s=_BUDGET_S, what=f"updates of {name}")

        for name in ("w1", "w2"):
            await more_of(name, 0)
        with network.cut(cut_off):
            before = {name: await updates(name) for name in ("w1", "w2")}

            async def expired() -> bool:
                return bool((await status())["faults"])

            await wait_for(expired, timeout_s=_BUDGET_S, what="the end of its lease")
            await more_of("w2", before["w2"])
            # For less than that, its connections would wait and go on.
            told = log_of(tmp_path, "w1")
            await wait_for(lambda: "away" in told.read_text(), timeout_s=_BUDGET_S, what="w1 to notice")
            during = await status()
            silent = next(each for each in during["workers"] if each["name"] == "w1")
            # What was on its way when the link was cut may have come.
            assert silent["updates"] <= before["w1"] + 1
            assert silent["idle_s"] >= LEASE_S / 2
            assert during["state"] == "running"
        await more_of("w1", silent["updates"])
        done = [await asyncio.wait_for(each, _BUDGET_S) for each in working_there]
        assert await host_process.exit_code(timeout_s=_BUDGET_S) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["updates"] == STEPS
    assert sum(each["updates"] for each in done) == STEPS
    assert result["faults"] >= 1
    assert result["accuracy"] > 2 / 3
