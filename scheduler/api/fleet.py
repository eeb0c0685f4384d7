"""Routes of the fleet: registration and heartbeats, the device list, the mapping with the paper's formulas, weights."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import time
from functools import cache
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import FileResponse
from PIL import Image
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from models.data import ImageSet, read_sample
from models.hierarchy import bundled_hierarchy
from models.manifest import ModelEntry, weights_folder
from models.store import ModelStore
from scheduler.api.own_address import OwnAddress
from scheduler.api.privacy import has_audit
from scheduler.api.routing import (
    ADMINS,
    CHECKS,
    MISSING,
    NODES,
    NOSNIFF,
    OPERATORS,
    USERS,
    USERS_AND_NODES,
    CallerOf,
    Service,
    SmallBody,
    for_nodes,
    for_operators,
)
from scheduler.api.schemas import AdaptiveReport, MappingReport, Pair, SignIn, WhoAmI
from scheduler.jobs.service import CLASSIFY_MAX_IMAGES, Scheduler
from scheduler.metrics import REFUSED
from scheduler.placement.adaptive.pilot import Pilot
from scheduler.placement.adaptive.planner import Ask, Send as SendUp
from scheduler.placement.bound import NodeCounts, bound_of_scheme
from scheduler.placement.mapping import time_end, time_end_cloud, time_end_edge, time_mapping
from scheduler.placement.routes import PAPER_BATCH, Fleet
from tierkit.access import SESSION_COOKIE, SESSION_PATH, Caller, Gate
from tierkit.distribution import installed_version
from tierkit.errors import Conflict, Forbidden, InvalidInput, NotFound, OtherNetworks, WeightsError
from tierkit.types import Scheme, Tier
from tierkit.wire.api import Device, DeviceList
from tierkit.wire.messages import Heartbeat, Lease, NodeId, Registration

__all__ = ["about", "fleet"]

_log = logging.getLogger(__name__)

NodeName = Annotated[NodeId, Path()]

fleet = APIRouter(tags=["fleet"], dependencies=CHECKS, route_class=SmallBody)
about = APIRouter(tags=["about"], dependencies=CHECKS, route_class=SmallBody)


@fleet.get("/v1/devices", response_model=DeviceList, summary="The device list", dependencies=USERS)
async def list_devices(scheduler: Service) -> DeviceList:
    now = time.monotonic()
    return DeviceList(
        devices=tuple(
            Device.model_validate(
                {
                    **(view.device.load.model_dump() if view.device.load else {}),
                    **view.device.registration.model_dump(),
                    "health": view.health,
                    "reason": view.reason,
                    "trusted": scheduler.fleet.trusts(view.device),
                    "network": scheduler.fleet.node(view.device).model,
                    "accuracy": scheduler.fleet.accuracy(view.device),
                    "silent_s": round(view.silent_s, 3),
                    "reached": view.device.reached,
                    "phi": round(view.phi, 1),
                    "joined_s": round(now - view.device.joined_at, 3),
                    "outstanding": scheduler.dispatcher.outstanding(view.device.node_id),
                }
            )
            for view in (*scheduler.devices.view(now), *scheduler.devices.strangers(now))
        )
    )


@fleet.post(
    "/v1/devices",
    response_model=Lease,
    responses={409: {"description": "The id is another node's, or the networks are not those of the model set."}},
    summary="Register a node",
    dependencies=NODES,
)
async def register(request: Request, scheduler: Service, caller: CallerOf, registration: Registration) -> Lease:
    try:
        return await _register(request, scheduler, caller, registration)
    except (Conflict, Forbidden) as exc:
        # A node whose token is for other names has proved nothing.
        claim = registration if isinstance(exc, Conflict) else None
        scheduler.devices.refused(registration.node_id, str(exc), time.monotonic(), claim, tier=registration.tier)
        reason = "networks" if isinstance(exc, OtherNetworks) else "claim" if claim else "forbidden"
        REFUSED.labels(registration.tier, reason).inc()
        raise


async def _register(request: Request, scheduler: Scheduler, caller: Caller | None, registration: Registration) -> Lease:
    if caller is not None:
        caller.check_claim(registration.node_id, registration.tier)
    server: tuple[str, int] | None = request.scope["server"]
    own: OwnAddress = request.app.state.own_address
    if registration.url == str(request.base_url).rstrip("/") or (
        server is not None and await own.is_at(registration.url, port=server[1])
    ):
        raise InvalidInput("url: this is the scheduler's own address; it must be the one at which the node listens")
    scheduler.fleet.check_networks(registration)
    return scheduler.devices.register(registration, time.monotonic())


@fleet.post(
    "/v1/devices/{node_id}/heartbeat",
    status_code=204,
    responses={**MISSING, 409: {"description": "Another process has this id now."}},
    summary="Renew a node's lease",
    dependencies=NODES,
)
async def heartbeat(scheduler: Service, caller: CallerOf, node_id: NodeName, beat: Heartbeat) -> Response:
    """404 or 409: register again."""
    if caller is not None:
        caller.check_claim(node_id)
    scheduler.devices.heartbeat(node_id, beat, time.monotonic())
    return Response(status_code=204)


@fleet.post(
    "/v1/devices/{node_id}/drain",
    status_code=204,
    responses=MISSING,
    summary="Give a node no new tasks",
    dependencies=OPERATORS,
)
async def drain(scheduler: Service, caller: CallerOf, node_id: NodeName) -> None:
    """Holds until it is resumed, over restarts of the node and of the scheduler."""
    await scheduler.operators.drain(node_id, _name(caller))


@fleet.delete(
    "/v1/devices/{node_id}/drain",
    status_code=204,
    responses={**MISSING, 409: {"description": "The node itself takes no tasks: it shuts down, or lacks a model."}},
    summary="Give a drained node tasks again, or let a removed one register",
    dependencies=OPERATORS,
)
async def resume(scheduler: Service, caller: CallerOf, node_id: NodeName) -> None:
    await scheduler.operators.resume(node_id, _name(caller))


@fleet.put(
    "/v1/devices/{node_id}/trust",
    status_code=204,
    responses=MISSING,
    summary="Say whether a node may see pixels",
    dependencies=ADMINS,
)
async def trust(
    scheduler: Service,
    caller: CallerOf,
    node_id: NodeName,
    trusted: Annotated[
        Literal["yes", "no", "default"], Query(description="`default`: as the scheduler's setting `trusted` says.")
    ],
) -> None:
    """Counts from the next task on, and over restarts, before the setting."""
    await scheduler.operators.trust(node_id, _name(caller), {"yes": True, "no": False, "default": None}[trusted])


@fleet.delete(
    "/v1/devices/{node_id}",
    status_code=204,
    responses={**MISSING, 409: {"description": "It has another incarnation now, or cannot be forgotten: it lives."}},
    summary="Remove a node, or forget one that is gone",
)
async def remove(
    request: Request,
    scheduler: Service,
    caller: CallerOf,
    node_id: NodeName,
    incarnation: Annotated[str | None, Query(description="A node takes its leave: this process of it ends.")] = None,
    forget: Annotated[bool, Query(description="Strike a dead or removed node off the list.")] = False,
) -> None:
    """Its tasks go to others, and it may not register until it is resumed, or forgotten once it is gone."""
    if incarnation is not None:
        await for_nodes(request, scheduler, caller)
        if caller is not None:
            caller.check_claim(node_id)
        scheduler.devices.leave(node_id, incarnation, time.monotonic())
        return
    await for_operators(caller)
    if forget:
        await scheduler.operators.forget(node_id, trust=caller is None or caller.may("admin"))
    else:
        await scheduler.operators.remove(node_id, _name(caller))


def _name(caller: Caller | None) -> str:
    return "" if caller is None else caller.name


@fleet.get("/v1/mapping", response_model=MappingReport, summary="Who forwards to whom, and why", dependencies=USERS)
async def get_mapping(
    scheduler: Service,
    scheme: Annotated[Scheme | None, Query(description="Default: the scheduler's.")] = None,
    tasks: Annotated[int, Query(ge=1, le=1_000_000, description="N_t of the formulas, tasks of 50 images.")] = 200,
) -> MappingReport:
    now, fleet, pilot = time.monotonic(), scheduler.fleet, scheduler.dispatcher.pilot
    shown = scheme or scheduler.settings.scheme
    n_map, routes, adaptive = fleet.n_map(now), fleet.routes(shown, now), None
    pairs = [
        Pair(
            end=route.end,
            upstream=[node.node_id for node in route.upstreams],
            shared=route.in_turn,
            reason=route.reason,
        )
        for route in routes.values()
    ]
    if shown is Scheme.ADAPTIVE:
        pairs = _planned(fleet, pilot, now)
        nodes, links = pilot.estimates(fleet.alive_ends(now), fleet.uppers(now), now)
        adaptive = AdaptiveReport(nodes=nodes, links=links)
    return MappingReport(
        scheme=shown,
        scheme_default=scheduler.settings.scheme,
        n_map=n_map.value,
        n_map_reason=n_map.reason,
        theta_cloud=fleet.theta_cloud(now),
        pairs=pairs,
        formulas=_formulas(fleet, shown, n_ends=len(routes), tasks=tasks, now=now),
        adaptive=adaptive,
    )


class _File(FileResponse):
    """Refuses a `Range` in the form of all errors; the framework would do so in plain text."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def checked(message: Message) -> None:
            status = message.get("status")
            if status == 400:
                raise InvalidInput("Range must name bytes of the file, such as bytes=0-99")
            if status == 416:
                length = Headers(raw=message["headers"])["Content-Range"]
                raise HTTPException(416, "Range names no bytes that the file has", {"Content-Range": length})
            await send(message)

        await super().__call__(scope, receive, checked)


@about.get(
    "/v1/models",
    summary="The manifest: classes, and all networks and encoders that nodes may fetch",
    response_class=Response,
    responses={
        200: {"content": {"application/json": {}}},
        304: {"description": "The manifest that `If-None-Match` names is this one."},
    },
    dependencies=USERS_AND_NODES,
)
async def list_models(request: Request, scheduler: Service) -> Response:
    etag = f'"{scheduler.manifest.digest}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"ETag": etag})
    return Response(scheduler.manifest.as_json(), media_type="application/json", headers={"ETag": etag})


@about.get(
    "/v1/models/{name}/file",
    summary="The weights of a network",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": {}}},
        206: {"description": "The bytes that `Range` names.", "content": {"application/octet-stream": {}}},
        304: {"description": "The version that `If-None-Match` names is this one."},
        404: {"description": "Not here, or another version."},
        416: {"description": "`Range` names no bytes that the file has."},
    },
    dependencies=USERS_AND_NODES,
)
async def get_weights(
    request: Request,
    scheduler: Service,
    name: str,
    sha256: Annotated[str | None, Query(pattern="^[0-9a-f]{64}$", description="The version that is wanted.")] = None,
) -> Response:
    entry = scheduler.manifest.weights(name)
    if sha256 is not None and sha256 != entry.sha256:
        raise NotFound(f"model {name!r} is here with sha256 {entry.sha256}, not {sha256}")
    etag = f'"{entry.sha256}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"ETag": etag})
    folder = scheduler.settings.models or weights_folder()
    try:
        path = await asyncio.to_thread(ModelStore([folder], folder).find, entry)
    except WeightsError as exc:
        _log.error("weights cannot be given to nodes", extra={"model": name, "why": str(exc)})
        raise NotFound(f"the weights of {name!r} are damaged here") from exc
    if path is None:
        raise NotFound(f"the weights of {name!r} are not here")
    return _File(path, media_type="application/octet-stream", headers={"ETag": etag, **NOSNIFF})


@about.get(
    "/v1/samples/{index}",
    summary="A picture to try the fleet with",
    response_class=Response,
    responses={200: {"content": {"image/png": {}}}, 404: {"description": "There is none, or the set has none."}},
    dependencies=USERS,
)
async def get_sample(
    scheduler: Service, index: Annotated[int, Path(ge=0, le=999_999_999, description="Below `samples` of /v1/info.")]
) -> Response:
    """One of the test pictures that come with Terrace, where the fleet answers their classes. Its class stands in the
    header `Terrace-Sample`."""
    if index >= (samples := _samples(scheduler)):
        raise NotFound(f"no sample {index}: there are {samples}")
    content, label = await asyncio.to_thread(_sample, index)
    headers = {"Terrace-Sample": label, "Cache-Control": "private, max-age=86400", **NOSNIFF}
    return Response(content, media_type="image/png", headers=headers)


@about.get("/v1/whoami", response_model=WhoAmI, summary="Whose token this is, and until when")
async def get_caller(caller: CallerOf) -> WhoAmI:
    if caller is None:
        return WhoAmI()
    return WhoAmI(name=caller.name, role=caller.role, expires=caller.entry.expires if caller.entry else None)


@about.post(SESSION_PATH, response_model=WhoAmI, summary="Exchange a user's token for a session cookie, in a browser")
async def sign_in(request: Request, response: Response, given: SignIn) -> WhoAmI:
    """The cookie is valid for 12 hours, and no longer than the token. Where no token is asked for there is none."""
    gate: Gate | None = request.app.state.gate
    if gate is None:
        return WhoAmI()
    caller, value, seconds = gate.sign_in(given.token)
    _set_session(request, response, value, seconds)
    return await get_caller(caller)


@about.delete(SESSION_PATH, status_code=204, summary="Forget the session cookie")
async def sign_out(request: Request, response: Response) -> None:
    _set_session(request, response, "", 0)


def _set_session(request: Request, response: Response, value: str, seconds: int) -> None:
    # The origin has been checked: it is https as well where TLS ends in front of this service.
    secure = "https" in (request.url.scheme, request.headers.get("origin", "").partition(":")[0])
    root_path = request.scope["root_path"] or "/"  # other services of the same site need not see it
    response.set_cookie(
        SESSION_COOKIE, value, max_age=seconds, path=root_path, secure=secure, httponly=True, samesite="strict"
    )


_SAMPLES = 1000
"""Pictures of the bundled sample."""


def _samples(scheduler: Scheduler) -> int:
    """Pictures that come with Terrace and have classes of this fleet."""
    return _SAMPLES if scheduler.manifest.hierarchy.digest == bundled_hierarchy().digest else 0


@cache
def _sample_set() -> ImageSet:
    return read_sample()


def _sample(index: int) -> tuple[bytes, str]:
    """A picture as PNG, and its class. Blocks."""
    sample, file = _sample_set(), io.BytesIO()
    assert sample.fine is not None
    Image.fromarray(sample.images[index]).save(file, "PNG")
    return file.getvalue(), bundled_hierarchy().fine[sample.fine[index]]


def _pixels_of(entry: ModelEntry) -> dict[str, Any]:
    """What a network sees of a picture."""
    height, width, rule, resize_to, resample = entry.fit
    return {
        "name": entry.name,
        "tier": entry.tier,
        "height": height,
        "width": width,
        "resize": rule,
        "resize_to": resize_to,
        "resample": resample,
    }


@about.get("/v1/info", summary="Version, limits and class names", dependencies=USERS)
async def get_info(scheduler: Service) -> dict[str, Any]:
    limits, hierarchy = scheduler.settings, scheduler.manifest.hierarchy
    return {
        "version": installed_version(),
        "limits": {
            "max_images": limits.max_images,
            "max_upload_bytes": limits.max_body_bytes,
            "max_pixels": limits.max_pixels,
            "max_file_bytes": limits.max_file_bytes,
            "max_inflated_bytes": limits.max_inflated_bytes,
            "classify_max_images": CLASSIFY_MAX_IMAGES,
        },
        "input_shape": list(scheduler.manifest.models[0].input_shape),
        "samples": _samples(scheduler),
        "audit": has_audit(limits),
        "networks": [_pixels_of(entry) for entry in scheduler.manifest.models],
        "hierarchy": {
            "name": hierarchy.name,
            "fine": list(hierarchy.fine),
            "coarse": list(hierarchy.coarse),
            "parent": list(hierarchy.parent),
        },
    }


def _planned(fleet: Fleet, pilot: Pilot, now: float) -> list[Pair]:
    """Where each end device would send a lone task of 50 images that came now."""
    pairs = []
    for end in fleet.alive_ends(now):
        ask = Ask(remaining=1, interactive=True)
        plan = pilot.plan(ask, PAPER_BATCH, [end], fleet.uppers(now), now)
        if isinstance(plan, SendUp):
            upstream = [node.node_id for node in plan.upper]
            pairs.append(Pair(end=end.node_id, upstream=upstream, shared=min(1, len(upstream)), reason=plan.reason))
        else:
            reason = "it has as many tasks as it may" if plan is None else plan.reason
            pairs.append(Pair(end=end.node_id, upstream=[], shared=0, reason=reason))
    return pairs


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
    figures["figures"] = {"N_t": tasks, "N_end": n_ends, "N_edge": n_edges, "N_cloud": n_clouds}
    for tier in Tier:
        task = getattr(times, tier) if times is not None else None
        figures["figures"][f"tc_{tier}_s"] = task.communication_s if task else None
        figures["figures"][f"tp_{tier}_s"] = round(task.processing_s, 6) if task else None
    return figures
