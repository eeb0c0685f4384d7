"""Routes of the sites of a fleet."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Query

from scheduler.api.parameters import SitePath
from scheduler.api.routing import CHECKS, MISSING, OPERATORS, USERS, CallerOf, Service, SmallBody, sites_of
from scheduler.core.device import Device
from scheduler.core.site import NO_SITE, SitesSeen
from scheduler.jobs.service import Scheduler
from tierkit.access import Caller
from tierkit.errors import Conflict, Forbidden, InvalidInput, NotFound
from tierkit.types import Health, Scheme, SiteHealth, Tier
from tierkit.wire.api import SiteChange, SiteList, SiteNow

__all__ = ["cloud_share", "sites", "sites_now"]

_MOST_TOLD = 3
"""Nodes in the reason of a site."""

sites = APIRouter(tags=["fleet"], dependencies=CHECKS, route_class=SmallBody)


@sites.get("/v1/sites", response_model=SiteList, summary="The sites of the fleet", dependencies=USERS)
async def list_sites(scheduler: Service, caller: CallerOf) -> SiteList:
    """All known sites, or those to which the caller is limited. A site is known until it is forgotten."""
    return SiteList(sites=sites_now(scheduler, SitesSeen(allowed=sites_of(caller)), time.monotonic()))


@sites.get("/v1/sites/{site}", response_model=SiteNow, responses=MISSING, summary="A site", dependencies=USERS)
async def get_site(scheduler: Service, caller: CallerOf, site: SitePath) -> SiteNow:
    """Health, nodes and figures of the site, and the rule for its pictures."""
    _check_known(scheduler, site, caller)
    return _site_now(scheduler, site, time.monotonic())


@sites.post(
    "/v1/sites/{site}/drain",
    response_model=SiteChange,
    responses=MISSING,
    summary="Give the nodes of a site no new tasks",
    dependencies=OPERATORS,
)
async def drain(scheduler: Service, caller: CallerOf, site: SitePath) -> SiteChange:
    """For operators. Also holds for nodes that register later, and over restarts, until the site is resumed."""
    _check_known(scheduler, site, caller)
    await scheduler.operators.intend_site(site, _name(caller), drained=True)
    return await _each(scheduler, site, caller, scheduler.operators.drain)


@sites.delete(
    "/v1/sites/{site}/drain",
    response_model=SiteChange,
    responses=MISSING,
    summary="Resume the nodes of a site",
    dependencies=OPERATORS,
)
async def resume(scheduler: Service, caller: CallerOf, site: SitePath) -> SiteChange:
    """For operators. Drained nodes get tasks again, and removed ones may register."""
    _check_known(scheduler, site, caller)
    await scheduler.operators.intend_site(site, _name(caller))
    return await _each(scheduler, site, caller, scheduler.operators.resume)


@sites.delete(
    "/v1/sites/{site}",
    response_model=SiteChange,
    responses=MISSING,
    summary="Remove the nodes of a site, or forget those that are gone",
    dependencies=OPERATORS,
)
async def remove(
    scheduler: Service,
    caller: CallerOf,
    site: SitePath,
    forget: Annotated[bool, Query(description="Strike its dead or removed nodes off the list.")] = False,
) -> SiteChange:
    """For operators. The nodes' tasks go to others, and no node may register for the site until it is resumed. With
    `forget`, dead or removed nodes are struck off the list, and the site as well once it has no nodes."""
    _check_known(scheduler, site, caller)
    operators = scheduler.operators
    if not forget:
        await operators.intend_site(site, _name(caller), removed=True)
        return await _each(scheduler, site, caller, operators.remove)
    trust = caller is None or caller.may("admin")
    changed = await _each(scheduler, site, caller, lambda node_id, _: operators.forget(node_id, trust=trust))
    if not any(True for _ in scheduler.devices.members(site)):
        await operators.forget_site(site)
    return changed


async def _each(
    scheduler: Scheduler, site: str, caller: Caller | None, change: Callable[[str, str], Awaitable[None]]
) -> SiteChange:
    """Do something with each node of a site. Nodes that this cannot be done with stay as they are, and the answer does
    not name them."""
    by, changed = _name(caller), []
    for device in sorted(scheduler.devices.members(site), key=lambda device: device.order):
        try:
            await change(device.node_id, by)
        except (Conflict, Forbidden, NotFound):
            continue
        changed.append(device.node_id)
    return SiteChange(nodes=tuple(changed))


def _name(caller: Caller | None) -> str:
    return "" if caller is None else caller.name


def _check_known(scheduler: Scheduler, site: str, caller: Caller | None) -> None:
    """Raises NotFound for an unknown site, Forbidden for one that is not the caller's."""
    try:
        scheduler.check_site(site, sites_of(caller))
    except InvalidInput as exc:
        raise NotFound(str(exc)) from exc


def sites_now(scheduler: Scheduler, seen: SitesSeen, now: float) -> tuple[SiteNow, ...]:
    """The sites that an answer shows."""
    known = scheduler.devices.sites
    if known in ([], [NO_SITE]):
        return ()
    return tuple(_site_now(scheduler, site, now) for site in known if site != NO_SITE and seen.site(site))


def cloud_share(scheduler: Scheduler, site: str, now: float) -> float | None:
    """The cloud's actual share of the images in the scheme `mapping` since the planned share of the site last changed;
    None before the first."""
    share = scheduler.dispatcher.cloud_shares.of(site, scheduler.placement.theta_cloud(now, site))
    return None if share is None or share.actual is None else round(share.actual, 6)


def _site_now(scheduler: Scheduler, site: str, now: float) -> SiteNow:
    devices, placement = list(scheduler.devices.members(site)), scheduler.placement
    health, reason = _health(scheduler, site, devices, now)
    images_per_s = scheduler.dispatcher.record.images_per_s
    return SiteNow(
        site=site,
        share=placement.share(site),
        health=health,
        reason=reason,
        nodes=Counter(device.tier for device in devices),
        alive=Counter(device.tier for device in devices if device.told[0] is Health.ALIVE),
        images_per_s=round(sum(images_per_s(device.node_id) for device in devices), 1),
        n_map=placement.n_map(now, site).value,
        theta_cloud=placement.theta_cloud(now, site),
        cloud_share=cloud_share(scheduler, site, now),
        cloud_nodes=round(placement.cloud_nodes(site, now), 3),
    )


def _health(scheduler: Scheduler, site: str, devices: list[Device], now: float) -> tuple[SiteHealth, str]:
    ends = [device for device in devices if device.tier is Tier.END]
    ill = sorted((each for each in devices if each.told[0] is not Health.ALIVE), key=lambda each: each.order)
    told = ", ".join(f"{each.node_id} is {each.told[0]}" for each in ill[:_MOST_TOLD])
    told += f" and {len(ill) - _MOST_TOLD} more are not well" if len(ill) > _MOST_TOLD else ""
    if not devices:
        intent = scheduler.devices.site_intent(site)
        return SiteHealth.DOWN, f"removed{intent.of_whom}" if intent.removed else "none of its nodes is on the list"
    if not ends:
        return SiteHealth.DOWN, "it has no end device"
    if all(each in ill for each in ends):
        drained = all(each.told[0] is Health.DRAINING for each in ends)
        return (SiteHealth.DRAINED if drained else SiteHealth.DOWN), told
    if not scheduler.placement.has_upstream(Scheme.MAPPING, now, site=site):
        share = scheduler.placement.share(site)
        return SiteHealth.COARSE, f"no upstream node is alive that it may ask (share = {share})" + (
            told and f"; {told}"
        )
    return (SiteHealth.DEGRADED, told) if ill else (SiteHealth.OK, "all its nodes are alive")
