"""The server under load, in the test's event loop or in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.integration.bench.aids import SumModel, serving


@pytest.fixture
def model() -> SumModel:
    return SumModel()


@pytest.fixture
async def node_url(model: SumModel) -> AsyncIterator[str]:
    async with serving(model) as url:
        yield url


@pytest.fixture
def threaded_url(model: SumModel) -> Iterator[str]:
    """The same server in a thread, for commands that run an event loop of their own."""
    started, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    found: list[str] = []

    async def run() -> None:
        async with serving(model) as url:
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
