"""A run whose host and workers are processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierkit.errors import ServiceFailed, TerraceError
from tierkit.http.client import open_client
from tierkit.orphan import PARENT_VARIABLE
from training.messages import RESULT, RunStatus
from training.worker.connection import HostConnection

__all__ = ["LocalRun", "Started", "flags_of", "run_here", "started_processes"]

_TERRACE = (sys.executable, "-P", "-m", "terrace", "train")
"""-P, or a foreign folder models/ in the current directory would be imported."""

_LOOK_S = 0.1
_STOP_S = 15.0
_MOST_RESTARTS = 100
_KEPT_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """What to train, and with how many workers."""

    host: Mapping[str, object]
    """Settings of the host, by the names of its flags; those that are None are left out."""
    worker: Mapping[str, object]
    """The same of each worker."""
    workers: int
    on_line: Callable[[str, str], None] = lambda name, line: None
    """Called with the name of a process and a line that it has written."""
    on_start: Callable[[str, int], None] = lambda name, pid: None
    """Called when a process has been started."""


@dataclass(slots=True)
class Started:
    """A process that was started here."""

    name: str
    arguments: list[str]
    process: asyncio.subprocess.Process
    watcher: asyncio.Task[int]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    @property
    def failure(self) -> ServiceFailed:
        """The error of a process that has ended by itself, or was killed."""
        code = self.process.returncode or 0
        if code < 0:
            return ServiceFailed(f"{self.name} was killed by {signal.Signals(-code).name}", code=code)
        words = [line for line in self.last_lines if not line.startswith("{")]  # no progress
        last = words[-1] if words else "it said nothing"
        said = re.sub(r"^terrace (host|rank \d+): ", "", last)
        return ServiceFailed(f"{self.name} stopped with exit code {code}: {said}", code=code)


async def run_here(run: LocalRun, watch: Callable[[RunStatus], None] = lambda status: None) -> dict[str, Any]:
    """Train to the end. A process that is killed is started again; the host goes on from its folder.

    Args:
        watch: called with how the run is, ten times a second.

    Returns:
        The host's result; its `faults` count the processes that were killed as well.

    Raises:
        ServiceFailed: the host, or all workers, have ended with an error; the message ends with what was said last.
    """
    with tempfile.TemporaryDirectory(prefix="terrace-") as folder:
        ready = Path(folder) / "host.ready"
        async with started_processes(run.on_line, run.on_start) as start, open_client() as http:
            host = await start(
                "host",
                [
                    *_TERRACE,
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
            command = [*_TERRACE, "work", url, *flags_of(run.worker)]
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
    """What a host that has ended has left in its folder."""
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


@contextlib.asynccontextmanager
async def started_processes(
    on_line: Callable[[str, str], None], on_start: Callable[[str, int], None]
) -> AsyncIterator[Callable[..., Any]]:
    """Starts processes, and ends all of them on the way out: the first one last, so that others can say farewell."""
    started: dict[str, Started] = {}

    async def start(
        name: str, arguments: list[str], again: Started | None = None, environment: Mapping[str, str] | None = None
    ) -> Started:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
        running = again or Started(name, arguments, process, asyncio.ensure_future(asyncio.sleep(0, 0)))
        running.process = process
        running.watcher = asyncio.create_task(_watch(running, on_line), name=f"watch {name}")
        started[name] = running
        on_start(name, process.pid)
        return running

    try:
        yield start
    finally:
        ending = asyncio.ensure_future(_end(list(started.values())))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise


async def _end(processes: Sequence[Started]) -> None:
    for chosen in (processes[1:], processes[:1]):
        for number in (signal.SIGTERM, signal.SIGKILL):
            going = [each for each in chosen if each.process.returncode is None]
            for each in going:
                each.process.send_signal(number)
            if going:
                await asyncio.wait([each.watcher for each in going], timeout=_STOP_S)


async def _watch(running: Started, on_line: Callable[[str, str], None]) -> int:
    output = running.process.stdout
    assert output is not None
    while line := await output.readline():
        text = line.decode("utf-8", "replace").rstrip()
        running.last_lines.append(text)
        on_line(running.name, text)
    return await running.process.wait()


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """Words of a command line; a setting of None is left out."""
    given = ((name, value) for name, value in settings.items() if value is not None)
    return [word for name, value in given for word in (f"--{name.replace('_', '-')}", str(value))]
