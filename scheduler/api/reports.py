"""What the API tells of the fleet: devices, mapping with the paper's formulas, models, limits. Reads only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, Field

from models.manifest import Manifest
from scheduler.devices.list import DeviceList
from scheduler.ingest.collect import IngestLimits
from scheduler.placement.adaptive.pilot import EndPlace, Pilot
from scheduler.placement.adaptive.planner import Ask, Send
from scheduler.placement.bound import NodeCounts, bound_of_scheme
from scheduler.placement.mapping import time_end, time_end_cloud, time_end_edge, time_mapping
from scheduler.placement.routes import PAPER_BATCH, Fleet
from scheduler.settings import SchedulerSettings
from tierkit.types import Health, Scheme, Tier
from tierkit.wire.messages import ModelOffer

__all__ = ["DevicePage", "DeviceReport", "MappingReport", "Pair", "device_page", "info", "mapping_report"]


class DeviceReport(BaseModel):
    """A node of the device list."""

    node_id: str
    tier: Tier
    url: str
    incarnation: str
    version: str
    health: Health
    reason: str = Field(description="Why the failure detector thinks so.")
    trusted: bool = Field(description="Whether it may see pixels, by the scheduler's own list.")
    silent_s: float = Field(description="Seconds since its last sign of life.")
    reached: bool = Field(description="Whether the scheduler has reached it by itself, at the address it gave.")
    phi: float = Field(description="Suspicion by silence: 8 means that one heartbeat in 10^8 comes so late.")
    joined_s: float = Field(description="Seconds since it registered.")
    outstanding: int = Field(description="Tasks that the scheduler has given it.")
    in_flight: int
    queued_images: int
    running_images: int
    images_done: int
    images_per_minute: int | None = Field(description="Its power budget.")
    models: tuple[ModelOffer, ...]


class DevicePage(BaseModel):
    devices: list[DeviceReport]


class Pair(BaseModel):
    """Where an end device sends its tasks on."""

    end: str
    upstream: list[str] = Field(description="In the order in which the device tries them.")
    shared: int = Field(description="So many of them, from the first, take turns.")
    reason: str


class NodeReport(BaseModel):
    """What the scheme `adaptive` thinks of a node now."""

    node_id: str
    tier: Tier
    ms_per_image: float
    samples: int = Field(description="Answers that this comes from; 0: the node's own measurement at its start.")
    tasks: int = Field(description="On their way to it, waiting there or being computed.")
    backlog_s: float = Field(description="Until it will be done with them.")


class LinkReport(BaseModel):
    """What it thinks of the link between an end device and an upper node."""

    end: str
    upper: str
    seconds: float = Field(description="There and back, without the work in between.")
    samples: int


class AdaptiveReport(BaseModel):
    """The estimates that the scheme `adaptive` decides by. Links appear once an answer has passed them."""

    nodes: list[NodeReport]
    links: list[LinkReport]


class MappingReport(BaseModel):
    """The mapping of the fleet as it is now, and the paper's formulas with its figures."""

    scheme: Scheme
    scheme_default: Scheme
    n_map: int | None = Field(description="Null where there is no end device or no edge node to compute it for.")
    n_map_reason: str
    theta_cloud: float | None
    pairs: list[Pair]
    formulas: dict[str, dict[str, Any]]
    adaptive: AdaptiveReport | None = Field(description="With the scheme `adaptive`.")


def device_page(devices: DeviceList, fleet: Fleet, outstanding: Callable[[str], int], now: float) -> DevicePage:
    reports = []
    for view in devices.view(now):
        device, registration = view.device, view.device.registration
        load = device.load
        reports.append(
            DeviceReport(
                node_id=device.node_id,
                tier=device.tier,
                url=registration.url,
                incarnation=registration.incarnation,
                version=registration.version,
                health=view.health,
                reason=view.reason,
                trusted=fleet.trusts(device),
                silent_s=round(view.silent_s, 3),
                reached=device.reached,
                phi=round(view.phi, 1),
                joined_s=round(now - device.joined_at, 3),
                outstanding=outstanding(device.node_id),
                in_flight=load.in_flight if load else 0,
                queued_images=load.queued_images if load else 0,
                running_images=load.running_images if load else 0,
                images_done=load.images_done if load else 0,
                images_per_minute=registration.images_per_minute,
                models=registration.models,
            )
        )
    return DevicePage(devices=reports)


def mapping_report(
    fleet: Fleet, pilot: Pilot, settings: SchedulerSettings, *, scheme: Scheme | None, tasks: int, now: float
) -> MappingReport:
    """Args: tasks: N_t of the formulas."""
    shown = scheme or settings.scheme
    n_map = fleet.n_map(now)
    routes = fleet.routes(shown, now)
    return MappingReport(
        scheme=shown,
        scheme_default=settings.scheme,
        n_map=n_map.value,
        n_map_reason=n_map.reason,
        theta_cloud=fleet.theta_cloud(now),
        pairs=_planned(fleet, pilot, now)
        if shown is Scheme.ADAPTIVE
        else [
            Pair(
                end=route.end,
                upstream=[node.node_id for node in route.upstreams],
                shared=route.in_turn,
                reason=route.reason,
            )
            for route in routes.values()
        ],
        formulas=_formulas(fleet, shown, n_ends=len(routes), tasks=tasks, now=now),
        adaptive=_estimates(fleet, pilot, now) if shown is Scheme.ADAPTIVE else None,
    )


def _planned(fleet: Fleet, pilot: Pilot, now: float) -> list[Pair]:
    """Where each end device would send a lone task of 50 images that came now."""
    pairs = []
    for end in fleet.alive_ends(now):
        ask = Ask(remaining=1, interactive=True)
        way = pilot.plan(ask, PAPER_BATCH, [EndPlace(node=end, has_room=True)], fleet.uppers(now), now)
        if isinstance(way, Send):
            upstream = [node.node_id for node in way.upper]
            pairs.append(Pair(end=end.node_id, upstream=upstream, shared=min(1, len(upstream)), reason=way.reason))
        else:
            reason = "it has as many tasks as it may" if way is None else way.reason
            pairs.append(Pair(end=end.node_id, upstream=[], shared=0, reason=reason))
    return pairs


def _estimates(fleet: Fleet, pilot: Pilot, now: float) -> AdaptiveReport:
    nodes, links = pilot.estimates(fleet.alive_ends(now), fleet.uppers(now), now)
    return AdaptiveReport(
        nodes=[
            NodeReport(
                node_id=node.node_id,
                tier=node.tier,
                ms_per_image=round(node.ms_per_image, 4),
                samples=node.samples,
                tasks=node.tasks,
                backlog_s=round(node.backlog_s, 3),
            )
            for node in nodes
        ],
        links=[
            LinkReport(end=link.end, upper=link.upper, seconds=round(link.seconds, 4), samples=link.samples)
            for link in links
        ],
    )


def info(manifest: Manifest, limits: IngestLimits, *, classify_max_images: int) -> dict[str, Any]:
    hierarchy = manifest.hierarchy
    return {
        "version": version("terrace"),
        "limits": {
            "max_images": limits.max_images,
            "max_upload_bytes": limits.max_body_bytes,
            "max_pixels": limits.max_pixels,
            "max_file_bytes": limits.max_file_bytes,
            "max_inflated_bytes": limits.max_inflated_bytes,
            "classify_max_images": classify_max_images,
        },
        "input_shape": list(manifest.models[0].input_shape),
        "hierarchy": {
            "name": hierarchy.name,
            "fine": list(hierarchy.fine),
            "coarse": list(hierarchy.coarse),
            "parent": list(hierarchy.parent),
        },
    }


def _formulas(fleet: Fleet, scheme: Scheme, *, n_ends: int, tasks: int, now: float) -> dict[str, dict[str, Any]]:
    """Eq. 1 to 6 of the paper, and the bound of the scheme; a value is null where the tier that it is about has no
    node."""
    times = fleet.times(now)
    n_edges, n_clouds = len(fleet.upper(Tier.EDGE, now)), len(fleet.upper(Tier.CLOUD, now))
    n_map, theta = fleet.n_map(now), fleet.theta_cloud(now)
    end_s = edge_s = cloud_s = mapping_s = None
    if times is not None:
        end_s = time_end(tasks, n_ends, times.end)
        if times.edge is not None and n_edges:
            edge_s = time_end_edge(tasks, n_ends, n_edges, times.end, times.edge)
        if times.cloud is not None and n_clouds:
            cloud_s = time_end_cloud(tasks, n_ends, n_clouds, times.end, times.cloud)
        if theta is not None and edge_s is not None and cloud_s is not None:
            mapping_s = time_mapping(theta, cloud_s, edge_s)
    counts = NodeCounts(end=n_ends, edge=n_edges, cloud=n_clouds)
    bound_s = None
    if times is not None and n_ends:
        with contextlib.suppress(ValueError):  # no upper node that the scheme could use
            bound_s = bound_of_scheme(scheme, tasks, counts, times, n_map=n_map.used).seconds
    texts: dict[str, tuple[str, float | None]] = {
        "T_End": ("N_t / N_end * (tc_end + tp_end)", end_s),
        "T_End-Cloud": ("T_End + N_t / N_cloud * (tc_cloud + tp_cloud)", cloud_s),
        "T_End-Edge": ("T_End + N_t / N_edge * (tc_edge + tp_edge)", edge_s),
        "N_map": ("ceil((tc_edge + tp_edge) / (tc_end + tp_end))", n_map.value),
        "theta_cloud": ("max(0, (N_end - N_edge * N_map) / N_end)", theta),
        "bound": (
            "max(N_t / N_end * tp_end, n_edge / N_edge * tp_edge, n_cloud / N_cloud * tp_cloud), each with the rest of "
            "the way of one task",
            bound_s,
        ),
        "T_Mapping": ("theta_cloud * T_End-Cloud + (1 - theta_cloud) * T_End-Edge", mapping_s),
    }
    figures: dict[str, dict[str, Any]] = {
        name: {"formula": text, "value": None if value is None else round(value, 6)}
        for name, (text, value) in texts.items()
    }
    figures["figures"] = {"N_t": tasks, "N_end": n_ends, "N_edge": n_edges, "N_cloud": n_clouds}
    for tier in Tier:
        task = getattr(times, tier) if times is not None else None
        figures["figures"][f"tc_{tier}_s"] = task.communication_s if task else None
        figures["figures"][f"tp_{tier}_s"] = round(task.processing_s, 6) if task else None
    return figures
