"""The route of the mapping, with the formulas of the paper."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query

from scheduler.api.routing import (
    CHECKS,
    MISSING,
    USERS,
    SeenSites,
    Service,
    SmallBody,
)
from scheduler.api.schemas import AdaptiveReport, LinkReport, MappingReport, Pair, SiteMapping
from scheduler.api.sites import cloud_share
from scheduler.core.site import NO_SITE
from scheduler.jobs.service import Scheduler
from scheduler.placement.adaptive.pilot import Pilot
from scheduler.placement.adaptive.planner import Ask, Send as SendUp
from scheduler.placement.bound import NodeCounts, bound_of_scheme
from scheduler.placement.mapping import time_end, time_end_cloud, time_end_edge, time_mapping
from scheduler.placement.routes import PAPER_BATCH, Placement
from tierkit.types import Scheme, Tier

__all__ = ["mapping"]


mapping = APIRouter(tags=["fleet"], dependencies=CHECKS, route_class=SmallBody)


@mapping.get(
    "/v1/mapping",
    response_model=MappingReport,
    responses=MISSING,
    summary="The mapping of end devices to upstream nodes",
    dependencies=USERS,
)
async def get_mapping(
    scheduler: Service,
    seen: SeenSites,
    scheme: Annotated[
        Scheme | None, Query(description="Scheme to show the mapping for. Default: the scheduler's setting.")
    ] = None,
    tasks: Annotated[
        int, Query(ge=1, le=1_000_000, description="Number of tasks in the formulas (N_t), each of 50 images.")
    ] = 200,
) -> MappingReport:
    """Upstream nodes of each end device with the reason, and the paper's formulas with their values. With `site`,
    figures and formulas are about this site, otherwise about the nodes of no site."""
    now, placement, pilot = time.monotonic(), scheduler.placement, scheduler.dispatcher.pilot
    shown, site = scheme or scheduler.settings.scheme, seen.only or NO_SITE
    known = [each for each in scheduler.devices.sites if each == NO_SITE or seen.site(each)]
    wanted = [site] if seen.only else [each for each in known if each or seen.node(NO_SITE, Tier.END)]
    n_map, adaptive = placement.n_map(now, site), None
    if shown is Scheme.ADAPTIVE:
        pairs = [pair for each in wanted for pair in _planned(placement, pilot, each, now)]
        ends = [end for each in wanted for end in placement.alive_ends(now, each)]
        uppers = {node.node_id: node for each in wanted for node in placement.uppers(now, site=each)}
        nodes, links = pilot.estimates(ends, list(uppers.values()), now)
        adaptive = AdaptiveReport(nodes=nodes, links=links)
    else:
        routes = [route for each in wanted for route in placement.routes(shown, now, each).values()]
        pairs = [
            Pair(
                end=route.end,
                upstream=[node.node_id for node in route.upstreams],
                shared=route.in_turn,
                reason=route.reason,
            )
            for route in routes
        ]
    return MappingReport(
        scheme=shown,
        scheme_default=scheduler.settings.scheme,
        site=seen.only,
        n_map=n_map.value,
        n_map_reason=n_map.reason
        if seen.only or not any(wanted)
        else f"each site has its own; no site: {n_map.reason}",
        theta_cloud=placement.theta_cloud(now, site),
        cloud_share=cloud_share(scheduler, site, now),
        pairs=pairs,
        formulas=_formulas(placement, shown, site, tasks=tasks, now=now),
        links={
            tier: LinkReport(set_s=link.set_s, measured_s=link.measured_s, used_s=link.used_s)
            for tier, link in placement.links().items()
        },
        sites=[_of_site(scheduler, each, now) for each in wanted if each],
        encoding=pilot.encoding.estimates(
            {
                device.node_id
                for each in wanted
                for tier in (Tier.END, Tier.EDGE)
                for device in scheduler.devices.alive(tier, now, each)
            }
        ),
        adaptive=adaptive,
    )


def _of_site(scheduler: Scheduler, site: str, now: float) -> SiteMapping:
    placement = scheduler.placement
    n_map = placement.n_map(now, site)
    return SiteMapping(
        site=site,
        n_map=n_map.value,
        n_map_reason=n_map.reason,
        theta_cloud=placement.theta_cloud(now, site),
        cloud_share=cloud_share(scheduler, site, now),
        cloud_nodes=round(placement.cloud_nodes(site, now), 6),
    )


def _planned(placement: Placement, pilot: Pilot, site: str, now: float) -> list[Pair]:
    """The upstream nodes that each end device of a site would use for a single task of 50 images now."""
    pairs, uppers = [], placement.uppers(now, site=site)
    for end in placement.alive_ends(now, site):
        ask = Ask(remaining=1, interactive=True)
        plan = pilot.plan(ask, PAPER_BATCH, [end], uppers, now)
        if isinstance(plan, SendUp):
            upstream = [node.node_id for node in plan.upper]
            pairs.append(Pair(end=end.node_id, upstream=upstream, shared=min(1, len(upstream)), reason=plan.reason))
        else:
            reason = "it has as many tasks as it may" if plan is None else plan.reason
            pairs.append(Pair(end=end.node_id, upstream=[], shared=0, reason=reason))
    return pairs


def _formulas(placement: Placement, scheme: Scheme, site: str, *, tasks: int, now: float) -> dict[str, dict[str, Any]]:
    """Eq. 1 to 6 of the paper for a site, and the bound of the scheme; a value is null if the tier that it is about
    has no node. The equations count a site's share of the cloud nodes of no site, the bound all of them: no order of
    the tasks is faster, whatever other sites do."""
    times, n_ends = placement.times(now, site), len(placement.alive_ends(now, site))
    n_edges, clouds = len(placement.upper(Tier.EDGE, now, site=site)), placement.upper(Tier.CLOUD, now, site=site)
    shared = sum(node.site != site for node in clouds)
    n_clouds = len(clouds) - shared + (placement.cloud_nodes(site, now) if shared else 0)
    n_map, theta = placement.n_map(now, site), placement.theta_cloud(now, site)
    end_s = edge_s = cloud_s = mapping_s = None
    if times is not None:
        end_s = time_end(tasks, n_ends, times.end)
        if times.edge is not None and n_edges:
            edge_s = time_end_edge(tasks, n_ends, n_edges, times.end, times.edge)
        if times.cloud is not None and n_clouds:
            cloud_s = time_end_cloud(tasks, n_ends, n_clouds, times.end, times.cloud)
        if theta is not None and edge_s is not None and (cloud_s is not None or not theta):
            mapping_s = time_mapping(theta, cloud_s or 0.0, edge_s)
    counts = NodeCounts(end=n_ends, edge=n_edges, cloud=len(clouds))
    bound_s = None
    if times is not None and n_ends:
        with contextlib.suppress(ValueError):  # no upstream node that the scheme could use
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
    figures["figures"] = {"N_t": tasks, "N_end": n_ends, "N_edge": n_edges}
    figures["figures"]["N_cloud"] = round(n_clouds, 6)
    for tier in Tier:
        task = getattr(times, tier) if times is not None else None
        figures["figures"][f"tc_{tier}_s"] = task.communication_s if task else None
        figures["figures"][f"tp_{tier}_s"] = round(task.processing_s, 6) if task else None
    return figures
