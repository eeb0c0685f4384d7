"""A snapshot of the fleet for the page, made at most once a second and shared by all readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from pydantic import ConfigDict

from scheduler.api.sites import cloud_share, sites_now
from scheduler.core.device import Device, DeviceView
from scheduler.core.site import ALL_SITES, NO_SITE, SitesSeen
from scheduler.history.record import COLUMNS
from scheduler.jobs.durable import DurableRecipient
from scheduler.jobs.service import Scheduler
from tierkit.types import Health, JobState, Scheme, Share, Tier
from tierkit.wire.api import SiteNow

__all__ = ["FleetSnapshot", "JobNow", "LinkNow", "NodeNow", "Snapshots"]

_MOST_NODES = 1000
"""Nodes shown, unhealthy nodes first. More would be unreadable and would block a browser."""
_MOST_JOBS = 100
"""Unfinished jobs that are shown, the newest."""
_DIGITS = 12
"""Length of the start of a sha256: enough to tell the networks of a fleet apart."""
_ENCODE = msgspec.json.Encoder(enc_hook=SiteNow.model_dump).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNow:
    """One node of the device list."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    node_id: str
    """Id of the node."""
    tier: Tier
    """Tier of the node."""
    site: str | None
    """The place to which it belongs; null: no site."""
    health: Health
    """Verdict of the failure detector; only `alive` nodes get new tasks."""
    reason: str
    """Reason why the failure detector thinks so."""
    draining: bool
    """True if an operator or the node itself wants no new tasks for it."""
    trusted: bool
    """True if it may see pixels."""
    models: tuple[str, ...]
    """Names of the networks that it serves."""
    digests: tuple[str, ...] = ()
    """First digits of the sha256 of each file that it has loaded."""
    network: str
    """The model that tasks ask it for."""
    accuracy: float | None
    """Accuracy of that network on the images that the model set was measured on; null if unknown."""
    version: str
    """Version of Terrace that it runs."""
    outstanding: int
    """Tasks that it has now."""
    queued_images: int
    """Images that wait there for their batch."""
    images_per_s: float
    """Images per second that it answered in the last seconds."""
    ms_per_image: float | None
    """Speed by its latest answers; null before the first."""
    own_ms_per_image: float
    """Milliseconds per image by its own measurement at its start."""
    images_per_minute: int | None
    """Power budget in images per minute; null: no limit."""
    joined_at: float
    """Seconds since 1970."""
    last_seen: float | None
    """Seconds since 1970; null if it is heard all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkNow:
    """Link from an end device to an upstream node."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    end: str
    """Id of the end device."""
    upper: str
    """Id of the upstream node."""
    mapped: bool
    """True if the scheduler's own scheme sends the device's tasks there."""
    images_per_s: float
    """Images per second that went over it and were answered in the last seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNow:
    """An unfinished job."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    id: str
    """Id of the job."""
    name: str | None
    """Name given at the submission; null without one."""
    site: str | None
    """The site where it runs; null: anywhere."""
    owner: str | None
    """Name of the token that submitted it."""
    state: JobState
    """State of the job."""
    reason: str
    """Reason why it waits; "" while tasks go."""
    images: int
    """Images of the job."""
    answered_coarse: int
    """Images with a coarse answer so far."""
    answered_fine: int
    """Images with a fine answer so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """All that changes by the second."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    at: float
    """Seconds since 1970."""
    scheme: Scheme
    """Scheme of jobs that name none."""
    doubting: bool
    """True if the scheduler hears no node, and looks for the fault in itself."""
    nodes: tuple[NodeNow, ...]
    """At most 1,000, those that are not well before others."""
    known: int
    """All nodes of the device list; for users limited to sites, those that they see."""
    links: tuple[LinkNow, ...]
    """Links between these nodes, mapped or in use."""
    jobs: tuple[JobNow, ...]
    """Unfinished jobs, the newest 100."""
    unfinished: int
    """All of them."""
    figures: dict[str, float | None]
    """The last second; names as in the history."""
    theta_cloud: float | None = None
    """The cloud's planned share of the tasks (Eq. 5), of a fleet without sites; null if the scheme is not mapping."""
    cloud_share: float | None = None
    """The cloud's actual share, as in the mapping."""
    sites: tuple[SiteNow, ...] = ()
    """All sites that the caller may see; none in a fleet without sites."""
    site: str | None = None
    """The site whose nodes, links, jobs and events are shown; null: all."""


class Snapshots:
    """Makes and keeps the newest one.

    Args:
        clock: of the scheduler, monotonic seconds.
    """

    def __init__(self, scheduler: Scheduler, *, clock: Callable[[], float]) -> None:
        self.record = scheduler.dispatcher.record
        self._scheduler = scheduler
        self._clock = clock
        self._version = -1
        self._newest: dict[SitesSeen, FleetSnapshot] = {}
        self._json: dict[tuple[str | None, SitesSeen], bytes] = {}
        """Snapshots by owner of the jobs and sites that they show."""
        self._mapped: tuple[int, dict[str, tuple[str, ...]]] = -1, {}

    @property
    def stopping(self) -> bool:
        """True once all streams have to end."""
        return self._scheduler.stopping

    def json(self, owner: str | None = None, seen: SitesSeen = ALL_SITES) -> bytes:
        """The newest snapshot as JSON; made again only if something has changed.

        Args:
            owner: only their jobs are in it; None: all.
            seen: only their nodes, and those that these use, are in it.
        """
        if self._version != self.record.version:
            self._version = self.record.version
            self._newest.clear()
            self._json.clear()
        if seen not in self._newest:
            self._newest[seen] = self._take(seen)
        if (owner, seen) not in self._json:
            running = self._scheduler.running(_MOST_JOBS, owner, seen.only)
            shown = replace(self._newest[seen], jobs=tuple(map(self._job, running)))
            if seen.allowed:
                # The figures of the fleet are about all sites.
                images_per_s = round(sum(site.images_per_s for site in shown.sites), 1)
                shown = replace(shown, figures={"first": images_per_s}, unfinished=len(running))
            self._json[owner, seen] = _ENCODE(shown)
        return self._json[owner, seen]

    def _views(self, seen: SitesSeen, now: float) -> list[DeviceView]:
        """The nodes that are shown."""
        devices = self._scheduler.devices
        strangers = [view for view in devices.strangers(now) if seen.site(view.device.site)]
        if seen == ALL_SITES:
            return [*devices.view(now, _MOST_NODES), *strangers]
        sites = seen.allowed if seen.only is None else (seen.only,)
        own = [view for site in sites for view in devices.of_site(site, now)]
        shown = {view.device.node_id: view for view in own}
        shared = (view for view in devices.of_site(NO_SITE, now) if seen.node(NO_SITE, view.device.tier))
        if any(self._scheduler.placement.share(site) is not Share.NONE for site in sites):
            shown |= {view.device.node_id: view for view in shared}
        # Nodes of other sites that the devices use.
        used = {upper for uppers in self._mapped_to([view.device for view in own], now).values() for upper in uppers}
        used |= {upper for end, upper in self.record.traffic() if end in shown}
        for node_id in used - shown.keys():
            device = devices.find(node_id)
            if device is not None and (view := devices.view_of(node_id, device.incarnation, now)) is not None:
                shown[node_id] = view
        return [*sorted(shown.values(), key=lambda view: view.device.order)[:_MOST_NODES], *strangers]

    def _take(self, seen: SitesSeen) -> FleetSnapshot:
        now, scheduler = self._clock(), self._scheduler
        views = self._views(seen, now)
        sited = bool(seen.allowed) or scheduler.devices.sites not in ([], [NO_SITE])
        planned = scheduler.settings.scheme is Scheme.MAPPING and not sited
        _, rows = self.record.seconds.since(self.record.wall(now) - 2)
        last = rows[-1].tolist() if len(rows) else []
        return FleetSnapshot(
            at=round(self.record.wall(now), 3),
            scheme=scheduler.settings.scheme,
            doubting=scheduler.devices.doubting,
            nodes=tuple(self._node(view, now) for view in views),
            known=self._known(seen, views),
            links=self._links([view.device for view in views], now),
            jobs=(),
            unfinished=scheduler.unfinished,
            figures=dict(zip(COLUMNS, map(_finite, last), strict=False)),
            theta_cloud=scheduler.placement.theta_cloud(now) if planned else None,
            cloud_share=cloud_share(scheduler, NO_SITE, now) if planned else None,
            sites=sites_now(scheduler, seen, now),
            site=seen.only,
        )

    def _known(self, seen: SitesSeen, views: Sequence[DeviceView]) -> int:
        devices = self._scheduler.devices
        if not seen.allowed:
            return devices.healths().total()
        return sum(devices.find(view.device.node_id) is not None for view in views)

    def _node(self, view: DeviceView, now: float) -> NodeNow:
        device = view.device
        load, registration = device.load, device.registration
        speed_s = self._scheduler.dispatcher.pilot.speed_of(device.node_id, now)
        return NodeNow(
            node_id=device.node_id,
            tier=device.tier,
            site=registration.site,
            health=view.health,
            reason=view.reason,
            draining=device.draining or (load is not None and load.draining),
            trusted=self._scheduler.placement.trusts(device),
            models=tuple(offer.name for offer in registration.models),
            network=self._scheduler.placement.node(device).model,
            digests=tuple(dict.fromkeys(offer.sha256[:_DIGITS] for offer in registration.models)),
            accuracy=self._scheduler.placement.accuracy(device),
            version=registration.version,
            outstanding=self._scheduler.devices.assigned.outstanding(device.node_id),
            queued_images=0 if load is None else load.queued_images,
            images_per_s=round(self.record.images_per_s(device.node_id), 1),
            ms_per_image=None if speed_s is None else round(1000 * speed_s, 4),
            own_ms_per_image=device.ms_per_image,
            images_per_minute=registration.images_per_minute,
            joined_at=round(self.record.wall(device.joined_at), 1),
            last_seen=None if view.health is Health.ALIVE else round(self.record.wall(device.last_seen), 1),
        )

    def _links(self, devices: Sequence[Device], now: float) -> tuple[LinkNow, ...]:
        """Views of the nodes that are shown."""
        mapped = self._mapped_to(devices, now)
        shown = {device.node_id for device in devices}
        traffic = {link: images for link, images in self.record.traffic().items() if shown.issuperset(link)}
        pairs = {(end, upper) for end, uppers in mapped.items() for upper in uppers if upper in shown}
        return tuple(
            LinkNow(end=end, upper=upper, mapped=(end, upper) in pairs, images_per_s=traffic.get((end, upper), 0.0))
            for end, upper in sorted(pairs | traffic.keys())
        )

    def _mapped_to(self, devices: Sequence[Device], now: float) -> Mapping[str, tuple[str, ...]]:
        """Upstream nodes by end device under the scheduler's own scheme; computed again when the fleet has changed."""
        scheduler = self._scheduler
        scheme, changes = scheduler.settings.scheme, scheduler.devices.version
        if scheme is Scheme.ADAPTIVE:
            return {}
        if self._mapped[0] != changes:
            self._mapped = changes, {}
        known, mapped = self._mapped[1], {}
        for device in devices:
            node_id = device.node_id
            if device.tier is Tier.END and device.listed:
                if node_id not in known:
                    route = scheduler.placement.route(scheme, node_id, now)
                    known[node_id] = tuple(node.node_id for node in route.upstreams[: max(1, route.in_turn)])
                mapped[node_id] = known[node_id]
        return mapped

    def _job(self, recipient: DurableRecipient) -> JobNow:
        job, active = recipient.job, self._scheduler.dispatcher.job(recipient.job.id)
        return JobNow(
            id=job.id,
            name=job.policy.name,
            site=job.policy.site,
            owner=job.owner,
            state=recipient.state,
            reason="" if active is None else active.reason,
            images=job.images,
            answered_coarse=recipient.progress.answered_coarse,
            answered_fine=recipient.progress.answered_fine,
        )


def _finite(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None
