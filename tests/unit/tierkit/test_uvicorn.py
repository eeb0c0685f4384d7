"""What `tierkit.http` relies on in uvicorn beyond its documented interface; pyproject.toml bounds its version."""

import asyncio
import inspect
from typing import Any

import pytest
import uvicorn
from uvicorn.server import Server, ServerState


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (Server.startup, ["self", "sockets"]),
        (Server.main_loop, ["self"]),
        (Server.on_tick, ["self", "counter"]),
        (Server.shutdown, ["self", "sockets"]),
        (Server.capture_signals, ["self"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_methods_that_are_replaced_or_called(method: Any, parameters: list[str]) -> None:
    assert list(inspect.signature(method).parameters) == parameters
    assert inspect.iscoroutinefunction(method) is (method is not Server.capture_signals)


def test_a_server_goes_through_them_in_their_order() -> None:
    whole = inspect.getsource(Server.serve) + inspect.getsource(Server._serve)
    calls = ("self.capture_signals()", "self.startup(", "self.main_loop()", "self.shutdown(")
    assert [whole.count(call) for call in calls] == [1, 1, 1, 1]
    assert sorted(calls, key=whole.index) == list(calls)


def test_the_state_that_connections_share() -> None:
    state = ServerState()
    assert (state.connections, state.tasks, state.default_headers) == (set(), set(), [])


def test_how_a_connection_is_made() -> None:
    class Protocol(asyncio.Protocol):
        pass

    config = uvicorn.Config(print, http=Protocol, log_config=None)
    config.load()
    assert config.http_protocol_class is Protocol
    made = inspect.getsource(Server.startup)
    for argument in ("config=config", "server_state=self.server_state", "app_state="):
        assert argument in made
