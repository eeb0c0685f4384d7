"""A small service, run as a process by the tests: `python service_under_test.py <flags>`."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tierkit.errors import WeightsError
from tierkit.flags import command, run_main
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import serve
from tierkit.settings import ServiceSettings


class SampleSettings(ServiceSettings):
    """Settings of the sample service."""

    service: ClassVar[str] = "sample"
    start: str = "well"
    """`well`, `fails` (a SetupError) or `hangs` (never becomes ready)."""


def build(settings: SampleSettings, lifecycle: Lifecycle) -> Starlette:
    release = asyncio.Event()

    async def work(request: Request) -> JSONResponse:
        """Answers once /release was asked for."""
        await release.wait()
        return JSONResponse({"done": True})

    async def let_go(request: Request) -> JSONResponse:
        release.set()
        return JSONResponse({})

    async def crash(request: Request) -> JSONResponse:
        async def loop() -> None:
            raise ZeroDivisionError("the loop divides by nothing")

        lifecycle.own(loop(), name="sample loop")
        return JSONResponse({})

    async def block(request: Request) -> JSONResponse:
        time.sleep(30)  # noqa: ASYNC251  # a service that is stuck is what the test wants
        return JSONResponse({})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if settings.start == "fails":
            raise WeightsError("the weights are gone; run 'terrace doctor'")
        if settings.start == "hangs":
            await asyncio.Event().wait()
        yield

    return Starlette(
        routes=[
            Route("/work", work, methods=["POST"]),
            Route("/release", let_go),
            Route("/crash", crash, methods=["POST"]),
            Route("/block", block, methods=["POST"]),
        ],
        lifespan=lifespan,
    )


run = command(
    SampleSettings, lambda settings: serve(lambda lifecycle: build(settings, lifecycle), settings, node_id="sample-1")
)

if __name__ == "__main__":
    run_main(run)
