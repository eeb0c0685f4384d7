"""Dependencies that routes share: the scheduler, the caller and its role, rate limits, checks of queries and bodies.

If the scheduler asks for no token, every caller may use every route.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.types import Message, Scope

from scheduler.core import events
from scheduler.core.policy import check_names
from scheduler.core.site import SitesSeen
from scheduler.jobs.service import UNLIMITED, Scheduler
from tierkit.access import CALLER, Allowance, Authenticator, Caller
from tierkit.errors import Forbidden, InvalidInput, NotFound, TerraceError, Unauthenticated
from tierkit.http.asgi import read_body
from tierkit.wire.messages import NODE_HEADER, NODE_ID_PATTERN

__all__ = [
    "ADMINS",
    "CHECKS",
    "MISSING",
    "NDJSON",
    "NODES",
    "NOSNIFF",
    "OPERATORS",
    "UPLOAD_FIELDS",
    "USERS",
    "USERS_AND_NODES",
    "USERS_AND_WORKERS",
    "CallerOf",
    "SeenSites",
    "Service",
    "SmallBody",
    "StillAdmitted",
    "allowance_of",
    "for_admins",
    "for_nodes",
    "for_operators",
    "for_users",
    "for_users_and_nodes",
    "for_users_and_workers",
    "metered",
    "note_refusal",
    "only_of",
    "sites_of",
    "still_admitted",
]

NOSNIFF = {"X-Content-Type-Options": "nosniff"}
NDJSON = "application/x-ndjson"
_NODE = NODE_HEADER.lower().encode()
UPLOAD_FIELDS = "x-upload-fields"
"""Mark of routes whose query holds policy fields: the reader of the upload checks them together with the form's
fields."""


# FastAPI sends plain functions to a thread, which costs more than what these do.
async def _scheduler(request: Request) -> Scheduler:
    scheduler: Scheduler = request.app.state.scheduler
    return scheduler


Service = Annotated[Scheduler, Depends(_scheduler)]


async def _caller(request: Request) -> Caller | None:
    caller: Caller | None = request.scope.get(CALLER)
    return caller


CallerOf = Annotated[Caller | None, Depends(_caller)]
"""The sender of the request; None if no token is asked for."""


async def for_users(caller: CallerOf) -> None:
    """A route for people and their programs. Raises Forbidden for others."""
    if caller is not None:
        caller.need("user")


async def for_users_and_nodes(caller: CallerOf) -> None:
    """A route for people and for the nodes of the fleet. Raises Forbidden for others."""
    if caller is not None:
        caller.need("user", "node")


async def for_users_and_workers(caller: CallerOf) -> None:
    """A route for people and for the workers of training runs. Raises Forbidden for others."""
    if caller is not None:
        caller.need("user", "worker", "guest")


async def for_operators(caller: CallerOf) -> None:
    """A route for those who look after the fleet. Raises Forbidden for others."""
    if caller is not None:
        caller.need("operator")


async def for_admins(caller: CallerOf) -> None:
    """A route for those who say whom to trust. Raises Forbidden for others."""
    if caller is not None:
        caller.need("admin")


def only_of(caller: Caller | None) -> str | None:
    """Name of the owner to whose jobs the caller is limited; None for all jobs."""
    return None if caller is None or caller.may("operator") else caller.name


async def for_nodes(request: Request, scheduler: Service, caller: CallerOf) -> None:
    """Admit nodes to a route. Raises Forbidden for other callers; a node with another node's token is noted on the
    device list."""
    if caller is not None:
        try:
            caller.need("node")
        except Forbidden as exc:
            note_refusal(scheduler, request.scope, exc)
            raise


def note_refusal(scheduler: Scheduler, scope: Scope, error: TerraceError) -> None:
    """Note on the device list that a node's token was refused."""
    for name, value in scope["headers"]:
        if name == _NODE:
            scheduler.dispatcher.handle(events.TurnedAway(value.decode("latin-1"), str(error)))


def sites_of(caller: Caller | None) -> tuple[str, ...]:
    """The sites to which the caller is limited; none: all."""
    return () if caller is None else caller.sites


async def _only_site(
    scheduler: Service,
    caller: CallerOf,
    site: Annotated[str | None, Query(pattern=NODE_ID_PATTERN, description="Only what belongs to this site.")] = None,
) -> SitesSeen:
    """The sites that the answer shows. Raises NotFound for an unknown one, Forbidden for one of others."""
    if site is not None:
        try:
            scheduler.check_site(site, sites_of(caller))
        except InvalidInput as exc:
            raise NotFound(str(exc)) from exc
    return SitesSeen(only=site, allowed=sites_of(caller))


SeenSites = Annotated[SitesSeen, Depends(_only_site)]


def allowance_of(caller: Caller | None) -> Allowance:
    """The limits of a caller; none if no token is asked for."""
    return (caller and caller.allowance) or UNLIMITED


async def still_admitted(request: Request, caller: CallerOf) -> Callable[[], bool]:
    authenticator: Authenticator | None = request.app.state.authenticator
    return lambda: authenticator is None or caller is None or authenticator.still_admits(caller)


StillAdmitted = Annotated[Callable[[], bool], Depends(still_admitted)]
"""Returns True while the caller's token is valid; used by answers that take long."""


async def metered(
    stream: AsyncIterable[bytes], allowance: Allowance, still_admitted: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """An upload, counted as it comes.

    Raises:
        LimitReached: before its first byte, when earlier ones have used up the allowance, or too many are under way.
        Unauthenticated: the token was revoked meanwhile.
    """
    allowance.check_upload(time.monotonic())
    with allowance.uploading():
        async for piece in stream:
            if not still_admitted():
                break
            allowance.count_bytes(len(piece), time.monotonic())
            yield piece
    if not still_admitted():
        raise Unauthenticated("the token was revoked, or has expired, while the upload came")


async def _check_query(request: Request) -> None:
    route: APIRoute = request.scope["route"]
    if UPLOAD_FIELDS not in (route.openapi_extra or {}):
        given = [name for name, _ in request.query_params.multi_items()]
        check_names("parameter", given, list(_query_names(route.dependant)))


def _query_names(dependant: Dependant) -> Iterator[str]:
    for field in dependant.query_params:
        yield field.alias
    for below in dependant.dependencies:
        yield from _query_names(below)


class SmallBody(APIRoute):
    """A route whose JSON is read on the event loop: it is bounded while it comes, before anything is done with it."""

    most_bytes = 64 * 1024
    """A heartbeat has a few hundred bytes, the longest registration about 40 kB."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def bounded(request: Request) -> Response:
            body = await read_body(request.receive, most_bytes=self.most_bytes)

            async def receive() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            return await handler(Request(request.scope, receive))

        return bounded


MISSING: dict[int | str, dict[str, Any]] = {404: {"description": "Nothing has this name."}}
"""Further answer of a route that is asked for a named thing."""

CHECKS = [Depends(_check_query)]
USERS = [Depends(for_users)]
USERS_AND_WORKERS = [Depends(for_users_and_workers)]
USERS_AND_NODES = [Depends(for_users_and_nodes)]
OPERATORS = [Depends(for_operators)]
ADMINS = [Depends(for_admins)]
NODES = [Depends(for_nodes)]
