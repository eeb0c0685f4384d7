"""A worker of a run that has a share of a core: `python -m experiments.training.paced URL`. Needs torch.

It is the worker of `terrace train work`. After each step it rests for as long as a machine would still compute that is
slower by this share. Nothing of the system is needed for that, and a machine that slows down for a while slows down
what is measured with it as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tierkit import logs
from tierkit.orphan import die_with_parent

__all__ = ["PACED", "READY", "Pacer", "spread_of"]

READY = "paced: ready"
"""What a worker writes when it has joined, and waits to be let go."""
PACED = "paced: "
"""Begins the line that a worker writes at its end; a figure of its own follows each name, as JSON."""


class Pacer:
    """Rests after each step: for the processor time that was used since the last one, and what other threads used
    meanwhile, `1 / share - 1` times over. Time in which the process was ready and had no core counts as rest, since a
    machine of its own would not have lost it; time in which it waited for its host does not.

    Args:
        cpu_s: processor seconds of the whole process.
        kept_waiting_s: seconds in which it was ready to run, and did not.
        clock: seconds.
    """

    def __init__(
        self,
        share: float,
        *,
        cpu_s: Callable[[], float],
        kept_waiting_s: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rest = 1 / share - 1
        self._cpu_s, self._kept_waiting_s = cpu_s, kept_waiting_s
        self._clock, self._sleep = clock, sleep
        self._since: tuple[float, float] | None = None
        self._owed_s = 0.0
        self._began_at = self._ended_at = 0.0
        self.steps_s: list[float] = []
        """Processor time of each step, with all that was done for it; but for the first, which is much else."""

    def step(self) -> None:
        """A step has been computed."""
        cpu_s, kept_waiting_s = self._cpu_s(), self._kept_waiting_s()
        self._ended_at = self._clock()
        if self._since is None:
            self._began_at = self._ended_at
        else:
            used_s = cpu_s - self._since[0]
            self.steps_s.append(used_s)
            self._owed_s += self._rest * used_s - (kept_waiting_s - self._since[1])
            if self._owed_s > 0:
                self._sleep(self._owed_s)
                self._owed_s -= self._clock() - self._ended_at
        self._since = cpu_s, self._kept_waiting_s()

    def figures(self, period: int) -> dict[str, Any]:
        """What was used: `cpu_s` for `steps`, for each of the `updates` (seconds), and `cores`.

        Args:
            period: steps of an update.
        """
        whole = len(self.steps_s) // period
        updates = [sum(self.steps_s[period * number : period * (number + 1)]) for number in range(whole)]
        seconds = self._ended_at - self._began_at
        return {
            "steps": len(self.steps_s),
            "cpu_s": sum(self.steps_s),
            "updates": [round(each, 6) for each in updates],
            "cores": sum(self.steps_s) / seconds if seconds > 0 else 0.0,
        }


def spread_of(updates: Sequence[Sequence[float]]) -> float:
    """Standard deviation of what an update takes one worker and another at the same time, of its mean: what slows all
    of them down alike has no part in it.

    Args:
        updates: seconds by worker, in the order of its updates.
    """
    rounds = [each for each in zip(*updates, strict=False) if len(each) > 1]
    if not rounds:
        return 0.0
    return math.sqrt(statistics.fmean(statistics.variance(each) / statistics.fmean(each) ** 2 for each in rounds))


def _kept_waiting_s() -> float:
    """Of all threads of this process, as Linux counts it; 0 where it does not."""
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(file.read_bytes().split()[1])
        except (OSError, ValueError, IndexError):  # a thread that has just ended
            continue
    return total / 1e9


def _main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--name", required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--share", type=float, required=True)
    parser.add_argument("--period", type=int, required=True)
    parser.add_argument("--gate", type=Path, required=True)
    parser.add_argument("--give-way", choices=("yes", "no"), required=True)
    given = parser.parse_args(arguments)
    die_with_parent()

    from training.worker.finding import at
    from training.worker.idle import give_way
    from training.worker.node import WorkerOptions, work

    if given.give_way == "yes":
        give_way()
    logs.configure("info", "text", node_id="work")
    pacer = Pacer(given.share, cpu_s=time.process_time, kept_waiting_s=_kept_waiting_s)
    waits = go = False

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def may_work() -> bool:
        nonlocal waits, go
        if not waits:
            waits = True
            say(READY)
        go = go or given.gate.exists()
        return go

    options = WorkerOptions(find_host=at(given.url), name=given.name, data=given.data, threads=1, may_work=may_work)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        asyncio.run(work(options, lambda spec, step: pacer.step()))
    finally:
        say(PACED + json.dumps(pacer.figures(given.period)))


if __name__ == "__main__":
    _main(sys.argv[1:])
