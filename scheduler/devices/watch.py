"""Probes of the failure detector: an open connection to each node, and a request to each suspect.

A probe is `GET /livez` on a fresh connection, and the connection of the last probe that was answered stays open. When
the node's process ends, its kernel closes that connection, so the scheduler notices it within a round trip, at no cost
in between. An idle node that is killed is noticed as quickly as a busy one. A closed connection by itself proves
nothing (a server closes idle ones after a while): it leads to the next probe, and a refused one is the proof.

A node that has fallen silent closes nothing. It becomes suspect by its missing heartbeats, is probed, and does not
answer; a suspect that answers is probed again until its heartbeats are back. A suspect that makes no progress is asked
for `GET /readyz` instead: an idle node computes an image for that, which its next heartbeat counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from scheduler.core import events
from scheduler.core.device import Device, DeviceView
from scheduler.core.fleet import Change, Ledger
from scheduler.core.health import Probe
from tierkit.access import tls_trouble
from tierkit.pacing import backoff_s
from tierkit.types import Health

__all__ = ["Watch"]

_log = logging.getLogger(__name__)

_MOST_PROBES = 64
"""Probes at a time. If more nodes fall silent at once, the later ones are given up `probe_s` later."""
_SLICES = 8
_BROKEN_AGAIN_S = 0.05
"""Pause after a connection that broke before its answer: a process that is just ending refuses the next one."""
_SOON_S = 1.0
"""A connection that the node closes sooner than this was not closed for being idle."""
_UNREACHED_AGAIN_S = 5.0
"""Seconds between two attempts to reach a node that heartbeats but does not answer."""
_STUCK_AGAIN_S = 1.0
"""Seconds between two questions to a node that makes no progress."""


class Watch:
    """Probes the nodes of a device list, and tells it what came of that.

    Args:
        devices: the list.
        handle: takes the outcomes. `node_changed` is called with each change of a node.
        clock: Returns monotonic seconds.
        tls: for nodes with https URLs.
    """

    def __init__(
        self,
        devices: Ledger,
        handle: Callable[[events.What], None],
        *,
        clock: Callable[[], float],
        tls: ssl.SSLContext,
    ) -> None:
        self._devices = devices
        self._handle = handle
        self._clock = clock
        self._tls = tls
        self._slots = asyncio.Semaphore(_MOST_PROBES)
        self._changed = asyncio.Event()
        self._changed_ids = {view.device.node_id for view in devices.view(clock())}
        """Nodes that have changed since `run` last looked."""
        self._watched: dict[str, tuple[Device, asyncio.Event]] = {}
        """By node id: the registered node, and the event that wakes the loop that watches it."""
        self._tls_failures: set[str] = set()
        """Incarnations whose TLS failure is in the log."""

    async def run(self) -> None:
        """Watch every node that registers, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                changed_ids, self._changed_ids = self._changed_ids, set()
                for node_id in changed_ids:
                    device = self._devices.find(node_id)
                    if device is None:
                        continue
                    watched, changed = self._watched.get(node_id, (None, None))
                    view = self._view(device)
                    # A node with a lease of its own saves bytes: it is not probed.
                    if watched is device or view is None or view.health.gone or not device.takes_tasks:
                        continue
                    if changed is not None:
                        changed.set()
                    self._watched[device.node_id] = (device, asyncio.Event())
                    group.create_task(self._watch(device), name=f"watch {device.node_id}")
                await self._changed.wait()

    def node_changed(self, change: Change) -> None:
        """Something has become of a node."""
        self._on_change(change.node_id)

    def _on_change(self, node_id: str) -> None:
        self._changed_ids.add(node_id)
        self._changed.set()
        if node_id in self._watched:
            self._watched[node_id][1].set()

    async def _watch(self, device: Device) -> None:
        """Watch a device until it is dead, or off the list, or has registered again."""
        node_id, incarnation = device.node_id, device.incarnation
        changed = self._watched[node_id][1]
        closed_soon = 0
        try:
            while (view := self._view(device)) is not None:
                if view.health.gone:
                    return
                changed.clear()
                began = self._clock()
                pause_s = await self._probe_and_hold(view, changed)
                if pause_s is None:
                    # A server that closes each connection after its answer would be asked without end.
                    closed_soon = closed_soon + 1 if self._clock() - began < _SOON_S else 0
                    pause_s = 0.0
                    if closed_soon:
                        pause_s = backoff_s(closed_soon, first_s=2 * _BROKEN_AGAIN_S, cap_s=_UNREACHED_AGAIN_S)
                if pause_s:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await changed.wait()
        except Exception as exc:
            _log.error("%s cannot be watched and is given up", node_id, exc_info=exc)
            self._handle(events.Unwatched(node_id, incarnation, f"{type(exc).__name__}: {exc}"))
        finally:
            if self._watched.get(node_id, (None, None))[1] is changed:
                del self._watched[node_id]
            self._tls_failures.discard(incarnation)
            self._on_change(node_id)

    async def _probe_and_hold(self, view: DeviceView, changed: asyncio.Event) -> float | None:
        """One probe; if it is answered, hold the connection until it closes or there is reason to ask again.

        Returns:
            Seconds to wait before the next probe, less if the node changes before; None when the node has
            closed the connection.
        """
        device, began = view.device, self._clock()
        path = "/livez" if view.keeps_tasks else "/readyz"
        async with self._slots:
            asking = asyncio.create_task(_ask(device.registration.url, path, self._tls), name=f"probe {device.node_id}")
            try:
                in_time = await _within(asking, self._devices.times.probe_s)
            except asyncio.CancelledError:
                _drop(asking)
                raise
        if not in_time:
            _drop(asking)
            return self._failed(device, Probe.SILENT, began)
        try:
            reader, writer = asking.result()
        except ConnectionRefusedError:
            return self._failed(device, Probe.REFUSED, began)
        except (ConnectionError, EOFError):
            self._failed(device, Probe.SILENT, began)
            return _BROKEN_AGAIN_S if device.reached else _UNREACHED_AGAIN_S
        except (OSError, ValueError) as exc:
            # No route, no such host, no usable address, another protocol.
            if device.incarnation not in self._tls_failures and (why := tls_trouble(exc, device.node_id)):
                self._tls_failures.add(device.incarnation)
                _log.warning("%s cannot be reached: %s", device.node_id, why)
            return self._failed(device, Probe.SILENT, began)
        try:
            self._report(device, Probe.ANSWERED, began)
            return None if await self._hold(device, reader, changed) else 0.0
        finally:
            writer.close()

    def _failed(self, device: Device, outcome: Probe, began: float) -> float:
        self._report(device, outcome, began)
        return self._again_s(device) or _UNREACHED_AGAIN_S

    async def _hold(self, device: Device, reader: asyncio.StreamReader, changed: asyncio.Event) -> bool:
        """Return when the connection closes (True), or when a suspect should be asked again (False)."""
        closed = asyncio.create_task(_closed(reader), name=f"connection to {device.node_id}")
        try:
            while True:
                again_s = self._again_s(device)
                changed.clear()
                woken = asyncio.create_task(changed.wait(), name=f"change of {device.node_id}")
                try:
                    await asyncio.wait((closed, woken), timeout=again_s, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    woken.cancel()
                if closed.done() or again_s is not None or self._again_s(device) is not None:
                    return closed.done()
        finally:
            closed.cancel()

    def _again_s(self, device: Device) -> float | None:
        """Seconds after which to ask again although nothing has happened; None for a node that is well."""
        view = self._view(device)
        if view is None or view.health.gone:
            return 0.0  # its watch is over
        if view.health is not Health.SUSPECT or view.set_aside:
            return None  # a wrong answer came from a process that is there
        return self._devices.times.heartbeat_s if view.keeps_tasks else _STUCK_AGAIN_S

    def _view(self, device: Device) -> DeviceView | None:
        """The current view of it; None once it has left the list or has registered again."""
        view = self._devices.view_of(device.node_id, device.incarnation, self._clock())
        return view if view is not None and view.device is device else None

    def _report(self, device: Device, outcome: Probe, began: float) -> None:
        _log.debug("probe of %s: it %s", device.node_id, outcome.value)
        self._handle(events.Probed(device.node_id, device.incarnation, outcome, began))


async def _ask(url: str, path: str, tls: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and return it when the first line of an HTTP answer, of any status, has come.

    Raises:
        OSError: no connection, or it broke.
        EOFError: it was closed before the answer.
        ValueError: the URL leads nowhere, or what answers does not speak HTTP.
    """
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"no host in {url!r}")
    secure = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if secure else 80),
        ssl=tls if secure else None,
    )
    try:
        writer.write(f"GET {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        line = await reader.readline()
        if not line:
            raise EOFError(f"{url} closed the connection")
        if not line.startswith(b"HTTP/1."):
            raise ValueError(f"{url} does not speak HTTP")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(65536):
            pass


async def _within(task: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]], budget_s: float) -> bool:
    """True if `task` ends within the budget. A pause of this whole process uses up one slice of it at most: an answer
    that came meanwhile must not be missed."""
    for _ in range(_SLICES):
        done, _pending = await asyncio.wait((task,), timeout=budget_s / _SLICES)
        if done:
            return True
    return False


def _drop(connecting: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    """Give up on a probe; should it be done in the very same moment, close what it has opened."""

    def close(task: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
        if not task.cancelled() and task.exception() is None:
            task.result()[1].close()

    connecting.add_done_callback(close)
    connecting.cancel()
