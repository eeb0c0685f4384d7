"""Routes of observations: nodes send them, people read them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from scheduler.api.routing import CHECKS, MISSING, NDJSON, NODES, NOSNIFF, USERS, CallerOf, Service, SmallBody
from scheduler.api.streams import NO_STORE, Stream, as_lines
from tierkit.errors import InvalidInput
from tierkit.http.asgi import BodyRoom, read_body
from tierkit.wire.messages import NODE_ID_PATTERN, ROUTE_HEADER, NodeId
from tierkit.wire.observations import ObservationBatch, Receipt, read_batch
from tierkit.wire.oip.compression import decompress
from tierkit.wire.sources import SeenGap, SeenPicture

__all__ = ["observations"]

_MOST_BYTES = 16 * 1024**2
"""Most bytes of a batch, before and after it is unpacked."""
_FILES = ("image/jpeg", "image/png", "image/webp")
_FILE = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in _FILES}

SourceName = Annotated[str, Path(pattern=NODE_ID_PATTERN)]
Number = Annotated[int, Path(ge=1, le=2**53, description="Sequence number.")]


async def _own_name(caller: CallerOf, node_id: NodeId) -> str:
    """The id of the node that asks. Raises Forbidden for another."""
    if caller is not None:
        caller.check_claim(node_id)
    return node_id


OwnName = Annotated[str, Depends(_own_name)]

observations = APIRouter(tags=["sources"], dependencies=CHECKS, route_class=SmallBody)


def _schema(of: Any) -> dict[str, Any]:
    (schema,), parts = msgspec.json.schema_components([of], ref_template="#/$defs/{name}")
    return {**schema, "$defs": parts}


_BATCH = {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(ObservationBatch)}}}}


@observations.post(
    "/v1/observations",
    summary="Send observations of a node's sources",
    response_class=Response,
    responses={
        200: {"content": {"application/json": {"schema": _schema(Receipt)}}},
        **MISSING,
        409: {"description": "Another process has this node id now."},
        415: {"description": "Another content encoding than gzip, deflate or zstd."},
    },
    openapi_extra=_BATCH,
    dependencies=NODES,
)
async def post_observations(request: Request, scheduler: Service, caller: CallerOf) -> Response:
    """Stored when this answers. The same again changes nothing. 404 or 409: register again. May be packed
    (`Content-Encoding: gzip`). The answer has the version of the node's route in `Terrace-Route`."""
    with BodyRoom() as room:
        body = await read_body(request.receive, room, most_bytes=_MOST_BYTES)
        if (coding := request.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
            body = await decompress(body, _MOST_BYTES, coding, hold=room.grow)
        try:
            batch = read_batch(body)
        except ValueError as exc:
            raise InvalidInput(f"the body is not a batch of observations: {exc}") from exc
    if caller is not None:
        caller.check_claim(batch.node_id)
    receipt = await scheduler.observations.accept(batch)
    headers = {ROUTE_HEADER: scheduler.route_of_sources(batch.node_id).version}
    return Response(msgspec.json.encode(receipt), media_type="application/json", headers=headers)


@observations.get(
    "/v1/observations",
    summary="Observations of sources",
    response_class=Response,
    responses={
        200: {
            "content": {
                NDJSON: {
                    "schema": {
                        "anyOf": [kind.model_json_schema(mode="serialization") for kind in (SeenPicture, SeenGap)]
                    }
                }
            }
        }
    },
    dependencies=USERS,
)
async def list_observations(
    scheduler: Service,
    source: Annotated[str | None, Query(pattern=NODE_ID_PATTERN, description="Only this source.")] = None,
    node: Annotated[str | None, Query(pattern=NODE_ID_PATTERN, description="Only sources of this node.")] = None,
    after: Annotated[int, Query(ge=0, le=2**53, description="Only higher sequence numbers.")] = 0,
) -> StreamingResponse:
    """By node, source and sequence number. A line with `gap` names numbers that the device has lost."""
    lines = scheduler.observations.lines(node, source, after, scheduler.hierarchies)
    return Stream(as_lines(lines), media_type=NDJSON, headers=NOSNIFF)


@observations.put(
    "/v1/observations/{node_id}/{source}/{sequence}/picture",
    status_code=204,
    responses={**MISSING, 415: {"description": "No JPEG, PNG or WebP file."}},
    openapi_extra={"requestBody": {"required": True, "content": _FILE}},
    summary="Send the picture of an observation",
    dependencies=NODES,
)
async def put_picture(
    request: Request, scheduler: Service, node_id: OwnName, source: SourceName, sequence: Number
) -> None:
    """The latest 100 of each source are kept."""
    with BodyRoom() as room:
        content = await read_body(request.receive, room, most_bytes=scheduler.settings.max_file_bytes)
        await scheduler.observations.put_picture(node_id, source, sequence, content)


@observations.get(
    "/v1/observations/{node_id}/{source}/{sequence}/picture",
    summary="The picture of an observation",
    response_class=Response,
    responses={200: {"content": _FILE}, **MISSING},
    dependencies=USERS,
)
async def get_picture(scheduler: Service, node_id: NodeId, source: SourceName, sequence: Number) -> Response:
    """If its device sends pictures to the scheduler."""
    content, media_type = await scheduler.observations.picture(node_id, source, sequence)
    headers = {**NO_STORE, "Content-Disposition": "inline", "Content-Security-Policy": "default-src 'none'", **NOSNIFF}
    return Response(content, media_type=media_type, headers=headers)
