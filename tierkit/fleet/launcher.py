"""Runs the services of a plan as processes of this machine, each started by the command that a person would use."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from tierkit.atomic import write_atomically
from tierkit.client import AsyncClient, Backoff
from tierkit.errors import DeadlineExceeded, ServiceFailed, Unavailable
from tierkit.fleet.plan import SCHEDULER, FleetPlan, ServicePlan
from tierkit.orphan import PARENT_VARIABLE
from tierkit.types import Health, Tier

__all__ = ["Exit", "Fleet", "LaunchOptions", "RunningService", "launch"]

TERRACE = (sys.executable, "-P", "-m", "terrace")
"""The usual command. -P, or a foreign folder models/ in the current directory would be imported."""

_READY_POLL_S, _JOIN_POLL_S = 0.02, 0.1
_MAX_LINE_BYTES = 1 << 20
_KEPT_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End of a service."""

    name: str
    code: int
    """Exit code; negative for the signal that killed it."""
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        if self.code >= 0:
            return f"{self.name} stopped with exit code {self.code}"
        return f"{self.name} was killed by {signal.Signals(-self.code).name}"


@dataclass(slots=True, kw_only=True)
class RunningService:
    """A process of the fleet."""

    plan: ServicePlan
    process: asyncio.subprocess.Process
    ready_file: Path
    watcher: asyncio.Task[None] | None = None
    url: str = ""
    exit: Exit | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def alive(self) -> bool:
        return self.process.returncode is None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of a launch."""

    on_line: Callable[[str, str], None] = lambda name, line: None
    """Called with the name of a service and a line that it wrote."""
    on_exit: Callable[[Exit], None] = lambda end: None
    """Called when a service ends that was not asked to."""
    on_ready: Callable[[RunningService], None] = lambda service: None
    """Called when a service is ready."""
    start_s: float = 120.0
    """Seconds until all services must be ready, if the scheduler is one of them."""
    stop_s: float = 15.0
    """Seconds that all services have to finish their work."""
    token: Callable[[], str] | None = None
    """Returns the token of a user, which the scheduler's device list needs."""
    tls_ca: Path | None = None
    """File with the certificates to trust then."""
    command: Sequence[str] = TERRACE
    """Starts a service, followed by its kind and its flags."""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """The running services of one machine; made by `launch`."""

    plan: FleetPlan
    folder: Path
    options: LaunchOptions
    services: dict[str, RunningService] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a service has ended; the waiter clears it."""
    _attended: bool = False
    """True while the end of a service is reported: not while starting, when it is an error, nor while stopping."""

    @property
    def scheduler_url(self) -> str:
        return self.plan.scheduler_url or self.services[SCHEDULER].url

    @property
    def alive(self) -> tuple[RunningService, ...]:
        """The services that still run."""
        return tuple(service for service in self.services.values() if service.alive)

    async def start(self, *, budget_s: float) -> None:
        """Start all services and wait until each says that it is ready: the scheduler first, then the nodes at once.
        Nodes of a scheduler elsewhere get their networks from there, so they are waited for until it is there.

        Raises:
            ServiceFailed: a service stopped before it was ready; the message ends with what it said.
            DeadlineExceeded: a service was not ready within the budget.
        """
        deadline = time.monotonic() + budget_s
        if self.plan.scheduler is not None:
            await self._ready(await self._spawn(self.plan.scheduler), deadline)
        else:
            deadline = math.inf
        nodes = [await self._spawn(node) for node in self.plan.nodes]
        for node in nodes:
            await self._ready(node, deadline)
        self._attended = True

    async def join(self, *, budget_s: float) -> None:
        """Wait until the scheduler lists every node of this machine as alive.

        Raises:
            DeadlineExceeded: it did not within the budget.
            ServiceFailed: a node stopped, or the scheduler that runs here.
            Unauthenticated, Forbidden, CertificateError: the scheduler does not tell us.
        """
        deadline = time.monotonic() + budget_s
        wanted = {node.name for node in self.plan.nodes}
        once = Backoff(attempts=1, failover_s=0.0)
        async with AsyncClient(
            self.scheduler_url,
            timeout_s=budget_s,
            backoff=once,
            token=self.options.token,
            tls_ca=self.options.tls_ca,
        ) as client:
            while True:
                try:
                    listed = {device.node_id for device in await client.devices() if device.health is Health.ALIVE}
                except Unavailable:
                    listed = set()
                if wanted <= listed:
                    return
                for name in (wanted - listed) | (self.services.keys() & {SCHEDULER}):
                    _check_alive(self.services[name])
                if time.monotonic() > deadline:
                    late = ", ".join(sorted(wanted - listed))
                    raise DeadlineExceeded(f"not in the device list after {budget_s:g} s: {late}")
                await asyncio.sleep(_JOIN_POLL_S)

    async def restart(self, name: str, *, budget_s: float) -> None:
        """Start a service again that has ended or is about to, and wait until it reports that it is ready.

        Raises:
            SetupError, DeadlineExceeded: see `start`.
        """
        deadline = time.monotonic() + budget_s
        await _ended([self.services[name]], budget_s)
        await self._ready(await self._spawn(self.services[name].plan), deadline)

    async def stop(self, *, budget_s: float) -> None:
        """SIGTERM and wait, tier by tier from below, so that work under way still finds the tiers above it; the
        scheduler last. What has not ended within the budget is killed."""
        self._attended = False
        deadline = time.monotonic() + budget_s
        for kinds in ((Tier.END,), (Tier.EDGE, Tier.CLOUD), (SCHEDULER,)):
            going = [service for service in self.alive if service.plan.kind in kinds]
            _signal(going, signal.SIGTERM)
            await _ended(going, max(0.0, deadline - time.monotonic()))
        self.kill()
        await _ended(self.services.values(), None)

    def kill(self) -> None:
        """End everything at once."""
        self._attended = False
        _signal(self.alive, signal.SIGKILL)

    async def _spawn(self, plan: ServicePlan) -> RunningService:
        ready_file = self.folder / f"{plan.name}.ready"
        ready_file.unlink(missing_ok=True)  # of a process that was killed
        settings = {**plan.settings, "ready_file": str(ready_file)}
        if plan.tables:
            config = self.folder / f"{plan.name}.toml"
            write_atomically(config, tomli_w.dumps(plan.tables).encode())
            settings = {**settings, "config": str(config)}
        if plan.kind != SCHEDULER:
            # Several nodes share a machine, so none insists on its usual port.
            settings = {"node_id": plan.name, "scheduler": self.scheduler_url, "port": "0", **settings}
        process = await asyncio.create_subprocess_exec(
            *self.options.command,
            *ServicePlan(name=plan.name, kind=plan.kind, settings=settings).arguments(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_MAX_LINE_BYTES,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            # A session of its own: Ctrl-C in the terminal reaches the launcher alone, which then stops all in order.
            start_new_session=True,
        )
        service = RunningService(plan=plan, process=process, ready_file=ready_file)
        service.watcher = asyncio.create_task(self._watch(service), name=f"watch {plan.name}")
        self.services[plan.name] = service
        return service

    async def _ready(self, service: RunningService, deadline: float) -> None:
        while not service.ready_file.exists():
            _check_alive(service)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{service.name} was not ready in time")
            await asyncio.sleep(_READY_POLL_S)
        service.url = json.loads(service.ready_file.read_text(encoding="utf-8"))["url"]
        self.options.on_ready(service)

    async def _watch(self, service: RunningService) -> None:
        """Pass on the lines of the service until it ends, then report its end unless it was asked to stop."""
        output = service.process.stdout
        assert output is not None
        while True:
            try:
                line = await output.readline()
            except ValueError:
                # A line above the limit; the reader has dropped it.
                continue
            if not line:
                break
            text = line.decode("utf-8", "replace").rstrip()
            service.last_lines.append(text)
            self.options.on_line(service.name, text)
        code = await service.process.wait()
        service.exit = Exit(name=service.name, code=code, last_lines=tuple(service.last_lines))
        self.changed.set()
        if self._attended:
            self.options.on_exit(service.exit)


@asynccontextmanager
async def launch(plan: FleetPlan, folder: Path, options: LaunchOptions | None = None) -> AsyncIterator[Fleet]:
    """A running fleet; leaving the block stops every process, after an error too.

    Args:
        folder: for the ready files; must exist.
    """
    fleet = Fleet(plan=plan, folder=folder, options=options or LaunchOptions())
    try:
        await fleet.start(budget_s=fleet.options.start_s)
        yield fleet
    finally:
        stopping = asyncio.ensure_future(fleet.stop(budget_s=fleet.options.stop_s))
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            # Cancelled once more while it was stopping: no more patience.
            fleet.kill()
            await stopping
            raise


def _check_alive(service: RunningService) -> None:
    if end := service.exit:
        said = end.last_lines[-1] if end.last_lines else "it said nothing"
        raise ServiceFailed(f"{end}: {said.removeprefix(f'terrace {service.plan.kind}: ')}", code=end.code)


def _signal(services: Iterable[RunningService], number: signal.Signals) -> None:
    for service in services:
        if service.alive:
            service.process.send_signal(number)


async def _ended(services: Iterable[RunningService], budget_s: float | None) -> None:
    watchers = [service.watcher for service in services if service.watcher is not None]
    if watchers:
        await asyncio.wait(watchers, timeout=budget_s)
