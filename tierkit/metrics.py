"""Prometheus metrics of inference; `/metrics` shows them. All durations in seconds, all sizes in bytes.

`docs/metrics.md` explains each. Metrics of the service runtime (event loop lag) stand where they are measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from weakref import WeakSet

from prometheus_client import REGISTRY, Counter, Histogram, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

from tierkit.errors import DeadlineExceeded, InvalidInput, Unavailable
from tierkit.inference.statistics import BatchRecord

__all__ = ["ModelMetrics", "outcome_of"]

_FROM_HALF_A_MILLISECOND = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

_TOGETHER = 64
"""Batches or requests that are counted at once. One by one that takes several times as long, for the code has left the
processor's caches when the next one comes; nobody looks so often."""


class _CountFirst(Collector):
    """Registered before the metrics: whoever reads them, by whatever way, finds everything counted."""

    def __init__(self) -> None:
        self.models: WeakSet[ModelMetrics] = WeakSet()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for model in self.models:
            model.count()
        return ()


_count_first = _CountFirst()
REGISTRY.register(_count_first)

_request_duration = Histogram(
    "terrace_request_duration_seconds",
    "Inference requests, from the head of the request to its answer; outcome: ok, invalid, unavailable, deadline, "
    "cancelled or failed.",
    ["tier", "model", "outcome"],
    buckets=_FROM_HALF_A_MILLISECOND,
)
_queue_duration = Histogram(
    "terrace_queue_duration_seconds",
    "Time that a request waited for the start of its batch.",
    ["tier", "model"],
    buckets=_FROM_HALF_A_MILLISECOND,
)
_compute_duration = Histogram(
    "terrace_compute_duration_seconds",
    "Time of one batch in the model. A request larger than the largest batch is several.",
    ["tier", "model"],
    buckets=_FROM_HALF_A_MILLISECOND,
)
_batch_size = Histogram("terrace_batch_size", "Images in one batch.", ["tier", "model"], buckets=_BATCH_SIZES)
_upload_bytes = Counter("terrace_upload_bytes_total", "Bytes of inference request bodies received.", ["tier", "model"])


class ModelMetrics:
    """The metrics of one model on one node, label values bound once."""

    def __init__(self, tier: str, model: str) -> None:
        self._labels = (tier, model)
        self._queue = _queue_duration.labels(tier, model)
        self._compute = _compute_duration.labels(tier, model)
        self._batch = _batch_size.labels(tier, model)
        self._upload = _upload_bytes.labels(tier, model)
        self._answered = _request_duration.labels(tier, model, "ok")
        self._new_batches: list[BatchRecord] = []
        self._new_answers: list[tuple[float, int]] = []
        _count_first.models.add(self)

    def observe_batch(self, record: BatchRecord) -> None:
        """Count what was computed together."""
        self._new_batches.append(record)
        if len(self._new_batches) >= _TOGETHER:
            self.count()

    def observe_request(self, seconds: float, upload_bytes: int, error: BaseException | None) -> None:
        """Count one request, answered or not."""
        if error is None:
            self._new_answers.append((seconds, upload_bytes))
            if len(self._new_answers) >= _TOGETHER:
                self.count()
        else:
            self._upload.inc(upload_bytes)
            _request_duration.labels(*self._labels, outcome_of(error)).observe(seconds)

    def count(self) -> None:
        """Add up what has come since the last time."""
        batches, self._new_batches = self._new_batches, []
        for record in batches:
            for run in record.runs:
                self._batch.observe(run.images)
                self._compute.observe(run.seconds)
            for waited_s in record.queue_s:
                self._queue.observe(waited_s)
        answers, self._new_answers = self._new_answers, []
        for seconds, upload_bytes in answers:
            self._upload.inc(upload_bytes)
            self._answered.observe(seconds)


def outcome_of(error: BaseException) -> str:
    """The `outcome` label of a request that ended with this error."""
    match error:
        case InvalidInput():
            return "invalid"
        case Unavailable():
            return "unavailable"
        case DeadlineExceeded():
            return "deadline"
        case ClientDisconnect() | asyncio.CancelledError():
            return "cancelled"
        case _:
            return "failed"
