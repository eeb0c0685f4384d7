"""The fleet that faults are done to: every service behind a relay, and the hands that break and mend it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from experiments.chaos.faults import Fault, Kind
from experiments.chaos.relay import Relay
from tierkit.fleet import SCHEDULER, Fleet, FleetPlan
from tierkit.http.address import free_port
from tierkit.types import Health

__all__ = ["Sight", "World", "behind_relays", "small_disk"]

_DISK_MIB = 256
_WORK_S = 1.0
"""Seconds that a fault waits for work to strike."""
_RESTART_S = 60.0
_NOTICED_S = 1.5
"""Most seconds that a killed node stays away so that its death is noticed."""
_TASK_BYTES = 4096
"""A request to a node of fewer bytes carries no images."""
_SIGHT_S = 0.02
_GONE = (Health.DEAD, None)


class Sight:
    """The device list as the scheduler shows it, read again and again."""

    def __init__(self, scheduler_url: str) -> None:
        self._url = scheduler_url
        self.health: dict[str, Health] = {}
        self.busy: frozenset[str] = frozenset()
        """Nodes that hold work."""
        self.deaths: dict[str, float] = {}
        """Time when each node was last seen to become dead or to disappear (`time.monotonic`)."""
        self.blind_since = 0.0
        """Time when the list could not be read last."""
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Look until cancelled."""
        async with httpx.AsyncClient(base_url=self._url, timeout=1.0, trust_env=False) as http:
            while True:
                try:
                    devices = (await http.get("/v1/devices")).raise_for_status().json()["devices"]
                except (httpx.HTTPError, ValueError):
                    self.blind_since = time.monotonic()
                else:
                    self._take({str(device["node_id"]): device for device in devices}, time.monotonic())
                self._news.set()
                self._news.clear()
                await asyncio.sleep(_SIGHT_S)

    async def looked(self) -> None:
        """Wait for the next look at the list, whether it could be read or not."""
        await self._news.wait()

    def _take(self, devices: Mapping[str, Mapping[str, object]], now: float) -> None:
        health = {name: Health(str(device["health"])) for name, device in devices.items()}
        for name, before in self.health.items():
            if before is not Health.DEAD and health.get(name) in _GONE:
                self.deaths[name] = now
        self.health = health
        self.busy = frozenset(name for name, device in devices.items() if device["outstanding"] or device["in_flight"])


@asynccontextmanager
async def behind_relays(plan: FleetPlan) -> AsyncIterator[tuple[FleetPlan, dict[str, Relay]]]:
    """The plan on fixed ports, with a relay before each service by which the other services reach it."""
    relays: dict[str, Relay] = {}
    services = []
    try:
        for service in plan.services:
            host = service.settings.get("host", "127.0.0.1")
            port = free_port(host)
            work_bytes = 0 if service.kind == SCHEDULER else _TASK_BYTES
            relay = relays[service.name] = Relay((host, port), work_bytes=work_bytes)
            await relay.open()
            own = {"port": str(port)}
            if service.kind != SCHEDULER:
                own |= {"advertise_url": relay.url, "scheduler": relays[SCHEDULER].url}
            services.append(replace(service, settings={**service.settings, **own}))
        yield replace(plan, services=tuple(services)), relays
    finally:
        for relay in relays.values():
            await relay.close()


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small, separate disk at `folder`, which can be filled, and yield True if that worked. It needs root."""
    folder.mkdir()
    options = f"size={_DISK_MIB}m"
    mounted = os.geteuid() == 0 and (
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "terrace", str(folder)], capture_output=True).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


class World:
    """A fleet under faults.

    Args:
        state: the scheduler's state folder.
        relays: by name of the service behind each.
        sight: the device list.
    """

    def __init__(self, fleet: Fleet, relays: Mapping[str, Relay], sight: Sight, state: Path) -> None:
        self._fleet = fleet
        self._relays = relays
        self._sight = sight
        self._state = state
        self.troubled_until = 0.0
        """End of the time in which the scheduler itself was struck. The device list before it does not count."""

    async def inflict(self, fault: Fault) -> dict[str, object]:
        """Do one fault, wait for its end, and mend what it broke; returns what is known of it."""
        await asyncio.sleep(fault.after_s)
        if fault.kind in (Kind.RESET, Kind.CUT, Kind.DELAY, Kind.DUPLICATE):
            relay = self._relays[fault.target]
            struck = await relay.strike(fault.kind, fault.direction, fault.lasts_s, budget_s=_WORK_S)
            return {"struck": struck, "at_work": struck}
        at_work = await self._wait_for_work(fault.target)
        if fault.target == SCHEDULER:
            self.troubled_until = float("inf")
        try:
            detection_s = await self._do(fault)
        finally:
            if fault.target == SCHEDULER:
                self.troubled_until = time.monotonic() + _WORK_S
        return {"struck": True, "at_work": at_work, "detection_s": detection_s}

    async def _do(self, fault: Fault) -> float | None:
        match fault.kind:
            case Kind.KILL:
                return await self._kill(fault)
            case Kind.STOP:
                return await self._stop(fault)
            case Kind.REFUSE:
                relay = self._relays[fault.target]
                relay.refuse()
                await asyncio.sleep(fault.lasts_s)
                await relay.open()
            case Kind.LOCK:
                await asyncio.to_thread(self._lock_database, fault.lasts_s)
            case Kind.FULL:
                await asyncio.to_thread(self._fill_disk, fault.lasts_s)
        return None

    async def _kill(self, fault: Fault) -> float | None:
        began = time.monotonic()
        relay = self._relays[fault.target]
        # As the kernel does it: the sockets of a process end with it.
        self._fleet.services[fault.target].process.send_signal(signal.SIGKILL)
        relay.refuse()
        detection_s = await self._detection(fault.target, began, _NOTICED_S)
        await asyncio.sleep(max(0.0, began + fault.lasts_s - time.monotonic()))
        await relay.open()
        await self._fleet.restart(fault.target, budget_s=_RESTART_S)
        return detection_s

    async def _stop(self, fault: Fault) -> float | None:
        process = self._fleet.services[fault.target].process
        began = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        try:
            detection_s = await self._detection(fault.target, began, fault.lasts_s)
            await asyncio.sleep(max(0.0, began + fault.lasts_s - time.monotonic()))
        finally:
            process.send_signal(signal.SIGCONT)
        return detection_s

    async def _detection(self, node: str, began: float, budget_s: float) -> float | None:
        """Seconds until the device list had the node as dead; None when it was not there before, when that took longer
        than the fault lasted, or when the scheduler was in trouble itself."""
        sight = self._sight
        if node == SCHEDULER or sight.health.get(node) in _GONE:
            return None
        while time.monotonic() < began + budget_s:
            if max(self.troubled_until, sight.blind_since) > began:
                return None
            if (died := sight.deaths.get(node, 0.0)) >= began:
                return died - began
            await self._sight.looked()
        return None

    async def _wait_for_work(self, target: str) -> bool:
        def at_work() -> bool:
            return bool(self._sight.busy) if target == SCHEDULER else target in self._sight.busy

        deadline = time.monotonic() + _WORK_S
        while not (found := at_work()) and time.monotonic() < deadline:
            await self._sight.looked()
        return found

    def _lock_database(self, seconds: float) -> None:
        with contextlib.closing(sqlite3.connect(self._state / "scheduler.db", timeout=10)) as connection:
            connection.isolation_level = None
            connection.execute("BEGIN EXCLUSIVE")
            time.sleep(seconds)
            connection.execute("ROLLBACK")

    def _fill_disk(self, seconds: float) -> None:
        ballast = self._state / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(bytes(64)):
                pass
        time.sleep(seconds)
        ballast.unlink()
