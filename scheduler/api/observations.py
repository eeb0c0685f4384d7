"""Routes of observations: nodes send them, people read them."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Struct
from pydantic import AwareDatetime, BeforeValidator
from starlette.types import Receive, Scope, Send

from scheduler.api.description import texts_of_fields
from scheduler.api.parameters import (
    CURSOR,
    LIMIT,
    Bom,
    Format,
    LastEventId,
    NodePath,
    OnlyNode,
    OnlySource,
    SequencePath,
    SourcePath,
)
from scheduler.api.routing import (
    CHECKS,
    MISSING,
    NDJSON,
    NODES,
    NOSNIFF,
    USERS,
    CallerOf,
    Service,
    SmallBody,
    StillAdmitted,
    allowance_of,
    for_nodes,
    only_of,
)
from scheduler.api.streams import (
    NO_STORE,
    OBSERVATION_CSV,
    EventStream,
    Stream,
    as_csv,
    as_lines,
    as_server_sent,
    event_stream,
)
from scheduler.core.seeking import SoughtObservations, classes_called
from scheduler.jobs import query
from scheduler.jobs.service import Scheduler
from scheduler.metrics import OBSERVATION_BYTES
from tierkit.access import CALLER, Caller
from tierkit.errors import InvalidInput
from tierkit.http.asgi import BodyRoom, read_body
from tierkit.http.server_sent import last_event_of
from tierkit.wire import observations as wire
from tierkit.wire.messages import LABELS_HEADER, NODE_ID_PATTERN, ROUTE_HEADER
from tierkit.wire.observations import ObservationBatch, Receipt, read_batch
from tierkit.wire.oip.compression import decompress
from tierkit.wire.sources import ObservationPage, SeenGap, SeenPicture

__all__ = ["OwnName", "in_sight", "observations", "post_observations_directly"]

_MOST_BYTES = 16 * 1024**2
"""Most bytes of a batch, before and after it is unpacked."""
_FILES = ("image/jpeg", "image/png", "image/webp")
_FILE = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in _FILES}


async def _own_name(caller: CallerOf, node_id: NodePath) -> str:
    """The id of the node that asks. Raises Forbidden for another."""
    if caller is not None:
        caller.check_claim(node_id)
    return node_id


OwnName = Annotated[str, Depends(_own_name)]

observations = APIRouter(tags=["sources"], dependencies=CHECKS, route_class=SmallBody)


def _schema(of: type[Struct]) -> dict[str, Any]:
    """The JSON schema of a struct, with the docstrings of its fields."""
    (schema,), parts = msgspec.json.schema_components([of], ref_template="#/$defs/{name}")
    for name, part in parts.items():
        for field, text in texts_of_fields(getattr(wire, name)).items():
            part["properties"][field]["description"] = text
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
        429: {"description": "The node's token has used up its observations per minute."},
    },
    openapi_extra=_BATCH,
    dependencies=NODES,
)
async def post_observations(request: Request, scheduler: Service, caller: CallerOf) -> Response:
    """For nodes. The observations are stored when the answer is sent; the same batch again changes nothing. 404 or 409:
    the node has to register again. The body may be compressed, for example with `Content-Encoding: gzip`. The header
    `Terrace-Route` of the answer has the version of the node's route."""
    return await _stored(request, scheduler, caller)


async def post_observations_directly(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application of `post_observations` that does not pass through the web framework, whose layers take long."""
    request = Request(scope, receive)
    scheduler: Scheduler = request.app.state.scheduler
    caller: Caller | None = scope.get(CALLER)
    await for_nodes(request, scheduler, caller)
    answer = await _stored(request, scheduler, caller)
    await answer(scope, receive, send)


async def _stored(request: Request, scheduler: Scheduler, caller: Caller | None) -> Response:
    allowance = allowance_of(caller)
    allowance.check_observations(time.monotonic())
    with BodyRoom() as room:
        body = await read_body(request.receive, room, most_bytes=_MOST_BYTES)
        size = len(body)
        if (coding := request.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
            body = await decompress(body, _MOST_BYTES, coding, hold=room.grow)
        try:
            batch = read_batch(body)
        except ValueError as exc:
            raise InvalidInput(f"the body is not a batch of observations: {exc}") from exc
    if caller is not None:
        caller.check_claim(batch.node_id)
    allowance.count_observations(len(batch.observations) + len(batch.gaps), time.monotonic())
    receipt = await scheduler.observations.accept(batch)
    OBSERVATION_BYTES.inc(size)
    headers = {ROUTE_HEADER: scheduler.route_of_sources(batch.node_id).version}
    if last_label := scheduler.learning.last_number(batch.node_id):
        headers[LABELS_HEADER] = str(last_label)
    return Response(msgspec.json.encode(receipt), media_type="application/json", headers=headers)


def _no_number(value: object) -> object:
    """Refuse a number, which pydantic takes for seconds since 1970."""
    if isinstance(value, str) and re.fullmatch(r"[-+0-9._e]*", value):
        raise ValueError("write a date and a time with its zone, such as 2026-01-31T08:00:00Z")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationFilter:
    """Query parameters that choose observations."""

    source: OnlySource = None
    node: OnlyNode = None
    site: Annotated[
        str | None,
        Query(
            pattern=NODE_ID_PATTERN, description="Only observations of nodes that belonged to this site at the time."
        ),
    ] = None
    label: Annotated[
        str | None, Query(max_length=200, description="Only this class, or all classes of this superclass.")
    ] = None
    since: Annotated[
        AwareDatetime | None,
        BeforeValidator(_no_number),
        Query(description="Only pictures that were taken later; ISO 8601 with a time zone."),
    ] = None
    below: Annotated[float | None, Query(ge=0, le=1, description="Only answers with a lower confidence.")] = None
    amended: Annotated[bool, Query(description="Only observations that were amended.")] = False


async def _sought(
    scheduler: Service, caller: CallerOf, wanted: Annotated[ObservationFilter, Depends()]
) -> SoughtObservations:
    """The search that the caller asks for. Raises NotFound for a source that they may not see, or a class that does not
    exist."""
    book, reader = scheduler.observations.book, only_of(caller)
    if wanted.node is not None and wanted.source is not None:
        book.check_sight(reader, wanted.node, wanted.source)
    return SoughtObservations(
        node_id=wanted.node,
        source=wanted.source,
        site=wanted.site,
        classes=None if wanted.label is None else classes_called(wanted.label, book.hierarchies),
        since=None if wanted.since is None else wanted.since.timestamp(),
        below=wanted.below,
        amended=wanted.amended,
        reader=reader,  # asked again with each query: rights may end while an answer is under way
    )


async def in_sight(scheduler: Service, caller: CallerOf, node_id: NodePath, source: SourcePath) -> None:
    """Raises NotFound for a source that the caller may not see."""
    scheduler.observations.book.check_sight(only_of(caller), node_id, source)


Sought = Annotated[SoughtObservations, Depends(_sought)]
_SEEN = SeenPicture.model_json_schema(mode="serialization")
_GAP = SeenGap.model_json_schema(mode="serialization")
_NOTHING = {"type": "object", "additionalProperties": False, "description": "Data of `begin`: no fields."}
_PAGE = ObservationPage.model_json_schema(mode="serialization")


@observations.get(
    "/v1/observations",
    summary="Observations of sources, the newest first",
    response_class=Response,
    responses={200: {"content": {"application/json": {"schema": _PAGE}}}, **MISSING},
    dependencies=USERS,
)
async def list_observations(
    scheduler: Service,
    sought: Sought,
    limit: Annotated[int, Query(ge=1, le=1000, description=LIMIT)] = 100,
    cursor: Annotated[str | None, Query(max_length=500, description=CURSOR)] = None,
) -> Response:
    """Sorted by the time at which the pictures were taken. A search takes a bounded time: a page may be short or empty
    and still have a `next_cursor`, so continue until it is null."""
    rows, next_cursor = await scheduler.observations.page(sought, limit, cursor)
    content = msgspec.json.encode({"observations": rows, "next_cursor": next_cursor})
    return Response(content, media_type="application/json", headers={**NO_STORE, **NOSNIFF})


@observations.get(
    "/v1/observations/export",
    summary="All observations of sources, in order",
    response_class=Response,
    responses={200: {"content": {NDJSON: {"schema": {"anyOf": [_SEEN, _GAP]}}, "text/csv": {}}}, **MISSING},
    dependencies=USERS,
)
async def export_observations(
    scheduler: Service,
    sought: Sought,
    after: Annotated[int, Query(ge=0, le=2**53, description="Only higher sequence numbers.")] = 0,
    format: Format = "jsonl",
    bom: Bom = False,
) -> StreamingResponse:
    """Sorted by node, source and sequence number. In JSON lines, `{"gap": ...}` names numbers that a device has lost;
    such lines come without filters other than `source`, `node` and `after`."""
    lines = scheduler.observations.lines(sought, after)
    if format == "csv":
        pictures = _pictures_of(lines)
        content = as_csv(pictures, bom=bom, header=OBSERVATION_CSV)
        return Stream(content, media_type="text/csv; charset=utf-8", headers=NOSNIFF)
    return Stream(as_lines(lines), media_type=NDJSON, headers=NOSNIFF)


async def _pictures_of(pages: AsyncGenerator[list[dict[str, Any]], None]) -> AsyncGenerator[list[dict[str, Any]], None]:
    async with aclosing(pages):
        async for page in pages:
            yield [line for line in page if "gap" not in line]


@observations.get(
    "/v1/observations/events",
    summary="Follow observations (server-sent events)",
    response_class=Response,
    responses={200: {"content": event_stream(_SEEN, _NOTHING)}, **MISSING},
    dependencies=USERS,
)
async def follow_observations(
    scheduler: Service,
    caller: CallerOf,
    still_admitted: StillAdmitted,
    sought: Sought,
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """`observation` and `amended` carry an observation in its state at the time of sending. `begin` comes first and has
    the number from which to resume. With `Last-Event-ID`, missed observations come first; without it, the stream begins
    now."""
    after = None if last_event_id is None else last_event_of(last_event_id)
    events = scheduler.observations.follow(sought, after)
    return EventStream(as_server_sent(events), allowance_of(caller), still_admitted)


@observations.put(
    "/v1/observations/{node_id}/{source}/{sequence}/picture",
    status_code=204,
    responses={**MISSING, 415: {"description": "No JPEG, PNG or WebP file."}},
    openapi_extra={"requestBody": {"required": True, "content": _FILE}},
    summary="Send the picture of an observation",
    dependencies=NODES,
)
async def put_picture(
    request: Request, scheduler: Service, node_id: OwnName, source: SourcePath, sequence: SequencePath
) -> None:
    """For nodes: a JPEG, PNG or WebP file. The scheduler keeps the latest 100 pictures of each source."""
    with BodyRoom() as room:
        content = await read_body(request.receive, room, most_bytes=scheduler.settings.max_file_bytes)
        await scheduler.observations.put_picture(node_id, source, sequence, content)


@observations.get(
    "/v1/observations/{node_id}/{source}/{sequence}/picture",
    summary="The picture of an observation",
    response_class=Response,
    responses={200: {"content": _FILE}, **MISSING},
    dependencies=[*USERS, Depends(in_sight)],
)
async def get_picture(
    scheduler: Service,
    node_id: NodePath,
    source: SourcePath,
    sequence: SequencePath,
    size: Annotated[
        int | None,
        Query(ge=16, le=512, description="Largest number of pixels on the longer side. Default: the original file."),
    ] = None,
) -> Response:
    """Available if its device sends pictures to the scheduler, and among the latest 100 of its source. With `size`, the
    answer is a small JPEG."""
    content, media_type = await scheduler.observations.picture(node_id, source, sequence)
    if size is not None:
        content, media_type = await query.small(scheduler, content, f"picture {sequence} of {source}", size)
    headers = {
        "Cache-Control": "private, max-age=86400, immutable",
        "Content-Disposition": "inline",
        "Content-Security-Policy": "default-src 'none'",
        **NOSNIFF,
    }
    return Response(content, media_type=media_type, headers=headers)
