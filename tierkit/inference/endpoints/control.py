"""Triton's extension `model_repository`: which models are served, and to unload and load them."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tierkit.access import CALLER, Caller
from tierkit.errors import InvalidInput, MalformedMessage
from tierkit.http.asgi import read_body
from tierkit.inference.endpoints.lookup import Models
from tierkit.inference.repository import Repository

__all__ = ["control_routes"]

_MAX_BODY_BYTES = 64 * 1024

T = TypeVar("T")
Plain = dict[str, str | int | float | bool]


class _Index(msgspec.Struct):
    ready: bool = False


class _Change(msgspec.Struct):
    parameters: Plain = {}


def control_routes(found: Models, repository: Repository) -> list[Route]:
    """Routes of the extension.

    Args:
        found: the models of the node.
        repository: of the same.
    """

    async def index(request: Request) -> Response:
        asked = await _read(request, _Index)
        return JSONResponse(repository.index(ready=asked.ready))

    async def load(request: Request) -> Response:
        _check_operator(request)
        runner = found.runner(request.scope)
        if (await _read(request, _Change)).parameters:
            raise InvalidInput("a model is loaded as this node was told to at its start: send no parameters")
        await repository.load(runner)
        return Response()

    async def unload(request: Request) -> Response:
        _check_operator(request)
        runner = found.runner(request.scope)
        # No model depends on another, so `unload_dependents` is right either way.
        if others := set((await _read(request, _Change)).parameters) - {"unload_dependents"}:
            raise InvalidInput(f"the only parameter of an unload is unload_dependents, not {min(others)[:100]!r}")
        await repository.unload(runner)
        return Response()

    return [
        Route("/v2/repository/index", index, methods=["POST"]),
        Route("/v2/repository/models/{model}/load", load, methods=["POST"]),
        Route("/v2/repository/models/{model}/unload", unload, methods=["POST"]),
    ]


def _check_operator(request: Request) -> None:
    caller: Caller | None = request.scope.get(CALLER)
    if caller is not None:
        caller.need("operator")


async def _read(request: Request, form: type[T]) -> T:
    """The body, as JSON; an empty one is an empty object."""
    body = await read_body(request.receive, most_bytes=_MAX_BODY_BYTES)
    try:
        return msgspec.json.decode(body or b"{}", type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedMessage(f"the body cannot be read: {exc}") from exc
