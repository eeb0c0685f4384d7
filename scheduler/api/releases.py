"""Routes of releases and of the files of their networks."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import ValidationError

from models.escalation import Tuning, load_tuning
from models.manifest import Manifest, load_manifest, parse_manifest
from scheduler.api.routing import (
    CHECKS,
    MISSING,
    OPERATORS,
    USERS,
    USERS_AND_NODES,
    CallerOf,
    Service,
    SmallBody,
)
from scheduler.core.release import NetworkSet, Release, ReleaseChange, chosen
from scheduler.jobs.service import Scheduler
from tierkit.access import Caller
from tierkit.errors import InvalidInput, NotFound, SetupError, WeightsError
from tierkit.types import Tier
from tierkit.wire.releases import (
    GuardNow,
    NewRelease,
    Pruned,
    ReleaseList,
    ReleaseNetwork,
    ReleaseNow,
    Rollout,
    StartRequest,
    TroubleNow,
)

__all__ = ["releases", "releases_now"]

_MOST_DEVICES = 100
_MOST_HISTORY = 20
_WRONG = "its answers"
_CONFLICT: dict[int | str, dict[str, Any]] = {409: {"description": "It cannot be done now; the answer says why."}}

Ref = Annotated[str, Path(max_length=80, description="The release: NAME@NUMBER, or only the number.")]
Sha256 = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="sha256 of the file.")]


class _LargeBody(SmallBody):
    """A route that takes a manifest: with a hundred thousand classes it has a few million bytes."""

    most_bytes = 64 * 1024**2


releases = APIRouter(tags=["releases"], dependencies=CHECKS, route_class=SmallBody)


@releases.get(
    "/v1/releases", response_model=ReleaseList, summary="All releases, and the change under way", dependencies=USERS
)
async def list_releases(scheduler: Service) -> ReleaseList:
    """Releases, the newest first, with the change under way and the latest changes that have ended."""
    return releases_now(scheduler, time.monotonic())


@releases.get(
    "/v1/releases/{ref}", response_model=ReleaseNow, responses=MISSING, summary="A release", dependencies=USERS
)
async def get_release(scheduler: Service, ref: Ref) -> ReleaseNow:
    """Networks, nodes that hold them, and troubles of nodes that cannot."""
    return _release_now(scheduler, scheduler.releases.find(ref), _jobs(scheduler), time.monotonic())


@releases.get(
    "/v1/releases/{ref}/manifest",
    summary="The manifest of a release: classes, networks and encoders",
    response_class=Response,
    responses={
        **MISSING,
        200: {"content": {"application/json": {}}},
        304: {"description": "`If-None-Match` names it."},
    },
    dependencies=USERS_AND_NODES,
)
async def get_release_manifest(request: Request, scheduler: Service, ref: Ref) -> Response:
    """Content of its `manifest.json`. The header `ETag` is its digest."""
    manifest = scheduler.releases.find(ref).manifest
    etag = f'"{manifest.digest}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"ETag": etag})
    return Response(manifest.as_json(), media_type="application/json", headers={"ETag": etag})


@releases.post(
    "/v1/releases/{ref}/start",
    response_model=Rollout,
    responses={**MISSING, **_CONFLICT},
    summary="Try a release on a part of the fleet",
    dependencies=OPERATORS,
)
async def start(scheduler: Service, caller: CallerOf, ref: Ref, wanted: StartRequest) -> Rollout:
    """For operators. End devices, chosen by a hash of their ids, and a share of the new jobs use the release. If the
    guards hold until the end, the whole fleet gets it; if one fails, it is rolled back. 409: another change is under
    way, or the release cannot be used now."""
    return _rollout(
        scheduler, await scheduler.releases.start(ref, wanted, _name(caller)), scheduler.releases.trial.guards
    )


@releases.post(
    "/v1/releases/{ref}/promote",
    response_model=Rollout,
    responses={**MISSING, **_CONFLICT},
    summary="Give a release to everyone, without guards",
    dependencies=OPERATORS,
)
async def promote(scheduler: Service, caller: CallerOf, ref: Ref) -> Rollout:
    """For operators. All nodes get the release, and no guard is checked. 409: another change is under way, or the
    release cannot be used now."""
    return _rollout(scheduler, await scheduler.releases.promote(ref, _name(caller)), scheduler.releases.trial.guards)


@releases.post(
    "/v1/releases/{ref}/stop",
    response_model=Rollout,
    responses={**MISSING, **_CONFLICT},
    summary="End the trial or roll-out of a release",
    dependencies=OPERATORS,
)
async def stop(scheduler: Service, caller: CallerOf, ref: Ref) -> Rollout:
    """For operators. The release in force before stays, or returns."""
    return _rollout(scheduler, await scheduler.releases.stop(ref, _name(caller)), scheduler.releases.trial.guards)


@releases.post(
    "/v1/releases/{ref}/rollback",
    response_model=Rollout,
    responses={**MISSING, **_CONFLICT},
    summary="Return to the release before",
    dependencies=OPERATORS,
)
async def roll_back(scheduler: Service, caller: CallerOf, ref: Ref) -> Rollout:
    """For operators. Leaves this release and rolls out the previous one."""
    return _rollout(scheduler, await scheduler.releases.roll_back(ref, _name(caller)), scheduler.releases.trial.guards)


@releases.delete(
    "/v1/releases",
    response_model=Pruned,
    summary="Remove old releases, and files that no release names",
    dependencies=OPERATORS,
)
async def prune(
    scheduler: Service,
    dry_run: Annotated[
        bool, Query(description="True: remove nothing, and list the releases and files that would be removed.")
    ] = True,
) -> Pruned:
    """For operators. These releases stay: the one in force, the one before it, releases that were never started, and
    releases of unfinished jobs."""
    rows, files = await scheduler.releases.prune(dry_run=dry_run)
    return Pruned(
        releases=tuple(each.ref for each in rows),
        files=tuple(sorted(files)),
        bytes=sum(files.values()),
        dry_run=dry_run,
    )


_large = APIRouter(tags=["releases"], dependencies=CHECKS, route_class=_LargeBody)


@_large.post(
    "/v1/releases",
    status_code=201,
    response_model=ReleaseNow,
    responses={**_CONFLICT, 200: {"model": ReleaseNow, "description": "The same content has this name already."}},
    summary="Make a release of networks",
    dependencies=OPERATORS,
)
async def create(scheduler: Service, caller: CallerOf, response: Response, wanted: NewRelease) -> ReleaseNow:
    """For operators. Each file that the manifest names must be there: `PUT /v1/networks/{sha256}` sends one, and 409
    names a missing one. 200: a release with this name and content exists already."""
    manifest, tuning = _content(scheduler, wanted)
    release, is_new = await scheduler.releases.create(wanted.name, manifest, tuning, _name(caller))
    response.status_code = 201 if is_new else 200
    return _release_now(scheduler, release, _jobs(scheduler), time.monotonic())


@releases.get(
    "/v1/networks/{sha256}",
    summary="Check for the file of a network",
    status_code=204,
    responses=MISSING,
    dependencies=USERS_AND_NODES,
)
async def has_network(scheduler: Service, sha256: Sha256) -> None:
    """204: the scheduler has the file. 404: it lacks the file."""
    if not scheduler.releases.files.path(sha256).is_file() and not scheduler.releases.names(sha256):
        raise NotFound(f"no file with sha256 {sha256} is here")


@releases.put(
    "/v1/networks/{sha256}",
    summary="Send the file of a network",
    status_code=201,
    responses={200: {"description": "It was here."}, 400: {"description": "The content has another digest."}},
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}, "required": True}},
    dependencies=OPERATORS,
)
async def put_network(request: Request, scheduler: Service, response: Response, sha256: Sha256) -> None:
    """For operators: the file is the body. 201: it was stored. 200: it was already there. 400: the content has another
    digest."""
    if not await scheduler.releases.files.receive(sha256, request.stream()):
        response.status_code = 200


releases.routes.extend(_large.routes)


def releases_now(scheduler: Scheduler, now: float) -> ReleaseList:
    """All releases as they are now."""
    known, jobs = scheduler.releases, _jobs(scheduler)
    previous = known.previous
    return ReleaseList(
        in_force=known.current.ref,
        previous=None if previous is None else previous.ref,
        rollout=None if known.change is None else _rollout(scheduler, known.change, known.trial.guards),
        releases=tuple(_release_now(scheduler, each, jobs, now) for each in reversed(known.rows.values())),
        history=tuple(_rollout(scheduler, change, guards) for change, guards in known.history[:_MOST_HISTORY]),
    )


def _release_now(scheduler: Scheduler, release: Release, jobs: Counter[int], now: float) -> ReleaseNow:
    known, manifest = scheduler.releases, release.manifest
    nodes, holders = 0, Counter[str]()
    troubles: list[TroubleNow] = []
    if release.number in known.live:
        networks = NetworkSet(manifest)
        for view in scheduler.devices.present(now):
            device = view.device
            held = {offer.sha256 for offer in device.registration.models if networks.is_of_it(offer)}
            nodes += bool(held)
            holders.update(held)
            for trouble in () if device.load is None else device.load.troubles:
                if trouble.release == release.number:
                    troubles.append(TroubleNow(node_id=device.node_id, kind=trouble.kind, detail=trouble.detail))
            for sha256, why in device.barred.items():
                if sha256 in held and why.startswith(_WRONG):
                    troubles.append(TroubleNow(node_id=device.node_id, kind="differs", detail=why))
    return ReleaseNow(
        release=release.ref,
        name=release.name,
        number=release.number,
        state=known.state(release.number),
        digest=release.digest,
        created_at=_time(release.created_at),
        created_by=release.created_by,
        origin=release.origin,
        classes=len(manifest.hierarchy.fine),
        networks=tuple(
            ReleaseNetwork(
                name=entry.name,
                tier=Tier(entry.tier),
                sha256=entry.sha256,
                gpu=entry.gpu,
                target=entry.target,
                size_bytes=entry.size_bytes,
                accuracy=entry.accuracy,
                test_images=entry.test_images,
                nodes=holders[entry.sha256],
            )
            for entry in manifest.models
        ),
        encoders=tuple(encoder.name for encoder in manifest.encoders),
        thresholds=not isinstance(known.tuning(release.number), Exception),
        probes=sum(known.prober.knows(entry.sha256) for entry in manifest.models),
        nodes=nodes,
        jobs=jobs[release.number],
        troubles=tuple(troubles),
    )


def _rollout(scheduler: Scheduler, change: ReleaseChange, guards: tuple[GuardNow, ...]) -> Rollout:
    """A change as it is now."""
    known = scheduler.releases
    devices: list[str] = []
    to_hold = ready = 0
    if not change.state.final:
        present = scheduler.devices.present(time.monotonic())
        ends = (view.device.node_id for view in present if view.device.tier is Tier.END)
        devices = [node_id for node_id in ends if chosen(change, node_id)]
        fleet = known.fleet_of(change)
        to_hold, ready = fleet.wanted, fleet.ready
    return Rollout(
        release=known.ref_of(change.release),
        previous=known.ref_of(change.previous),
        kind=change.kind,
        state=change.state,
        share=change.share,
        canary=change.canary,
        guards=guards,
        for_s=change.for_s,
        elapsed_s=round(known.trial_s(change), 1),
        extended=change.extended,
        devices=tuple(devices[:_MOST_DEVICES]),
        device_count=len(devices),
        wanted=to_hold,
        ready=ready,
        started_at=_time(change.started_at),
        started_by=change.by,
        ended_at=None if change.ended_at is None else _time(change.ended_at),
        reason=change.reason,
    )


def _content(scheduler: Scheduler, wanted: NewRelease) -> tuple[Manifest, Tuning | None]:
    """Manifest and thresholds of a new release. Raises InvalidInput."""
    try:
        if wanted.manifest is None:
            folder = scheduler.settings.models
            try:
                return load_manifest(folder), load_tuning(folder)
            except NotFound:
                return load_manifest(folder), None
        manifest = parse_manifest(json.dumps(wanted.manifest).encode(), "of the new release")
        return manifest, None if wanted.tuning is None else Tuning.model_validate(wanted.tuning)
    except (WeightsError, SetupError) as exc:
        raise InvalidInput(str(exc)) from exc
    except ValidationError as exc:
        raise InvalidInput(f"tuning: {exc.errors()[0]['msg']}") from exc


def _jobs(scheduler: Scheduler) -> Counter[int]:
    return Counter(each.job.policy.release_number for each in scheduler.recipients.values())


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _name(caller: Caller | None) -> str:
    return "" if caller is None else caller.name
