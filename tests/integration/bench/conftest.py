"""The server under load, in a thread of its own for commands that run an event loop of their own."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.integration.bench.aids import TaskServer
from tierkit.testing import listening


@pytest.fixture
def server() -> TaskServer:
    return TaskServer()


@pytest.fixture
def threaded_url(server: TaskServer) -> Iterator[str]:
    started, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    found: list[str] = []

    async def run() -> None:
        async with listening(server.handle) as url:
            found.append(url)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), name="server under load")
    thread.start()
    try:
        assert started.wait(10)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
