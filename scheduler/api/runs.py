"""Routes of training runs. docs/how-to/training.md describes them."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from scheduler.api.parameters import CURSOR, LIMIT
from scheduler.api.routing import (
    CHECKS,
    MISSING,
    USERS,
    USERS_AND_WORKERS,
    CallerOf,
    Service,
    SmallBody,
    StillAdmitted,
    allowance_of,
    only_of,
)
from scheduler.api.streams import EventStream, as_server_sent, event_stream
from scheduler.api.tokens import change_tokens
from scheduler.runs.invitations import invited
from scheduler.runs.service import Sight
from tierkit.access import Authenticator, Caller, TokenEntry, digest_of, new_token
from tierkit.errors import Conflict, Forbidden, NotFound
from tierkit.wire.runs import (
    RUN_ID_PATTERN,
    BegunRun,
    Invitation,
    InvitationWish,
    Run,
    RunMatch,
    RunOrders,
    RunPage,
    RunProgress,
    RunReport,
    RunStart,
    WorkerOffer,
    WorkerWish,
)

__all__ = ["runs"]

_RUN, _PROGRESS = (kind.model_json_schema(mode="serialization") for kind in (Run, RunProgress))
_SHORT_NAME = 20
"""Characters of the inviter's name in the name of an invitation."""


class _ReportBody(SmallBody):
    most_bytes = 512 * 1024
    """A report of a thousand workers, with a result, has about 250 kB."""


async def _sight(caller: CallerOf) -> Sight:
    """Operators see all runs, users their own, workers all unfinished runs, and guests the run of their invitation."""
    if caller is not None and caller.role in ("worker", "guest"):
        return Sight(unended=True, run=None if caller.entry is None else caller.entry.run)
    return Sight(owner=only_of(caller))


def _name(caller: Caller | None) -> str | None:
    return None if caller is None else caller.name


RunId = Annotated[
    str, Path(max_length=64, description="Id of the run, 32 hex digits.", json_schema_extra={"pattern": RUN_ID_PATTERN})
]
Seen = Annotated[Sight, Depends(_sight)]

runs = APIRouter(tags=["training runs"], dependencies=CHECKS, route_class=_ReportBody)


@runs.post(
    "/v1/runs",
    status_code=201,
    response_model=BegunRun,
    responses={
        200: {"model": BegunRun, "description": "A host that was restarted goes on with its run."},
        409: {"description": "The id is the run of somebody else, or this run has ended."},
        429: {"description": "Too many runs, or unfinished jobs and runs, of this caller."},
    },
    summary="Begin a training run, or continue it",
    dependencies=USERS,
)
async def begin(
    request: Request, response: Response, scheduler: Service, caller: CallerOf, wanted: RunStart
) -> BegunRun:
    """For hosts. The same id again, by the same owner, takes over the run after a restart: from then on only reports of
    this incarnation count. `secret` is returned only here."""
    name = _name(caller)
    check = not scheduler.runs.is_under_way(wanted.id)
    with allowance_of(caller).submits(scheduler.unfinished_of(name), check=check):
        run, is_new = await scheduler.runs.begin(wanted, name)
    response.headers["Location"] = f"{request.scope['root_path']}/v1/runs/{run.id}"
    response.status_code = 201 if is_new else 200
    return run


@runs.put(
    "/v1/runs/{run_id}/report",
    response_model=RunOrders,
    responses={**MISSING, 409: {"description": "Another host has taken the run over."}},
    summary="Report on a run, every second",
    dependencies=USERS,
)
async def report(request: Request, scheduler: Service, caller: CallerOf, run_id: RunId, said: RunReport) -> RunOrders:
    """For hosts, every second. The last report has the state `finished` or `failed`; it is stored when the answer is
    sent, and may be repeated. A host that is asked to stop ends the run and reports `finished`. At most 1,000 workers
    and 512 KiB."""
    orders = await scheduler.runs.report(run_id, said, _name(caller))
    authenticator: Authenticator | None = request.app.state.authenticator
    return (
        orders
        if authenticator is None
        else orders.model_copy(update={"revoked": authenticator.revoked_of(said.tickets)})
    )


@runs.get(
    "/v1/runs", response_model=RunPage, summary="List training runs, newest first", dependencies=USERS_AND_WORKERS
)
async def list_runs(
    scheduler: Service,
    sight: Seen,
    limit: Annotated[int, Query(ge=1, le=200, description=LIMIT)] = 50,
    cursor: Annotated[
        str | None,
        Query(
            max_length=64,
            description=CURSOR,
            json_schema_extra={"pattern": "^[0-9]{1,17}-[0-9a-f]{32}$"},
        ),
    ] = None,
) -> RunPage:
    """All runs for operators, their own for users, and unfinished ones for workers. `next_cursor` of a page continues
    the list."""
    return await scheduler.runs.page(limit=limit, cursor=cursor, sight=sight)


@runs.get(
    "/v1/runs/{run_id}",
    response_model=Run,
    responses=MISSING,
    summary="A training run as it is now",
    dependencies=USERS_AND_WORKERS,
)
async def get_run(scheduler: Service, sight: Seen, run_id: RunId) -> Run:
    """Figures, workers, curve, configuration and result."""
    return await scheduler.runs.view(run_id, sight)


@runs.get(
    "/v1/runs/{run_id}/events",
    summary="Follow a training run (server-sent events)",
    response_class=Response,
    responses={**MISSING, 200: {"content": event_stream(_RUN, _PROGRESS)}},
    dependencies=USERS_AND_WORKERS,
)
async def get_events(
    scheduler: Service, caller: CallerOf, still_admitted: StillAdmitted, sight: Seen, run_id: RunId
) -> StreamingResponse:
    """`state` carries the run: first, and at each change of its state. `report` carries the same without `url`,
    `config`, `curve` and `result`, after each report. The stream ends after the final state."""
    events = await scheduler.runs.events(run_id, sight)
    return EventStream(as_server_sent(events), allowance_of(caller), still_admitted)


@runs.post(
    "/v1/matches",
    response_model=RunMatch,
    responses={
        **MISSING,
        409: {"description": "The run that was chosen has ended, is about to, or wants another kind of worker."},
        429: {"description": "This caller asks too often."},
    },
    summary="Find a run for a worker",
    dependencies=USERS_AND_WORKERS,
)
async def match(request: Request, scheduler: Service, caller: CallerOf, sight: Seen, offer: WorkerOffer) -> RunMatch:
    """The oldest run that still wants workers, or the chosen one. 503: no run wants this worker now, or the host of the
    chosen run is not heard; try again. The worker shows the host the `ticket`, never the token. A caller that came by
    https gets only https URLs."""
    if caller is not None:
        caller.check_claim(offer.name)
    asks = _name(caller) or (request.client.host if request.client is not None else "")
    token = caller.entry if caller is not None and caller.role in ("worker", "guest") else None
    if token is not None:
        _may_use(token, offer.name)
    found = await scheduler.runs.match(offer, asks, sight, token=token, https=request.url.scheme == "https")
    if token is not None and token.uses is not None and offer.name not in token.used:
        await change_tokens(request, lambda entries: [_used(each, token, offer.name) for each in entries])
    return found


def _may_use(token: TokenEntry, worker: str) -> None:
    """Raises Forbidden for an invitation with which enough others have come."""
    if token.uses is not None and worker not in token.used and len(token.used) >= token.uses:
        raise Forbidden(f"the invitation {token.name!r} is used up: ask for another one")


def _used(entry: TokenEntry, token: TokenEntry, worker: str) -> TokenEntry:
    if entry.sha256 != token.sha256 or worker in entry.used:
        return entry
    _may_use(entry, worker)
    return entry.model_copy(update={"used": (*entry.used, worker)})


@runs.post(
    "/v1/runs/{run_id}/invitations",
    status_code=201,
    response_model=Invitation,
    responses={
        **MISSING,
        409: {"description": "The run has ended, or takes no workers; or the scheduler asks for no tokens."},
        429: {"description": "This caller has 20 valid invitations, or 1,000 uses of them, or more with this one."},
    },
    summary="Invite workers to a training run",
    dependencies=USERS,
)
async def invite(
    request: Request, scheduler: Service, caller: CallerOf, sight: Seen, run_id: RunId, wanted: InvitationWish
) -> Invitation:
    """Makes a token with the role worker, only for this run. One use is one name under which a worker comes with it."""
    run = await scheduler.runs.view(run_id, sight)
    if run.state.final:
        raise Conflict(f"run {run_id} is {run.state} already")
    if run.wants.workers == 0:
        raise Conflict(f"run {run_id} takes no workers: its ranks are all there")
    inviter, now = _name(caller), datetime.now(UTC).replace(microsecond=0)
    name = f"{(inviter or '')[:_SHORT_NAME]}.{secrets.token_hex(3)}"
    token, expires = new_token(name), now + timedelta(seconds=max(1.0, wanted.expires_s))
    digest = digest_of(token.encode()).hex()

    authenticator: Authenticator | None = request.app.state.authenticator
    ended = await scheduler.runs.ended_of(frozenset() if authenticator is None else authenticator.invited_to)

    def add(entries: list[TokenEntry]) -> list[TokenEntry]:
        entry = TokenEntry(
            name=name,
            role="worker",
            sha256=digest,
            created=now,
            expires=expires,
            nodes=(f"{name}-*",),
            run=run_id,
            uses=wanted.uses,
            inviter=inviter,
        )
        return invited(entries, entry, now=now.timestamp(), ended=ended)

    await change_tokens(request, add)
    return Invitation(name=name, token=token, run=run_id, uses=wanted.uses, expires=expires)


@runs.delete(
    "/v1/runs/{run_id}/invitations/{name}",
    status_code=204,
    responses={**MISSING, 409: {"description": "The scheduler asks for no tokens."}},
    summary="End an invitation to a training run",
    dependencies=USERS,
)
async def uninvite(
    request: Request,
    scheduler: Service,
    sight: Seen,
    run_id: RunId,
    name: Annotated[str, Path(max_length=63, description="Name of the invitation.")],
) -> None:
    """For everyone who may invite to the run. The token is invalid at once, and the tickets of its workers within
    seconds."""
    await scheduler.runs.view(run_id, sight)

    def end(entries: list[TokenEntry]) -> list[TokenEntry]:
        kept = [each for each in entries if (each.run, each.name) != (run_id, name)]
        if len(kept) == len(entries):
            raise NotFound(f"run {run_id} has no invitation {name!r}")
        return kept

    await change_tokens(request, end)


@runs.put(
    "/v1/runs/{run_id}/workers/{name}",
    response_model=Run,
    responses={**MISSING, 409: {"description": "The run has ended already, or has ranks."}},
    summary="Pause, drop, trust or resume a worker of a run",
    dependencies=USERS,
)
async def order_worker(
    scheduler: Service,
    sight: Seen,
    run_id: RunId,
    name: Annotated[str, Path(max_length=63, description="Name of the worker.")],
    wanted: WorkerWish,
) -> Run:
    """`pause`: no work for it. `drop`: no work ever. `trust`: its updates count without being judged. `resume`: its
    updates are judged again. The host gets the order in the answer to its next report; until it reports the change, the
    order is the worker's `wish`."""
    return await scheduler.runs.order(run_id, name, wanted.order, sight)


@runs.delete(
    "/v1/runs/{run_id}",
    response_model=Run,
    responses={**MISSING, 409: {"description": "It has ended already."}},
    summary="Stop a training run",
    dependencies=USERS,
)
async def stop_run(scheduler: Service, sight: Seen, run_id: RunId) -> Run:
    """The run is `stopping` until its host reports the end, or has not reported for 10 s."""
    return await scheduler.runs.stop(run_id, sight)
