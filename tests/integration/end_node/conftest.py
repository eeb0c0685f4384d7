"""An end node and an upstream node on real sockets."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from end_node.app import create_app
from end_node.node import EndNode
from end_node.settings import EndSettings
from tests.integration.end_node.aids import (
    HIERARCHY,
    PixelModel,
    RunningEnd,
    RunningUpper,
    StartEnd,
    serve_upper,
)
from tierkit.http.lifecycle import Lifecycle
from tierkit.testing import ServiceProcess, serve_app, service_process


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop that services run on."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
        yield client


@pytest.fixture
def start_end(http: httpx.AsyncClient) -> StartEnd:
    """`async with start_end(max_queue_images=8) as end: ...`; settings of the node as keywords."""

    @asynccontextmanager
    async def start(
        model: PixelModel | None = None, clock: Callable[[], float] = time.monotonic, **values: object
    ) -> AsyncIterator[RunningEnd]:
        own = model or PixelModel("coarse", 2)
        settings = EndSettings.model_validate({"node_id": "end-1", "port": 0, "drain_s": 5.0, **values})

        def build(lifecycle: Lifecycle) -> Starlette:
            return create_app(EndNode(settings, [own], lifecycle, HIERARCHY, clock=clock))

        async with serve_app(build, settings) as lifecycle:
            try:
                yield RunningEnd(lifecycle, own, http)
            finally:
                own.gate.set()

    return start


@pytest.fixture
async def end(start_end: StartEnd) -> AsyncIterator[RunningEnd]:
    async with start_end() as running:
        yield running


@pytest.fixture
async def upper() -> AsyncIterator[RunningUpper]:
    async with serve_upper(PixelModel("fine", 4)) as running:
        yield running


@pytest.fixture
async def end_process(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    """An end node in a process of its own, with the network that ships."""
    flags = ["--port", "0", "--node-id", "end-1", "--log-format", "json"]
    async with service_process(["-m", "terrace", "end", *flags], ready_file=tmp_path / "end.json") as service:
        yield service


@pytest.fixture
async def edge_process(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    """An edge node likewise."""
    flags = ["--port", "0", "--node-id", "edge-1", "--log-level", "debug"]
    async with service_process(["-m", "terrace", "edge", *flags], ready_file=tmp_path / "edge.json") as service:
        yield service
