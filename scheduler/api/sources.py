"""Routes of the sources of nodes, which the scheduler passes on to them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request

from scheduler.api.routing import CHECKS, MISSING, OPERATORS, USERS, Service, SmallBody
from tierkit.http.asgi import read_body
from tierkit.wire.messages import NODE_ID_PATTERN, NodeId
from tierkit.wire.sources import SourcesReport

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

SourceName = Annotated[str, Path(pattern=NODE_ID_PATTERN)]

sources = APIRouter(tags=["sources"], dependencies=CHECKS, route_class=SmallBody)


@sources.get(
    "/v1/devices/{node_id}/sources",
    response_model=SourcesReport,
    responses={**MISSING, **{code: _REMOTE[code] for code in (502, 504)}},
    summary="Sources of a node",
    dependencies=USERS,
)
async def list_sources(scheduler: Service, node_id: NodeId) -> SourcesReport:
    """With the state of its spool and its uplink."""
    return await scheduler.remote_sources.report(node_id)


@sources.post(
    "/v1/devices/{node_id}/sources",
    status_code=201,
    responses={**_REMOTE, 409: {"description": "The node has a source with this name."}},
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _SOURCE}}}},
    summary="Add a source to a node",
    dependencies=OPERATORS,
)
async def add_source(request: Request, scheduler: Service, node_id: NodeId) -> None:
    """If the settings of the node allow it (`remote_sources`)."""
    body = await read_body(request.receive, most_bytes=_MOST_BYTES)
    await scheduler.remote_sources.change(node_id, "POST", "", body or b"{}")


@sources.delete(
    "/v1/devices/{node_id}/sources/{name}",
    status_code=204,
    responses=_REMOTE,
    summary="Remove a source of a node",
    dependencies=OPERATORS,
)
async def remove_source(scheduler: Service, node_id: NodeId, name: SourceName) -> None:
    await scheduler.remote_sources.change(node_id, "DELETE", f"/{name}")


@sources.post(
    "/v1/devices/{node_id}/sources/{name}/pause",
    status_code=204,
    responses=_REMOTE,
    summary="Pause a source of a node",
    dependencies=OPERATORS,
)
async def pause_source(scheduler: Service, node_id: NodeId, name: SourceName) -> None:
    """It takes no pictures until it is resumed."""
    await scheduler.remote_sources.change(node_id, "POST", f"/{name}/pause")


@sources.delete(
    "/v1/devices/{node_id}/sources/{name}/pause",
    status_code=204,
    responses=_REMOTE,
    summary="Let a paused source continue",
    dependencies=OPERATORS,
)
async def resume_source(scheduler: Service, node_id: NodeId, name: SourceName) -> None:
    await scheduler.remote_sources.change(node_id, "DELETE", f"/{name}/pause")
