"""Sources of nodes through the scheduler, from the API, the client and the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from scheduler.devices import sources as remote
from terrace.cli import run
from tierkit.client import AsyncClient
from tierkit.errors import DeadlineExceeded, Forbidden, NotFound, UpstreamError
from tierkit.testing import serve_app

KEY = "the-key-of-the-node"
GATE = {"name": "gate", "kind": "stream", "url": "rtsp://10.0.0.9/main", "state": "running", "taken": 1234}
REPORT = {
    "sources": [GATE, {"name": "yard", "kind": "folder", "state": "waiting", "reason": "no such folder"}],
    "spool": {"bytes": 5, "size_bytes": 500, "waiting_answers": 7, "lost_answers": 3},
    "uplink": {"online": True, "spent_bytes": 100, "bytes_per_day": 5000, "a_later_field": 1},
}


class FakeNode:
    """An end node that keeps what it is asked, and answers as it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None, bytes]] = []
        self.answer: Callable[[], Awaitable[Response]] = self.usual

    async def usual(self) -> Response:
        return JSONResponse(REPORT)

    async def take(self, request: Request) -> Response:
        shown = request.headers.get("authorization")
        self.asked.append((request.method, request.url.path, shown, await request.body()))
        return await self.answer()


@pytest.fixture
async def node(scheduler: Any, kit: Any) -> AsyncIterator[FakeNode]:
    fake = FakeNode()
    methods = ["GET", "POST", "DELETE"]
    app = Starlette(
        routes=[Route(path, fake.take, methods=methods) for path in ("/v1/sources", "/v1/sources/{rest:path}")]
    )
    async with serve_app(app) as lifecycle:
        place = {**kit.registration("end-0", url=lifecycle.url), "spool": "5" * 16, "lease_s": 600.0, "key": KEY}
        assert (await scheduler.http.post("/v1/devices", json=place)).status_code == 200
        yield fake


@pytest.fixture
async def client(scheduler: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(scheduler.url) as client:
        yield client


def answering(status: int, content: bytes) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(content, status)

    return answer


async def test_requests_reach_the_node_with_its_key(node: FakeNode, client: AsyncClient) -> None:
    report = await client.node_sources("end-0")
    assert [(source.name, source.taken) for source in report.sources] == [("gate", 1234), ("yard", 0)]
    assert report.spool is not None
    assert report.spool.lost_answers == 3
    node.answer = answering(204, b"")
    await client.add_source("end-0", "door", "rtsp://10.0.0.8/", rate=2.0, keep="unsure")
    await client.pause_source("end-0", "door")
    await client.resume_source("end-0", "door")
    await client.remove_source("end-0", "door")
    shown = f"Bearer {KEY}"
    assert [(method, path, token) for method, path, token, _ in node.asked] == [
        ("GET", "/v1/sources", shown),
        ("POST", "/v1/sources", shown),
        ("POST", "/v1/sources/door/pause", shown),
        ("DELETE", "/v1/sources/door/pause", shown),
        ("DELETE", "/v1/sources/door", shown),
    ]
    added = json.loads(node.asked[1][3])
    assert added == {"name": "door", "url": "rtsp://10.0.0.8/", "rate": 2.0, "keep": "unsure"}


async def test_refusals_of_the_node_come_back(node: FakeNode, client: AsyncClient) -> None:
    for status, kind in ((403, Forbidden), (404, NotFound)):
        node.answer = answering(status, b'{"error": "remote_sources is off"}')
        with pytest.raises(kind, match="remote_sources is off"):
            await client.add_source("end-0", "door", "rtsp://10.0.0.8/")
    # The scheduler's key is refused, and not the token of the caller.
    node.answer = answering(401, b'{"error": "no token"}')
    with pytest.raises(UpstreamError, match="does not accept the scheduler's key"):
        await client.node_sources("end-0")


async def test_a_node_that_answers_nonsense_or_not_at_all(
    node: FakeNode, client: AsyncClient, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_BUDGET_S", 0.3)
    nonsense = (b"", b"<html>", b"[]", b'{"sources": 1}', json.dumps({"sources": [GATE] * 20_000}).encode())
    for content in nonsense:
        node.answer = answering(200, content)
        with pytest.raises(UpstreamError, match="a form that is not known here"):
            await client.node_sources("end-0")
    node.answer = answering(500, b"<html>")
    with pytest.raises(UpstreamError, match="answered 500, and not as a Terrace service does"):
        await client.node_sources("end-0")

    async def never() -> Response:
        await asyncio.Event().wait()
        return Response()

    node.answer = never
    with pytest.raises(DeadlineExceeded):
        await client.node_sources("end-0")


async def test_nodes_without_sources_or_without_an_address(client: AsyncClient, scheduler: Any, kit: Any) -> None:
    with pytest.raises(NotFound, match="no node 'end-9'"):
        await client.node_sources("end-9")
    await scheduler.register("end-1", "end")
    with pytest.raises(NotFound, match="has no sources"):
        await client.node_sources("end-1")
    place = {**kit.registration("end-2"), "spool": "5" * 16, "lease_s": 600.0}
    assert (await scheduler.http.post("/v1/devices", json=place)).status_code == 200
    with pytest.raises(UpstreamError, match="end-2"):
        await client.node_sources("end-2")
    too_long = await scheduler.http.post("/v1/devices/end-2/sources", content=b" " * 100_000)
    assert too_long.status_code == 413
    assert (await scheduler.http.delete("/v1/devices/end-2/sources/..%2Fx")).status_code in (400, 404)


async def test_the_command_sources(
    node: FakeNode, scheduler: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERRACE_SCHEDULER", scheduler.url)
    monkeypatch.setenv("COLUMNS", "160")

    async def call(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run, ["sources", *words])
        return code, *capsys.readouterr()

    code, shown, _ = await call("list", "end-0")
    assert code == 0
    assert "gate" in shown
    assert "no such folder" in shown
    assert "end-0: 7 answers and 0 pictures wait; 0 pictures dropped, 3 answers lost; online, 100 of 5,000" in shown
    code, shown, _ = await call("list", "end-0", "--json")
    report = json.loads(shown)
    assert (code, report["node_id"], report["sources"][0]["taken"]) == (0, "end-0", 1234)
    assert (await call("list", "end-9"))[0] == 2
    node.answer = answering(204, b"")
    for words, said in (
        (("add", "end-0", "door", "rtsp://10.0.0.8/", "--rate", "2"), "door on end-0: added"),
        (("pause", "end-0", "door"), "door on end-0: paused"),
        (("resume", "end-0", "door"), "door on end-0: resumed"),
        (("remove", "end-0", "door"), "door on end-0: removed"),
    ):
        code, shown, _ = await call(*words)
        assert (code, shown.strip()) == (0, said)
        assert json.loads((await call(*words, "--json"))[1]) == {
            "node_id": "end-0",
            "source": "door",
            "state": said.rpartition(" ")[2],
        }
    node.answer = answering(403, b'{"error": "remote_sources is off"}')
    code, _, error = await call("pause", "end-0", "door")
    assert (code, "remote_sources is off" in error) == (1, True)
