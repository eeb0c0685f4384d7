"""The device list as the mapping sees it: who is alive and may see pixels, with which model, along which routes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from encryption.policy import Form, Trust, decide_form
from scheduler.devices import Device, DeviceList
from scheduler.mapping import (
    FleetTimes,
    Node,
    Route,
    TaskTimes,
    map_count,
    plan_routes,
    share_to_cloud,
)
from scheduler.settings import SchedulerSettings
from tierkit.errors import Forbidden
from tierkit.protocol import Upstream
from tierkit.types import Privacy, Scheme, Tier

__all__ = ["PAPER_BATCH", "Fleet", "MapCount"]

PAPER_BATCH = 50
"""Images of a task in the paper's formulas."""

_UPPER_TIERS = {
    Scheme.END: (),
    Scheme.END_EDGE: (Tier.EDGE,),
    Scheme.END_CLOUD: (Tier.CLOUD,),
    Scheme.MAPPING: (Tier.EDGE, Tier.CLOUD),
    Scheme.ADAPTIVE: (Tier.EDGE, Tier.CLOUD),
}


@dataclass(frozen=True, slots=True)
class MapCount:
    """N_map as it is used, and where it comes from."""

    value: int
    reason: str


class Fleet:
    """Views of a device list.

    Args:
        devices: the list.
        settings: trust, N_map and link times.
        fine_models: names of the models that give fine answers, best known first.
    """

    def __init__(self, devices: DeviceList, settings: SchedulerSettings, fine_models: Collection[str]) -> None:
        self._devices = devices
        self._settings = settings
        self._fine_models = fine_models

    def route(self, scheme: Scheme, node_id: str, now: float) -> Route:
        """The route of one end device; one that is not alive is counted in as if it were."""
        return self.routes(scheme, now, also=(node_id,))[node_id]

    def routes(self, scheme: Scheme, now: float, *, also: Collection[str] = ()) -> dict[str, Route]:
        """The routes of the end devices that are alive, and of those in `also`."""
        edges, clouds = self.upper(Tier.EDGE, now), self.upper(Tier.CLOUD, now)
        if len(_UPPER_TIERS[scheme]) > 1:
            edges, clouds = self._sound(edges, now, beside=clouds), self._sound(clouds, now, beside=edges)
        return plan_routes(
            scheme,
            ends={*also, *(device.node_id for device in self._devices.alive(Tier.END, now))},
            edges=edges,
            clouds=clouds,
            n_map=self.n_map(now).value,
        )

    def has_upstream(self, scheme: Scheme, now: float) -> bool:
        """Whether an upper node that the scheme uses is alive and trusted."""
        return any(self.upper(tier, now) for tier in _UPPER_TIERS[scheme])

    def upper(self, tier: Tier, now: float) -> list[Node]:
        """Nodes of an upper tier that are alive and may see pixels; suspects where there is no other: the end device
        asks them with a budget, and the worst that comes of it is the coarse answer that would stand anyway."""
        candidates = self._devices.alive(tier, now) or self._devices.suspect(tier, now)
        return [self.node(device) for device in candidates if self._may_see_pixels(device, Privacy.AUTO)]

    def uppers(self, now: float) -> list[Node]:
        """The upper nodes of both tiers, edge first; those that are set aside only where there is no other."""
        nodes = [node for tier in (Tier.EDGE, Tier.CLOUD) for node in self.upper(tier, now)]
        return self._sound(nodes, now, beside=nodes)

    def _sound(self, nodes: Sequence[Node], now: float, *, beside: Sequence[Node]) -> list[Node]:
        """Those whose answers are not wrong, where there are such beside them; else all."""
        aside = {view.device.node_id for view in self._devices.view(now) if view.set_aside}
        if all(node.node_id in aside for node in beside):
            return list(nodes)
        return [node for node in nodes if node.node_id not in aside]

    def alive_ends(self, now: float) -> list[Node]:
        """End devices that may receive new tasks."""
        return [self.node(device) for device in self._devices.alive(Tier.END, now)]

    def trusts(self, device: Device) -> bool:
        """By the scheduler's own list, never by what the node says."""
        return device.tier in self._settings.trusted or device.node_id in self._settings.trusted

    def check_trust(self, scheme: Scheme, privacy: Privacy, now: float) -> None:
        """Whether a job may run without pixels getting to an untrusted node.

        A scheme is refused while a node that it would use is untrusted, or when none that it could use is trusted.
        Should an untrusted node join later, it is left out of the routes.

        Raises:
            Forbidden: with what to do about it.
        """
        known = [view.device for view in self._devices.view(now)]
        wanted = _UPPER_TIERS[scheme]
        untrusted = [d for d in known if d.tier in wanted and not self._may_see_pixels(d, privacy)]
        hopeless = bool(wanted) and not any(
            tier in self._settings.trusted or any(d.tier is tier and self.trusts(d) for d in known) for tier in wanted
        )
        if not untrusted and not hopeless:
            return
        tiers = [str(tier) for tier in wanted if tier not in self._settings.trusted]
        which = ", ".join(d.node_id for d in untrusted) or f"the {' and '.join(tiers)} tier"
        others = [scheme for scheme in (Scheme.END_EDGE, Scheme.END) if self._is_clean(scheme, known)]
        raise Forbidden(
            f"scheme {scheme} would send pixels to {which}, which this scheduler does not trust: submit with scheme "
            f"{' or '.join(others)}, or, if it may see them, start the scheduler with "
            f"--trusted {','.join([*self._settings.trusted, *tiers])}"
        )

    def n_map(self, now: float) -> MapCount:
        """End devices per edge node: as set, else Eq. 4 over the measured speeds."""
        if self._settings.n_map is not None:
            return MapCount(self._settings.n_map, "set by the operator (--n-map)")
        times = self.times(now)
        if times is None or times.edge is None:
            return MapCount(1, "no edge node to compute it for")
        value = map_count(times.end, times.edge)
        return MapCount(value, f"ceil({times.edge.total_s:.3f} s / {times.end.total_s:.3f} s), Eq. 4")

    def theta_cloud(self, now: float) -> float | None:
        """Eq. 5 for the fleet as it is; None without end devices."""
        ends = len(self._devices.alive(Tier.END, now))
        if not ends:
            return None
        return share_to_cloud(ends, len(self.upper(Tier.EDGE, now)), self.n_map(now).value)

    def times(self, now: float) -> FleetTimes | None:
        """Seconds per task of 50 images: each tier's mean measured speed, and the link times of the settings."""
        links = {
            Tier.END: self._settings.end_link_s,
            Tier.EDGE: self._settings.edge_link_s,
            Tier.CLOUD: self._settings.cloud_link_s,
        }

        def of(tier: Tier) -> TaskTimes | None:
            speeds = [self.node(device).ms_per_image for device in self._devices.alive(tier, now)]
            if not speeds:
                return None
            mean_s = sum(speeds) / len(speeds) / 1000
            return TaskTimes(communication_s=links[tier], processing_s=mean_s * PAPER_BATCH)

        end = of(Tier.END)
        return None if end is None else FleetTimes(end=end, edge=of(Tier.EDGE), cloud=of(Tier.CLOUD))

    def upstreams(self, nodes: Sequence[Node]) -> tuple[Upstream, ...]:
        """Route entries as they go over the wire."""
        return tuple(
            Upstream(
                node_id=node.node_id,
                url=node.url,
                tier=node.tier,
                model=node.model,
                key=self._devices.key_of(node.node_id),
            )
            for node in nodes
        )

    def ends(self, now: float) -> list[Device]:
        """All end devices in the order of the list, whatever their health."""
        return [view.device for view in self._devices.view(now) if view.device.tier is Tier.END]

    def node(self, device: Device) -> Node:
        """The node with the model that it would be asked for: on upper tiers a fine one where it holds one."""
        offers = device.registration.models
        offer = offers[0]
        if device.tier is not Tier.END:
            offer = next((o for o in offers if o.name in self._fine_models), offer)
        return Node(
            node_id=device.node_id,
            tier=device.tier,
            url=device.registration.url,
            model=offer.name,
            sha256=offer.sha256,
            ms_per_image=offer.ms_per_image,
        )

    def _may_see_pixels(self, device: Device, privacy: Privacy) -> bool:
        try:
            form = decide_form(privacy, Trust.TRUSTED if self.trusts(device) else Trust.UNTRUSTED)
        except Forbidden:
            return False
        return form is Form.PIXELS

    def _is_clean(self, scheme: Scheme, known: Sequence[Device]) -> bool:
        wanted = _UPPER_TIERS[scheme]
        return all(tier in self._settings.trusted for tier in wanted) and all(
            self.trusts(device) for device in known if device.tier in wanted
        )
