"""One job is one trace in a collector: the services send their spans by OTLP to a socket of this test."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.integration.fleet.test_traces import SPAN, TRACE, upload
from tierkit.client import AsyncClient
from tierkit.fleet import launch, local_plan
from tierkit.testing import serve_app, wait_for
from tierkit.types import Tier


@dataclass(frozen=True)
class Told:
    """A span as it came."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int


@dataclass
class Collector:
    """Where spans go."""

    spans: list[Told] = field(default_factory=list)

    async def take(self, request: Request) -> Response:
        sent = ExportTraceServiceRequest.FromString(await request.body())
        for group in sent.resource_spans:
            about = {each.key: each.value.string_value for each in group.resource.attributes}
            for scope in group.scope_spans:
                for span in scope.spans:
                    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                    times = (span.start_time_unix_nano, span.end_time_unix_nano)
                    self.spans.append(Told(span.name, about["service.name"], *ids, *times))
        return Response(ExportTraceServiceResponse().SerializeToString(), media_type="application/x-protobuf")

    def of(self, trace_id: str) -> list[Told]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def paths(self, trace_id: str) -> Counter[str]:
        """How often each way from a span up to the job, or to what is not here, occurs."""
        known = {span.span_id: span for span in self.of(trace_id)}

        def way(span: Told) -> Iterator[str]:
            if above := known.get(span.parent_id):
                yield from way(above)
            yield span.name

        return Counter(" ".join(way(span)) for span in known.values())


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    made = Collector()
    async with serve_app(Starlette(routes=[Route("/v1/traces", made.take, methods=["POST"])])) as service:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", service.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield made


WAYS = {
    "job": 1,
    "job attempt": 2,
    "job attempt end": 2,
    "job attempt end queue": 2,
    "job attempt end compute": 2,
    "job attempt end relay": 2,
    "job attempt end relay encode": 2,
    "job attempt end relay upstream": 2,
    "job attempt end relay upstream queue": 2,
    "job attempt end relay upstream compute": 2,
}


async def test_one_job_is_one_trace(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    plan = local_plan(
        {Tier.END: 1, Tier.EDGE: 1, Tier.CLOUD: 1},
        scheduler={"port": 0, "state": tmp_path / "state", "trusted": "end,edge"},
    )
    query, sampled = {"scheme": "end-cloud", "encode_on": "edge"}, f"00-{TRACE}-{SPAN}-01"
    async with (
        launch(plan, tmp_path) as fleet,
        AsyncClient(fleet.scheduler_url) as client,
        httpx.AsyncClient(base_url=fleet.scheduler_url, timeout=60) as http,
    ):
        await fleet.join(budget_s=20)
        for header in ({}, {"traceparent": f"00-{'1' * 32}-{SPAN}-00"}, {"traceparent": sampled}):
            headers = {"Content-Type": "application/x-npy", **header}
            answer = await http.post("/v1/jobs", params=query, content=upload(100), headers=headers)
            job = await client.wait(answer.json()["id"], budget_s=60)
            assert (job.state, job.answered_fine) == ("completed", 100)
        await wait_for(lambda: len(collector.of(TRACE)) == sum(WAYS.values()), what="all spans of the job")
    assert collector.paths(TRACE) == WAYS
    assert {span.trace_id for span in collector.spans} == {TRACE}  # no other job was sampled
    by_name = {span.name: span for span in collector.spans}
    assert by_name["job"].parent_id == SPAN
    services = {
        "job": "scheduler",
        "attempt": "scheduler",
        "end": "end",
        "relay": "edge",
        "encode": "edge",
        "upstream": "cloud",
    }
    assert {name: by_name[name].service for name in services} == {name: f"terrace-{s}" for name, s in services.items()}
    known = {span.span_id: span for span in collector.spans}
    for span in collector.spans:
        assert span.began <= span.ended
        above = known.get(span.parent_id)
        assert above is None or above.began <= span.began, span
