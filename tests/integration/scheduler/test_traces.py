"""A job belongs to the trace of the request that submitted it: in what it tells, in its tasks, after a restart."""

import csv
import io
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tierkit import spans
from tierkit.testing import wait_for
from tierkit.wire.trace import Trace

TRACE = Trace("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1, "foo=1,bar=2")


async def submit(kit: Any, scheduler: Any, images: Any, headers: dict[str, str]) -> dict[str, Any]:
    answer = await scheduler.try_submit(images, headers=headers, scheme="end", batch_size=10)
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


async def told(scheduler: Any, job_id: str) -> set[str]:
    """The trace id by the job, its results, its events and its CSV."""
    results = await scheduler.results(job_id)
    events = await scheduler.events(job_id)
    rows = list(csv.DictReader(io.StringIO((await scheduler.http.get(f"/v1/jobs/{job_id}/results?format=csv")).text)))
    assert len(results) == len(rows) == 30
    return {
        (await scheduler.job(job_id))["trace_id"],
        *(result["trace_id"] for result in results),
        *(row["trace_id"] for row in rows),
        *(data["trace_id"] for kind, _, data in events if kind == "state"),
        *(result["trace_id"] for kind, _, data in events if kind != "state" for result in data["results"]),
    }


async def test_the_callers_trace_goes_on(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end:
        job = await submit(kit, scheduler, kit.images(30), TRACE.headers)
        assert (await scheduler.finished(job["id"]))["state"] == "completed"
    assert end.traces == [TRACE] * 3
    assert await told(scheduler, job["id"]) == {TRACE.trace_id}


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-broken", "tracestate": "foo=1"}])
async def test_each_job_without_one_begins_a_trace(kit, scheduler, headers):
    async with kit.end(scheduler, "end-0") as end:
        jobs = [await submit(kit, scheduler, kit.images(30), headers) for _ in range(2)]
        for job in jobs:
            await scheduler.finished(job["id"])
    own = [await told(scheduler, job["id"]) for job in jobs]
    assert [len(ids) for ids in own] == [1, 1]
    assert own[0] != own[1]
    assert {trace.trace_id for trace in end.traces} == own[0] | own[1]
    assert {trace.state for trace in end.traces} == {""}


async def test_the_same_submission_again_belongs_to_the_first_trace(kit, scheduler):
    for number in range(2):
        other = Trace(f"{number + 1:032x}", TRACE.span_id)
        headers = {**other.headers, "Idempotency-Key": "k"}
        answer = await scheduler.try_submit(kit.images(10), headers=headers, scheme="end")
        assert answer.json()["trace_id"] == f"{1:032x}"


async def test_a_restarted_scheduler_goes_on_with_the_trace(kit, settings):
    async with AsyncExitStack() as nodes, kit.scheduler(settings) as scheduler:
        end = await nodes.enter_async_context(kit.end(scheduler, "end-0"))
        end.gate.clear()
        job = await submit(kit, scheduler, kit.images(30), TRACE.headers)
        await wait_for(lambda: end.waiting > 0, what="a task on the device")
    async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0") as end:
        assert (await scheduler.finished(job["id"]))["state"] == "completed"
        assert await told(scheduler, job["id"]) == {TRACE.trace_id}
    assert {trace.traceparent for trace in end.traces} == {TRACE.traceparent}
    assert {trace.state for trace in end.traces} == {""}  # which the database does not keep


async def test_the_span_of_a_job_is_told_once_whatever_restarts(kit, settings):
    exporter = InMemorySpanExporter()
    spans.configure("scheduler", "", exporter)
    try:
        async with AsyncExitStack() as nodes, kit.scheduler(settings) as scheduler:
            end = await nodes.enter_async_context(kit.end(scheduler, "end-0"))
            job = await submit(kit, scheduler, kit.images(30), TRACE.headers)
            await scheduler.finished(job["id"])
            end.gate.clear()
            broken = await submit(kit, scheduler, kit.images(30), TRACE.headers)
            await wait_for(lambda: end.waiting > 0, what="a task on the device")
        async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0"):
            await scheduler.finished(broken["id"])
    finally:
        spans.close()
    told: Any = exporter.get_finished_spans()
    own = {job["id"][-16:], broken["id"][-16:]}
    assert {span.context.trace_id for span in told} == {int(TRACE.trace_id, 16)}
    assert [span.name for span in told].count("job") == 2
    assert {f"{span.context.span_id:016x}" for span in told if span.name == "job"} == own
    assert {f"{span.parent.span_id:016x}" for span in told if span.name == "job"} == {TRACE.span_id}
    assert {f"{span.parent.span_id:016x}" for span in told if span.name == "attempt"} == own
    assert all(span.start_time <= span.end_time for span in told)


async def test_a_request_at_once_belongs_to_its_callers_trace(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end:
        body, headers = kit.tensor_body(kit.images(3))
        headers |= TRACE.headers
        answer = await scheduler.http.post("/v1/classify", content=body, headers=headers, params={"scheme": "end"})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["event"] for line in lines] == ["coarse", "done"]
    assert {lines[1]["trace_id"], *(result["trace_id"] for result in lines[0]["results"])} == {TRACE.trace_id}
    assert end.traces == [TRACE]
