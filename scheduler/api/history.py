"""Routes of fleet observability: the fleet as it is now, its events, and its figures over time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter

from scheduler.api.parameters import LastEventId
from scheduler.api.routing import (
    CHECKS,
    MISSING,
    NOSNIFF,
    USERS,
    CallerOf,
    SeenSites,
    StillAdmitted,
    allowance_of,
    only_of,
)
from scheduler.api.snapshot import FleetSnapshot, Snapshots
from scheduler.api.streams import NO_STORE, EventStream, event_stream
from scheduler.history.record import COLUMNS, FleetEvent
from tierkit.http.server_sent import WAITING, last_event_of, server_sent

__all__ = ["history"]

_KEEP_ALIVE_S = 15.0
_SECONDS_MINUTES = 60
"""A longer history comes by the minute."""
_JSON = msgspec.json.Encoder()


async def _snapshots(request: Request) -> Snapshots:
    snapshots: Snapshots = request.app.state.snapshots
    return snapshots


Newest = Annotated[Snapshots, Depends(_snapshots)]

_EVENT = TypeAdapter(FleetEvent).json_schema()
_SNAPSHOT = TypeAdapter(FleetSnapshot).json_schema()
_HISTORY = {
    "title": "History",
    "type": "object",
    "description": "Figures and events of the last minutes.",
    "properties": {
        "start": {"type": "integer", "description": "Time of the first row, in seconds since 1970."},
        "step_s": {"type": "integer", "description": "Length of a row in seconds: 1, or 60 for more than an hour."},
        "columns": {
            "type": "object",
            "description": "A list for each figure, with a value for each row; null: nothing was measured. Images per "
            "second: `first` answers, `finer` ones, `fallback`, `failed` and `sent_up`. Failed attempts per second. "
            "Latencies of the first and the final answer in milliseconds. Numbers of nodes by health, without removed "
            "ones, and of unfinished jobs.",
            "properties": {name: {"type": "array", "items": {"type": ["number", "null"]}} for name in COLUMNS},
        },
        "events": {"type": "array", "description": "Events of these minutes, the oldest first.", "items": _EVENT},
    },
}


def _answers(schema: Mapping[str, Any]) -> dict[int | str, dict[str, Any]]:
    return {**MISSING, 200: {"content": {"application/json": {"schema": schema}}}}


history = APIRouter(tags=["watching"], dependencies=[*CHECKS, *USERS])


@history.get(
    "/v1/fleet",
    summary="The fleet as it is now",
    response_class=Response,
    responses=_answers(_SNAPSHOT),
)
async def get_fleet(snapshots: Newest, caller: CallerOf, seen: SeenSites) -> Response:
    """Nodes, links with their traffic, and unfinished jobs: all jobs for operators, and their own for other callers. At
    most 1,000 nodes, unhealthy ones first, and the newest 100 jobs. Made at most once a second. With `site`, it also
    holds the nodes of other sites and of none that its devices use."""
    return Response(
        snapshots.json(only_of(caller), seen), media_type="application/json", headers={**NO_STORE, **NOSNIFF}
    )


@history.get(
    "/v1/fleet/events",
    summary="Follow the fleet (server-sent events)",
    response_class=Response,
    responses={**MISSING, 200: {"content": event_stream(_SNAPSHOT, _EVENT)}},
)
async def follow_fleet(
    caller: CallerOf,
    still_admitted: StillAdmitted,
    snapshots: Newest,
    seen_sites: SeenSites,
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """`snapshot` carries the content of `GET /v1/fleet`: at once, each second, and when a node changes. `happened`
    carries an event of the history. With `Last-Event-ID`, missed events come first."""
    owner = only_of(caller)
    after = snapshots.record.last_id if last_event_id is None else last_event_of(last_event_id)

    async def pieces() -> AsyncGenerator[bytes, None]:
        nonlocal after
        record, seen = snapshots.record, -1
        while not snapshots.stopping:
            if seen == record.version:
                yield WAITING
            else:
                seen = record.version
                for event in record.after(after):
                    after = event.id
                    if not event.concerns(owner, seen_sites):
                        continue
                    yield server_sent("happened", _JSON.encode(event), after)
                yield server_sent("snapshot", snapshots.json(owner, seen_sites), after)
            try:
                await asyncio.wait_for(record.changed(seen), _KEEP_ALIVE_S)
            except TimeoutError:
                continue

    return EventStream(pieces(), allowance_of(caller), still_admitted)


@history.get(
    "/v1/history",
    summary="Figures and events of the last minutes",
    response_class=Response,
    responses=_answers(_HISTORY),
)
async def get_history(
    snapshots: Newest,
    caller: CallerOf,
    seen: SeenSites,
    minutes: Annotated[
        int,
        Query(
            ge=1,
            le=1440,
            description="Length of the history: up to 60 minutes in rows of a second, otherwise in rows of a minute.",
        ),
    ] = 15,
) -> Response:
    """One list per figure, with a row every `step_s` seconds from `start`; null if nothing was measured. Figures are
    about the whole fleet; with `site`, the events are about this site. The history begins again with each start of the
    scheduler."""
    record, owner = snapshots.record, only_of(caller)
    since = record.wall(time.monotonic()) - 60 * minutes
    ring = record.seconds if minutes <= _SECONDS_MINUTES else record.minutes
    start, rows = ring.since(since)
    if seen.allowed:
        rows = rows[:0]  # they are about all sites
    content = {
        "start": start,
        "step_s": ring.step_s,
        "columns": dict(zip(COLUMNS, np.round(rows.astype(float), 3).T.tolist(), strict=True)),
        "events": [event for event in record.events if event.at >= since and event.concerns(owner, seen)],
    }
    return Response(_JSON.encode(content), media_type="application/json", headers={**NO_STORE, **NOSNIFF})
