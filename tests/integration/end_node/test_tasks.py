"""The task route: coarse at once, then fine, over real sockets."""

import asyncio
import json
import logging
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.integration.end_node.aids import PixelModel, RunningEnd, RunningUpper, StartEnd, images, to
from tierkit.logs import current_request_id
from tierkit.testing import MadeModel, serve_app, wait_for
from tierkit.types import Tier
from tierkit.wire.events import CoarseEvent, ErrorEvent, FallbackEvent, FineEvent, RoutedEvent, read_event
from tierkit.wire.messages import Stage
from tierkit.wire.oip import InferResponse, Tensor, encode_response
from tierkit.wire.trace import Trace, read_trace


async def test_coarse_then_fine(end: RunningEnd, upper: RunningUpper) -> None:
    coarse, fine = await end.answer(images(0, 1, 2, 3), to(upper.url))
    assert isinstance(coarse, CoarseEvent)
    assert (coarse.task_id, coarse.node_id, coarse.model) == ("task-1", "end-1", "coarse")
    assert coarse.labels == (0, 1, 0, 1)
    assert coarse.confidences == pytest.approx((0.7,) * 4)
    assert isinstance(fine, FineEvent)
    assert (fine.task_id, fine.node_id, fine.tier, fine.model) == ("task-1", "edge-1", "edge", "fine")
    assert fine.labels == (0, 1, 2, 3)
    assert fine.coarse_labels == (0, 0, 1, 1)
    assert fine.coarse_confidences == pytest.approx((0.8,) * 4)
    assert fine.round_trip_ms > 0


async def test_the_coarse_line_does_not_wait_for_the_fine_one(end: RunningEnd, upper: RunningUpper) -> None:
    upper.model.gate.clear()
    async with end.stream(images(3), to(upper.url)) as response:
        lines = response.aiter_lines()
        assert isinstance(read_event(await anext(lines)), CoarseEvent)
        upper.model.gate.set()
        assert isinstance(read_event(await anext(lines)), FineEvent)


async def test_without_upper_nodes_the_coarse_answer_is_all(end: RunningEnd) -> None:
    (coarse,) = await end.answer(images(1))
    assert isinstance(coarse, CoarseEvent)


async def test_the_fine_stage_alone_is_relayed_without_the_own_network(end: RunningEnd, upper: RunningUpper) -> None:
    end.model.entered.clear()  # set by the warm-up
    (fine,) = await end.answer(images(0, 3), to(upper.url), stage="fine")
    assert isinstance(fine, FineEvent)
    assert fine.labels == (0, 3)
    assert not end.model.entered.is_set()
    assert [event.event for event in await end.answer(images(0), to(upper.url), stage="all")] == ["coarse", "fine"]


async def test_a_task_that_comes_twice_is_answered_twice_alike(end: RunningEnd, upper: RunningUpper) -> None:
    first = await end.answer(images(1, 2), to(upper.url))
    second = await end.answer(images(1, 2), to(upper.url))
    assert [event.labels for event in first if isinstance(event, CoarseEvent | FineEvent)] == [
        event.labels for event in second if isinstance(event, CoarseEvent | FineEvent)
    ]


async def test_a_fine_model_on_the_end_node_is_summed_up(start_end: StartEnd) -> None:
    async with start_end(PixelModel("own", 4)) as end:
        (coarse,) = await end.answer(images(0, 3))
    assert isinstance(coarse, CoarseEvent)
    assert coarse.labels == (0, 1)
    assert coarse.confidences == pytest.approx((0.8, 0.8))


async def test_pixels_budget_priority_and_what_tells_requests_apart_reach_the_upper_node(end: RunningEnd) -> None:
    seen: dict[str, Any] = {}

    async def infer(request: Request) -> Response:
        seen.update(request.headers)
        body = await request.body()
        length = int(request.headers["inference-header-content-length"])
        seen["json"], seen["pixels"] = json.loads(body[:length]), body[length:]
        answer = InferResponse("fine", MadeModel.sha256, (Tensor("probabilities", np.full((2, 4), 0.25, np.float32)),))
        chunks, headers = encode_response(answer, binary=["probabilities"])
        return Response(b"".join(chunks), headers=headers)

    batch, trace = images(1, 2), Trace("1" * 32, "2" * 16, 1, "foo=1")
    path = f"/base/v2/models/fine/versions/{MadeModel.sha256}/infer"
    async with serve_app(Starlette(routes=[Route(path, infer, methods=["POST"])])) as service:
        upper = to(f"{service.url}/base")
        _, fine = await end.answer(batch, upper, budget_s=5.0, priority="interactive", headers=trace.headers)
    assert isinstance(fine, FineEvent)
    assert seen["pixels"] == batch.tobytes()
    assert seen["json"]["inputs"][0]["parameters"] == {"binary_data_size": batch.nbytes}
    assert [output["name"] for output in seen["json"]["outputs"]] == ["probabilities"]
    assert "id" not in seen["json"]  # the same JSON for each batch of this size
    assert seen["x-request-id"] == "request-1"
    assert read_trace([(name.encode(), seen[name].encode()) for name in ("traceparent", "tracestate")]) == trace
    assert 0 < float(seen["terrace-budget-ms"]) < 5000
    assert seen["terrace-priority"] == "interactive"


async def test_a_task_leaves_one_line_and_it_carries_the_request_id(
    end: RunningEnd, upper: RunningUpper, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[str, str, str]] = []

    class Note(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.getMessage() == "task done":
                told.append((current_request_id(), vars(record)["task"], vars(record)["answer"]))
            return True

    caplog.set_level(logging.DEBUG)
    with caplog.filtering(Note()):  # pytest's handler outlives this test
        await end.answer(images(0, 1), to(upper.url))
        await end.answer(images(0))
        await wait_for(lambda: len(told) == 2)
    assert told == [("request-1", "task-1", "fine"), ("request-1", "task-1", "coarse")]


async def test_tasks_of_many_clients_keep_their_own_answers(end: RunningEnd, upper: RunningUpper) -> None:
    async def one(label: int) -> None:
        coarse, fine = await end.answer(images(label, label), to(upper.url))
        assert isinstance(coarse, CoarseEvent)
        assert isinstance(fine, FineEvent)
        assert (coarse.labels, fine.labels) == ((label % 2,) * 2, (label,) * 2)

    await asyncio.gather(*(one(label % 4) for label in range(40)))


async def test_the_node_serves_its_model_by_the_inference_protocol(end: RunningEnd) -> None:
    answer = (await end.http.get(f"{end.url}/v2/models/coarse")).json()
    assert answer["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 2, 2, 3]}]
    assert (await end.http.get(f"{end.url}/readyz")).json()["checks"] == {"model coarse": "ok"}


# --- refused before any line ---


async def post(end: RunningEnd, headers: dict[str, str] | None = None, task_id: str = "task-1") -> httpx.Response:
    return await end.http.post(f"{end.url}/v1/tasks/{task_id}", headers=headers)


@pytest.mark.parametrize(
    ("status", "sentence", "headers"),
    [
        (400, "JSON", {}),
        (400, "Inference-Header-Content-Length must be a number", {"Inference-Header-Content-Length": "-1"}),
        (400, "body has 0 bytes", {"Inference-Header-Content-Length": "10"}),
        (400, "Terrace-Upstream cannot be read", {"Terrace-Upstream": "http://a"}),
        (400, "Terrace-Stage is 'all' or 'fine', not 'coarse'", {"Terrace-Stage": "coarse"}),
        (400, "Terrace-Priority is 'interactive' or absent, not 'high'", {"Terrace-Priority": "high"}),
        (400, "Terrace-Stage 'fine' needs upstream nodes to ask", {"Terrace-Stage": "fine"}),
    ],
)
async def test_a_wrong_head_is_refused(end: RunningEnd, status: int, sentence: str, headers: dict[str, str]) -> None:
    answer = await post(end, headers)
    assert answer.status_code == status
    assert sentence in answer.json()["error"]


@pytest.mark.parametrize("stage", ["all", "fine"])
@pytest.mark.parametrize("batch", [np.zeros((1, 3, 3, 3), np.uint8), np.zeros((1, 2, 2, 3), np.float32)])
async def test_images_of_another_kind_are_refused(end: RunningEnd, upper: RunningUpper, batch: Any, stage: str) -> None:
    async with end.stream(batch, to(upper.url), stage=stage) as response:
        await response.aread()
    assert response.status_code == 400
    assert "input 'images' of model 'coarse' is UINT8 [-1, 2, 2, 3]" in response.json()["error"]


@pytest.mark.parametrize("budget", ["soon", "-1", "nan", "1_000"])
async def test_a_budget_that_is_none_is_refused(end: RunningEnd, budget: str) -> None:
    async with end.stream(images(1), budget_s=None) as response:
        await response.aread()
    assert response.status_code == 200
    request = response.request
    answer = await end.http.post(
        request.url, content=request.content, headers={**request.headers, "Terrace-Budget-Ms": budget}
    )
    assert answer.status_code == 400
    assert "Terrace-Budget-Ms" in answer.json()["error"]


async def test_a_task_that_is_nested_deeply_is_refused(end: RunningEnd) -> None:
    answer = await end.http.post(f"{end.url}/v1/tasks/t", content='{"a":' * 900 + "1" + "}" * 900)
    assert answer.status_code == 400
    assert "JSON part" in answer.json()["error"]


async def test_a_task_id_that_is_none_is_refused(end: RunningEnd) -> None:
    answer = await post(end, task_id="a%20b")
    assert answer.status_code == 400
    assert "task id" in answer.json()["error"]
    for none in ("", "a/"):
        answer = await post(end, task_id=none)
        assert (answer.status_code, answer.json()) == (404, {"error": f"no such route: /v1/tasks/{none}"})


FORBIDDEN = "http://127.0.0.1:9"


async def test_an_upper_node_outside_the_allowed_ones_is_skipped(start_end: StartEnd, upper: RunningUpper) -> None:
    async with start_end(allowed_upstreams=(upper.url,)) as end:
        coarse, fine = await end.answer(images(1), to(FORBIDDEN, "edge-0"), to(upper.url))
        assert isinstance(coarse, CoarseEvent)
        assert isinstance(fine, FineEvent)
        assert fine.node_id == "edge-1"


@pytest.mark.parametrize("stage", [None, "fine"])
async def test_where_no_upper_node_is_allowed_the_coarse_answer_stands(
    start_end: StartEnd, upper: RunningUpper, stage: str | None
) -> None:
    async with start_end(allowed_upstreams=("http://10.0.0.5:7402",)) as end:
        *coarse, last = await end.answer(images(1), to(FORBIDDEN, "edge-0"), to(upper.url), stage=stage)
    assert len(coarse) == (stage is None)
    assert isinstance(last, FallbackEvent)
    assert (last.reason, last.tried, last.wrong) == ("forbidden", (), ())
    assert FORBIDDEN in last.detail
    assert upper.url in last.detail
    assert upper.model.ran.count(1) == 0


async def test_a_tier_without_an_allowed_node_is_a_loss_of_that_tier(start_end: StartEnd, upper: RunningUpper) -> None:
    stages = (Stage(tier=Tier.EDGE),)
    async with start_end(allowed_upstreams=("http://10.0.0.5:7402",)) as end:
        coarse, routed = await end.answer(images(1, 2), to(upper.url), escalation=stages)
    assert isinstance(coarse, CoarseEvent)
    assert isinstance(routed, RoutedEvent)
    assert [(loss.tier, loss.reason, loss.indices) for loss in routed.losses] == [(Tier.EDGE, "forbidden", (0, 1))]


async def test_a_spent_budget_is_refused(end: RunningEnd) -> None:
    async with end.stream(images(1), budget_s=0.0) as response:
        await response.aread()
    assert response.status_code == 504


async def test_a_full_queue_is_told_at_once(start_end: StartEnd) -> None:
    async with start_end(max_queue_images=4, max_batch_size=1) as end:
        end.model.gate.clear()
        end.model.entered.clear()  # set by the warm-up
        running = asyncio.create_task(end.answer(images(0)))
        await wait_for(end.model.entered.is_set, what="the first task out of the queue")
        waiting = [asyncio.create_task(end.answer(images(1))) for _ in range(6)]

        async def refused() -> bool:
            async with end.stream(images(1)) as response:
                await response.aread()
            return response.status_code == 503 and "retry-after" in response.headers

        await wait_for(lambda: end.lifecycle.in_flight >= 5)
        await wait_for(refused, what="a refusal")
        end.model.gate.set()
        assert len(await running) == 1
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(answer, list) for answer in answers) == 4


async def test_an_interactive_task_overtakes_those_that_wait(start_end: StartEnd) -> None:
    async def waiting(end: RunningEnd) -> float:
        text = (await end.http.get(f"{end.url}/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("terrace_queued_images"))

    async with start_end(max_batch_size=1) as end, asyncio.TaskGroup() as group:
        end.model.gate.clear()
        end.model.entered.clear()  # set by the warm-up
        group.create_task(end.answer(images(1)))
        await wait_for(end.model.entered.is_set, what="the first task out of the queue")
        for number, (label, priority) in enumerate([(2, None), (3, "interactive")], start=1):
            group.create_task(end.answer(images(label), priority=priority))

            async def queued(number: int = number) -> bool:
                return await waiting(end) == number

            await wait_for(queued, what=f"{number} in the queue")
        end.model.gate.set()
    assert end.model.ran[-3:] == [1, 3, 2]


# --- the end of things ---


async def test_a_client_that_hangs_up_cancels_the_question_to_the_upper_node(
    end: RunningEnd, upper: RunningUpper
) -> None:
    upper.model.gate.clear()
    async with end.stream(images(3), to(upper.url), budget_s=60.0) as response:
        lines = response.aiter_lines()
        await anext(lines)
        await wait_for(lambda: upper.lifecycle.in_flight == 1)
    await wait_for(lambda: end.lifecycle.in_flight == 0, what="the end node to give up")
    await wait_for(lambda: upper.lifecycle.in_flight == 0, what="the upstream node to hear of it")


async def test_a_client_that_hangs_up_takes_its_batch_out_of_the_queue(end: RunningEnd) -> None:
    end.model.entered.clear()
    end.model.gate.clear()
    running = asyncio.create_task(end.answer(images(0)))
    await wait_for(end.model.entered.is_set)
    waiting = asyncio.create_task(end.answer(images(1)))
    await wait_for(lambda: end.lifecycle.in_flight == 2)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await wait_for(lambda: end.lifecycle.in_flight == 1, what="the end node to give it up")
    end.model.gate.set()
    assert len(await running) == 1


async def test_draining_finishes_the_task_under_way_and_refuses_the_next(end: RunningEnd, upper: RunningUpper) -> None:
    upper.model.gate.clear()
    task = asyncio.create_task(end.answer(images(3), to(upper.url)))
    await wait_for(lambda: upper.lifecycle.in_flight == 1)
    end.lifecycle.drain()
    async with end.stream(images(1)) as response:
        await response.aread()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    upper.model.gate.set()
    assert [event.event for event in await task] == ["coarse", "fine"]


async def test_a_bug_after_the_first_line_is_told_in_the_stream(
    end: RunningEnd, upper: RunningUpper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("end_node.node.fine_event", broken)
    coarse, error = await end.answer(images(1), to(upper.url))
    assert isinstance(coarse, CoarseEvent)
    assert error == ErrorEvent(task_id="task-1", error="internal error; request id request-1")
    assert "ZeroDivisionError" in caplog.text
