"""Terrace: a host and worker processes over HTTP, as `terrace train run` starts them."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from models.training.config import CONFIGS
from training.local import LocalRun, run_here
from training.messages import RunStatus

_NETWORK = "mnist-64-64"
_EPOCHS = 10_000
"""Far more than it takes, so that the rate stays what it is at first."""
_STRATEGY = """\
family = "outer"
local_steps = {period}
"""
"""`fedavg`, with as many local steps as are asked for."""


class _Reached(Exception):
    """The run is to end."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--period", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--accuracy", type=float, required=True)
    asked = parser.parse_args()
    with TemporaryDirectory(prefix="terrace-") as folder:
        network, strategy = Path(folder, f"{_NETWORK}.toml"), Path(folder, "strategy.toml")
        text = (CONFIGS / f"{_NETWORK}.toml").read_text(encoding="utf-8")
        text = text.replace("epochs = 20\n", f"epochs = {_EPOCHS}\nwarmup = 1e-9\n")
        network.write_text(text.replace("peak_rate = 0.1\n", f"peak_rate = {asked.rate}\n"))
        strategy.write_text(_STRATEGY.format(period=asked.period))
        run = LocalRun(
            host={"network": network, "strategy": strategy, "workers": asked.workers, "seed": asked.seed},
            worker={"threads": 1},
            workers=asked.workers,
        )

        def watch(status: RunStatus) -> None:
            if status.accuracy is not None and status.accuracy >= asked.accuracy:
                result = {
                    "seconds": status.seconds,
                    "accuracy": status.accuracy,
                    "updates": status.updates,
                    "bytes_sent": status.bytes_sent,
                }
                print(json.dumps(result), flush=True)  # noqa: T201
                raise _Reached

        try:
            asyncio.run(run_here(run, watch))
        except _Reached:
            return


if __name__ == "__main__":
    main()
