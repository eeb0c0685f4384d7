"""A trace follows a job from the client through all services, in their logs and in a collector of spans."""

import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from models.data import read_sample
from tierkit.client import AsyncClient
from tierkit.fleet import LaunchOptions, launch, local_plan
from tierkit.testing import serve_app, wait_for
from tierkit.types import Tier

TRACE, SAMPLED, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "5" * 32, "00f067aa0ba902b7"


def upload(images: int) -> bytes:
    file = io.BytesIO()
    np.save(file, read_sample().images[:images])
    return file.getvalue()


class Logs:
    """What the services of a fleet log, in JSON."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def on_line(self, name: str, line: str) -> None:
        if line.startswith("{"):
            self.lines.append((name, json.loads(line)))

    def says(self, trace_id: str, begins: str, services: set[str]) -> bool:
        """Whether these services, and no others, have logged such lines of this trace."""
        return services == {
            name
            for name, line in self.lines
            if line.get("trace_id") == trace_id and str(line["message"]).startswith(begins)
        }


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


async def test_from_the_client_to_the_last_node(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    logs, settings = Logs(), {"log_level": "debug", "log_format": "json"}
    plan = local_plan(
        {Tier.END: 1, Tier.EDGE: 1, Tier.CLOUD: 1},
        scheduler={"port": 0, "state": tmp_path / "state", "trusted": "end,edge", **settings},
        node=settings,
    )
    # The edge node is the relay: it encodes for the cloud, which is not trusted.
    query = {"scheme": "end-cloud", "encode_on": "edge"}
    async with (
        launch(plan, tmp_path, LaunchOptions(on_line=logs.on_line)) as fleet,
        AsyncClient(fleet.scheduler_url) as client,
        httpx.AsyncClient(base_url=fleet.scheduler_url, timeout=60) as http,
    ):
        await fleet.join(budget_s=20)
        for given in (
            {"traceparent": f"00-{TRACE}-{SPAN}-00", "tracestate": "foo=1"},
            {"traceparent": "00-broken"},
            {},
        ):
            is_known = TRACE in given.get("traceparent", "")
            logs.lines.clear()
            headers = {"Content-Type": "application/x-npy", **given}
            answer = await http.post("/v1/jobs", params=query, content=upload(100), headers=headers)
            assert answer.status_code == 202, answer.text
            job = await client.wait(answer.json()["id"], budget_s=60)
            assert (job.state, job.answered_fine) == ("completed", 100)
            (trace_id,) = {line["trace_id"] for _, line in logs.lines if line["message"] == "job accepted"}
            assert (trace_id == TRACE) is is_known
            for begins, services in (
                ("POST /v1/relay/", {"edge-1"}),
                ("POST /v2/models/", {"cloud-1"}),
                ("task done", {"scheduler", "end-1"}),
            ):
                await wait_for(partial(logs.says, trace_id, begins, services), what=begins)
            # Requests at once belong to the trace of their caller as well.
            answer = await http.post("/v1/classify", params=query, content=upload(1), headers=headers)
            assert answer.status_code == 200, answer.text
            assert (json.loads(answer.text.splitlines()[-1])["trace_id"] == TRACE) is is_known
        sampled = {"Content-Type": "application/x-npy", "traceparent": f"00-{SAMPLED}-{SPAN}-01"}
        answer = await http.post("/v1/jobs", params=query, content=upload(100), headers=sampled)
        job = await client.wait(answer.json()["id"], budget_s=60)
        assert (job.state, job.answered_fine) == ("completed", 100)
        await wait_for(lambda: len(collector.spans) == sum(WAYS.values()), what="all spans of the job")
    assert collector.paths(SAMPLED) == WAYS
    assert {span.trace_id for span in collector.spans} == {SAMPLED}  # no other job was sampled
    by_name = {span.name: span for span in collector.spans}
    assert by_name["job"].parent_id == SPAN
    sources = {
        "job": "scheduler",
        "attempt": "scheduler",
        "end": "end",
        "relay": "edge",
        "encode": "edge",
        "upstream": "cloud",
    }
    assert {name: by_name[name].service for name in sources} == {name: f"terrace-{s}" for name, s in sources.items()}
    known = {span.span_id: span for span in collector.spans}
    for span in collector.spans:
        assert span.began <= span.ended
        above = known.get(span.parent_id)
        assert above is None or above.began <= span.began, span
