"""What a target finds out about a service before any load."""

import asyncio

import pytest

from experiments.bench.load import Closed, LoadPlan, measure
from experiments.bench.targets import RequestPlan, classify_target, tasks_target
from tests.integration.bench.aids import TaskServer
from tierkit.errors import NotFound, TerraceError, Unavailable, UpstreamError, UpstreamTimeout
from tierkit.testing import listening

PLAN = RequestPlan()


async def test_an_unknown_model_is_one_sentence() -> None:
    async with listening(TaskServer().handle) as url:
        with pytest.raises(NotFound, match="no model 'other'"):
            await tasks_target(url, "other", PLAN)


async def test_a_service_that_never_answers() -> None:
    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client hangs up

    async with listening(silent) as url:
        with pytest.raises(UpstreamTimeout, match=r"no answer from http://127\.0\.0\.1:\d+ within 0\.2 s"):
            await classify_target(url, RequestPlan(timeout_s=0.2))


async def test_an_address_where_nothing_listens() -> None:
    with pytest.raises(Unavailable, match=r"no server answers at http://127\.0\.0\.1:1"):
        await classify_target("127.0.0.1:1", PLAN)


async def test_an_end_node_is_not_a_scheduler() -> None:
    async with listening(TaskServer().handle) as url:
        with pytest.raises(NotFound, match="not a Terrace scheduler"):
            await classify_target(url, PLAN)


@pytest.mark.parametrize(("body", "words"), [("<html>", "JSON"), ("{}", "describe"), ('{"input_shape":["x"]}', "des")])
async def test_another_kind_of_server_is_refused(body: str, words: str) -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())

    async with listening(page) as url:
        with pytest.raises(UpstreamError, match=words):
            await classify_target(url, PLAN)


async def test_the_task_path_counts_fallbacks_as_answers() -> None:
    server = TaskServer()
    async with listening(server.handle) as url:
        target = await tasks_target(url, "coarse", RequestPlan(batch_size=3))
        level = await measure(target, Closed(1), LoadPlan(window_s=0.2, warmup_s=0.0))
    assert level is not None
    assert level.summary.fallbacks == level.summary.answered > 0
    assert len(set(server.tasks)) == 16
    first, whole = level.summary.first_ms["mean"], level.summary.latency_ms["mean"]
    assert first is not None
    assert whole is not None
    assert first <= whole


async def test_a_failing_task_path_is_found_by_the_trial() -> None:
    async with listening(TaskServer(["coarse", "error"]).handle) as url:
        with pytest.raises(TerraceError, match="error event"):
            await tasks_target(url, "coarse", PLAN)
