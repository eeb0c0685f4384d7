"""Processes of Terrace that another one starts, watches and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierkit.errors import ServiceFailed
from tierkit.orphan import PARENT_VARIABLE

__all__ = ["TERRACE", "Started", "flags_of", "started_processes"]

TERRACE = (sys.executable, "-P", "-m", "terrace", "train")
"""-P, or a foreign folder models/ in the current directory would be imported."""

_STOP_S = 15.0
_KEPT_LINES = 5


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
    """Words of a command line; a setting of None or False is left out, several values are joined by commas."""
    words: list[str] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return words
