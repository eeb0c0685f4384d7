"""A run whose host and workers are processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkit.errors import TerraceError
from tierkit.http.client import open_client
from training.messages import RESULT, RunStatus
from training.processes import TERRACE, Started, flags_of, started_processes
from training.worker.connection import HostConnection

__all__ = ["LocalRun", "run_here"]

_LOOK_S = 0.1
_MOST_RESTARTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """Training run of a host and several workers on this machine."""

    host: Mapping[str, object]
    """Settings of the host, by the names of its flags; unset ones are left out."""
    worker: Mapping[str, object]
    """Settings of each worker, in the same form."""
    workers: int
    on_line: Callable[[str, str], None] = lambda name, line: None
    """Called with the name of a process and a line that it has written."""
    on_start: Callable[[str, int], None] = lambda name, pid: None
    """Called when a process has been started."""


async def run_here(run: LocalRun, watch: Callable[[RunStatus], None] = lambda status: None) -> dict[str, Any]:
    """Train to the end. A process that is killed is started again, and the host continues from its folder.

    Args:
        watch: called with the status of the run, ten times a second.

    Returns:
        The host's result; its `faults` count the processes that were killed as well.

    Raises:
        ServiceFailed: the host, or all workers, have ended with an error; the message ends with its last output.
    """
    with tempfile.TemporaryDirectory(prefix="terrace-") as folder:
        ready = Path(folder) / "host.ready"
        async with started_processes(run.on_line, run.on_start) as start, open_client() as http:
            host = await start(
                "host",
                [
                    *TERRACE,
                    "host",
                    *flags_of({"port": 0, **run.host, "folder": run.host.get("folder") or folder}),
                    "--ready-file",
                    str(ready),
                ],
            )
            killed = 0

            async def again(each: Started) -> bool:
                """Start a process again if it was killed."""
                nonlocal killed
                if (each.process.returncode or 0) >= 0 or killed >= _MOST_RESTARTS:
                    return False
                killed += 1
                await start(each.name, each.arguments, each)
                return True

            # There is no limit of time: the host may have many images to read.
            while (url := _written_url(ready)) is None:
                if host.process.returncode is not None and not await again(host):
                    await host.watcher
                    if host.process.returncode == 0:  # of a run that had finished before
                        return _result(host, killed)
                    raise host.failure
                await asyncio.sleep(_LOOK_S)
            # One that is started again is to be found where it was.
            host.arguments += ["--port", url.rpartition(":")[2]]
            count = range(1, run.workers + 1)
            command = [*TERRACE, "work", url, *flags_of(run.worker)]
            workers = [await start(f"worker-{n}", [*command, "--name", f"worker-{n}"]) for n in count]
            connection = HostConnection("observer", "0" * 16, http, url=url)
            while True:
                for each in (host, *workers):
                    await again(each)
                if host.process.returncode is not None:
                    return _result(host, killed)
                # Asked in this order: workers end by themselves when there is nothing left to do.
                deserted = all(each.process.returncode is not None for each in workers)
                status = None
                with contextlib.suppress(TerraceError):  # the host is being started again
                    watch(status := await connection.status())
                if status is not None and deserted and not status.computed:
                    raise workers[-1].failure
                await asyncio.wait([each.watcher for each in (host, *workers)], timeout=_LOOK_S)
                await asyncio.sleep(_LOOK_S)


def _result(host: Started, killed: int) -> dict[str, Any]:
    """Return the result that an ended host has left in its folder."""
    kept = Path(host.arguments[host.arguments.index("--folder") + 1]) / RESULT
    if host.process.returncode != 0 or not kept.exists():
        raise host.failure
    result: dict[str, Any] = json.loads(kept.read_bytes())
    return {**result, "faults": result["faults"] + killed}


def _written_url(ready: Path) -> str | None:
    try:
        url: str = json.loads(ready.read_bytes())["url"]
    except FileNotFoundError:
        return None
    return url
