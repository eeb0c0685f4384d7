"""Events of nodes and of their sources. No transaction makes these true, so they are written by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.core.fleet import Change, Ledger
from scheduler.core.outbox import SinkEvent, is_online, node_event, source_event
from tierkit.types import Health
from tierkit.wire.messages import Registration
from tierkit.wire.observations import DeviceStatus

__all__ = ["FleetNews"]


class FleetNews:
    """Makes events of what becomes of nodes and sources, while there is a sink.

    Args:
        devices: the device list.
        status_of: returns the last word of a node about its sources; None without one.
        used: returns whether there is a sink.
        put: takes events.
    """

    def __init__(
        self,
        devices: Ledger,
        status_of: Callable[[str], DeviceStatus | None],
        *,
        used: Callable[[], bool],
        put: Callable[[Sequence[SinkEvent]], None],
    ) -> None:
        self._devices = devices
        self._status_of = status_of
        self._used = used
        self._put = put
        self._online: dict[str, dict[str, bool]] = {}
        """By node and source: True if it gave pictures when that was last reported."""

    def node_changed(self, change: Change) -> None:
        """Something has become of a node."""
        if not self._used():
            self._online.clear()
            return
        if change.struck is not None:
            self._struck(change.struck, died=change.died)
        elif (device := self._devices.find(change.node_id)) is not None:
            known = device.left if change.health is not None else not change.to_save
            event = node_event(device.registration, change.health, change.reason, known=known)
            # One that has just registered says itself how its sources are.
            sources = [] if change.health is None else self._of_sources(device.registration, change.health)
            self._put([event, *sources])

    def _struck(self, node: Registration, *, died: bool) -> None:
        """A node is off the list: it has left, or has been dead for long."""
        if not died:
            event = node_event(node, Health.DEAD, "has left: its process has ended", known=True)
            self._put([event, *self._of_sources(node, Health.DEAD)])
        self._online.pop(node.node_id, None)

    def heard(self, node_id: str) -> None:
        """A node has said how its sources are."""
        if not self._used():
            return
        device = self._devices.find(node_id)
        if device is not None and (events := self._of_sources(device.registration, device.told[0])):
            self._put(events)

    def _of_sources(self, node: Registration, health: Health) -> list[SinkEvent]:
        node_id = node.node_id
        status = self._status_of(node_id)
        events, told = [], self._online.setdefault(node_id, {})
        for source in () if status is None else status.sources:
            online = is_online(source.state, health)
            if online is None or told.get(source.name) is online:
                continue
            told[source.name] = online
            fields = {
                "node": node_id,
                "source": source.name,
                "site": node.site,
                "state": source.state,
                "reason": source.reason,
                "health": health,
            }
            events.append(source_event(fields, online=online))
        return events
