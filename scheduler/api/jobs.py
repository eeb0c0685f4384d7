"""Routes of jobs and of interactive requests. docs/reference/jobs.md describes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from scheduler.api.parameters import CURSOR, LIMIT, Bom, Format, LastEventId
from scheduler.api.routing import (
    CHECKS,
    MISSING,
    NDJSON,
    NOSNIFF,
    UPLOAD_FIELDS,
    USERS,
    CallerOf,
    Service,
    StillAdmitted,
    allowance_of,
    for_users,
    metered,
    only_of,
    sites_of,
    still_admitted,
)
from scheduler.api.schemas import ClassifiedImages, ClassifyDone, ClassifyError
from scheduler.api.streams import NO_STORE, EventStream, Stream, as_csv, as_lines, as_server_sent, event_stream
from scheduler.core.policy import PolicyRequest
from scheduler.core.seeking import SoughtJobs
from scheduler.ingest.upload import ACCEPTED, Incoming
from scheduler.jobs import classify as interactive, follow, query, submit as submission
from scheduler.jobs.classify import CLASSIFY_MAX_IMAGES
from scheduler.jobs.service import Scheduler
from scheduler.jobs.submit import Submitter
from tierkit.access import CALLER, Allowance, Caller
from tierkit.errors import NotFound
from tierkit.http.asgi import cancelled_on_disconnect
from tierkit.http.server_sent import last_event_of
from tierkit.logs import current_request_id
from tierkit.types import JobState
from tierkit.wire.api import AttemptPage, Explanation, ImageResult, Job, JobPage, TaskResults
from tierkit.wire.messages import NODE_ID_PATTERN

__all__ = ["classify_directly", "jobs"]

_BODY = {
    "description": "Images: a form with files in `images` (PNG, JPEG, WebP, TIFF, BMP, GIF, AVIF, HEIC, .zip, .npz, "
    ".npy), one such file as the whole body, or an Open Inference Protocol request with the binary tensors `images` "
    "(UINT8 [n, h, w, 3]) and `labels` (INT64 [n]).",
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["images"],
                "properties": {
                    "images": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}},
                    "labels": {
                        "type": "string",
                        "description": "JSON list with a fine class (name or number) or null per image, such as "
                        '["apple", 3, null].',
                        "example": "",  # or the page at /docs would send labels that do not fit
                    },
                },
            }
        },
        **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in ACCEPTED if "/form" not in kind},
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A wrong upload or field; the sentence names it."},
    403: {"description": "The policy would send pixels to an untrusted node, or the token has another role."},
    409: {"description": "The Idempotency-Key is another submission's, or no encoder fits the nodes."},
    413: {"description": "More bytes, pixels or images than the limit."},
    415: {"description": "A kind of file that is not accepted."},
}


def _policy_parameters() -> list[dict[str, Any]]:
    schema = PolicyRequest.model_json_schema()
    definitions = schema.get("$defs", {})
    parameters = []
    for name, field in schema["properties"].items():
        inner = next((choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"), field)
        inner = definitions.get(inner.get("$ref", "").rpartition("/")[2], inner)
        shown = {key: value for key, value in inner.items() if key not in ("title", "description", "pattern")}
        parameters.append({"in": "query", "name": name, "description": field.get("description", ""), "schema": shown})
    return parameters


_RESULT = ImageResult.model_json_schema(mode="serialization")
_TASK = TaskResults.model_json_schema(mode="serialization")
_LINES = [kind.model_json_schema(mode="serialization") for kind in (ClassifiedImages, ClassifyDone, ClassifyError)]

_UPLOAD = {UPLOAD_FIELDS: True, "requestBody": _BODY, "parameters": _policy_parameters()}


async def _seen(
    scheduler: Service,
    caller: CallerOf,
    job_id: Annotated[str, Path(description="Id of the job.", max_length=64)],
) -> str:
    """The id of a job that the caller may see. Raises NotFound."""
    if (owner := only_of(caller)) is not None:
        await query.check_owner(scheduler, job_id, owner)
    return job_id


JobId = Annotated[str, Depends(_seen)]
"""Id of a job: any job for operators, and only their own for other callers."""
Cursor = Annotated[str | None, Query(max_length=64, description=CURSOR)]
JobCursor = Annotated[Cursor, Query(json_schema_extra={"pattern": "^[0-9a-f]{20}$"})]
AttemptCursor = Annotated[Cursor, Query(json_schema_extra={"pattern": "^[0-9]{1,9}-[0-9]{1,9}$"})]
OnlyTask = Annotated[int | None, Query(ge=0, le=999_999_999, description="Only entries of this task.")]


async def _sought(
    caller: CallerOf,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    site: Annotated[str | None, Query(pattern=NODE_ID_PATTERN, description="Only jobs that name this site.")] = None,
) -> SoughtJobs:
    """The search that the caller asks for."""
    return SoughtJobs(state=state, owner=only_of(caller), site=site)


jobs = APIRouter(tags=["jobs"], dependencies=[*CHECKS, *USERS])


def _incoming(request: Request, allowance: Allowance, may_go_on: Callable[[], bool]) -> Incoming:
    return Incoming(
        headers=request.headers,
        query=request.query_params.multi_items(),
        stream=metered(request.stream(), allowance, may_go_on),
        until_gone=cancelled_on_disconnect(request.scope),
    )


@jobs.post(
    "/v1/jobs",
    status_code=202,
    response_model=Job,
    responses=_ERRORS | {200: {"model": Job, "description": "Submitted before with the same Idempotency-Key."}},
    openapi_extra=_UPLOAD,
    summary="Submit images as a job",
)
async def submit(
    request: Request,
    response: Response,
    scheduler: Service,
    caller: CallerOf,
    may_go_on: StillAdmitted,
    idempotency_key: Annotated[
        str | None,
        Header(
            description="Name of this submission, chosen by the client. The same request with the same name returns "
            "the same job, even after a lost answer."
        ),
    ] = None,
) -> Job:
    """Images come in a form, as one file, or as an Open Inference Protocol request. The job is stored when the answer
    is sent, and the header `Location` has its address. Policy fields belong in the query or, with a form, in the form.

    Two images with the same name are refused. If archives of one upload hold the same names, the name of the archive is
    put in front. A file name that `filename` cannot hold goes percent-encoded into the header `Terrace-Name` of its
    part. Images with another size than the networks' are resized.
    """
    allowance = allowance_of(caller)
    job, is_new = await submission.submit(
        scheduler,
        _incoming(request, allowance, may_go_on),
        idempotency_key=idempotency_key,
        submitter=Submitter(None if caller is None else caller.name, allowance, sites_of(caller)),
    )
    response.headers["Location"] = f"{request.scope['root_path']}/v1/jobs/{job.id}"
    response.status_code = 202 if is_new else 200
    return job


@jobs.get("/v1/jobs", response_model=JobPage, summary="List jobs, newest first")
async def list_jobs(
    scheduler: Service,
    sought: Annotated[SoughtJobs, Depends(_sought)],
    limit: Annotated[int, Query(ge=1, le=200, description=LIMIT)] = 50,
    cursor: JobCursor = None,
) -> JobPage:
    """All jobs for operators, and only their own for other callers. `next_cursor` of a page continues the list."""
    return await query.page(scheduler, sought, limit=limit, cursor=cursor)


@jobs.get("/v1/jobs/{job_id}", response_model=Job, responses=MISSING, summary="A job as it is now")
async def get_job(scheduler: Service, job_id: JobId) -> Job:
    """State, counts, accuracies and latencies. A latency runs from the dispatch of an image's task to the arrival of
    the answer at the scheduler."""
    return await query.get_job(scheduler, job_id)


@jobs.delete(
    "/v1/jobs/{job_id}",
    response_model=Job,
    responses={**MISSING, 409: {"description": "It has ended already."}},
    summary="Cancel a job",
)
async def cancel_job(scheduler: Service, job_id: JobId) -> Job:
    """Answers that are there stay; the rest is not computed. 409 for a job that has ended."""
    return await follow.cancel(scheduler, job_id)


@jobs.get(
    "/v1/jobs/{job_id}/results",
    summary="One result per image, in the order of the upload",
    response_class=Response,
    responses={**MISSING, 200: {"content": {NDJSON: {"schema": _RESULT}, "text/csv": {}}}},
)
async def get_results(
    scheduler: Service,
    job_id: JobId,
    format: Format = "jsonl",
    bom: Bom = False,
) -> StreamingResponse:
    """While the job runs, the results so far; afterwards all images. The header `Terrace-Job-State` gives the state. In
    CSV, a text that a spreadsheet would compute begins with a single quote; JSON has all texts unchanged."""
    state, rows = await query.results(scheduler, job_id)
    headers = {"Terrace-Job-State": state, **NOSNIFF}
    if format == "csv":
        return Stream(as_csv(rows, bom=bom), media_type="text/csv; charset=utf-8", headers=headers)
    return Stream(as_lines(rows), media_type=NDJSON, headers=headers)


@jobs.get(
    "/v1/jobs/{job_id}/attempts",
    response_model=AttemptPage,
    responses=MISSING,
    summary="Attempts of a job's tasks",
)
async def get_attempts(
    scheduler: Service,
    job_id: JobId,
    limit: Annotated[int, Query(ge=1, le=1000, description=LIMIT)] = 200,
    cursor: AttemptCursor = None,
    task: OnlyTask = None,
) -> AttemptPage:
    """Device, upstream node and outcome of each attempt, sorted by task, then by start. Attempts under way are
    included."""
    return await query.attempts(scheduler, job_id, limit=limit, cursor=cursor, task=task)


@jobs.get(
    "/v1/jobs/{job_id}/explain",
    response_model=Explanation,
    responses=MISSING,
    summary="Reasons for the route of each task",
)
async def get_explanation(
    scheduler: Service,
    job_id: JobId,
    limit: Annotated[int, Query(ge=1, le=1000, description=LIMIT)] = 200,
    cursor: AttemptCursor = None,
    task: OnlyTask = None,
) -> Explanation:
    """The reason of each attempt, sorted by task, then by start. Attempts under way are included."""
    return await query.explain(scheduler, job_id, limit=limit, cursor=cursor, task=task)


@jobs.get(
    "/v1/jobs/{job_id}/events",
    summary="Follow a job (server-sent events)",
    response_class=Response,
    responses={**MISSING, 200: {"content": event_stream(_TASK, Job.model_json_schema(mode="serialization"))}},
)
async def get_events(
    scheduler: Service,
    caller: CallerOf,
    may_go_on: StillAdmitted,
    job_id: JobId,
    last_event_id: LastEventId = None,
    only: Annotated[Literal["state"] | None, Query(description="`state`: leave the results out.")] = None,
) -> StreamingResponse:
    """`coarse`, `fine`, `fallback` and `failed` carry the results of a task, and `state` carries the job. The stream
    begins with the job's first event and ends after the final state. `state` comes again with its reason when nothing
    has happened for two seconds. `Last-Event-ID` continues a broken stream."""
    after = last_event_of(last_event_id or "0")
    events = await follow.events(scheduler, job_id, after=after, states_only=only is not None)
    return EventStream(as_server_sent(events), allowance_of(caller), may_go_on)


@jobs.get(
    "/v1/jobs/{job_id}/images/{index}",
    summary="A small picture of an unfinished job",
    response_class=Response,
    responses={
        200: {"content": {"image/png": {}, "image/jpeg": {}}},
        204: {"description": "The same as 404, for an image element of a page (`Sec-Fetch-Dest: image`)."},
        404: {"description": "No such job or picture, the job has ended, or the picture cannot be read."},
    },
)
async def get_image(
    scheduler: Service,
    job_id: JobId,
    index: Annotated[int, Path(ge=0, le=999_999_999, description="Index of the image in the upload, from 0.")],
    size: Annotated[int, Query(ge=16, le=512, description="Largest number of pixels on the longer side.")] = 96,
    sec_fetch_dest: Annotated[str | None, Header(include_in_schema=False)] = None,
) -> Response:
    """Upright, in its original shape, and not enlarged: a PNG if the job keeps pixels, otherwise a JPEG. Pictures are
    deleted when their job ends; then the answer is 404."""
    try:
        content, media_type = await query.thumbnail(scheduler, job_id, index, size)
    except NotFound:
        if sec_fetch_dest != "image":
            raise
        return Response(status_code=204, headers=NO_STORE)  # browsers count a 404 as an error of the page
    headers = {
        "Cache-Control": "private, max-age=3600",
        "Content-Disposition": "inline",
        "Content-Security-Policy": "default-src 'none'",
        **NOSNIFF,
    }
    return Response(content, media_type=media_type, headers=headers)


@jobs.post(
    "/v1/classify",
    summary=f"Classify up to {CLASSIFY_MAX_IMAGES} images at once",
    response_class=Response,
    responses={200: {"content": {NDJSON: {"schema": {"anyOf": _LINES}}}}, **_ERRORS},
    openapi_extra=_UPLOAD,
)
async def classify(
    request: Request, scheduler: Service, caller: CallerOf, may_go_on: StillAdmitted
) -> StreamingResponse:
    """Takes images like `POST /v1/jobs`, and streams JSON lines: `coarse` with its results, then `fine`, `fallback` or
    `failed`, then `done`; or `error` if the request fails. Its tasks overtake all jobs, and nothing is stored. It
    counts among the unfinished jobs of the caller.

    An image whose damage a node finds has an `error` in its result and no answer; the other images are answered.
    """
    return await _classified(request, scheduler, caller, may_go_on)


async def classify_directly(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application of `classify` that does not pass through the web framework, whose layers take long."""
    request = Request(scope, receive)
    caller: Caller | None = scope.get(CALLER)
    await for_users(caller)
    answer = await _classified(request, request.app.state.scheduler, caller, await still_admitted(request, caller))
    await answer(scope, receive, send)


async def _classified(
    request: Request, scheduler: Scheduler, caller: Caller | None, may_go_on: Callable[[], bool]
) -> StreamingResponse:
    allowance = allowance_of(caller)
    with ExitStack() as counted:
        counted.enter_context(allowance.submits(scheduler.unfinished_of(None if caller is None else caller.name)))
        incoming = _incoming(request, allowance, may_go_on)
        lines = await interactive.classify(scheduler, incoming, request_id=current_request_id(), sites=sites_of(caller))
        return Stream(as_lines(lines), media_type=NDJSON, headers=NOSNIFF, until_sent=counted.pop_all())
