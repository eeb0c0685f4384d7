"""Runs of real processes whose workers have a share of a core each, and the same runs on virtual time. Needs torch."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.training.paced import PACED, READY, spread_of
from experiments.training.running import NETWORK, sync_s
from models.dataset import Dataset
from models.training.config import find_config
from tierkit.errors import DeadlineExceeded, SetupError
from training.local import LocalRun, run_here
from training.simulation import Machines, read_images, run_simulation
from training.strategies.config import STRATEGIES

__all__ = ["real_run", "request_steps", "virtual_run"]

_BUDGET_S = 300.0
"""Of a run of processes."""
_LAST_WORDS_S = 10.0
"""Of a worker whose host has ended."""
_PACED = (sys.executable, "-P", "-m", "experiments.training.paced")


async def real_run(
    strategy: str, seed: int, *, workers: int, share: float, epochs: int, data: Path | None, give_way: bool = False
) -> dict[str, Any]:
    """Train with `terrace train host` and so many paced workers, which all begin at the same time, to the end.

    Args:
        share: of a core, that each worker has. The host has what it needs.
        give_way: workers leave a core to the host at once when it wants one, which has then as good as a machine of its
            own. They would not come to anything where others compute.

    Returns:
        `seconds` from the first unit of work to the last update, `updates`; `step_s`, what a step takes a worker with
        its share, by the processor time that all used; `spread`, see `spread_of`; `cores` that each used of the time;
        and `sync_s`, what the disk takes to keep an update, measured after the run.

    Raises:
        SetupError: workers have died, or have said nothing.
        ServiceFailed: as `run_here`.
        DeadlineExceeded: it takes too long.
    """
    ready: set[str] = set()
    found: dict[str, dict[str, Any]] = {}
    told = asyncio.Event()
    period = STRATEGIES[strategy].period
    with tempfile.TemporaryDirectory(prefix="terrace-") as folder:
        gate = Path(folder) / "gate"

        def written(name: str, line: str) -> None:
            if line == READY:
                ready.add(name)
                if len(ready) == workers:
                    gate.touch()
            elif line.startswith(PACED):
                found[name] = json.loads(line.removeprefix(PACED))
                if len(found) == workers:
                    told.set()

        host = {"network": NETWORK, "strategy": strategy, "workers": workers, "epochs": epochs, "seed": seed}
        plan = LocalRun(
            host={**host, "data": data},
            worker={
                "data": data,
                "share": share,
                "period": period,
                "gate": gate,
                "give_way": "yes" if give_way else "no",
            },
            workers=workers,
            on_line=written,
            worker_command=_PACED,
        )
        try:
            async with asyncio.timeout(_BUDGET_S):
                result = await run_here(plan)
        except TimeoutError:
            raise DeadlineExceeded(f"a run of {strategy} did not end within {_BUDGET_S:g} s") from None
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await told.wait()
        except TimeoutError:
            raise SetupError(f"only {len(found)} of {workers} workers have said what they used") from None
    if result["faults"]:
        raise SetupError(f"a run of {strategy} had {result['faults']} faults")
    size = result["bytes_sent"] // result["updates"]
    used = list(found.values())
    return {
        "seconds": result["seconds"],
        "updates": result["updates"],
        "step_s": sum(each["cpu_s"] for each in used) / sum(each["steps"] for each in used) / share,
        "spread": spread_of([each["updates"] for each in used]),
        "cores": [each["cores"] for each in used],
        "sync_s": await asyncio.to_thread(sync_s, size, Path(tempfile.gettempdir())),
    }


async def request_steps(strategy: str, *, workers: int, share: float, epochs: int, data: Path | None) -> float:
    """What a request takes, a fetch of the weights or an update: from one paced worker to its host and back, without
    the disk, in steps of that worker. So many of them train at the same time, each with a host of its own, so that none
    waits for another one's requests, and the machine is as busy as in a run of as many.

    Args:
        strategy: one whose workers exchange often, or the figure is a small difference of two large ones.
    """
    runs = await asyncio.gather(
        *(
            real_run(strategy, seed, workers=1, share=share, epochs=epochs, data=data, give_way=True)
            for seed in range(workers)
        )
    )
    period = STRATEGIES[strategy].period
    return statistics.fmean(
        max(0.0, (each["seconds"] / each["updates"] - each["sync_s"]) / each["step_s"] - period) / 2 for each in runs
    )


def virtual_run(
    strategy: str,
    seed: int,
    *,
    workers: int,
    epochs: int,
    step_s: float,
    spread: float,
    serve_s: float,
    sync_s: float,
    data: Path | None,
) -> dict[str, Any]:
    """The same run on virtual time, without gradients, which its time does not depend on.

    Args:
        spread: standard deviation of what an update takes a worker, of its mean.
    """
    config = find_config(NETWORK, None).model_copy(update={"seed": seed, "epochs": epochs})
    images, test = read_images(config, Dataset.open(config.dataset, data))
    # Even between 1 - width and 1 + width, which has the standard deviation width / sqrt(3).
    width = min(1.0, math.sqrt(3) * spread)
    machines = Machines(workers=workers, step_s=step_s, serve_s=serve_s, sync_s=sync_s, spread=width)
    return run_simulation(config, STRATEGIES[strategy], images, test, machines, gradients=False)
