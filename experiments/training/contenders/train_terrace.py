# mypy: ignore-errors
# What it shares with the rivals is found beside it only.
"""Terrace: a host and worker processes over HTTP, as `terrace train run` starts them, watched over HTTP as well."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import Digits, Measuring, task, tell
from torch import nn

from models.training.config import CONFIGS
from tierkit.errors import TerraceError
from tierkit.http.address import free_port
from tierkit.http.client import open_client
from training.local import LocalRun, run_here
from training.wire import unpack
from training.worker.connection import HostConnection

_NETWORK = "mnist-64-64"
_EPOCHS = 10_000
"""Far more than it takes, so that the rate stays what it is at first."""
_STRATEGY = """\
family = "outer"
period = {period}
"""
"""`fedavg`, with as many local steps as are asked for."""
_LOOK_S = 0.02


async def measured(url: str, asked: argparse.Namespace) -> None:
    """Look at the host's weights until they are good enough."""
    digits = Digits(asked.data)
    network, measure = digits.network(), Measuring(digits)
    async with open_client() as http:
        host = HostConnection("observer", "0" * 16, http, url=url)
        while True:
            await asyncio.sleep(_LOOK_S)
            if not measure.due:
                continue
            try:
                spec = await host.spec()
            except TerraceError:
                continue  # it is being started
            async with http.get(f"{url}/v1/weights") as answer:
                values, _ = unpack(await answer.read(), values=spec.values, buffers=spec.buffers)
            status = await host.status()
            if not status.updates:
                continue
            began = time.monotonic()
            nn.utils.vector_to_parameters(torch.from_numpy(values.copy()), network.parameters())
            if (accuracy := measure(network)) >= asked.accuracy:
                # From the first unit of work to the last update, and what it took to find out.
                seconds = status.seconds + time.monotonic() - began
                tell(seconds=seconds, accuracy=accuracy, updates=status.updates, bytes_sent=status.bytes_sent)
                return


def planned(asked: argparse.Namespace, folder: Path, port: int) -> LocalRun:
    """The run, its configurations in a folder."""
    network, strategy = folder / f"{_NETWORK}.toml", folder / "strategy.toml"
    text = (CONFIGS / f"{_NETWORK}.toml").read_text(encoding="utf-8")
    text = text.replace("epochs = 20\n", f"epochs = {_EPOCHS}\nwarmup = 1e-9\n")
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
