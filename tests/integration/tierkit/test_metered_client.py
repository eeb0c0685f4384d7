"""A client with a meter counts what passes its connections, headers included."""

import asyncio
from collections.abc import Callable

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tierkit.http.client import ask, calling, open_client, read_at_most
from tierkit.testing import connected, listening, serve_app


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None]) -> None:
    while piece := await reader.read(65536):
        count(len(piece))
        writer.write(piece)
        await writer.drain()
    writer.close()


class Counter:
    def __init__(self) -> None:
        self.sent = self.received = 0

    def __call__(self, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received


@pytest.mark.parametrize("size", [0, 10, 300_000])
async def test_what_passes_the_socket_is_counted_to_the_byte(size: int) -> None:
    """A raw relay between client and service counts the same."""
    seen, counter = Counter(), Counter()

    async def echo(request: Request) -> Response:
        return Response(await request.body() + b"!")

    async with serve_app(Starlette(routes=[Route("/", echo, methods=["POST"])])) as lifecycle:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with connected(lifecycle.url) as (from_service, to_service):
                await asyncio.gather(
                    pump(reader, to_service, lambda n: seen(n, 0)), pump(from_service, writer, lambda n: seen(0, n))
                )

        async with listening(relay) as url, open_client(meter=counter) as http:
            for _ in range(3):
                async with (
                    calling("echo", budget_s=10),
                    ask(http, "POST", url + "/", [bytes(size)] if size else ()) as answer,
                ):
                    assert len(await read_at_most(answer, 2**20)) == size + 1
    assert (counter.sent, counter.received) == (seen.sent, seen.received)
    assert counter.sent > 3 * size
