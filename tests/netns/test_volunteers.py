"""A host and three workers without images of their own, on machines of their own: one is killed, one is added, one
cheats, and the network becomes as good as in a calm run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.cli import run
from tests.integration.access.conftest import Certificates, certificates
from tests.netns.network import Network
from tests.netns.test_training import PORT, working
from tierkit.access import client_context
from tierkit.testing import service_process, wait_for

pytestmark = [
    pytest.mark.netns,
    pytest.mark.train,
    pytest.mark.anyio,
    pytest.mark.timeout(600),
    pytest.mark.skipif("TERRACE_DATA" not in os.environ, reason="needs MNIST: set TERRACE_DATA"),
]

__all__ = ["certificates"]  # the fixture

CHEATING = Path(__file__).with_name("cheating.py")
WORKERS = ("w1", "w2", "w3", "w4")
STRATEGY = """
family = "outer"
period = 10

[trust]
centre = "median"
"""
DATA_PORT = 8075
EPOCHS = 4
_BUDGET_S = 240.0


def prepare(folder: Path, certificates: Certificates, address: str) -> list[str]:
    """A strategy and tokens; the host's command, with a certificate for this address."""
    folder.mkdir()
    strategy, book = folder / "trust.toml", folder / "tokens.toml"
    strategy.write_text(STRATEGY)
    for name, role in (*((name, "worker") for name in WORKERS), ("ann", "user")):
        out = ["--tokens", str(book), "--out", str(folder / name)]
        assert run(["token", "create", "--name", name, "--role", role, *out]) == 0
    flags = {
        "network": "mnist-100",
        "data": os.environ["TERRACE_DATA"],
        "strategy": strategy,
        "workers": 3,
        "epochs": EPOCHS,
        "folder": folder / "run",
        "lease-s": 4,
        "host": address,
        "port": PORT,
        "tokens": book,
        **{name.replace("_", "-"): path for name, path in certificates.issue("train-host", address).items()},
    }
    return ["-m", "terrace", "train", "host", "--share-data", *(f"--{name}={value}" for name, value in flags.items())]


async def one_run(network: Network, certificates: Certificates, folder: Path, *, calm: bool) -> dict[str, Any]:
    """What came of a run with three workers; if it is not calm, the first one is killed, the third one cheats, and a
    fourth one joins."""
    user, hub = network.add("ann"), network.add("train-host")
    for each in WORKERS:
        network.add(each)
    command, go = prepare(folder, certificates, hub.address), folder / "go"
    os.mkfifo(go)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(network.here(user))
        host = await stack.enter_async_context(service_process(command, ready_file=folder / "ready", inside=hub.inside))
        http = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=f"https://{hub.address}:{PORT}",
                verify=client_context(certificates.ca),
                headers={"Authorization": f"Bearer {(folder / 'ann').read_text().strip()}"},
                timeout=30,
            )
        )

        def worker(
            name: str, *, cheats: bool = False, ends_well: bool = True
        ) -> contextlib.AbstractAsyncContextManager[asyncio.Task[Any]]:
            here = network[name].address
            own = {key.replace("_", "-"): path for key, path in certificates.issue(name, here).items()}
            images = ["--fetch=own", f"--cache={folder / 'cache'}", f"--serve-data={here}:{DATA_PORT}"]
            images += [f"--{key}={path}" for key, path in own.items() if key in ("tls-cert", "tls-key")]
            program = (str(CHEATING), str(go)) if cheats else ("-m", "terrace")
            return working(
                network,
                folder,
                str(http.base_url),
                name,
                certificates.ca,
                *images,
                program=program,
                ends_well=ends_well,
            )

        async def standings() -> dict[str, tuple[str, int]]:
            status = (await http.get("/v1/run")).raise_for_status().json()["status"]
            return {each["name"]: (each["standing"], each["updates"]) for each in status["workers"]}

        doomed = contextlib.AsyncExitStack()
        stack.push_async_callback(doomed.aclose)
        first = await doomed.enter_async_context(worker("w1", ends_well=calm))
        staying = [await stack.enter_async_context(worker("w2"))]
        third = await stack.enter_async_context(worker("w3", cheats=not calm, ends_well=calm))
        if not calm:

            async def the_honest_work() -> bool:
                found = await standings()
                return all(found.get(name, ("", 0))[1] > 0 for name in ("w1", "w2"))

            # Against one honest worker, a faster cheater has the majority.
            await wait_for(the_honest_work, timeout_s=_BUDGET_S, what="updates of w1 and w2")
            await asyncio.to_thread(go.write_bytes, b"")

            async def one_is_caught() -> bool:
                found = await standings()
                return found.get("w3", ("", 0))[0] == "quarantined" and found.get("w1", ("", 0))[1] > 0

            await wait_for(one_is_caught, timeout_s=_BUDGET_S, what="the quarantine of w3")
            await doomed.aclose()  # killed in the middle of a unit
            staying.append(await stack.enter_async_context(worker("w4")))

            async def the_new_one_works() -> bool:
                return (await standings()).get("w4", ("", 0))[1] > 0

            await wait_for(the_new_one_works, timeout_s=_BUDGET_S, what="updates of w4")
        done = [await asyncio.wait_for(each, _BUDGET_S) for each in staying]
        assert all(each["updates"] > 0 for each in done)
        if calm:  # or they would be killed on their way out
            await asyncio.wait_for(asyncio.gather(first, third), _BUDGET_S)
        assert await host.exit_code(timeout_s=_BUDGET_S) == 0
    found: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return found


async def test_one_is_killed_one_is_added_one_cheats_and_the_network_is_as_good(
    certificates: Certificates, tmp_path: Path
) -> None:
    with Network() as network:
        calm = await one_run(network, certificates, tmp_path / "calm", calm=True)
    with Network() as network:
        rough = await one_run(network, certificates, tmp_path / "rough", calm=False)
    assert calm["accuracy"] > 0.85
    assert rough["accuracy"] > calm["accuracy"] - 0.02
