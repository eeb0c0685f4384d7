"""Routes of the device list: registration, heartbeats and leases, and what operators do to nodes."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from scheduler.api.own_address import OwnAddress
from scheduler.api.parameters import NodePath
from scheduler.api.routing import (
    ADMINS,
    CHECKS,
    MISSING,
    NODES,
    OPERATORS,
    USERS,
    CallerOf,
    SeenSites,
    Service,
    SmallBody,
    for_nodes,
    for_operators,
)
from scheduler.core import events
from scheduler.core.device import Device as KnownDevice
from scheduler.core.site import SitesSeen
from scheduler.jobs.service import Scheduler
from scheduler.metrics import REFUSED
from tierkit.access import Caller
from tierkit.errors import Conflict, Forbidden, InvalidInput, OtherNetworks
from tierkit.wire.api import Device, DeviceList
from tierkit.wire.copies import CopyAnswer, CopyReport
from tierkit.wire.messages import (
    LABELS_HEADER,
    RELEASES_HEADER,
    ROUTE_HEADER,
    DeviceRoute,
    Heartbeat,
    Lease,
    Registration,
)

__all__ = ["devices"]

devices = APIRouter(tags=["fleet"], dependencies=CHECKS, route_class=SmallBody)


@devices.get(
    "/v1/devices", response_model=DeviceList, responses=MISSING, summary="The nodes of the fleet", dependencies=USERS
)
async def list_devices(scheduler: Service, seen: SeenSites) -> DeviceList:
    """Nodes with their health, load and networks. A user who is limited to sites sees their nodes, and the cloud nodes
    that all sites share."""
    now = time.monotonic()
    return DeviceList(
        devices=tuple(
            Device.model_validate(
                {
                    **(view.device.load.model_dump() if view.device.load else {}),
                    **view.device.registration.model_dump(),
                    "sources": view.device.registration.sources,
                    "health": view.health,
                    "reason": view.reason,
                    "trusted": scheduler.placement.trusts(view.device),
                    "network": scheduler.placement.node(view.device).model,
                    "accuracy": scheduler.placement.accuracy(view.device),
                    "silent_s": round(view.silent_s, 3),
                    "reached": view.device.reached,
                    "phi": round(view.phi, 1),
                    "joined_s": round(now - view.device.joined_at, 3),
                    "outstanding": scheduler.devices.assigned.outstanding(view.device.node_id),
                }
            )
            for view in (*scheduler.devices.view(now), *scheduler.devices.strangers(now))
            if _is_shown(seen, view.device)
        )
    )


@devices.post(
    "/v1/devices",
    response_model=Lease,
    responses={409: {"description": "The id is another node's, or the networks are not those of the model set."}},
    summary="Register a node",
    dependencies=NODES,
)
async def register(
    request: Request, response: Response, scheduler: Service, caller: CallerOf, registration: Registration
) -> Lease:
    """For nodes. The answer is the lease, which heartbeats renew. A node that follows releases gets their numbers in
    the header `Terrace-Releases`; one with sources gets the version of its route in `Terrace-Route`."""
    try:
        lease = await _register(request, scheduler, caller, registration)
    except (Conflict, Forbidden) as exc:
        # A node whose token is for other names has proved nothing.
        claim = registration if isinstance(exc, Conflict) else None
        refusal = events.TurnedAway(registration.node_id, str(exc), claim, registration.tier)
        scheduler.dispatcher.handle(refusal)
        reason = "networks" if isinstance(exc, OtherNetworks) else "claim" if claim else "forbidden"
        REFUSED.labels(registration.tier, reason).inc()
        raise
    response.headers.update(_told(scheduler, registration.node_id))
    return lease


def _told(scheduler: Scheduler, node_id: str) -> dict[str, str]:
    """Headers of each answer to a node: the releases to hold, the version of the route of its sources, and the number
    of the newest label of its pictures."""
    device = scheduler.devices.get(node_id)
    headers = {}
    if device.registration.follows:
        headers[RELEASES_HEADER] = scheduler.releases.header(device)
    if device.registration.sources:
        headers[ROUTE_HEADER] = scheduler.route_of_sources(node_id).version
        if last_label := scheduler.learning.last_number(node_id):
            headers[LABELS_HEADER] = str(last_label)
    return headers


async def _register(request: Request, scheduler: Scheduler, caller: Caller | None, registration: Registration) -> Lease:
    if caller is not None:
        caller.check_claim(registration.node_id, registration.tier)
        registration = registration.model_copy(update={"site": caller.site_of_node(registration.site)})
    server: tuple[str, int] | None = request.scope["server"]
    own: OwnAddress = request.app.state.own_address
    if registration.url == str(request.base_url).rstrip("/") or (
        server is not None and await own.is_at(registration.url, port=server[1])
    ):
        raise InvalidInput("url: this is the scheduler's own address; it must be the one at which the node listens")
    scheduler.placement.check_networks(registration)
    scheduler.dispatcher.handle(events.Registered(registration))
    times = scheduler.devices.get(registration.node_id).times
    return Lease(lease_s=times.lease_s, heartbeat_s=times.heartbeat_s)


@devices.post(
    "/v1/devices/{node_id}/heartbeat",
    status_code=204,
    responses={**MISSING, 409: {"description": "Another process has this id now."}},
    summary="Renew a node's lease",
    dependencies=NODES,
)
async def heartbeat(scheduler: Service, caller: CallerOf, node_id: NodePath, beat: Heartbeat) -> Response:
    """For nodes, every `heartbeat_s` seconds of the lease. 404 or 409: the node has to register again. The answer has
    the headers of the answer to a registration, and the number of the newest label in `Terrace-Labels`."""
    if caller is not None:
        caller.check_claim(node_id)
    scheduler.dispatcher.handle(events.Beat(node_id, beat))
    return Response(status_code=204, headers=_told(scheduler, node_id))


@devices.get(
    "/v1/devices/{node_id}/route",
    response_model=DeviceRoute,
    response_model_exclude_defaults=True,  # devices of an older Terrace refuse fields that they do not know
    responses=MISSING,
    summary="The route of the pictures of a node's sources",
    dependencies=NODES,
)
async def get_route(scheduler: Service, caller: CallerOf, node_id: NodePath) -> DeviceRoute:
    """For nodes with sources: the upstream nodes to ask, the form of the pictures, and the thresholds. The header
    `Terrace-Route` of other answers has its version."""
    if caller is not None:
        caller.check_claim(node_id)
    return scheduler.route_of_sources(node_id)


@devices.post(
    "/v1/devices/{node_id}/copies",
    response_model=CopyAnswer,
    responses={**MISSING, 409: {"description": "Another process has this id now."}},
    summary="Source of a network's file",
    dependencies=NODES,
)
async def copies(scheduler: Service, caller: CallerOf, node_id: NodePath, report: CopyReport) -> CopyAnswer:
    """For nodes that lack the file of a network. The node reports its progress and learns from which node, or from the
    scheduler, to copy the file. 404 also if no release has the file."""
    if caller is not None:
        caller.check_claim(node_id)
    return await scheduler.spreading.told(node_id, report)


@devices.post(
    "/v1/devices/{node_id}/drain",
    status_code=204,
    responses=MISSING,
    summary="Give a node no new tasks",
    dependencies=OPERATORS,
)
async def drain(scheduler: Service, caller: CallerOf, node_id: NodePath) -> None:
    """For operators. The node finishes the tasks that it has. The order holds until the node is resumed, and over
    restarts of the node and of the scheduler."""
    await scheduler.operators.drain(node_id, _name(caller))


@devices.delete(
    "/v1/devices/{node_id}/drain",
    status_code=204,
    responses={**MISSING, 409: {"description": "The node itself takes no tasks: it shuts down, or lacks a model."}},
    summary="Give a drained node tasks again, or let a removed one register",
    dependencies=OPERATORS,
)
async def resume(scheduler: Service, caller: CallerOf, node_id: NodePath) -> None:
    """For operators. Ends a drain or a removal."""
    await scheduler.operators.resume(node_id, _name(caller))


@devices.put(
    "/v1/devices/{node_id}/trust",
    status_code=204,
    responses=MISSING,
    summary="Set whether a node may see pixels",
    dependencies=ADMINS,
)
async def trust(
    scheduler: Service,
    caller: CallerOf,
    node_id: NodePath,
    trusted: Annotated[
        Literal["yes", "no", "default"],
        Query(description="`yes`: it may. `no`: it may not. `default`: the scheduler's setting `trusted` decides."),
    ],
) -> None:
    """For admins. Overrides the scheduler's setting `trusted` from the next task on, and over restarts."""
    await scheduler.operators.trust(node_id, _name(caller), {"yes": True, "no": False, "default": None}[trusted])


@devices.delete(
    "/v1/devices/{node_id}",
    status_code=204,
    responses={**MISSING, 409: {"description": "It has another incarnation now, or cannot be forgotten: it lives."}},
    summary="Remove a node, or forget one that is gone",
)
async def remove(
    request: Request,
    scheduler: Service,
    caller: CallerOf,
    node_id: NodePath,
    incarnation: Annotated[
        str | None, Query(description="For nodes that shut down: the incarnation of the process that ends.")
    ] = None,
    forget: Annotated[
        bool, Query(description="Strike a dead or removed node off the list. 409 for any other node.")
    ] = False,
) -> None:
    """For operators. The node's tasks go to other nodes, and it may not register until it is resumed. `forget` strikes
    a dead or removed node off the list, with every order about it, so that it may register again. Forgetting a node
    with an order on trust takes an admin."""
    if incarnation is not None:
        await for_nodes(request, scheduler, caller)
        if caller is not None:
            caller.check_claim(node_id)
        scheduler.dispatcher.handle(events.TookLeave(node_id, incarnation))
        return
    await for_operators(caller)
    if forget:
        await scheduler.operators.forget(node_id, trust=caller is None or caller.may("admin"))
    else:
        await scheduler.operators.remove(node_id, _name(caller))


def _is_shown(seen: SitesSeen, device: KnownDevice) -> bool:
    return seen.site(device.site) if seen.only is not None else seen.node(device.site, device.tier)


def _name(caller: Caller | None) -> str:
    return "" if caller is None else caller.name
