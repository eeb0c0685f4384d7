"""What a target finds out about a server before any load."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from experiments.bench.inputs import InputPlan
from experiments.bench.levels import Closed, Plan, measure
from experiments.bench.targets import Target, classify_target, oip_target, tasks_target
from tests.integration.bench.aids import SumModel
from tierkit.errors import InvalidInput, NotFound, TerraceError, Unavailable, UpstreamError, UpstreamTimeout
from tierkit.testing import listening


async def test_tensors_may_go_as_json(node_url: str, model: SumModel) -> None:
    plan = InputPlan(batch_size=2, binary_inputs=False, binary_outputs=False)
    target = await oip_target(node_url, "sum", plan)
    assert b'"data":[' in target.requests[0]
    assert model.images_seen >= 2


async def test_only_the_outputs_asked_for(node_url: str) -> None:
    target = await oip_target(node_url, "sum", InputPlan(outputs=["logits"]))
    assert b'"outputs":[{"name":"logits"' in target.requests[0]
    with pytest.raises(InvalidInput, match="nope"):
        await oip_target(node_url, "sum", InputPlan(outputs=["nope"]))


async def test_an_unknown_model_is_one_sentence(node_url: str) -> None:
    with pytest.raises(NotFound, match="no model 'other'"):
        await oip_target(node_url, "other", InputPlan())


@pytest.mark.parametrize("make", [oip_target, tasks_target])
async def test_a_server_that_never_answers(make: Callable[[str, str, InputPlan], Awaitable[Target]]) -> None:
    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client hangs up

    async with listening(silent) as url:
        with pytest.raises(UpstreamTimeout, match=r"no answer from http://127\.0\.0\.1:\d+ within 0\.2 s"):
            await make(url, "sum", InputPlan(timeout_s=0.2))


async def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match=r"no server answers at http://127\.0\.0\.1:1"):
        await oip_target("127.0.0.1:1", "sum", InputPlan())


async def test_a_node_is_no_scheduler(node_url: str) -> None:
    with pytest.raises(NotFound, match="no Terrace scheduler"):
        await classify_target(node_url, InputPlan())


async def test_a_web_page_is_no_inference_server() -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>")

    async with listening(page) as url:
        with pytest.raises(UpstreamError, match="not JSON"):
            await oip_target(url, "sum", InputPlan())


class TaskServer:
    """An end node's task path, as the protocol describes it."""

    def __init__(self, events: list[dict[str, str]]) -> None:
        self.body = b"".join(json.dumps(event).encode() + b"\n" for event in events)
        self.paths: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = head.split()[1].decode()
            self.paths.append(path)
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                ),
                0,
            )
            await reader.readexactly(length)
            metadata = {"name": "coarse", "inputs": [{"name": "images", "datatype": "UINT8", "shape": [-1, 4, 4, 3]}]}
            body = self.body if path.startswith("/v1/tasks/") else json.dumps(metadata).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for line in body.splitlines(keepends=True):
                writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")


async def test_the_task_path_counts_fallbacks_as_answers() -> None:
    server = TaskServer([{"event": "coarse"}, {"event": "fallback"}])
    async with listening(server.handle) as url:
        target = await tasks_target(url, "coarse", InputPlan(batch_size=3))
        level = await measure(target, Closed(1), Plan(window_s=0.2, warmup_s=0.0), asyncio.Event())
    assert level is not None
    assert level.summary.fallbacks == level.summary.answered > 0
    assert len({path for path in server.paths if path.startswith("/v1/tasks/")}) == 16
    first, whole = level.summary.first_ms["mean"], level.summary.latency_ms["mean"]
    assert first is not None
    assert whole is not None
    assert first <= whole


async def test_a_failing_task_path_is_found_by_the_trial() -> None:
    async with listening(TaskServer([{"event": "coarse"}, {"event": "error"}]).handle) as url:
        with pytest.raises(TerraceError, match="error event"):
            await tasks_target(url, "coarse", InputPlan())
