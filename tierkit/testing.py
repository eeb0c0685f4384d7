"""Aids for tests: a clock that stands still, services on real sockets, services as processes, waiting for conditions.

Nothing here is imported by a service.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette

from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import Build, running
from tierkit.settings import ServiceSettings
from tierkit.tensors import TensorSpec

__all__ = [
    "FakeClock",
    "MadeModel",
    "Say",
    "ServiceProcess",
    "Talker",
    "connected",
    "listening",
    "serve_app",
    "service_process",
    "talking",
    "wait_for",
]

_POLL_S = 0.005


class MadeModel:
    """Properties of a test's network, with defaults; a subclass adds its tensors and `run`."""

    name = "made"
    platform = "numpy_test"
    sha256 = "ab" * 32
    inputs = (TensorSpec(name="images", datatype="UINT8", shape=(-1, 4, 4, 3)),)
    labels: Mapping[str, Sequence[str]] = {}
    parameters: Mapping[str, str | int | float | bool] = {}


@dataclass
class FakeClock:
    """A monotonic clock that moves only on request; call it for the time in seconds."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, by_s: float) -> None:
        self.now_s += by_s


async def wait_for(
    condition: Callable[[], bool | Awaitable[bool]], *, timeout_s: float = 30.0, what: str = "the condition"
) -> None:
    """Wait until `condition` is true.

    Raises:
        AssertionError: it was not true within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if result if isinstance(result, bool) else await result:
            return
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}"
        await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def serve_app(app: Starlette | Build, settings: ServiceSettings | None = None) -> AsyncIterator[Lifecycle]:
    """Serve an application in this event loop on a real socket, with the shell that it has in production.

    Yields its `Lifecycle`: `.url` is where it listens; `.drain()` does what SIGTERM does.
    """
    lifecycle = Lifecycle()
    build: Build = (lambda _: app) if isinstance(app, Starlette) else app
    async with running(build, settings or ServiceSettings(drain_s=2.0), lifecycle=lifecycle):
        yield lifecycle


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Say = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handler: Handler, *, port: int = 0) -> AsyncIterator[str]:
    """Run a raw TCP server that can act like a faulty peer; yields its http URL. None of its connections outlives the
    block."""
    open_here: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The other side may give up first.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        with contextlib.suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(handle(reader, writer))
        open_here[task] = writer
        task.add_done_callback(open_here.pop)

    server = await asyncio.start_server(take, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        # A connection that was accepted a moment ago is handed to `take` in one of the next rounds of the loop.
        for _ in range(3):
            await asyncio.sleep(0)
        # A task that has not begun would not close anything when it is cancelled.
        tasks = list(open_here)
        for task, writer in open_here.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Talker:
    """A server of `talking`: its URL, and the numbers of its connections so far and of ended ones."""

    def __init__(self) -> None:
        self.url = ""
        self.opened = self.closed = 0


@asynccontextmanager
async def talking(say: Say) -> AsyncIterator[Talker]:
    """A raw HTTP server that reads requests and has `say` write what it likes to each, while it listens."""
    seen = Talker()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.opened += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = (line.partition(b":") for line in head.lower().split(b"\r\n"))
                lengths = [int(value) for name, _, value in fields if name == b"content-length"]
                await reader.readexactly(sum(lengths))
                await say(writer)
        finally:
            seen.closed += 1

    async with listening(handle) as seen.url:
        yield seen


@asynccontextmanager
async def connected(
    url: str, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a raw connection to a service, to act like a faulty client. On exit it is aborted, with unsent data
    dropped."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@dataclass
class ServiceProcess:
    """A service in a separate process, started by its command."""

    process: asyncio.subprocess.Process
    ready: Mapping[str, str] = field(default_factory=dict)
    output: bytearray = field(default_factory=bytearray)
    """Output so far, of both streams."""

    @property
    def url(self) -> str:
        return self.ready["url"]

    @property
    def log(self) -> str:
        return self.output.decode(errors="replace")

    def terminate(self) -> None:
        """SIGTERM: drain and exit."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: gone without a word."""
        self.process.kill()

    async def exit_code(self, *, timeout_s: float = 60.0) -> int:
        """Wait for its end."""
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()


@asynccontextmanager
async def service_process(
    command: Sequence[str],
    *,
    ready_file: Path,
    wait_ready: bool = True,
    environment: Mapping[str, str] | None = None,
    inside: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> AsyncIterator[ServiceProcess]:
    """Run `python -P <command> --ready-file <ready_file>` and yield it. Example of a command: `["-m", "end_node",
    "--port", "0"]`.

    Args:
        wait_ready: True to wait until it has written its ready file.
        inside: command that runs it in another place and becomes it (`["ip", "netns", "exec", "host"]`).

    Raises:
        AssertionError: it was not ready within `timeout_s`, or exited before; the message holds its output.
    """
    process = await asyncio.create_subprocess_exec(
        *inside,
        sys.executable,
        "-P",
        *command,
        "--ready-file",
        str(ready_file),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
    )
    service = ServiceProcess(process)
    reading = asyncio.create_task(_collect(service))
    try:
        deadline = time.monotonic() + timeout_s
        while wait_ready and not (ready := _read_ready(ready_file)):
            in_time = process.returncode is None and time.monotonic() < deadline
            assert in_time, f"{command} did not become ready (exit code {process.returncode}):\n{service.log}"
            await asyncio.sleep(_POLL_S)
        service.ready = ready if wait_ready else {}
        yield service
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


def _read_ready(path: Path) -> dict[str, str]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


async def _collect(service: ServiceProcess) -> None:
    assert service.process.stdout is not None
    while chunk := await service.process.stdout.read(65536):
        service.output += chunk
