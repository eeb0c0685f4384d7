"""Routes of sinks. Only admins may use them: they say where data goes."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from scheduler.api.parameters import LIMIT
from scheduler.api.routing import ADMINS, CHECKS, MISSING, CallerOf, Service, SmallBody
from scheduler.core.outbox import DeadLetter, EventFilter, Sink
from scheduler.jobs.service import Scheduler
from scheduler.sinks.delivery import Courier
from scheduler.sinks.service import GROUP
from tierkit.extensions import names
from tierkit.wire.messages import NODE_ID_PATTERN
from tierkit.wire.sinks import (
    DeadLetterNow,
    DeadLetterPage,
    NewSink,
    Replayed,
    ReplayRequest,
    SentEvent,
    SinkFilter,
    SinkList,
    SinkNow,
    SinkTested,
)

__all__ = ["sinks"]

_CONFLICT: dict[int | str, dict[str, Any]] = {409: {"description": "The name is taken, or there are too many sinks."}}
_RECEIVER: dict[int | str, dict[str, Any]] = {502: {"description": "The receiver does not take it."}}

Name = Annotated[str, Path(pattern=NODE_ID_PATTERN, max_length=63, description="Name of the sink.")]

sinks = APIRouter(tags=["sinks"], dependencies=[*CHECKS, *ADMINS], route_class=SmallBody)


@sinks.get("/v1/sinks", response_model=SinkList, summary="Receivers of events")
async def list_sinks(scheduler: Service) -> SinkList:
    """All sinks with their state, and the kinds that can be added."""
    return SinkList(
        sinks=tuple(_now(scheduler, each) for each in scheduler.sinks.couriers()),
        kinds=names(GROUP),
    )


@sinks.post("/v1/sinks", status_code=201, response_model=SinkNow, responses=_CONFLICT, summary="Add a sink")
async def add(scheduler: Service, caller: CallerOf, wanted: NewSink) -> SinkNow:
    """The sink gets events from now on. Nothing is sent to the receiver yet."""
    sink = Sink(
        name=wanted.name,
        kind=wanted.kind,
        filter=EventFilter(**wanted.filter.model_dump()),
        options=wanted.options,
        created_by=None if caller is None else caller.name,
        created_at=time.time(),
    )
    return _now(scheduler, await scheduler.sinks.add(sink))


@sinks.get("/v1/sinks/{name}", response_model=SinkNow, responses=MISSING, summary="A sink")
async def get_sink(scheduler: Service, name: Name) -> SinkNow:
    """The sink with its state and its counts."""
    return _now(scheduler, scheduler.sinks.courier(name))


@sinks.delete(
    "/v1/sinks/{name}", status_code=204, responses=MISSING, summary="Forget a sink, its events and its dead letters"
)
async def remove(scheduler: Service, name: Name) -> None:
    """Nothing more is sent to the receiver; waiting events are lost."""
    await scheduler.sinks.remove(name)


@sinks.post(
    "/v1/sinks/{name}/pause", response_model=SinkNow, responses=MISSING, summary="Let the events of a sink wait"
)
async def pause(scheduler: Service, caller: CallerOf, name: Name) -> SinkNow:
    """Events wait until the sink is resumed, and over restarts."""
    by = "" if caller is None else f" by {caller.name}"
    return _now(scheduler, await scheduler.sinks.pause(name, f"paused{by}"))


@sinks.delete("/v1/sinks/{name}/pause", response_model=SinkNow, responses=MISSING, summary="Resume a sink")
async def resume(scheduler: Service, name: Name) -> SinkNow:
    """Resumes delivery over a new connection, which reads the files with secrets again."""
    return _now(scheduler, await scheduler.sinks.resume(name))


@sinks.post(
    "/v1/sinks/{name}/test",
    response_model=SinkTested,
    responses={**MISSING, **_RECEIVER},
    summary="Send a receiver a test event",
)
async def test(scheduler: Service, name: Name) -> SinkTested:
    """The answer is sent when the receiver has taken the event. 502 or 503: the receiver does not take it. 403: its
    address is not allowed."""
    return SinkTested(seconds=round(await scheduler.sinks.test(name), 3))


@sinks.get("/v1/sinks/{name}/dead", response_model=DeadLetterPage, responses=MISSING, summary="Dead letters of a sink")
async def dead(
    scheduler: Service,
    name: Name,
    after: Annotated[int, Query(ge=0, le=2**53, description="Only higher numbers.")] = 0,
    limit: Annotated[int, Query(ge=1, le=500, description=LIMIT)] = 100,
) -> DeadLetterPage:
    """Events that were given up, by number. `next` is the `after` of the next page."""
    found = await scheduler.sinks.letters(name, after=after, most=limit)
    return DeadLetterPage(
        letters=tuple(map(_letter_now, found)), next=found[-1].event.number if len(found) == limit else None
    )


@sinks.post("/v1/sinks/{name}/replay", response_model=Replayed, responses=MISSING, summary="Deliver dead letters again")
async def replay(scheduler: Service, name: Name, wanted: ReplayRequest) -> Replayed:
    """Delivers them again in the background; events that fail again stay dead letters."""
    return Replayed(count=await scheduler.sinks.replay(name, wanted.numbers))


def _now(scheduler: Scheduler, courier: Courier) -> SinkNow:
    sink = courier.sink
    return SinkNow(
        name=sink.name,
        kind=sink.kind,
        options=sink.options,
        filter=SinkFilter(
            events=sink.filter.events,
            sources=sink.filter.sources,
            labels=sink.filter.labels,
            confidence=sink.filter.confidence,
        ),
        created_by=sink.created_by,
        created_at=datetime.fromtimestamp(sink.created_at, UTC),
        state="paused" if sink.paused else "failing" if courier.trouble else "ok",
        reason=sink.reason if sink.paused else courier.trouble,
        waiting=courier.behind,
        lag_s=round(courier.lag_s, 3),
        delivered=courier.delivered,
        failed=courier.failed,
        dead=scheduler.sinks.dead(sink.name),
        dropped=sink.dropped + courier.dropped,
        lost_letters=sink.lost_letters + courier.lost_letters,
    )


def _letter_now(letter: DeadLetter) -> DeadLetterNow:
    event = letter.event
    return DeadLetterNow(
        number=event.number,
        reason=letter.reason,
        attempts=letter.attempts,
        at=datetime.fromtimestamp(letter.at, UTC),
        replaying=letter.wanted,
        event=SentEvent(
            id=event.id, type=event.type, timestamp=datetime.fromtimestamp(round(event.at, 3), UTC), data=event.data
        ),
    )
