"""Runs of real processes whose workers have a share of a core each, and the same runs on virtual time. Needs torch."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.peers.processes import cpu_s
from experiments.training.cores import CoreShare, core_shares
from experiments.training.running import NETWORK, SPREAD, sync_s
from experiments.training.virtual_time import Seen, of_a_step, thinned
from models.dataset import Dataset
from models.training.config import find_config
from tierkit.errors import DeadlineExceeded, SetupError
from training.local import LocalRun, run_here
from training.messages import RunStatus
from training.simulation import Machines, read_images, run_simulation
from training.strategies.config import STRATEGIES

__all__ = ["real_run", "real_runs", "step_s", "virtual_run"]

_BUDGET_S = 300.0
"""Of a run of processes."""
_EPOCHS = 100
"""Of a run that is ended before."""
_KNOWS_THE_RUN = "the run is "
"""What a worker writes before it reads its images."""


class _Enough(Exception):
    """The run has been seen for long enough."""


class _Gate:
    """Stops each worker when it knows its run; when all are there, gives each its share of a core and lets them go."""

    def __init__(self, shares: Sequence[CoreShare]) -> None:
        self._shares = shares
        self._stopped: list[int] = []

    @property
    def opened(self) -> bool:
        return len(self._stopped) == len(self._shares)

    def arrived(self, pid: int) -> None:
        """A worker knows its run."""
        if self.opened:
            return
        os.kill(pid, signal.SIGSTOP)
        self._stopped.append(pid)
        if self.opened:
            for share, stopped in zip(self._shares, self._stopped, strict=True):
                share.take(stopped)
            for stopped in self._stopped:
                os.kill(stopped, signal.SIGCONT)


async def real_runs(
    strategy: str,
    seed: int,
    *,
    runs: int,
    workers: int,
    share: float,
    epochs: int,
    data: Path | None,
    enough_s: float | None = None,
) -> list[dict[str, Any]]:
    """Train with `terrace train host` and so many `terrace train work`, which all begin at the same time.

    Args:
        runs: at the same time, each with a host of its own.
        workers: of each run.
        share: of a core, that each worker has. The hosts have what they need.
        enough_s: end a run when it has taken so long. Default: never.

    Returns:
        For each run `seconds` from the first unit of work to the last update, `updates`, `seen` (how many there were at
        which of these seconds) and `cores` (processor time of each worker by the time between the first and the last
        look).

    Raises:
        SetupError: the workers cannot be held to a share, or did not run to the end.
        ServiceFailed: as `run_here`.
        DeadlineExceeded: it takes too long.
    """
    with core_shares(*[None] * runs, *[share] * (runs * workers)) as shares:
        gate = _Gate(shares[runs:])
        wanted = {"network": NETWORK, "strategy": strategy, "workers": workers, "epochs": epochs, "seed": seed}
        return await asyncio.gather(
            *(_real_run(gate, host, {**wanted, "data": data}, workers, enough_s) for host in shares[:runs])
        )


async def _real_run(
    gate: _Gate, of_host: CoreShare, host: dict[str, Any], workers: int, enough_s: float | None
) -> dict[str, Any]:
    seen: list[Seen] = []
    sent: list[int] = []
    used: list[dict[str, float]] = []
    pids: dict[str, int] = {}

    def started(name: str, pid: int) -> None:
        if name == "host":
            of_host.take(pid)
        else:
            pids[name] = pid

    def written(name: str, line: str) -> None:
        if name in pids and _KNOWS_THE_RUN in line:
            gate.arrived(pids[name])

    def watch(status: RunStatus) -> None:
        if status.updates:
            seen.append((status.seconds, status.updates))
            sent.append(status.bytes_sent)
            used.append({name: cpu_s(pid) for name, pid in pids.items()} | {"at": asyncio.get_running_loop().time()})
        if enough_s is not None and status.seconds >= enough_s:
            raise _Enough

    plan = LocalRun(
        host=host, worker={"threads": 1, "data": host["data"]}, workers=workers, on_line=written, on_start=started
    )
    try:
        async with asyncio.timeout(_BUDGET_S):
            result = await run_here(plan, watch)
            seen.append((result["seconds"], result["updates"]))
    except _Enough:
        result = {"seconds": seen[-1][0], "updates": seen[-1][1], "bytes_sent": sent[-1], "faults": 0}
    except TimeoutError:
        raise DeadlineExceeded(f"a run of {host['strategy']} did not end within {_BUDGET_S:g} s") from None
    if not gate.opened or result["faults"]:
        raise SetupError(
            f"a run of {host['strategy']} had {result['faults']} faults, or workers that were not held back"
        )
    # The last look of all finds workers that have ended, whose processor time is not known any more.
    whole = [each for each in used if min(each.values()) > 0] or [{"at": 0.0}]
    elapsed = whole[-1]["at"] - whole[0]["at"]
    return {
        "seconds": result["seconds"],
        "updates": result["updates"],
        "bytes_sent": result["bytes_sent"],
        "seen": thinned(seen),
        "cores": [(whole[-1][name] - whole[0][name]) / elapsed for name in pids] if elapsed > 0 else [],
    }


async def real_run(
    strategy: str, seed: int, *, workers: int, share: float, epochs: int, data: Path | None
) -> dict[str, Any]:
    """One run to its end: `real_runs`."""
    (found,) = await real_runs(strategy, seed, runs=1, workers=workers, share=share, epochs=epochs, data=data)
    return found


async def step_s(
    strategy: str, seed: int, *, workers: int, share: float, serve_s: float, enough_s: float, data: Path | None
) -> dict[str, Any]:
    """What a step takes a worker with this share of a core, with all that it does for an update: the mean over so many
    that run at the same time, each with a host of its own. And what the disk takes to keep an update.

    Raises:
        SetupError, ServiceFailed, DeadlineExceeded: as `real_runs`.
    """
    alone = await real_runs(
        strategy, seed, runs=workers, workers=1, share=share, epochs=_EPOCHS, data=data, enough_s=enough_s
    )
    size = alone[0]["bytes_sent"] // alone[0]["updates"]
    kept_s = await asyncio.to_thread(sync_s, size, Path(tempfile.gettempdir()))
    host_s, push = 2 * serve_s + kept_s, STRATEGIES[strategy].push
    return {
        "step_s": statistics.fmean(of_a_step(each["seen"], steps=push, host_s=host_s) for each in alone),
        "sync_s": kept_s,
        "seen": [each["seen"] for each in alone],
        "cores": [cores for each in alone for cores in each["cores"]],
    }


def virtual_run(
    strategy: str,
    seed: int,
    *,
    workers: int,
    epochs: int,
    step_s: float,
    serve_s: float,
    sync_s: float,
    data: Path | None,
) -> dict[str, Any]:
    """The same run on virtual time, without gradients, which its time does not depend on."""
    config = find_config(NETWORK, None).model_copy(update={"seed": seed, "epochs": epochs})
    images, test = read_images(config, Dataset.open(config.dataset, data))
    machines = Machines(workers=workers, step_s=step_s, serve_s=serve_s, sync_s=sync_s, spread=SPREAD)
    return run_simulation(config, STRATEGIES[strategy], images, test, machines, gradients=False)
