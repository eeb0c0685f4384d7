"""Whatever an upstream node does, a task ends in time with its coarse answer and a reason."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.integration.end_node.aids import (
    PixelModel,
    RunningEnd,
    RunningUpper,
    StartEnd,
    images,
    never,
    serve_upper,
    to,
)
from tierkit.http.address import free_port
from tierkit.tensors import Array
from tierkit.testing import FakeClock, MadeModel, listening, serve_app, wait_for
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent
from tierkit.wire.messages import Upstream
from tierkit.wire.oip import InferResponse, Tensor, encode_response


def refused() -> str:
    """A URL at which nobody listens."""
    return f"http://127.0.0.1:{free_port()}"


async def fallback(end: RunningEnd, *upstreams: Upstream, budget_s: float = 10.0) -> FallbackEvent:
    coarse, event = await end.answer(images(0, 1), *upstreams, budget_s=budget_s)
    assert isinstance(coarse, CoarseEvent)
    assert coarse.labels == (0, 1)
    assert isinstance(event, FallbackEvent), event
    assert event.tried == tuple(upstream.node_id for upstream in upstreams)
    return event


async def test_nobody_listens(end: RunningEnd) -> None:
    event = await fallback(end, to(refused()))
    assert event.reason == "upstream_unavailable"
    assert event.detail.startswith("edge-1: ")


async def test_it_says_nothing_within_the_budget(end: RunningEnd) -> None:
    async with listening(never) as url:
        event = await fallback(end, to(url), budget_s=0.2)
    assert event.reason == "upstream_timeout"


async def test_it_computes_longer_than_the_budget(end: RunningEnd, upper: RunningUpper) -> None:
    upper.model.gate.clear()
    event = await fallback(end, to(upper.url), budget_s=0.2)
    assert event.reason == "upstream_timeout"


async def test_without_its_own_answer_a_node_relays_to_the_next_one_or_says_why_not(
    end: RunningEnd, upper: RunningUpper
) -> None:
    (fine,) = await end.answer(images(1), to(refused(), "edge-0"), to(upper.url), stage="fine")
    assert isinstance(fine, FineEvent)
    assert fine.node_id == "edge-1"
    (event,) = await end.answer(images(1), to(refused()), stage="fine")
    assert isinstance(event, FallbackEvent)
    assert event.reason == "upstream_unavailable"


async def test_it_has_no_such_model(end: RunningEnd, upper: RunningUpper) -> None:
    event = await fallback(end, to(upper.url, model="other"))
    assert event.reason == "upstream_error"
    assert "no model 'other' here" in event.detail


async def test_it_tells_another_number_of_classes_apart(end: RunningEnd) -> None:
    async with serve_upper(PixelModel("fine", 5)) as upper:
        event = await fallback(end, to(upper.url))
    assert event.reason == "upstream_error"
    assert "[2, 5] where [2, 4] were asked for" in event.detail


async def test_it_drains(end: RunningEnd, upper: RunningUpper) -> None:
    upper.lifecycle.drain()
    event = await fallback(end, to(upper.url))
    assert event.reason == "upstream_unavailable"
    assert "shutting down" in event.detail


def tensors(data: Array) -> Callable[[], Response]:
    def respond() -> Response:
        chunks, headers = encode_response(
            InferResponse("fine", MadeModel.sha256, (Tensor("probabilities", data),)), binary=["probabilities"]
        )
        return Response(b"".join(chunks), headers=headers)

    return respond


GOOD = np.full((2, 4), 0.25, np.float32)


@pytest.mark.parametrize(
    ("respond", "reason"),
    [
        (lambda: Response(b"hello"), "upstream_error"),
        (lambda: JSONResponse({"outputs": []}), "upstream_error"),
        (lambda: JSONResponse({"error": "no"}, 500), "upstream_error"),
        (lambda: Response(b"<h1>busy</h1>", 503, {"Retry-After": "soon"}), "upstream_unavailable"),
        (lambda: JSONResponse({"error": "late"}, 504), "upstream_timeout"),
        (lambda: Response(status_code=307, headers={"location": "http://127.0.0.1:1/"}), "upstream_error"),
        (tensors(GOOD[:1]), "upstream_error"),
        (tensors(GOOD * np.float32(np.nan)), "upstream_error"),
        (tensors(GOOD * 2), "upstream_error"),
        (tensors(np.zeros((2, 4), np.int32)), "upstream_error"),
    ],
    ids=["text", "empty", "500", "503", "504", "redirect", "rows", "nan", "sum", "integers"],
)
async def test_it_answers_with_nonsense(end: RunningEnd, respond: Callable[[], Response], reason: str) -> None:
    async def infer(request: Request) -> Response:
        await request.body()
        return respond()

    path = f"/v2/models/fine/versions/{MadeModel.sha256}/infer"
    async with serve_app(Starlette(routes=[Route(path, infer, methods=["POST"])])) as service:
        event = await fallback(end, to(service.url))
    assert event.reason == reason
    assert [answer.node_id for answer in event.wrong] == (["edge-1"] if reason == "upstream_error" else [])


async def test_a_fine_answer_says_whose_was_wrong_before(end: RunningEnd, upper: RunningUpper) -> None:
    routes = [to(refused(), "edge-7"), to(upper.url, "edge-8", model="other"), to(upper.url)]
    _, event = await end.answer(images(0, 1), *routes)
    assert isinstance(event, FineEvent)
    (answer,) = event.wrong
    assert answer.node_id == "edge-8"
    assert "no model 'other' here" in answer.detail


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"", "upstream_unavailable"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "upstream_unavailable"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{", "upstream_unavailable"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel", "upstream_unavailable"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", "upstream_error"),
    ],
    ids=["closes", "no http", "cut", "cut chunk", "text"],
)
async def test_the_connection_brings_something_else(end: RunningEnd, reply: bytes, reason: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()

    async with listening(handle) as url:
        event = await fallback(end, to(url))
    assert event.reason == reason


async def test_the_next_one_is_asked(end: RunningEnd, upper: RunningUpper) -> None:
    async with serve_upper(PixelModel("fine", 5)) as wrong:
        _, fine = await end.answer(
            images(2, 3), to(refused(), "edge-0"), to(wrong.url, "edge-5"), to(upper.url, "edge-1")
        )
    assert isinstance(fine, FineEvent)
    assert (fine.node_id, fine.labels) == ("edge-1", (2, 3))


async def test_one_that_hangs_leaves_time_for_the_next(end: RunningEnd, upper: RunningUpper) -> None:
    async with listening(never) as url:
        _, fine = await end.answer(images(2), to(url, "edge-0"), to(upper.url), budget_s=1.0)
    assert isinstance(fine, FineEvent)


async def test_all_fail_and_each_is_named(end: RunningEnd) -> None:
    async with AsyncExitStack() as stack:
        silent = await stack.enter_async_context(listening(never))
        event = await fallback(end, to(refused(), "edge-0"), to(silent, "edge-1"), budget_s=0.4)
    assert event.reason == "upstream_timeout"
    assert "edge-0: " in event.detail
    assert "; edge-1: " in event.detail


async def test_a_budget_that_the_coarse_answer_used_up_leaves_none_for_the_fine_one(
    start_end: StartEnd, upper: RunningUpper
) -> None:
    clock = FakeClock()
    async with start_end(clock=clock) as end:
        end.model.gate.clear()
        end.model.entered.clear()
        answer = asyncio.create_task(end.answer(images(1), to(upper.url), budget_s=10.0))
        await wait_for(end.model.entered.is_set)
        clock.advance(10.5)
        end.model.gate.set()
        coarse, event = await answer
    assert isinstance(coarse, CoarseEvent)
    assert isinstance(event, FallbackEvent)
    assert (event.reason, event.tried) == ("deadline", ())


async def test_the_log_tells_a_failure_once_and_when_it_is_over(
    end: RunningEnd, upper: RunningUpper, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="end_node.node")
    for url in (refused(), refused(), upper.url, upper.url):
        await end.answer(images(2), to(url))
    assert [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "end_node.node"] == [
        ("WARNING", "no fine answers from an upstream node"),
        ("INFO", "the upstream node answers again"),
    ]


async def test_failures_are_counted(end: RunningEnd) -> None:
    await fallback(end, to(refused()))
    text = (await end.http.get(f"{end.url}/metrics")).text
    line = 'terrace_escalation_duration_seconds_count{outcome="upstream_unavailable",to="edge"}'
    assert line in text


async def test_a_failed_upper_node_leaves_the_connection_pool_clean(end: RunningEnd, upper: RunningUpper) -> None:
    async with listening(never) as url:
        await asyncio.gather(*(fallback(end, to(url), budget_s=2.0) for _ in range(80)))
    # More than the pool holds have just been given up; each must have given its place back.
    _, fine = await end.answer(images(2), to(upper.url))
    assert isinstance(fine, FineEvent)
    assert json.loads((await end.http.get(f"{end.url}/healthz")).text)["in_flight"] == 0
