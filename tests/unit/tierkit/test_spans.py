"""Which spans are recorded, and what they say. The exporter keeps them in memory."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tierkit import spans
from tierkit.spans import Span
from tierkit.wire.trace import Trace, new_trace

TRACE = Trace("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1, "foo=1")


@pytest.fixture
def told() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    spans.configure("edge", "edge-1", exporter)
    yield exporter
    spans.close()


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Of trace, span and parent."""
    assert span.context is not None
    parent = "" if span.parent is None else f"{span.parent.span_id:016x}"
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent


def test_a_span_is_below_its_parent_and_what_goes_on_is_below_it(told: InMemorySpanExporter) -> None:
    with Span("upstream", TRACE) as span:
        assert span.trace is not None
        assert (span.trace.trace_id, span.trace.state, span.trace.sampled) == (TRACE.trace_id, "foo=1", True)
        assert span.trace.span_id != TRACE.span_id
        span.says(images=50, model="m")
    (found,) = told.get_finished_spans()
    assert ids(found) == (TRACE.trace_id, span.trace.span_id, TRACE.span_id)
    assert (found.name, found.attributes, found.status.is_ok) == (
        "upstream",
        {"terrace.images": 50, "terrace.model": "m"},
        True,
    )
    assert found.start_time is not None
    assert found.end_time is not None
    assert found.start_time <= found.end_time
    assert (found.resource.attributes["service.name"], found.resource.attributes["service.instance.id"]) == (
        "terrace-edge",
        "edge-1",
    )


def test_its_parts_follow_one_another_up_to_now(told: InMemorySpanExporter) -> None:
    with Span("end", TRACE) as span:
        span.took(queue=2.0, compute=0.5)
    compute, queue, whole = told.get_finished_spans()
    assert [part.name for part in (queue, compute, whole)] == ["queue", "compute", "end"]
    assert ids(queue)[2] == ids(compute)[2] == ids(whole)[1]
    assert queue.start_time is not None
    assert compute.start_time is not None
    assert compute.end_time is not None
    assert compute.end_time - compute.start_time == 500_000_000
    assert compute.start_time - queue.start_time == 2_000_000_000
    assert queue.end_time == compute.start_time


def test_an_error_is_told_and_goes_on(told: InMemorySpanExporter) -> None:
    with pytest.raises(ZeroDivisionError), Span("end", TRACE):
        raise ZeroDivisionError
    (found,) = told.get_finished_spans()
    assert not found.status.is_ok
    assert found.status.description == "ZeroDivisionError"


@pytest.mark.parametrize("trace", [None, TRACE.with_sampled(False), new_trace()], ids=["none", "unsampled", "new"])
def test_what_is_not_sampled_goes_on_as_it_came(told: InMemorySpanExporter, trace: Trace | None) -> None:
    with Span("end", trace) as span:
        span.says(images=1)
        span.took(queue=1.0)
        assert span.trace == trace
    assert not told.get_finished_spans()


def test_where_nobody_listens_nothing_is_recorded() -> None:
    with Span("end", TRACE) as span:
        span.says(images=1)
        span.took(queue=1.0)
    assert span.trace == TRACE
    assert not spans.new_root().sampled


def test_what_begins_here_has_no_parent(told: InMemorySpanExporter) -> None:
    root = spans.new_root()
    with Span("job", root, span_id="1" * 16, began_ns=1):
        pass
    (found,) = told.get_finished_spans()
    assert ids(found) == (root.trace_id, "1" * 16, "")
    assert found.start_time == 1


@pytest.mark.parametrize(
    ("sampler", "argument", "least", "most"),
    [
        (None, None, 1000, 1000),
        ("always_off", None, 0, 0),
        ("parentbased_always_off", None, 0, 0),
        ("parentbased_traceidratio", "0", 0, 0),
        ("parentbased_traceidratio", "1", 1000, 1000),
        ("parentbased_traceidratio", "0.2", 100, 300),
        ("traceidratio", "0.2", 100, 300),
    ],
)
def test_a_trace_that_begins_here_is_sampled_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, sampler: str | None, argument: str | None, least: int, most: int
) -> None:
    for name, value in (("OTEL_TRACES_SAMPLER", sampler), ("OTEL_TRACES_SAMPLER_ARG", argument)):
        if value is not None:
            monkeypatch.setenv(name, value)
    spans.configure("scheduler", "", InMemorySpanExporter())
    try:
        counted = Counter(spans.new_root().sampled for _ in range(1000))
        assert Span("end", TRACE).recorded  # its caller has decided
        assert not Span("end", TRACE.with_sampled(False)).recorded
    finally:
        spans.close()
    assert least <= counted[True] <= most


SERVICES = "import end_node.app, edge_node.app, cloud_node.__main__, scheduler.api.app"


def test_without_an_endpoint_or_the_extra_nothing_is_imported() -> None:
    script = f"""
import os, sys
{SERVICES}
from tierkit import spans

def check():
    spans.configure('end', 'end-1')
    assert not spans.is_recorded(spans.new_root())
    assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]

check()
os.environ |= {{'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://127.0.0.1:9', 'OTEL_SDK_DISABLED': 'true'}}
check()
sys.stderr.write('so far\\n')
del os.environ['OTEL_SDK_DISABLED']
sys.modules['opentelemetry.exporter'] = None  # as if the extra was not installed
check()
"""
    done = subprocess.run([sys.executable, "-c", script], env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, _, after = done.stderr.partition("so far")
    assert before == ""
    assert "extra 'otel'" in after
