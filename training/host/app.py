"""The routes of a host."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tierkit.access import CALLER, Caller
from tierkit.copies.serving import piece_route
from tierkit.documents import faults
from tierkit.errors import InvalidInput, NotFound
from tierkit.http.answering import install
from tierkit.http.asgi import BodyRoom, cancelled_on_disconnect, read_body
from tierkit.http.lifecycle import Lifecycle
from tierkit.wire.runs import WorkerWish
from training.host.host import Host
from training.messages import (
    LEASE_HEADER,
    UPDATE_HEADER,
    VERSION_HEADER,
    DataReport,
    Join,
    Progress,
    UpdateHead,
)
from training.payloads import compress, decompress, packed_bytes

__all__ = ["create_app", "largest_body"]

_SMALL_BYTES = 16 * 1024
_MEDIA = "application/octet-stream"
_NUMBER = re.compile(r"[0-9]{1,19}")

M = TypeVar("M", bound=BaseModel)


def largest_body(values: int, buffers: int) -> int:
    """Bytes of the largest update of a network: dense and in fp32, or what compression makes of random bytes."""
    return packed_bytes(values, buffers, "fp32") * 1001 // 1000 + 4096


def create_app(host: Host, lifecycle: Lifecycle) -> Starlette:
    """Create the application. The run's thread lives as long as its lifespan."""
    most_bytes = largest_body(host.spec.values, host.spec.buffers)

    async def manifest(request: Request) -> Response:
        _need(request, "worker", "user")
        return JSONResponse(host.shared.manifest.model_dump(mode="json"))

    async def may_fetch(request: Request) -> None:
        await host.check(*_asking_worker(request))

    async def read(sha256: str, span: range | None) -> tuple[bytes, int]:
        return await host.shared.read(sha256, span)

    async def report(request: Request) -> Response:
        told = await _document(request, DataReport)
        _need_worker(request, told.worker)
        with cancelled_on_disconnect(request.scope):
            answer = await host.data(told)
        return JSONResponse(answer.model_dump(mode="json"))

    async def spread(request: Request) -> Response:
        _need(request, "user")
        return JSONResponse({"workers": [each.model_dump(mode="json") for each in host.shared.view()]})

    async def run(request: Request) -> Response:
        _need(request, "worker", "user")
        status = await host.status()
        return JSONResponse({"spec": host.spec.model_dump(mode="json"), "status": status.model_dump(mode="json")})

    async def stop(request: Request) -> Response:
        _need(request, "user")
        host.stop()
        return JSONResponse({"state": host.state})

    async def join(request: Request) -> Response:
        asked = await _document(request, Join)
        _need_worker(request, asked.name)
        await host.join(asked, _caller_of(request))
        return JSONResponse({"name": asked.name})

    async def leave(request: Request) -> Response:
        name, incarnation = request.path_params["name"], request.query_params.get("incarnation", "")
        _need_worker(request, name)
        await host.leave(name, incarnation)
        return Response(status_code=204)

    async def order(request: Request) -> Response:
        _need(request, "user")
        wanted = await _document(request, WorkerWish)
        found = await host.order(request.path_params["name"], wanted.order)
        return JSONResponse(found.model_dump(mode="json"))

    async def lease(request: Request) -> Response:
        name, incarnation = _asking_worker(request)
        await read_body(request.receive, most_bytes=_SMALL_BYTES)
        with cancelled_on_disconnect(request.scope):
            granted = await host.lease(name, incarnation)
        if granted is None:
            return JSONResponse({"finished": host.finished}, 202)
        told, body = granted
        headers = {LEASE_HEADER: told.model_dump_json()}
        return _octets(request, body, headers)

    async def renew(request: Request) -> Response:
        progress = await _document(request, Progress)
        _need_worker(request, progress.worker)
        number = request.path_params["number"]
        if _NUMBER.fullmatch(number) is None:
            raise InvalidInput(f"no number of a lease: {number[:40]!r}; it is in the header {LEASE_HEADER} of a lease")
        if not await host.renew(int(number), progress):
            raise NotFound("this lease has expired: ask for another one")
        return Response(status_code=204)

    async def update(request: Request) -> Response:
        head = _parsed(UpdateHead, request.headers.get(UPDATE_HEADER, ""))
        _need_worker(request, head.worker)
        host.expect(head)
        with BodyRoom() as room:
            body = await read_body(request.receive, room, most_bytes=most_bytes)
            received_at, size = time.monotonic(), len(body)
            match request.headers.get("content-encoding", "identity"):
                case "identity":
                    pass
                case "zstd":
                    if host.expect(head):
                        body = decompress(body, most_bytes=most_bytes)
                        room.grow(len(body))
                case other:
                    raise InvalidInput(f"the encoding {other[:40]!r} is not known here; zstd is")
            answer = await host.take(head, body, size)
        return JSONResponse({**answer.model_dump(), "host_s": time.monotonic() - received_at})

    async def base(request: Request) -> Response:
        _need(request, "worker", "user")
        return Response(host.base, media_type=_MEDIA)

    async def weights(request: Request) -> Response:
        _need(request, "worker", "user")
        version, body = await host.weights()
        wanted = request.query_params.get("version")
        if wanted is not None and wanted != str(version):
            raise NotFound(f"version {wanted[:20]!r} of the weights is not kept: the present one is {version}")
        return _octets(request, body, {VERSION_HEADER: str(version)})

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with host.running(lifecycle):
            yield

    def route(path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        return Route(path, endpoint, methods=[method])

    app = Starlette(
        routes=[
            route("/v1/run", run, "GET"),
            route("/v1/run", stop, "DELETE"),
            route("/v1/weights", weights, "GET"),
            route("/v1/base", base, "GET"),
            route("/v1/workers", join, "POST"),
            route("/v1/workers/{name}", leave, "DELETE"),
            route("/v1/workers/{name}/order", order, "PUT"),
            route("/v1/leases", lease, "POST"),
            route("/v1/leases/{number}", renew, "PUT"),
            route("/v1/updates", update, "POST"),
            route("/v1/data", report, "POST"),
            route("/v1/data", spread, "GET"),
            route("/v1/segments", manifest, "GET"),
            piece_route("/v1/segments", read, may_fetch),
        ],
        lifespan=lifespan,
    )
    install(app)
    return app


def _need(request: Request, *roles: str) -> None:
    """Raises Forbidden for a caller that has none of these roles; where no tokens are asked for, all have all."""
    caller: Caller | None = request.scope.get(CALLER)
    if caller is not None and not any(caller.may(role) for role in roles):  # type: ignore[arg-type]
        caller.need(roles[-1])  # type: ignore[arg-type]


def _caller_of(request: Request) -> str:
    """Name of the caller's token; its address where no tokens are asked for."""
    caller: Caller | None = request.scope.get(CALLER)
    if caller is not None:
        return caller.name
    return "" if request.client is None else request.client.host


def _need_worker(request: Request, name: str) -> None:
    """Raises Forbidden unless the caller is the worker of this name."""
    caller: Caller | None = request.scope.get(CALLER)
    if caller is not None:
        caller.need("worker")
        caller.check_claim(name)


def _asking_worker(request: Request) -> tuple[str, str]:
    """Name and incarnation of the worker that sent this request.

    Raises:
        InvalidInput: the query does not name them.
        Forbidden: the caller may not act for this worker.
    """
    name, incarnation = (request.query_params.get(each, "") for each in ("worker", "incarnation"))
    if not name or not incarnation:
        raise InvalidInput("say in the query which worker asks, as it has joined: ?worker=NAME&incarnation=INCARNATION")
    _need_worker(request, name)
    return name, incarnation


async def _document(request: Request, kind: type[M]) -> M:
    return _parsed(kind, await read_body(request.receive, most_bytes=_SMALL_BYTES))


def _parsed(kind: type[M], content: str | bytes) -> M:
    try:
        return kind.model_validate_json(content)
    except ValidationError as exc:
        raise InvalidInput(f"no JSON of the form {kind.__name__}: {faults(exc, kind)}") from exc


def _octets(request: Request, body: bytes, headers: dict[str, str]) -> Response:
    """A body of numbers, compressed for who asks for it."""
    if "zstd" in request.headers.get("accept-encoding", ""):
        return Response(compress(body), media_type=_MEDIA, headers={**headers, "Content-Encoding": "zstd"})
    return Response(body, media_type=_MEDIA, headers=headers)
