# mypy: ignore-errors
# What it shares with the rivals is found beside it only.
"""Terrace: a host and worker processes over HTTP, started like the processes of `terrace train run` and watched over
HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import Curve, Pictures, fill, task

from tierkit.errors import TerraceError
from tierkit.http.address import free_port
from tierkit.http.client import open_client
from training.local import LocalRun, run_here
from training.payloads import unpack
from training.worker.connection import HostConnection

_NETWORK = Path(__file__).with_name("wrn-10-1.toml")
_STRATEGY = """\
family = "outer"
period = {period}
"""
"""`fedavg`, with as many local steps as are asked for."""
_LOOK_S = 0.05


async def measured(url: str, asked: argparse.Namespace) -> None:
    """Measure the host's weights after each round until they are good enough."""
    pictures = Pictures(asked)
    network, curve = pictures.network(), Curve(pictures, asked.accuracy)
    version = 0
    async with open_client() as http:
        host = HostConnection("observer", "0" * 16, http, url=url)
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                status = await host.status()
            except TerraceError:
                continue  # it is being started
            if status.version == version:
                continue
            version, spec = status.version, await host.spec()
            async with http.get(f"{url}/v1/weights") as answer:
                values, buffers = unpack(await answer.read(), values=spec.values, buffers=spec.buffers)
            fill(network, torch.cat([torch.from_numpy(each.copy()) for each in (values, buffers)]))
            counts = {"updates": status.updates, "steps": status.done // asked.workers}
            # Seconds are from the first unit of work to the last update.
            if await asyncio.to_thread(curve.reached, network, status.seconds, **counts):
                return


def planned(asked: argparse.Namespace, folder: Path, port: int) -> LocalRun:
    """The run, its configurations in a folder."""
    network, strategy = folder / _NETWORK.name, folder / "strategy.toml"
    text = _NETWORK.read_text(encoding="utf-8")
    network.write_text(text.replace("peak_rate = 0.1\n", f"peak_rate = {asked.rate}\n"))
    strategy.write_text(_STRATEGY.format(period=asked.period))
    settings = {"network": network, "strategy": strategy, "workers": asked.workers, "seed": asked.seed, "port": port}
    return LocalRun(host=settings, worker={"threads": 1}, workers=asked.workers)


async def main() -> None:
    asked, port = task(), free_port()
    with TemporaryDirectory(prefix="terrace-") as folder:
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(run_here(planned(asked, Path(folder), port)))
            await measured(f"http://127.0.0.1:{port}", asked)
            training.cancel()


if __name__ == "__main__":
    asyncio.run(main())
