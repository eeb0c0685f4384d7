"""The end node's HTTP application.

POST /v1/tasks/{task_id}: one batch in, a stream of lines out: coarse at once, then fine or why there is none.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from end_node.escalation import read_stages
from end_node.node import EndNode, Task
from tierkit.errors import InvalidInput
from tierkit.http.asgi import cancelled_on_disconnect
from tierkit.inference.endpoints.request import RequestReader, announced_images, budget_s, is_urgent
from tierkit.inference.model import Array
from tierkit.inference.node import node_app
from tierkit.inference.upstreams import read_upstreams
from tierkit.logs import current_request_id
from tierkit.wire.events import ErrorEvent, TaskEvent, written
from tierkit.wire.messages import ESCALATION_HEADER, STAGE_HEADER, UPSTREAM_HEADER, Upstream
from tierkit.wire.oip import InferRequest, Limits

__all__ = ["create_app"]

log = logging.getLogger(__name__)

_ESCALATION = ESCALATION_HEADER.lower().encode()
_STAGE = STAGE_HEADER.lower().encode()
_UPSTREAM = UPSTREAM_HEADER.lower().encode()
_TASK_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def create_app(node: EndNode) -> Starlette:
    """The task route, and the Open Inference Protocol for the node's own models."""
    tasks = _TaskEndpoint(node)
    return node_app(
        node, [Route("/v1/tasks/{task_id}", tasks, methods=["POST"])], below={"/v1/tasks": (tasks, "task_id")}
    )


class _TaskEndpoint:
    """ASGI application of the route."""

    def __init__(self, node: EndNode) -> None:
        self._node = node
        self._settings = node.settings
        self._reader = RequestReader(Limits(max_body_bytes=node.settings.max_body_bytes))
        self._metrics = node.metrics[node.default_runner.model.name]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        arrived = self._node.clock()
        body = b""
        error: BaseException | None = None
        wants_coarse = True
        coarse = probabilities = None
        try:
            headers = dict(scope["headers"])
            task_id = _task_id(scope)
            upstreams = read_upstreams(_text(headers, _UPSTREAM), self._settings.allowed_upstreams)
            wants_coarse = _wants_coarse(_text(headers, _STAGE), upstreams)
            urgent = is_urgent(headers)
            stages = read_stages(_text(headers, _ESCALATION), upstreams, coarse_known=not wants_coarse)
            runner = self._node.default_runner
            if wants_coarse:
                # Before the body is read: a node that is full says so at once.
                runner.check_room(announced_images(headers, runner.model.inputs[0]))
            body = await self._reader.body(headers, receive)
            check_room = runner.check_room if wants_coarse else None
            request = await self._reader.read(headers, body, raw_input=runner.model.inputs[0], check_room=check_room)
            budget = budget_s(headers, request)
            task = Task(
                task_id=task_id,
                images=_images(request),
                upstreams=upstreams,
                stages=stages,
                deadline=arrived + (self._settings.task_budget_s if budget is None else budget),
                request_id=current_request_id(),
                urgent=urgent,
            )
            if wants_coarse:
                with cancelled_on_disconnect(scope):
                    coarse, probabilities = await self._node.coarse(task)
            else:
                self._node.check_images(task)
                if stages and stages[0].only and stages[0].only[-1] >= len(task.images):
                    raise InvalidInput(
                        f"{ESCALATION_HEADER} asks about image {stages[0].only[-1]} of a task of {len(task.images)}"
                    )
        except BaseException as exc:
            error = exc
            raise
        finally:
            if wants_coarse or error is not None:  # else the model that these figures are about had nothing to do
                self._metrics.observe_request(time.perf_counter() - started, len(body), error)
        headers_sent = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers_sent})
        answered = ""
        if coarse is not None:
            await _send_line(send, coarse, more=bool(task.upstreams))
            answered = coarse.event
        if task.upstreams:
            # Only the upper node's time: when the client hangs up, the question to it is dropped as well.
            with cancelled_on_disconnect(scope):
                event = await self._fine(task, probabilities)
            await _send_line(send, event, more=False)
            answered = event.event
        elapsed_ms = round((time.perf_counter() - started) * 1000, 2)
        log.info("task done", extra={"task": task_id, "images": len(task.images), "answer": answered, "ms": elapsed_ms})

    async def _fine(self, task: Task, coarse: Array | None) -> TaskEvent:
        try:
            if task.stages:
                return await self._node.escalated(task, coarse)
            return await self._node.fine(task)
        except Exception:
            # The status has been sent; the stream itself must say that it does not end as it should.
            log.exception("the fine answer failed", extra={"task_id": task.task_id})
            return ErrorEvent(task_id=task.task_id, error=f"internal error; request id {task.request_id}")


async def _send_line(send: Send, event: TaskEvent, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": written(event) + b"\n", "more_body": more})


def _images(request: InferRequest) -> Array:
    if [tensor.name for tensor in request.inputs] != ["images"]:
        raise InvalidInput(f"a task has one tensor, 'images', not {[tensor.name for tensor in request.inputs]}")
    return request.inputs[0].data


def _wants_coarse(stage: str | None, upstreams: Sequence[Upstream]) -> bool:
    if stage not in (None, "all", "fine"):
        raise InvalidInput(f"{STAGE_HEADER} is 'all' or 'fine', not {stage[:32]!r}")
    if stage == "fine" and not upstreams:
        raise InvalidInput(f"{STAGE_HEADER} 'fine' needs upper nodes to ask: name them in {UPSTREAM_HEADER}")
    return stage != "fine"


def _task_id(scope: Scope) -> str:
    task_id: str = scope["path_params"]["task_id"]
    if not _TASK_ID.fullmatch(task_id):
        raise InvalidInput("a task id has 1 to 128 letters, digits, dots, dashes, colons and underscores")
    return task_id


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")
