"""Routes of the sources of nodes, which the scheduler passes on to them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from scheduler.api.parameters import NodePath, OnlyNode, OnlySource, SourcePath
from scheduler.api.routing import (
    CHECKS,
    MISSING,
    NOSNIFF,
    OPERATORS,
    USERS,
    CallerOf,
    SeenSites,
    Service,
    SmallBody,
    StillAdmitted,
    allowance_of,
    only_of,
)
from scheduler.api.streams import NO_STORE, EventStream, event_stream
from scheduler.observations.service import MOST_READERS
from tierkit.errors import Forbidden, NotFound
from tierkit.http.asgi import read_body
from tierkit.http.server_sent import WAITING, server_sent
from tierkit.wire.messages import NODE_ID_PATTERN, NodeId
from tierkit.wire.sources import SourceList, SourceRights, SourcesReport

__all__ = ["sources"]

_MOST_BYTES = 64 * 1024
_REMOTE: dict[int | str, dict[str, Any]] = {
    403: {"description": "The token has another role, or the node lets its sources be changed only on the spot."},
    404: {"description": "No such node or source."},
    502: {"description": "The node cannot be reached, or answers nonsense."},
    504: {"description": "The node does not answer in time."},
}
_SOURCE = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string", "pattern": NODE_ID_PATTERN}, "url": {"type": "string"}},
    "description": "The fields of a `[[source]]` table.",
}


class SourceFilter(NamedTuple):
    """The sources that a caller asks for."""

    reader: str | None
    node: str | None
    source: str | None
    site: str | None


async def _wanted(
    caller: CallerOf,
    seen: SeenSites,
    node: OnlyNode = None,
    source: OnlySource = None,
) -> SourceFilter:
    return SourceFilter(only_of(caller), node, source, seen.only)


WantedSources = Annotated[SourceFilter, Depends(_wanted)]


class NewRights(BaseModel):
    """The users who may see a source, by the names of their tokens."""

    model_config = ConfigDict(extra="forbid")

    owner: NodeId | None = Field(
        None, description="User who may pause and resume the source, and change its readers; null: only operators."
    )
    readers: Annotated[list[NodeId], Field(max_length=MOST_READERS)] = Field(
        default_factory=list, description="Users who may see the source and its observations."
    )


async def _for_owners(scheduler: Service, caller: CallerOf, node_id: NodePath, name: SourcePath) -> None:
    """A route for operators and the owner of a source. Raises NotFound, Forbidden for others."""
    scheduler.observations.book.check_owner(only_of(caller), node_id, name)


OWNERS = [*USERS, Depends(_for_owners)]

_SOURCES = SourceList.model_json_schema(mode="serialization")

sources = APIRouter(tags=["sources"], dependencies=CHECKS, route_class=SmallBody)


@sources.get(
    "/v1/sources",
    summary="The sources of all nodes",
    response_class=Response,
    responses={**MISSING, 200: {"content": {"application/json": {"schema": _SOURCES}}}},
    dependencies=USERS,
)
async def list_all_sources(scheduler: Service, wanted: WantedSources) -> Response:
    """Last answer, state, and spool of each source. Operators see all sources, other users those that they own or may
    read. Made at most once a second."""
    content, _ = scheduler.observations.book.snapshot(*wanted)
    return Response(content, media_type="application/json", headers={**NO_STORE, **NOSNIFF})


@sources.get(
    "/v1/sources/events",
    summary="Follow the sources of all nodes (server-sent events)",
    response_class=Response,
    responses={**MISSING, 200: {"content": event_stream(_SOURCES)}},
    dependencies=USERS,
)
async def follow_sources(
    scheduler: Service,
    caller: CallerOf,
    still_admitted: StillAdmitted,
    wanted: WantedSources,
) -> StreamingResponse:
    """`snapshot` carries the content of `GET /v1/sources`: at once, and at most once a second when something has
    changed."""
    snapshots = scheduler.observations.follow_sources(*wanted)

    async def pieces() -> AsyncGenerator[bytes, None]:
        async with aclosing(snapshots):
            async for snapshot in snapshots:
                yield WAITING if snapshot is None else server_sent("snapshot", snapshot)

    return EventStream(pieces(), allowance_of(caller), still_admitted)


@sources.put(
    "/v1/sources/{node_id}/{name}/rights",
    response_model=SourceRights,
    responses={403: {"description": "Only operators change the owner."}, **MISSING},
    summary="Set the users who may see a source",
    dependencies=USERS,
)
async def set_rights(
    scheduler: Service, caller: CallerOf, node_id: NodePath, name: SourcePath, wanted: NewRights
) -> SourceRights:
    """Operators see all sources. An owner may change the readers. The source need not have sent anything yet."""
    book, user = scheduler.observations.book, only_of(caller)
    book.check_owner(user, node_id, name)
    if user is not None and wanted.owner != user:
        raise Forbidden("only operators change the owner of a source")
    rights = SourceRights(owner=wanted.owner, readers=tuple(wanted.readers))
    return await scheduler.observations.set_rights(node_id, name, rights)


@sources.get(
    "/v1/devices/{node_id}/sources",
    response_model=SourcesReport,
    responses={**MISSING, **{code: _REMOTE[code] for code in (502, 504)}},
    summary="Sources of a node",
    dependencies=USERS,
)
async def list_sources(scheduler: Service, caller: CallerOf, node_id: NodePath) -> SourcesReport:
    """Asked from the device itself, with the state of its spool and its uplink. The device has 5 s to answer. Users see
    the sources that they own or may read."""
    user, book = only_of(caller), scheduler.observations.book
    if user is not None and not any(node == node_id for node, _ in book.visible(user)):
        raise NotFound(f"no node {node_id!r} has sources that you may see")
    report = await scheduler.remote_sources.report(node_id)
    seen = tuple(each for each in report.sources if book.may_see(user, node_id, each.name))
    return report.model_copy(update={"sources": seen})


@sources.post(
    "/v1/devices/{node_id}/sources",
    status_code=201,
    responses={**_REMOTE, 409: {"description": "The node has a source with this name."}},
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _SOURCE}}}},
    summary="Add a source to a node",
    dependencies=OPERATORS,
)
async def add_source(request: Request, scheduler: Service, node_id: NodePath) -> None:
    """For operators. The body has the fields of a `[[source]]` table. The device refuses it with 403 unless its setting
    `remote_sources` allows changes."""
    body = await read_body(request.receive, most_bytes=_MOST_BYTES)
    await scheduler.remote_sources.change(node_id, "POST", "", body or b"{}")


@sources.delete(
    "/v1/devices/{node_id}/sources/{name}",
    status_code=204,
    responses=_REMOTE,
    summary="Remove a source of a node",
    dependencies=OPERATORS,
)
async def remove_source(scheduler: Service, node_id: NodePath, name: SourcePath) -> None:
    """For operators. Its observations stay."""
    await scheduler.remote_sources.change(node_id, "DELETE", f"/{name}")


@sources.post(
    "/v1/devices/{node_id}/sources/{name}/pause",
    status_code=204,
    responses=_REMOTE,
    summary="Pause a source of a node",
    dependencies=OWNERS,
)
async def pause_source(scheduler: Service, node_id: NodePath, name: SourcePath) -> None:
    """For operators and the owner. The source takes no pictures until it is resumed."""
    await scheduler.remote_sources.change(node_id, "POST", f"/{name}/pause")


@sources.delete(
    "/v1/devices/{node_id}/sources/{name}/pause",
    status_code=204,
    responses=_REMOTE,
    summary="Let a paused source continue",
    dependencies=OWNERS,
)
async def resume_source(scheduler: Service, node_id: NodePath, name: SourcePath) -> None:
    """For operators and the owner."""
    await scheduler.remote_sources.change(node_id, "DELETE", f"/{name}/pause")
