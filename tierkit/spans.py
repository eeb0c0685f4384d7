"""Spans: the work of a service for a request of a sampled trace, sent to a collector by OTLP.

    with Span("upstream", current_trace()) as span:
        ...  # requests that go on from here take `span.trace` along
        span.says(images=50)

Nothing is recorded, and nothing of OpenTelemetry imported, unless `configure` finds an endpoint in the environment; the
extra `otel` has what it needs then. A span is written when it ends: unfinished work of a killed process is not
reported.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tierkit.distribution import install_command
from tierkit.wire.trace import Trace, new_span_id, new_trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Span", "close", "configure", "is_recorded", "new_root"]

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_FLUSH_S = 3.0
"""Seconds to send the remaining spans at the end of a service."""


class Span:
    """One piece of work that starts now; as a context manager, it ends with the block.

    Args:
        name: name of the work.
        parent: place in a trace at which it happens; None outside a trace.
        span_id: id of the span; by default a new one.
        began_ns: start in nanoseconds of the wall clock; default: now.
    """

    __slots__ = ("_about", "_began_ns", "_name", "_parent", "recorded", "trace")

    def __init__(self, name: str, parent: Trace | None, *, span_id: str = "", began_ns: int = 0) -> None:
        self._name = name
        self._parent = self.trace = parent
        self.recorded = is_recorded(parent)
        """True if the span is recorded."""
        if self.recorded and parent is not None:
            self.trace = parent.below(span_id or new_span_id())
            self._began_ns = began_ns or time.time_ns()
            self._about: dict[str, str | int | float] = {}

    def says(self, **about: str | int | float) -> None:
        """Add attributes to the span; each is called `terrace.NAME`."""
        if self.recorded:
            self._about |= {f"terrace.{name}": value for name, value in about.items()}

    def end(self, error: str = "") -> None:
        """It is over; `error` is what went wrong, "" if nothing did."""
        if self.recorded and _recorder is not None and self.trace is not None and self._parent is not None:
            _recorder.record(self._name, self.trace, self._parent, self._began_ns, time.time_ns(), self._about, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end("" if error is None else str(error) or type(error).__name__)

    def took(self, **seconds: float) -> None:
        """Its parts of these names came one after the other, and the last one ends now."""
        if not self.recorded or _recorder is None or self.trace is None:
            return
        until_ns = time.time_ns()
        for name, took_s in reversed(seconds.items()):
            began_ns = until_ns - round(took_s * 1e9)
            _recorder.record(name, self.trace.below(new_span_id()), self.trace, began_ns, until_ns, {}, "")
            until_ns = began_ns


def is_recorded(trace: Trace | None) -> bool:
    """True if spans of this trace are recorded here."""
    return _recorder is not None and trace is not None and trace.sampled


def new_root() -> Trace:
    """Return a new trace. If spans are recorded, `OTEL_TRACES_SAMPLER` decides whether it is sampled."""
    trace = new_trace()
    return trace if _recorder is None else _recorder.sampled(trace)


class _Recorder:
    """OpenTelemetry's SDK.

    Args:
        exporter: where spans go.
        at_once: each span goes as it ends, in the caller's thread; else in batches, from another thread.
    """

    def __init__(self, exporter: SpanExporter, about: dict[str, str], *, at_once: bool) -> None:
        from opentelemetry import trace as api
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider, sampling
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.sdk.trace.id_generator import IdGenerator

        class Ids(IdGenerator):
            """Ids that other services know already."""

            trace_id = span_id = 0

            def generate_trace_id(self) -> int:
                return self.trace_id

            def generate_span_id(self) -> int:
                return self.span_id

        self._api = api
        self._ids = Ids()
        # What reads the standard environment. It decides about traces that begin here; others bring their decision.
        self._sampler, self._yes = TracerProvider(shutdown_on_exit=False).sampler, sampling.Decision.RECORD_AND_SAMPLE
        self._provider = TracerProvider(
            sampling.ALWAYS_ON, Resource.create(about), shutdown_on_exit=False, id_generator=self._ids
        )
        self._provider.add_span_processor(SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("terrace")

    def sampled(self, trace: Trace) -> Trace:
        decision = self._sampler.should_sample(None, int(trace.trace_id, 16), "root").decision
        return trace.with_sampled(decision is self._yes)

    def record(
        self, name: str, own: Trace, parent: Trace, began_ns: int, ended_ns: int, about: dict[str, Any], error: str
    ) -> None:
        api, ids = self._api, self._ids
        ids.trace_id, ids.span_id = int(own.trace_id, 16), int(own.span_id, 16)
        context = api.Context()
        if not parent.begins:
            above = api.SpanContext(ids.trace_id, int(parent.span_id, 16), True, api.TraceFlags(api.TraceFlags.SAMPLED))
            context = api.set_span_in_context(api.NonRecordingSpan(above), context)
        span = self._tracer.start_span(name, context, start_time=began_ns, attributes=about)
        if error:
            span.set_status(api.Status(api.StatusCode.ERROR, error))
        span.end(ended_ns)

    def close(self) -> None:
        # A collector that does not answer is not waited for.
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(_FLUSH_S)


_recorder: _Recorder | None = None


def configure(service: str, node_id: str, exporter: SpanExporter | None = None) -> None:
    """Record spans from now on if the environment names an endpoint (`OTEL_EXPORTER_OTLP_ENDPOINT`).

    Args:
        service: kind of this service, such as "edge"; part of `service.name`.
        node_id: name of the node; "" if the service is not a node.
        exporter: takes each span at once instead of an endpoint, whatever the environment names.
    """
    global _recorder  # one for the process, as logs and metrics are
    if exporter is None:
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or not any(
            map(os.environ.get, _ENDPOINTS)
        ):
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            log.warning("no spans are recorded: that needs the extra 'otel': %s", install_command("otel"))
            return
        _recorder = _Recorder(OTLPSpanExporter(), _resource(service, node_id), at_once=False)
    else:
        _recorder = _Recorder(exporter, _resource(service, node_id), at_once=True)


def _resource(service: str, node_id: str) -> dict[str, str]:
    about = {"service.instance.id": node_id} if node_id else {}
    if not os.environ.get("OTEL_SERVICE_NAME"):  # which comes first
        about["service.name"] = f"terrace-{service}"
    return about


def close() -> None:
    """Record no more; what is left goes out, within a few seconds."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()
