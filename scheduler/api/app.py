"""The HTTP API: routes decode, call the scheduler, encode. Jobs are described in docs/jobs.md."""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from models.manifest import weights_folder
from models.store import ModelStore
from scheduler.api.access import CallerOf, WhoAmI, for_nodes, for_users, metered, who_am_i
from scheduler.api.docs_page import render_docs
from scheduler.api.reports import DevicePage, MappingReport, device_page, info, mapping_report
from scheduler.api.views import AttemptPage, Explanation, ImageResult, JobPage, JobView
from scheduler.devices.own_address import OwnAddress
from scheduler.ingest.upload import ACCEPTED
from scheduler.jobs.policy import PolicyRequest
from scheduler.jobs.service import CLASSIFY_MAX_IMAGES, Scheduler
from scheduler.runtime import open_scheduler
from scheduler.settings import SchedulerSettings
from tierkit.errors import InvalidInput, NotFound, WeightsError
from tierkit.http import errors as http_errors
from tierkit.http.asgi import HeadAsGet, ReadsWhileWanted, cancelled_on_disconnect, read_body
from tierkit.http.lifecycle import Lifecycle
from tierkit.logs import current_request_id
from tierkit.types import Scheme
from tierkit.wire.messages import Heartbeat, Lease, NodeId, Registration

__all__ = ["create_app"]

_log = logging.getLogger(__name__)

_HEADERS = {"X-Content-Type-Options": "nosniff"}
_NDJSON = "application/x-ndjson"
_MOST_JSON_BYTES = 64 * 1024
"""For what nodes say of themselves: a heartbeat has a few hundred bytes, the longest registration some 40 kB."""

_BODY = {
    "description": "Images: a form with files in `images` (PNG, JPEG, WebP, .zip, .npz, .npy), one such file as the "
    "whole body, or an Open Inference Protocol request with the binary tensors `images` (UINT8 [n, h, w, 3]) and "
    "`labels` (INT64 [n]).",
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["images"],
                "properties": {
                    "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
                    "labels": {
                        "type": "string",
                        "description": "JSON list with a fine class (name or number) or null per image.",
                        "example": '["apple", 3, null]',
                    },
                },
            }
        },
        **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in ACCEPTED if "/form" not in kind},
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A wrong upload or field; the sentence names it."},
    401: {"description": "No valid token, where one is asked for."},
    403: {"description": "The policy would send pixels to an untrusted node, or the token has another role."},
    413: {"description": "More bytes, pixels or images than the limit."},
    415: {"description": "A kind of file that is not accepted."},
    429: {"description": "The token's limit of requests, uploads or unfinished jobs; see Retry-After."},
    503: {"description": "Not now; see Retry-After."},
}


def _policy_parameters() -> list[dict[str, Any]]:
    schema = PolicyRequest.model_json_schema()
    definitions = schema.get("$defs", {})
    parameters = []
    for name, field in schema["properties"].items():
        inner = next((choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"), field)
        inner = definitions.get(inner.get("$ref", "").rpartition("/")[2], inner)
        shown = {key: value for key, value in inner.items() if key not in ("title", "description")}
        parameters.append({"in": "query", "name": name, "description": field.get("description", ""), "schema": shown})
    return parameters


_UPLOAD = {"requestBody": _BODY, "parameters": _policy_parameters()}


# FastAPI sends plain functions to a thread, which costs more than what these do.
async def _scheduler(request: Request) -> Scheduler:
    scheduler: Scheduler = request.app.state.scheduler
    return scheduler


Service = Annotated[Scheduler, Depends(_scheduler)]


class _Stream(StreamingResponse):
    """Ends what it is made from with itself, also where it is cut off between two pieces."""

    def __init__(self, pieces: AsyncGenerator[str, None], *, media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._pieces = pieces

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._pieces):
            await super().stream_response(send)


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


JobId = Annotated[str, Path(description="As in `Location` and `id`.", max_length=64)]
NodeName = Annotated[NodeId, Path()]


async def _check_query(request: Request) -> None:
    """Refuse parameters that a route does not have: whoever misspells one would take the default for his choice."""
    route: APIRoute = request.scope["route"]
    if route.openapi_extra is _UPLOAD:
        return  # policy fields, which the upload's reader checks together with those of the form
    known = [field.alias for field in route.dependant.query_params]
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            names = f"known are {', '.join(known)}" if known else "there are none here"
            raise InvalidInput(f"unknown parameter {name[:64]!r}: {f'did you mean {close[0]!r}?' if close else names}")
        if given.count(name) > 1:
            raise InvalidInput(f"the parameter {name!r} is given twice")


class _SmallBody(APIRoute):
    """A route whose JSON is read on the event loop: it is bounded while it comes, before anything is done with it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def bounded(request: Request) -> Response:
            body = await read_body(request.receive, most_bytes=_MOST_JSON_BYTES)

            async def receive() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            return await handler(Request(request.scope, receive))

        return bounded


_CHECKS = [Depends(_check_query)]
_USERS = [Depends(for_users)]
_NODES = [Depends(for_nodes)]
jobs = APIRouter(tags=["jobs"], dependencies=[*_CHECKS, *_USERS])
fleet = APIRouter(tags=["fleet"], dependencies=_CHECKS, route_class=_SmallBody)
about = APIRouter(tags=["about"], dependencies=_CHECKS)


@jobs.post(
    "/v1/jobs",
    status_code=202,
    response_model=JobView,
    responses=_ERRORS | {200: {"model": JobView, "description": "Submitted before with the same Idempotency-Key."}},
    openapi_extra=_UPLOAD,
    summary="Submit images as a job",
)
async def submit(
    request: Request,
    response: Response,
    scheduler: Service,
    caller: CallerOf,
    idempotency_key: Annotated[
        str | None, Header(description="Names this submission: the same again answers with the same job.")
    ] = None,
) -> JobView:
    """The job is stored when this answers; its progress is at `Location`. Policy fields stand in the query or, with a
    form, in the form."""
    allowance = None if caller is None else caller.allowance
    submission = await scheduler.submit(
        request.headers,
        request.query_params.multi_items(),
        metered(request.stream(), allowance),
        until_gone=cancelled_on_disconnect(request.scope),
        idempotency_key=idempotency_key,
        allowance=allowance,
    )
    response.headers["Location"] = f"/v1/jobs/{submission.view.id}"
    if submission.replayed:
        response.status_code = 200
    return submission.view


@jobs.get("/v1/jobs", response_model=JobPage, summary="List jobs, newest first")
async def list_jobs(
    scheduler: Service,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=64, description="`next_cursor` of the page before.")] = None,
    state: Literal["queued", "running", "completed", "failed", "cancelled"] | None = None,
) -> JobPage:
    return await scheduler.page(limit=limit, cursor=cursor, state=state)


@jobs.get("/v1/jobs/{job_id}", response_model=JobView, summary="A job as it is now")
async def get_job(scheduler: Service, job_id: JobId) -> JobView:
    return await scheduler.view(job_id)


@jobs.delete(
    "/v1/jobs/{job_id}",
    response_model=JobView,
    responses={409: {"description": "It has ended already."}},
    summary="Cancel a job",
)
async def cancel_job(scheduler: Service, job_id: JobId) -> JobView:
    """Answers that are there stay; the rest is not computed."""
    return await scheduler.cancel(job_id)


@jobs.get(
    "/v1/jobs/{job_id}/results",
    summary="One result per image, in the order of the upload",
    response_class=Response,
    responses={200: {"content": {_NDJSON: {"schema": ImageResult.model_json_schema()}, "text/csv": {}}}},
)
async def get_results(
    scheduler: Service, job_id: JobId, format: Annotated[Literal["jsonl", "csv"], Query()] = "jsonl"
) -> StreamingResponse:
    """While the job runs, what there is so far (the header `Terrace-Job-State` says which); afterwards all images."""
    state, pieces = await scheduler.results(job_id, form=format)
    media_type = "text/csv; charset=utf-8" if format == "csv" else _NDJSON
    return _Stream(pieces, media_type=media_type, headers={"Terrace-Job-State": state, **_HEADERS})


@jobs.get("/v1/jobs/{job_id}/attempts", response_model=AttemptPage, summary="Who tried which task, and what came of it")
async def get_attempts(
    scheduler: Service,
    job_id: JobId,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    cursor: Annotated[str | None, Query(max_length=64, description="`next_cursor` of the page before.")] = None,
    task: Annotated[int | None, Query(ge=0, le=999_999_999, description="Only those of this task.")] = None,
) -> AttemptPage:
    """By task, then in the order in which they began; with those under way."""
    return await scheduler.attempts(job_id, limit=limit, cursor=cursor, task=task)


@jobs.get("/v1/jobs/{job_id}/explain", response_model=Explanation, summary="Why each task went where it went")
async def get_explanation(
    scheduler: Service,
    job_id: JobId,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    cursor: Annotated[str | None, Query(max_length=64, description="`next_cursor` of the page before.")] = None,
    task: Annotated[int | None, Query(ge=0, le=999_999_999, description="Only those of this task.")] = None,
) -> Explanation:
    """The reason of each attempt, by task, then in the order in which they began; with those under way."""
    return await scheduler.explain(job_id, limit=limit, cursor=cursor, task=task)


@jobs.get(
    "/v1/jobs/{job_id}/events",
    summary="Follow a job (server-sent events)",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def get_events(
    scheduler: Service,
    job_id: JobId,
    last_event_id: Annotated[str | None, Header(description="Go on after this event.")] = None,
    only: Annotated[
        Literal["state"] | None, Query(description="Leave the results out: whoever waits for the end needs none.")
    ] = None,
) -> StreamingResponse:
    """`coarse`, `fine`, `fallback` and `failed` carry `{"task", "first_index", "results": [...]}`, `state` carries the
    job. Ends after the final state."""
    after = last_event_id or "0"
    if not (after.isascii() and after.isdigit() and len(after) < 19):
        raise InvalidInput(f"Last-Event-ID is a number that this stream has given, not {after[:32]!r}")
    events = await (scheduler.states(job_id) if only else scheduler.events(job_id, after=int(after)))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **_HEADERS}
    return _Stream(events, media_type="text/event-stream", headers=headers)


@jobs.post(
    "/v1/classify",
    summary=f"Classify up to {CLASSIFY_MAX_IMAGES} images at once",
    response_class=Response,
    responses={200: {"content": {_NDJSON: {}}}, **_ERRORS},
    openapi_extra=_UPLOAD,
)
async def classify(request: Request, scheduler: Service, caller: CallerOf) -> StreamingResponse:
    """Lines as they come: `{"event": "coarse", "results": [...]}`, then `fine`, `fallback` or `failed`, then `done`.
    Goes before all jobs; nothing is stored."""
    lines = await scheduler.classify(
        request.headers,
        request.query_params.multi_items(),
        metered(request.stream(), None if caller is None else caller.allowance),
        until_gone=cancelled_on_disconnect(request.scope),
        request_id=current_request_id(),
    )
    return _Stream(lines, media_type=_NDJSON, headers=_HEADERS)


@fleet.get("/v1/devices", response_model=DevicePage, summary="The device list", dependencies=_USERS)
async def list_devices(scheduler: Service) -> DevicePage:
    return device_page(scheduler.devices, scheduler.fleet, scheduler.dispatcher.outstanding, time.monotonic())


@fleet.post("/v1/devices", response_model=Lease, summary="Register a node", dependencies=_NODES)
async def register(request: Request, scheduler: Service, caller: CallerOf, registration: Registration) -> Lease:
    if caller is not None:
        caller.check_claim(registration.node_id, registration.tier)
    server: tuple[str, int] | None = request.scope["server"]
    own: OwnAddress = request.app.state.own_address
    if registration.url == str(request.base_url).rstrip("/") or (
        server is not None and await own.is_at(registration.url, port=server[1])
    ):
        raise InvalidInput("url: this is the scheduler's own address; it must be the one at which the node listens")
    return scheduler.devices.register(registration, time.monotonic())


@fleet.post("/v1/devices/{node_id}/heartbeat", status_code=204, summary="Renew a node's lease", dependencies=_NODES)
async def heartbeat(scheduler: Service, caller: CallerOf, node_id: NodeName, beat: Heartbeat) -> Response:
    """404 or 409: register again."""
    if caller is not None:
        caller.check_claim(node_id)
    scheduler.devices.heartbeat(node_id, beat, time.monotonic())
    return Response(status_code=204)


@fleet.post("/v1/devices/{node_id}/drain", status_code=204, summary="Give a node no new tasks", dependencies=_USERS)
async def drain(scheduler: Service, node_id: NodeName) -> Response:
    scheduler.devices.drain(node_id, time.monotonic())
    return Response(status_code=204)


@fleet.delete(
    "/v1/devices/{node_id}/drain", status_code=204, summary="Give a drained node tasks again", dependencies=_USERS
)
async def resume(scheduler: Service, node_id: NodeName) -> Response:
    """409: the node itself is shutting down."""
    scheduler.devices.resume(node_id, time.monotonic())
    return Response(status_code=204)


@fleet.delete("/v1/devices/{node_id}", status_code=204, summary="Strike a node off the list")
async def remove(
    scheduler: Service,
    caller: CallerOf,
    node_id: NodeName,
    incarnation: Annotated[str | None, Query(description="Only if this is the present one.")] = None,
) -> Response:
    """Its tasks go to others. A node that lives on registers again; drain it to keep it away. With a node's token, only
    a node of its own."""
    if caller is not None:
        caller.check_claim(node_id)
    scheduler.devices.remove(node_id, incarnation)
    return Response(status_code=204)


@fleet.get("/v1/mapping", response_model=MappingReport, summary="Who forwards to whom, and why", dependencies=_USERS)
async def get_mapping(
    scheduler: Service,
    scheme: Annotated[Scheme | None, Query(description="Default: the scheduler's.")] = None,
    tasks: Annotated[int, Query(ge=1, le=1_000_000, description="N_t of the formulas, tasks of 50 images.")] = 200,
) -> MappingReport:
    return mapping_report(
        scheduler.fleet,
        scheduler.dispatcher.pilot,
        scheduler.settings,
        scheme=scheme,
        tasks=tasks,
        now=time.monotonic(),
    )


@about.get("/v1/models", summary="The manifest: all networks and encoders that nodes may fetch")
async def list_models(scheduler: Service) -> dict[str, Any]:
    return scheduler.manifest.listing()


@about.get(
    "/v1/models/{name}/file",
    summary="The weights of a network",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": {}}},
        404: {"description": "Not here, or another version."},
    },
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
    folder = scheduler.settings.weights or weights_folder()
    try:
        path = await asyncio.to_thread(ModelStore([folder], folder).find, entry)
    except WeightsError as exc:
        _log.error("weights cannot be given to nodes", extra={"model": name, "why": str(exc)})
        raise NotFound(f"the weights of {name!r} are damaged here") from exc
    if path is None:
        raise NotFound(f"the weights of {name!r} are not here")
    return _File(path, media_type="application/octet-stream", headers={"ETag": etag, **_HEADERS})


@about.get("/v1/whoami", response_model=WhoAmI, summary="Whose token this is, and until when")
async def get_caller(caller: CallerOf) -> WhoAmI:
    return who_am_i(caller)


@about.get("/v1/info", summary="Version, limits and class names", dependencies=_USERS)
async def get_info(scheduler: Service) -> dict[str, Any]:
    return info(scheduler.manifest, scheduler.limits, classify_max_images=CLASSIFY_MAX_IMAGES)


def create_app(settings: SchedulerSettings, lifecycle: Lifecycle) -> FastAPI:
    """The application; its lifespan is that of the scheduler behind it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_scheduler(settings, lifecycle) as scheduler:
            app.state.scheduler = scheduler
            app.state.own_address = OwnAddress(settings.host)
            yield

    app = FastAPI(
        title="Terrace scheduler",
        summary="Image classification over end devices, edge nodes and the cloud: coarse at once, fine a little later.",
        version=version("terrace"),
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load their scripts from elsewhere
        redoc_url=None,
    )
    for router in (jobs, fleet, about):
        app.include_router(router)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", **_HEADERS}
        return HTMLResponse(render_docs(app.openapi()), headers=policy)

    app.add_middleware(ReadsWhileWanted)
    app.add_middleware(HeadAsGet)
    http_errors.install(app)
    return app
