"""What is put under load: requests made ready beforehand, and how to tell a good answer from a bad one.

Each function asks the server what it serves, makes the requests, sends one as a trial and returns only if that was
answered; so a wrong address or a wrong model name ends in one sentence, not in a table of errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from experiments.bench.http import Connection, ConnectionBroken, Origin, Reply, encode_http
from experiments.bench.inputs import InputPlan, make_inputs
from experiments.bench.summary import ANSWERED, FALLBACK, OK
from tierkit.errors import InvalidInput, NotFound, Unavailable, UpstreamError, UpstreamTimeout
from tierkit.tensors import Array, TensorSpec
from tierkit.wire.oip import InferRequest, RequestedOutput, Tensor, encode_request

__all__ = ["Judge", "Target", "classify_target", "judge_lines", "judge_status", "oip_target", "tasks_target"]

Judge = Callable[[Reply], str]
"""The outcome of an answer: `OK`, `FALLBACK`, or the name of what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Requests for one endpoint."""

    origin: Origin
    name: str
    """For people: "mobilenet at http://127.0.0.1:8000"."""
    requests: Sequence[bytes]
    """Whole HTTP requests, sent in turn."""
    images: int
    """Images (rows) in each request."""
    judge: Judge
    stats_path: str | None = None
    """Where the server tells its queue and compute times (OIP statistics extension); None where it does not."""
    streams: bool = False
    """Whether the answer comes in parts, so that the time to the first part has a meaning of its own."""


def judge_status(reply: Reply) -> str:
    """200 is an answer; anything else is named by its status."""
    return OK if reply.status == 200 else str(reply.status)


def judge_lines(reply: Reply) -> str:
    """As `judge_status`, and what the events of a streamed answer say: an error, or that the coarse answer stands."""
    if reply.status != 200:
        return str(reply.status)
    try:
        events = {json.loads(line)["event"] for line in reply.body.splitlines()}
    except (ValueError, KeyError, TypeError):
        return "unreadable answer"
    if "error" in events or "failed" in events:
        return "error event"
    if "coarse" not in events:
        return "no coarse answer"
    return FALLBACK if "fallback" in events else OK


async def oip_target(url: str, model: str, plan: InputPlan) -> Target:
    """Inference by the Open Inference Protocol v2: POST /v2/models/{model}/infer.

    Raises:
        InvalidInput, NotFound, Unavailable, UpstreamError, UpstreamTimeout: the first thing that is wrong.
    """
    origin, path = Origin.parse(url, token=plan.token, tls_ca=plan.tls_ca), _path(model)
    payloads = make_inputs(await _inputs_of(origin, path, model, plan), plan)
    return await _tried(
        plan,
        origin=origin,
        name=f"{model} at {origin}",
        requests=[_request(origin, f"{path}/infer", payload, plan) for payload in payloads],
        judge=judge_status,
        stats_path=await _stats_path(origin, path, plan),
    )


async def tasks_target(url: str, model: str, plan: InputPlan) -> Target:
    """The task path of an end node: POST /v1/tasks/{id}; coarse alone, unless `plan.headers` name upstream nodes.

    `model` is the end node's coarse model: it tells the size of the images, and the server's times are its own.

    Raises:
        As `oip_target`.
    """
    origin, path, plan = Origin.parse(url, token=plan.token, tls_ca=plan.tls_ca), _path(model), _as_task(plan)
    payloads = make_inputs(await _inputs_of(origin, path, model, plan), plan)
    return await _tried(
        plan,
        origin=origin,
        name=f"tasks of {origin}",
        # The node keeps nothing of a task, so an id may come back.
        requests=[_request(origin, f"/v1/tasks/bench-{n}", payload, plan) for n, payload in enumerate(payloads)],
        judge=judge_lines,
        stats_path=await _stats_path(origin, path, plan),
        streams=True,
    )


async def classify_target(url: str, plan: InputPlan) -> Target:
    """The scheduler's answer while you wait, over all tiers: POST /v1/classify.

    Raises:
        As `oip_target`.
    """
    origin, plan = Origin.parse(url, token=plan.token, tls_ca=plan.tls_ca), _as_task(plan)
    info = _document(origin, await _get(origin, "/v1/info", plan), "route /v1/info, so it is no Terrace scheduler")
    try:
        shape = tuple(int(dim) for dim in info["input_shape"])
    except (KeyError, TypeError, ValueError):
        raise UpstreamError(f"{origin} is no Terrace scheduler: its /v1/info has no input_shape") from None
    payloads = make_inputs([TensorSpec(name="images", datatype="UINT8", shape=(-1, *shape))], plan)
    return await _tried(
        plan,
        origin=origin,
        name=f"classify at {origin}",
        requests=[_request(origin, "/v1/classify", payload, plan) for payload in payloads],
        judge=judge_lines,
        streams=True,
    )


async def _tried(plan: InputPlan, **facts: Any) -> Target:
    """The target, if it has answered a trial request.

    Raises:
        InvalidInput, NotFound, Unavailable, UpstreamError, UpstreamTimeout: it has not; the message says why.
    """
    target = Target(images=plan.batch_size, **facts)
    reply = await _exchange(target.origin, target.requests[0], plan.timeout_s)
    outcome = target.judge(reply)
    if outcome not in ANSWERED:
        raise _refusal(target.origin, reply, outcome)
    return target


def _path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}"


def _as_task(plan: InputPlan) -> InputPlan:
    """Terrace's own endpoints take binary tensors, and give events."""
    return replace(plan, outputs=(), binary_inputs=True)


def _request(origin: Origin, path: str, payload: Mapping[str, Array], plan: InputPlan) -> bytes:
    request = InferRequest(
        inputs=tuple(Tensor(name, data) for name, data in payload.items()),
        outputs=tuple(RequestedOutput(name, binary=plan.binary_outputs) for name in plan.outputs),
        binary_output=plan.binary_outputs,
    )
    chunks, headers = encode_request(request, binary=plan.binary_inputs)
    return encode_http("POST", origin, path, {**headers, **plan.headers}, b"".join(chunks))


async def _inputs_of(origin: Origin, path: str, model: str, plan: InputPlan) -> list[TensorSpec]:
    reply = await _get(origin, path, plan)
    if reply.status == 400 and b"nknown model" in reply.body:  # Triton says so with 400, and not with 404
        raise NotFound(f"{origin} has no model '{model}': {_reason(reply)}")
    metadata = _document(origin, reply, f"model '{model}'")
    try:
        specs = [
            TensorSpec(name=entry["name"], datatype=entry["datatype"], shape=tuple(int(dim) for dim in entry["shape"]))
            for entry in metadata["inputs"]
        ]
    except (KeyError, TypeError, ValueError):
        specs = []
    if not specs:
        raise UpstreamError(f"{origin} describes model '{model}' in a way that cannot be read")
    return specs


async def _stats_path(origin: Origin, path: str, plan: InputPlan) -> str | None:
    reply = await _get(origin, f"{path}/stats", plan)
    return f"{path}/stats" if reply.status == 200 else None


async def _get(origin: Origin, path: str, plan: InputPlan) -> Reply:
    return await _exchange(origin, encode_http("GET", origin, path), plan.timeout_s)


async def _exchange(origin: Origin, message: bytes, timeout_s: float) -> Reply:
    async with Connection(origin) as connection:
        try:
            return await connection.request(message, timeout_s=timeout_s)
        except TimeoutError:
            raise UpstreamTimeout(f"no answer from {origin} within {timeout_s:g} s") from None
        except ConnectionBroken as exc:
            # Said of whatever server this is, and not of another node of a fleet.
            raise Unavailable(str(exc)) from exc


def _document(origin: Origin, reply: Reply, what: str) -> dict[str, Any]:
    if reply.status == 404:
        raise NotFound(f"{origin} has no {what} ({_reason(reply)})")
    if reply.status != 200:
        raise _refusal(origin, reply, str(reply.status))
    try:
        document = json.loads(reply.body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise UpstreamError(f"{origin} answered with something that is not JSON: is this an inference server?")
    return document


def _refusal(origin: Origin, reply: Reply, outcome: str) -> InvalidInput | UpstreamError:
    """What a trial request came back with, as the error of the side that can act on it."""
    message = f"{origin} answered the trial request with {outcome}: {_reason(reply)}"
    if 400 <= reply.status < 500:
        return InvalidInput(message)
    return UpstreamError(message, status_code=reply.status)


def _reason(reply: Reply) -> str:
    text = reply.body.decode("utf-8", "replace").strip()
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        error = text
    return str(error)[:300] or "no reason given"
