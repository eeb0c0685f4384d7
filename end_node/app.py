"""The end node's HTTP application.

POST /v1/tasks/{task_id}: one batch in, a stream of lines out: coarse at once, then fine or why there is none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from end_node.escalation import read_stages
from end_node.node import EndNode, Task
from tierkit.errors import InvalidInput
from tierkit.http.asgi import BodyRoom, cancelled_on_disconnect, fields_of, is_alone
from tierkit.http.shell import Direct
from tierkit.inference.endpoints.request import RequestReader, announced_images, budget_s, is_small, is_urgent
from tierkit.inference.node import node_app
from tierkit.inference.upstreams import read_upstreams
from tierkit.inference.versions import Version
from tierkit.logs import current_request_id, current_trace
from tierkit.spans import Span
from tierkit.tensors import Array
from tierkit.wire.events import ErrorEvent, TaskEvent, written
from tierkit.wire.messages import ESCALATION_HEADER, NETWORK_HEADER, STAGE_HEADER, UPSTREAM_HEADER, Stage, Upstream
from tierkit.wire.oip import InferRequest, Limits

__all__ = ["create_app"]

log = logging.getLogger(__name__)

_STAGE, _UPSTREAMS, _ESCALATION, _NETWORK = (
    name.lower().encode() for name in (STAGE_HEADER, UPSTREAM_HEADER, ESCALATION_HEADER, NETWORK_HEADER)
)
_TASK_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def create_app(node: EndNode, routes: Sequence[Route] = ()) -> Starlette:
    """The task route, further `routes`, and the Open Inference Protocol for the node's own models."""
    tasks = _TaskEndpoint(node)
    route = Route("/v1/tasks/{task_id}", tasks, methods=["POST"])
    return node_app(node, [route, *routes], {"/v1/tasks/": Direct(tasks, last="task_id")})


class _Work(NamedTuple):
    """Belongings of one request."""

    version: Version
    room: BodyRoom
    span: Span


class _TaskEndpoint:
    """ASGI application of the route."""

    def __init__(self, node: EndNode) -> None:
        self._node = node
        self._reader = RequestReader(Limits(max_body_bytes=node.settings.max_body_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = fields_of(scope)
        version = self._node.version_for(_field(headers, _NETWORK), coarse=_field(headers, _STAGE) != "fine")
        with version.uses, BodyRoom() as room, Span("end", current_trace()) as span:
            await self._answer(scope, receive, send, _Work(version, room, span))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, work: _Work) -> None:
        node, runner, headers = self._node, work.version.runner, fields_of(scope)
        (images_input,) = runner.model.inputs
        started = node.clock()
        body = b""
        coarse = probabilities = None
        stage = _field(headers, _STAGE)
        wants_coarse = stage != "fine"
        try:
            task_id = _task_id(scope)
            upstreams = read_upstreams(_field(headers, _UPSTREAMS))
            _check_stage(stage, upstreams)
            urgent = is_urgent(headers)
            stages = read_stages(_field(headers, _ESCALATION), upstreams, coarse_known=not wants_coarse)
            if wants_coarse and (runner.queued_images or not is_small(headers)):
                # Before the body is read: a node that is full says so at once.
                runner.check_room(announced_images(headers, images_input))
            body = await self._reader.body(headers, receive, work.room)
            check_room = runner.check_room if wants_coarse else None
            request = await self._reader.read(headers, body, work.room, raw_input=images_input, check_room=check_room)
            budget = budget_s(headers, request)
            images = _images(request)
            if wants_coarse:
                runner.check_room(len(images))
            with cancelled_on_disconnect(scope):
                found = await node.read(images, work.version)
            positions: Sequence[int] = range(len(images))
            if found.damaged:
                positions = [place for place in positions if place not in found.damaged]
            task = Task(
                task_id=task_id,
                version=work.version,
                images=images[positions] if found.damaged else images,
                read=found,
                positions=positions,
                upstreams=upstreams,
                stages=_stages_for(stages, positions, len(images)),
                deadline=started + (node.settings.task_budget_s if budget is None else budget),
                request_id=current_request_id(),
                span=work.span,
                urgent=urgent,
            )
            if wants_coarse:
                with cancelled_on_disconnect(scope):
                    coarse, probabilities = await node.coarse(task, alone=is_alone(scope))
        except BaseException as exc:
            work.version.metrics.observe_request(node.clock() - started, len(body), exc)
            raise
        if wants_coarse:  # else the model that these figures are about had nothing to do
            work.version.metrics.observe_request(node.clock() - started, len(body), None)
        head = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        answered = ""
        if coarse is not None:
            await _send_line(send, coarse, more=bool(upstreams))
            answered = coarse.event
        if upstreams:
            # Only the upstream node's time: when the client hangs up, the question to it is dropped as well.
            with cancelled_on_disconnect(scope):
                event = await self._fine(task, probabilities)
            await _send_line(send, event, more=False)
            answered = event.event
        work.span.says(task=task_id, images=len(images), answer=answered)
        if log.isEnabledFor(logging.DEBUG):
            elapsed_ms = round((node.clock() - started) * 1000, 2)
            log.debug("task done", extra={"task": task_id, "images": len(images), "answer": answered, "ms": elapsed_ms})

    async def _fine(self, task: Task, coarse: Array | None) -> TaskEvent:
        try:
            return await self._node.finer(task, coarse)
        except Exception:
            # The status has been sent; the stream itself must say that it does not end as it should.
            log.exception("the fine answer failed", extra={"task_id": task.task_id})
            return ErrorEvent(task_id=task.task_id, error=f"internal error; request id {task.request_id}")


async def _send_line(send: Send, event: TaskEvent, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": written(event) + b"\n", "more_body": more})


def _field(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


def _images(request: InferRequest) -> Array:
    if [tensor.name for tensor in request.inputs] != ["images"]:
        raise InvalidInput(f"a task has one tensor, 'images', not {[tensor.name for tensor in request.inputs]}")
    return request.inputs[0].data


def _stages_for(stages: tuple[Stage, ...], positions: Sequence[int], images: int) -> tuple[Stage, ...]:
    """The stages for the images that can be read, by their places among these.

    Raises:
        InvalidInput: they ask about an image that the task does not have.
    """
    only = stages[0].only if stages else None
    if not only:
        return stages
    if only[-1] >= images:
        raise InvalidInput(f"{ESCALATION_HEADER} asks about image {only[-1]} of a task of {images}")
    places = {position: place for place, position in enumerate(positions)}
    asked = tuple(places[index] for index in only if index in places)
    return (stages[0].model_copy(update={"only": asked}), *stages[1:])


def _check_stage(stage: str | None, upstreams: Sequence[Upstream]) -> None:
    if stage not in (None, "all", "fine"):
        raise InvalidInput(f"{STAGE_HEADER} is 'all' or 'fine', not {stage[:32]!r}")
    if stage == "fine" and not upstreams:
        raise InvalidInput(f"{STAGE_HEADER} 'fine' needs upstream nodes to ask: name them in {UPSTREAM_HEADER}")


def _task_id(scope: Scope) -> str:
    task_id: str = scope["path_params"]["task_id"]
    if not _TASK_ID.fullmatch(task_id):
        raise InvalidInput("a task id has 1 to 128 letters, digits, dots, dashes, colons and underscores")
    return task_id
