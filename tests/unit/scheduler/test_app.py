"""How the application is put together."""

from collections.abc import Iterator
from inspect import iscoroutinefunction

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from scheduler import app


def within(dependant: Dependant) -> Iterator[Dependant]:
    for inner in dependant.dependencies:
        yield inner
        yield from within(inner)


@pytest.mark.parametrize("router", ["jobs", "fleet", "about"])
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
