"""The HTTP application: routes decode, call the scheduler, encode."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
from fastapi import FastAPI

from scheduler.api.about import about
from scheduler.api.description import describe
from scheduler.api.devices import devices
from scheduler.api.history import history
from scheduler.api.jobs import classify_directly, jobs
from scheduler.api.learning import learning
from scheduler.api.mapping import mapping
from scheduler.api.networks import networks
from scheduler.api.observations import observations, post_observations_directly
from scheduler.api.offers import offers
from scheduler.api.own_address import OwnAddress
from scheduler.api.pages import pages
from scheduler.api.privacy import privacy
from scheduler.api.releases import releases
from scheduler.api.routing import note_refusal
from scheduler.api.runs import runs
from scheduler.api.sessions import sessions
from scheduler.api.sinks import sinks
from scheduler.api.sites import sites
from scheduler.api.snapshot import Snapshots
from scheduler.api.sources import sources
from scheduler.api.tokens import tokens
from scheduler.jobs.service import Scheduler
from scheduler.runtime.leadership import leading
from scheduler.settings import SchedulerSettings
from tierkit.distribution import installed_version
from tierkit.http.answering import install
from tierkit.http.asgi import HeadAsGet, ReadsWhileWanted
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.shell import Direct, answer_directly

__all__ = ["create_app"]


def create_app(
    settings: SchedulerSettings, lifecycle: Lifecycle, middlewares: Sequence[aiohttp.ClientMiddlewareType] = ()
) -> FastAPI:
    """Return the application; its lifespan is the scheduler's.

    Args:
        middlewares: aiohttp middlewares that the scheduler's own requests pass through.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        def take(scheduler: Scheduler) -> None:
            app.state.scheduler = scheduler
            lifecycle.on_refusal = partial(note_refusal, scheduler)
            app.state.snapshots = Snapshots(scheduler, clock=time.monotonic)

        app.state.own_address = OwnAddress(settings.host)
        async with leading(settings, lifecycle, take, middlewares):
            yield

    app = FastAPI(
        title="Terrace scheduler",
        summary="Image classification over end devices, edge nodes and the cloud: coarse at once, fine a little later.",
        version=installed_version(),
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load their scripts from elsewhere
        redoc_url=None,
    )
    app.state.authenticator = lifecycle.authenticator
    of_the_fleet = (devices, sites, sources, observations, learning, mapping, history, privacy)
    routers = (jobs, runs, offers, *of_the_fleet, sinks, tokens, releases, networks, about, sessions, pages)
    for router in routers:
        app.router.routes.extend(router.routes)  # include_router builds each route once more for each application

    describe(app)
    app.add_middleware(ReadsWhileWanted)
    app.add_middleware(HeadAsGet)
    install(app)
    answer_directly(
        app,
        {"/v1/classify": Direct(classify_directly), "/v1/observations": Direct(post_observations_directly)},
    )
    return app
