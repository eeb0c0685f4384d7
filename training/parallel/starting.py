"""Ranks that are processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierkit.http.address import free_port
from training.parallel.elastic import LIGHTHOUSE_VARIABLE, lighthouse
from training.processes import Started, flags_of, started_processes
from training.strategies.config import ExchangeConfig
from training.strategies.finding import find_strategy

__all__ = ["LocalRanks", "run_ranks_here"]

_RANK = (sys.executable, "-P", "-m", "training.parallel")
_LOOK_S = 0.1
_SETTLE_S = 3.0
"""Seconds for the others to end by themselves when one has ended with an error."""
_HANGS_S = 20.0
"""Seconds for the other members of an elastic run to end when one has ended; after that they hang."""
_MOST_RESTARTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRanks:
    """A run of ranks on this machine."""

    network: str
    settings: Mapping[str, object]
    """Settings of each rank, by the names of its flags; None leaves one out."""
    ranks: int
    on_line: Callable[[str, str], None] = lambda name, line: None
    """Called with the name of a rank and a line that it has written."""
    on_start: Callable[[str, int], None] = lambda name, pid: None
    """Called when a process has been started."""


async def run_ranks_here(
    run: LocalRanks, watch: Callable[[Mapping[str, Any]], None] = lambda progress: None
) -> dict[str, Any]:
    """Train to the end. A member of an elastic run that is killed is started again; else all end when one does.

    Args:
        watch: called with `training.parallel.reporting.RankProgress` as an object, some times a second.

    Returns:
        The result of rank 0; its `faults` are the processes that were started again.

    Raises:
        ServiceFailed: a rank has ended with an error; the message ends with what it said last.
        MissingExtra: an elastic run, and torchft is not installed.
    """
    strategy = find_strategy(str(run.settings["strategy"]))
    elastic = isinstance(strategy, ExchangeConfig) and strategy.elastic
    found: dict[str, Any] = {}

    def read(name: str, line: str) -> None:
        if line.startswith(('{"progress"', '{"result"')):
            found.update(said := json.loads(line))
            if "progress" in said:
                watch(said["progress"])
        else:
            run.on_line(name, line)

    with contextlib.ExitStack() as stack:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(run.ranks)}
        settings = dict(run.settings)
        if elastic:
            place[LIGHTHOUSE_VARIABLE] = stack.enter_context(lighthouse())
            # One that is started again begins where it was, should all others have ended.
            if settings.get("folder") is None:
                settings["folder"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="terrace-"))
        command = [*_RANK, run.network, *flags_of(settings), "--json"]
        killed, hung_at = 0, math.inf
        async with started_processes(read, run.on_start) as start:

            async def started(rank: int, again: Started | None = None) -> Started:
                here = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process: Started = await start(f"rank-{rank}", command, again, here)
                return process

            ranks = [await started(rank) for rank in range(run.ranks)]
            while going := [each for each in ranks if each.process.returncode is None]:
                await asyncio.wait([each.watcher for each in going], timeout=_LOOK_S, return_when="FIRST_COMPLETED")
                for rank, each in enumerate(ranks):
                    if elastic and (each.process.returncode or 0) < 0 and killed < _MOST_RESTARTS:
                        killed += 1
                        await started(rank, each)
                if elastic and any(each.process.returncode == 0 for each in ranks):
                    hung_at = min(hung_at, time.monotonic() + _HANGS_S)
                if time.monotonic() > hung_at:  # the others have the final weights, and so does their folder
                    if "result" in found:
                        break
                    ranks[0].process.kill()
                    hung_at = time.monotonic() + 2 * _HANGS_S
                if any(each.process.returncode for each in ranks):
                    await asyncio.wait([each.watcher for each in ranks], timeout=_SETTLE_S)
                    for each in ranks:
                        if each.process.returncode is None:
                            each.process.kill()  # it hangs: what it has kept is whole
                    raise _first_cause(ranks).failure
            await asyncio.gather(*(each.watcher for each in ranks if each.process.returncode is not None))
        return {**found["result"], "faults": killed}


def _first_cause(ranks: Sequence[Started]) -> Started:
    """The rank that ended first, as far as exit codes show; the others then miss it."""
    failed = [each for each in ranks if each.process.returncode]
    return min(failed, key=lambda each: (each.process.returncode == os.EX_TEMPFAIL, (each.process.returncode or 0) > 0))
