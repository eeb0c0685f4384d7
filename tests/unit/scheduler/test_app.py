"""How the application is put together."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from inspect import iscoroutinefunction

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.types import Message

from scheduler.api import app, streams
from tierkit.errors import Unavailable
from tierkit.http.exchange import ON_DISCONNECT


def within(dependant: Dependant) -> Iterator[Dependant]:
    for inner in dependant.dependencies:
        yield inner
        yield from within(inner)


@pytest.mark.parametrize("router", ["jobs", "devices", "mapping", "networks", "sessions", "sites", "sources", "about"])
def test_no_request_waits_for_a_thread(router: str) -> None:
    """FastAPI runs what is no coroutine function in a thread: as long as all the rest that a heartbeat takes."""
    routes = [route for route in getattr(app, router).routes if isinstance(route, APIRoute)]
    threaded = {
        f"{route.path}: {inner.call}"
        for route in routes
        for inner in (route.dependant, *within(route.dependant))
        if not iscoroutinefunction(inner.call)
    }
    assert routes
    assert not threaded


async def test_a_stream_that_is_cut_off_between_two_pieces_ends_what_it_is_made_from() -> None:
    """At once: who cuts off may be about to close what the pieces are read from."""
    ended, stuck = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncGenerator[str, None]:
        try:
            yield "first"
        finally:
            ended.set()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            stuck.set()
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    source = pieces()
    scope = {"type": "http", "extensions": {ON_DISCONNECT: lambda _hang_up: lambda: None}}
    answer = streams.Stream(source, media_type="text/plain", headers={})(scope, receive, send)
    answering = asyncio.create_task(answer)
    await stuck.wait()
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    assert ended.is_set()


async def test_what_a_stream_fails_with_before_its_first_piece_comes_before_its_status() -> None:
    async def pieces() -> AsyncGenerator[str, None]:
        if not sent:
            raise Unavailable("the database does not answer now")
        yield "first"

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    with pytest.raises(Unavailable):
        await streams.Stream(pieces(), media_type="text/plain", headers={}).stream_response(send)
    assert sent == []
