"""HTTP of sources and observations on the device: for local programs, and for operators through the scheduler."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from end_node.observing import ObservingNode
from end_node.settings import SourceSettings
from end_node.sources.picture import TakenPicture
from end_node.spool import Spool
from end_node.uplink.rules import may_go
from models.kept.page import KEPT_PICTURES, MOST_PICTURES
from models.kept.sample import KeptPicture
from tierkit.access import CALLER, Caller
from tierkit.documents import faults
from tierkit.errors import Forbidden, InvalidInput, NotFound, Overloaded, Unavailable
from tierkit.http.asgi import BodyRoom, cancelled_on_disconnect, read_body
from tierkit.http.server_sent import EVENT_STREAM, WAITING, last_event_of, server_sent
from tierkit.wire.observations import Observation

__all__ = ["source_routes"]

M = TypeVar("M", bound=BaseModel)

_MOST_SETTINGS_BYTES = 64 * 1024
_MOST_PICTURE_BYTES = 64 * 2**20
_AT_ONCE = 100
"""Events that are read from the spool at a time."""
_KEEP_ALIVE_S = 15.0
_NUMBER = re.compile(r"[0-9]{1,18}")
_MOST_READERS = 64
_KEEPS_NOTHING = "this node keeps no pictures to learn from: its settings have no table [learn]"


def source_routes(node: ObservingNode) -> Sequence[Route]:
    """Routes of a node with sources."""
    return [
        Route("/v1/sources", _Sources(node).answer, methods=["GET", "POST"]),
        Route("/v1/sources/{name}", _Sources(node).remove, methods=["DELETE"]),
        Route("/v1/sources/{name}/pause", _Sources(node).pause, methods=["POST", "DELETE"]),
        Route("/v1/sources/{name}/pictures", _Sources(node).push, methods=["POST"]),
        Route("/v1/kept", _Kept(node).answer, methods=["GET"]),
        Route(KEPT_PICTURES, _KeptPictures(node), methods=["GET"]),
        Route("/v1/observations/events", _Events(node).answer, methods=["GET"]),
    ]


class _Sources:
    def __init__(self, node: ObservingNode) -> None:
        self._node = node

    async def answer(self, request: Request) -> Response:
        """List the sources, or add one."""
        if request.method == "POST":
            _check_operator(request)
            await self._node.add_source(await _read(request, SourceSettings))
            return Response(status_code=201)
        report = await self._node.report()
        return JSONResponse(report.model_dump(mode="json"))

    async def remove(self, request: Request) -> Response:
        _check_operator(request)
        await self._node.remove_source(request.path_params["name"])
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        """Pause a source (POST), or let it continue (DELETE)."""
        _check_operator(request)
        await self._node.pause_source(request.path_params["name"], paused=request.method == "POST")
        return Response(status_code=204)

    async def push(self, request: Request) -> Response:
        """Answer a picture that a local program sends; the answer is its observation."""
        name = request.path_params["name"]
        self._node.check_push(name)
        with BodyRoom() as room:
            body = await read_body(request.receive, room, most_bytes=_MOST_PICTURE_BYTES)
            if not body:
                raise InvalidInput("the body is empty: send the bytes of a picture")
            # The picture is stored even if the program does not wait for the answer.
            observation = await asyncio.shield(self._node.push(name, TakenPicture(content=body)))
        return JSONResponse(self._node.seen(observation).model_dump(mode="json"), 201)


class _Kept:
    def __init__(self, node: ObservingNode) -> None:
        self._node = node

    async def answer(self, request: Request) -> Response:
        """Return the size of the kept sample."""
        _check_operator(request)
        kept = self._node.kept
        if kept is None:
            raise NotFound(_KEEPS_NOTHING)
        return JSONResponse(kept.model_dump(mode="json"))


class _KeptPictures:
    """ASGI application of the route that gives kept pictures to a node. One reader at a time bounds the memory."""

    def __init__(self, node: ObservingNode) -> None:
        self._node = node
        self._busy = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        node, request = self._node, Request(scope, receive)
        if node.keeping is None:
            raise NotFound(_KEEPS_NOTHING)
        may_go, (after, limit) = self._allowed(request), _place(request)
        if (wait_s := node.pace.opens_in_s()) > 0:
            raise Unavailable("pictures may not leave this device at this time of day", retry_after_s=wait_s)
        if self._busy:
            raise Overloaded("another node fetches kept pictures: try again later")
        self._busy = True
        try:
            with cancelled_on_disconnect(scope):
                body = await node.keeping.page(after, limit, may_go)
                answer = Response(body, media_type="application/x-ndjson", headers={"Cache-Control": "no-store"})
                await answer(scope, receive, send)
        finally:
            self._busy = False

    def _allowed(self, request: Request) -> Callable[[KeptPicture], bool]:
        """Return a function that decides whether a picture may go to the caller.

        Raises:
            Forbidden: none may.
        """
        learn = self._node.settings.learn
        tiers = () if learn is None else learn.pictures_to
        if not tiers:
            raise Forbidden("this device gives no kept pictures away: set pictures_to in its table [learn] to allow it")
        route = self._node.uplink.route
        if route is not None and not route.learn:
            raise Forbidden(
                "this fleet does not learn, so no kept picture leaves the device: start its scheduler with --learn"
            )
        caller: Caller | None = request.scope.get(CALLER)
        if caller is None:
            raise Forbidden("kept pictures go only to a node with a token: start this device with --tokens")
        caller.need("node")
        entry = caller.entry
        if entry is None or len(entry.tiers) != 1:
            raise Forbidden(f"the token of {caller.name!r} is not for one tier: make one with --tier edge")
        (tier,) = entry.tiers
        if tier not in tiers:
            raise Forbidden(
                f"kept pictures do not go to {tier} nodes: pictures_to of this device does not name the tier"
            )
        return lambda picture: may_go(picture, tier, entry.may_take, self._node.uplink.route)


class _Events:
    def __init__(self, node: ObservingNode) -> None:
        self._node = node
        self._readers = 0

    async def answer(self, request: Request) -> Response:
        """Send each observation as an event, when it is made and each time that it is amended."""
        if others := set(request.query_params) - {"source"}:
            raise InvalidInput(f"the only parameter is source, not {min(others)[:32]!r}")
        source = request.query_params.get("source")
        if source is not None:
            self._node.keeper(source)
        last = request.headers.get("last-event-id")
        after: int = await self._node.spool.do(lambda spool: spool.last_change)
        if last is not None:
            # A higher number than any comes from a spool that is lost: all of this one is new to the reader.
            number = last_event_of(last)
            after = number if number <= after else 0
        if self._readers >= _MOST_READERS:
            raise Overloaded(f"{_MOST_READERS} programs read the events already; try again later")
        return _EventStream(self._events(after, source))

    async def _events(self, after: int, source: str | None) -> AsyncGenerator[bytes, None]:
        node = self._node
        self._readers += 1
        try:
            yield b": the observations of this node\n\n"
            while not node.lifecycle.draining:
                changed = node.changed
                found = await node.spool.do(partial(_changes, after))
                for after, observation in found:
                    if source in (None, observation.source):
                        kind = "amended" if observation.revision else "observation"
                        yield server_sent(kind, node.seen(observation).model_dump_json().encode(), after)
                if not found and not await _either(changed.wait(), node.lifecycle.wait_draining()):
                    yield WAITING
        finally:
            self._readers -= 1


def _changes(after: int, spool: Spool) -> list[tuple[int, Observation]]:
    return spool.changes(after, _AT_ONCE)


class _EventStream(StreamingResponse):
    """Ends with the connection of its reader."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type=EVENT_STREAM, headers={"Cache-Control": "no-store"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            with cancelled_on_disconnect(scope):
                await self.stream_response(send)


async def _either(*events: Coroutine[Any, Any, Any]) -> bool:
    """Wait until one of them is done; False if none is in time."""
    waiting = [asyncio.ensure_future(event) for event in events]
    try:
        done, _ = await asyncio.wait(waiting, timeout=_KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
    return bool(done)


def _check_operator(request: Request) -> None:
    """Let operators of this node through, and the scheduler, which has asked for the operator's token itself."""
    caller: Caller | None = request.scope.get(CALLER)
    if caller is not None:
        caller.need("operator", "fleet")


def _place(request: Request) -> tuple[int, int]:
    """Return the key after which pictures are wanted, and how many.

    Raises:
        InvalidInput: another parameter, or a value out of its range.
    """
    if others := set(request.query_params) - {"after", "limit"}:
        raise InvalidInput(f"the parameters are after and limit, not {min(others)[:32]!r}")
    after, limit = request.query_params.get("after", "0"), request.query_params.get("limit", str(MOST_PICTURES))
    if not (_NUMBER.fullmatch(after) and _NUMBER.fullmatch(limit) and 1 <= int(limit) <= MOST_PICTURES):
        raise InvalidInput(f"after is a key of a picture, and limit a number from 1 to {MOST_PICTURES}")
    return int(after), int(limit)


async def _read(request: Request, form: type[M]) -> M:
    body = await read_body(request.receive, most_bytes=_MOST_SETTINGS_BYTES)
    try:
        return form.model_validate_json(body)
    except ValidationError as exc:
        raise InvalidInput(faults(exc, form)) from exc
