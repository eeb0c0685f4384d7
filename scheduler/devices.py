"""The device list: who may receive tasks now. Time is passed in; nothing here does I/O.

A node registers with an incarnation that is fresh at each of its starts, receives a lease and renews it by heartbeats.
The list is not stored: after a restart of the scheduler the nodes' next heartbeats are answered "unknown" and they
register again, which is both quicker and truer than what a file remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scheduler.health import LeaseTimes, judge
from scheduler.mapping import natural_order
from tierkit.errors import Conflict, NotFound
from tierkit.protocol import Heartbeat, Lease, Registration
from tierkit.types import Health, Tier

__all__ = ["Device", "DeviceList", "DeviceView"]

_FORGET_S = 600.0
"""A dead node stays visible this long, for whoever looks into what happened."""


@dataclass(slots=True, kw_only=True)
class Device:
    """What the scheduler knows of one node."""

    registration: Registration
    joined_at: float
    last_seen: float
    draining: bool = False
    accusation: str | None = None
    not_before: float = 0.0
    """The node asked to be left alone until then ("503, Retry-After")."""
    load: Heartbeat | None = None
    """What the node said of itself last."""
    retired: set[str] = field(default_factory=set)
    """Older incarnations of this node id: they cannot come back."""

    @property
    def node_id(self) -> str:
        return self.registration.node_id

    @property
    def tier(self) -> Tier:
        return self.registration.tier

    @property
    def incarnation(self) -> str:
        return self.registration.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """One node with the failure detector's opinion of it, at one moment."""

    device: Device
    health: Health
    reason: str
    silent_s: float


class DeviceList:
    """Registrations, leases and health of all nodes. Iterates in the order of the device list: end-2 before end-10.

    Args:
        times: heartbeat, suspicion and lease.
        on_change: called with a node id after any change that may free, add or remove capacity.
    """

    def __init__(self, times: LeaseTimes, on_change: Callable[[str], None] = lambda node_id: None) -> None:
        self.times = times
        self.on_change = on_change
        self._devices: dict[str, Device] = {}
        self._health: dict[str, Health] = {}

    def register(self, registration: Registration, now: float) -> Lease:
        """Give a node a place in the list.

        A known node id with a new incarnation is the node after a restart: it takes the place of the old one, whose
        tasks are void.

        Raises:
            Conflict: the incarnation was replaced before by one that is alive: two running nodes claim the same id.
        """
        node_id = registration.node_id
        old = self._devices.get(node_id)
        retired: set[str] = set()
        if old is not None:
            if registration.incarnation in old.retired and self._view(old, now).health is not Health.DEAD:
                raise Conflict(
                    f"another node with the id {node_id!r} has registered since; give one of the two another --node-id"
                )
            retired = old.retired | ({old.incarnation} - {registration.incarnation})
        self._devices[node_id] = Device(registration=registration, joined_at=now, last_seen=now, retired=retired)
        self._devices = dict(sorted(self._devices.items(), key=lambda item: natural_order(item[0])))
        self._health[node_id] = Health.ALIVE
        self.on_change(node_id)
        return Lease(lease_s=self.times.lease_s, heartbeat_s=self.times.heartbeat_s)

    def heartbeat(self, node_id: str, beat: Heartbeat, now: float) -> None:
        """Renew a lease.

        Raises:
            NotFound: unknown node, or one whose lease has run out: it must register again.
            Conflict: an older incarnation of this node.
        """
        device = self.get(node_id)
        if device.incarnation != beat.incarnation:
            raise Conflict(f"node {node_id!r} has registered again with another incarnation since")
        if self._view(device, now).health is Health.DEAD:
            raise NotFound(f"the lease of node {node_id!r} has run out: register again")
        device.last_seen = now
        device.accusation = None
        device.draining = device.draining or beat.draining
        device.load = beat
        self._announce(device, now)

    def accuse(self, node_id: str, incarnation: str, reason: str, now: float) -> None:
        """Passive evidence: an attempt could not reach the node. Suspect until its next heartbeat."""
        device = self._devices.get(node_id)
        if device is not None and device.incarnation == incarnation:
            device.accusation = reason
            self._announce(device, now)

    def set_aside(self, node_id: str, incarnation: str, until: float) -> None:
        """The node said "not now": give it no new tasks before `until`."""
        device = self._devices.get(node_id)
        if device is not None and device.incarnation == incarnation:
            device.not_before = max(device.not_before, until)

    def drain(self, node_id: str, now: float) -> None:
        """Give the node no new tasks; those that it has may finish. Raises NotFound."""
        device = self.get(node_id)
        device.draining = True
        self._announce(device, now)

    def resume(self, node_id: str, now: float) -> None:
        """Take back `drain`.

        Raises:
            NotFound: no such node.
            Conflict: the node itself is shutting down.
        """
        device = self.get(node_id)
        if device.load is not None and device.load.draining:
            raise Conflict(f"node {node_id!r} is shutting down by itself; start it again")
        device.draining = False
        self._announce(device, now)

    def remove(self, node_id: str, incarnation: str | None = None) -> None:
        """Strike a node off the list; its tasks go to others.

        Raises:
            NotFound: no such node.
            Conflict: `incarnation` is not the present one.
        """
        device = self.get(node_id)
        if incarnation is not None and incarnation != device.incarnation:
            raise Conflict(f"node {node_id!r} has registered again with another incarnation since")
        del self._devices[node_id], self._health[node_id]
        self.on_change(node_id)

    def get(self, node_id: str) -> Device:
        """The node's record. Raises NotFound."""
        device = self._devices.get(node_id)
        if device is None:
            raise NotFound(f"no node {node_id!r} on the device list")
        return device

    def view(self, now: float) -> list[DeviceView]:
        """All nodes in the order of the list, with their health at `now`."""
        return [self._view(device, now) for device in self._devices.values()]

    def alive(self, tier: Tier, now: float) -> list[Device]:
        """Nodes of a tier that may receive new tasks, in the order of the list."""
        return [
            device
            for device in self._devices.values()
            if device.tier is tier and self._view(device, now).health is Health.ALIVE and device.not_before <= now
        ]

    def suspect(self, tier: Tier, now: float) -> list[Device]:
        """Nodes of a tier that are late or accused, but not given up."""
        return [view.device for view in self.view(now) if view.device.tier is tier and view.health is Health.SUSPECT]

    def is_current(self, node_id: str, incarnation: str, now: float) -> bool:
        """Whether work given to this incarnation still counts: it is on the list and not dead."""
        device = self._devices.get(node_id)
        return (
            device is not None
            and device.incarnation == incarnation
            and self._view(device, now).health is not Health.DEAD
        )

    def is_gone(self, node_id: str, now: float) -> bool:
        """Whether nobody of this name can answer any more: dead, or off the list."""
        device = self._devices.get(node_id)
        return device is None or self._view(device, now).health is Health.DEAD

    def sweep(self, now: float) -> list[DeviceView]:
        """Find nodes whose health has changed since the last call, tell `on_change`, forget the long dead."""
        changed = [view for view in self.view(now) if self._announce(view.device, now)]
        for node_id in [view.device.node_id for view in self.view(now) if view.silent_s > _FORGET_S]:
            del self._devices[node_id], self._health[node_id]
        return changed

    def forgive(self, pause_s: float) -> None:
        """The scheduler itself stood still for `pause_s` (suspended, starved): nobody could be heard in that time."""
        for device in self._devices.values():
            device.last_seen += pause_s

    def count(self, tiers: Iterable[Tier]) -> int:
        """Nodes of these tiers on the list, whatever their health."""
        wanted = set(tiers)
        return sum(device.tier in wanted for device in self._devices.values())

    def _view(self, device: Device, now: float) -> DeviceView:
        silent_s = max(0.0, now - device.last_seen)
        health, reason = judge(silent_s, self.times, accusation=device.accusation, draining=device.draining)
        return DeviceView(device=device, health=health, reason=reason, silent_s=silent_s)

    def _announce(self, device: Device, now: float) -> bool:
        health = self._view(device, now).health
        if self._health[device.node_id] is health:
            return False
        self._health[device.node_id] = health
        self.on_change(device.node_id)
        return True
