"""Requests that are ready to be sent, and the judgement of their answers.

Both functions ask the service for its input shape, build the requests, and send one as a trial. A wrong address or
model name is therefore one sentence, and not a table of errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from experiments.bench.http import Connection, ConnectionBroken, Origin, Reply, encode_http
from experiments.bench.summary import ANSWERED, FALLBACK, OK
from tierkit.errors import InvalidInput, NotFound, Unavailable, UpstreamError, UpstreamTimeout
from tierkit.wire.oip import InferRequest, Tensor, encode_request

__all__ = ["Judge", "RequestPlan", "Target", "classify_target", "judge_lines", "judge_status", "tasks_target"]

_PAYLOADS = 16
"""Different requests that take turns, so that no service is measured on one cached answer."""
_MOST_BYTES = 256 * 2**20
"""Largest images of one request, and of all requests together."""
_SHOWN = 300

Judge = Callable[[Reply], str]
"""Outcome of an answer: `OK`, `FALLBACK`, or the name of the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """Options of the requests."""

    batch_size: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    """Added to every request."""
    token: str | None = field(default=None, repr=False)
    tls_ca: Path | None = None
    """File with the certificates to trust; None for the public authorities."""
    seed: int = 0
    """Seed of the images."""
    timeout_s: float = 30.0
    """Budget of each question before the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Requests for one endpoint."""

    origin: Origin
    name: str
    """Name for people, such as "classify at http://127.0.0.1:8070"."""
    requests: Sequence[bytes]
    """Complete HTTP requests, sent in turn."""
    images: int
    """Images in each request."""
    judge: Judge


def judge_status(reply: Reply) -> str:
    """`OK` for 200, otherwise the status."""
    return OK if reply.status == 200 else str(reply.status)


def judge_lines(reply: Reply) -> str:
    """Outcome of a streamed answer: the status, an error event, a fallback to the coarse answer, or `OK`."""
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


async def tasks_target(url: str, model: str, plan: RequestPlan) -> Target:
    """Task path of an end node, POST /v1/tasks/{id}; a header names upstream nodes.

    Args:
        model: The end node's coarse model, which gives the size of the images.

    Raises:
        InvalidInput, NotFound, Unavailable, UpstreamError, UpstreamTimeout: The trial failed.
    """
    origin = Origin.parse(url, token=plan.token, tls_ca=plan.tls_ca)
    metadata = await _document(origin, f"/v2/models/{quote(model, safe='')}", f"model '{model}'", plan)
    # The node keeps nothing of a task, so an id may come back.
    paths = [f"/v1/tasks/bench-{number}" for number in range(_PAYLOADS)]
    return await _tried(f"tasks of {origin}", origin, paths, lambda: metadata["inputs"][0]["shape"][1:], plan)


async def classify_target(url: str, plan: RequestPlan) -> Target:
    """Direct answer of the scheduler over all tiers, POST /v1/classify. See `tasks_target` for errors."""
    origin = Origin.parse(url, token=plan.token, tls_ca=plan.tls_ca)
    info = await _document(origin, "/v1/info", "route /v1/info, so it is not a Terrace scheduler", plan)
    return await _tried(
        f"classify at {origin}", origin, ["/v1/classify"] * _PAYLOADS, lambda: info["input_shape"], plan
    )


async def _tried(
    name: str, origin: Origin, paths: Sequence[str], shape_of: Callable[[], Sequence[Any]], plan: RequestPlan
) -> Target:
    """The target, after it has answered a trial request."""
    try:
        shape = tuple(int(dim) for dim in shape_of())
    except (KeyError, IndexError, TypeError, ValueError):
        raise UpstreamError(f"{origin} does not describe its images: is it a Terrace service?") from None
    size = plan.batch_size * int(np.prod(shape))
    if not 0 < size <= _MOST_BYTES:
        raise InvalidInput(f"a request of {plan.batch_size:,} images {list(shape)} exceeds {_MOST_BYTES // 2**20} MiB")
    random = np.random.default_rng(plan.seed)
    requests = []
    for path in paths[: max(1, _MOST_BYTES // size)]:
        images = random.integers(0, 256, (plan.batch_size, *shape), np.uint8)
        chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", images),), binary_output=True))
        requests.append(encode_http("POST", origin, path, {**headers, **plan.headers}, b"".join(chunks)))
    reply = await _exchange(origin, requests[0], plan)
    outcome = judge_lines(reply)
    if outcome not in ANSWERED:
        raise _refusal(origin, reply, outcome)
    return Target(origin=origin, name=name, requests=requests, images=plan.batch_size, judge=judge_lines)


async def _document(origin: Origin, path: str, what: str, plan: RequestPlan) -> Mapping[str, Any]:
    reply = await _exchange(origin, encode_http("GET", origin, path), plan)
    if reply.status == 404:
        raise NotFound(f"{origin} has no {what} ({_reason(reply)})")
    if reply.status != 200:
        raise _refusal(origin, reply, str(reply.status))
    try:
        document = json.loads(reply.body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise UpstreamError(f"{origin} did not answer with JSON: is it a Terrace service?")
    return document


async def _exchange(origin: Origin, message: bytes, plan: RequestPlan) -> Reply:
    async with Connection(origin) as connection:
        try:
            return await connection.request(message, timeout_s=plan.timeout_s)
        except TimeoutError:
            raise UpstreamTimeout(f"no answer from {origin} within {plan.timeout_s:g} s") from None
        except ConnectionBroken as exc:
            raise Unavailable(str(exc)) from exc


def _refusal(origin: Origin, reply: Reply, outcome: str) -> InvalidInput | UpstreamError:
    """The answer to a trial request, as the error of the side that can act on it."""
    message = f"{origin} answered the trial request with {outcome}: {_reason(reply)}"
    if 400 <= reply.status < 500:
        return InvalidInput(message)
    return UpstreamError(message, status_code=reply.status)


def _reason(reply: Reply) -> str:
    try:
        return str(json.loads(reply.body)["error"])[:_SHOWN]
    except (ValueError, KeyError, TypeError):
        return reply.body[:_SHOWN].decode(errors="replace").strip() or f"status {reply.status} without a body"
