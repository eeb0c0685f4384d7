"""Prometheus metrics of inference; `/metrics` shows them. All durations in seconds, all sizes in bytes.

`docs/reference/metrics.md` explains each. Metrics of the service runtime (event loop lag) are defined where they are
measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

from tierkit.errors import DeadlineExceeded, InvalidInput, Unavailable
from tierkit.inference.sharing import OTHERS
from tierkit.inference.statistics import BatchRecord

__all__ = ["ModelMetrics", "ShareMetrics"]

_FROM_HALF_A_MILLISECOND = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

_MOST_PENDING = 64
"""Requests of a model that are counted together: one after the other they take twice as long."""

_counting: weakref.WeakSet[ModelMetrics] = weakref.WeakSet()


class _BeforeTheOthers(Collector):
    """Counts what is pending, before the metrics below are read."""

    def collect(self) -> Iterable[Metric]:
        for metrics in list(_counting):
            metrics.count()
        return ()


REGISTRY.register(_BeforeTheOthers())

_request_duration = Histogram(
    "terrace_request_duration_seconds",
    "Inference requests, from the head of the request to its answer; outcome: ok, invalid, unavailable, deadline, "
    "cancelled or failed.",
    ["tier", "model", "outcome"],
    buckets=_FROM_HALF_A_MILLISECOND,
)
_requests = cache(_request_duration.labels)  # to find the metric of a label takes longer than to count
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

_model_info = Gauge("terrace_model_info", "1 for each network that the node serves.", ["tier", "model", "sha256"])
_queued_images = Gauge("terrace_queued_images", "Images that wait for their batch.", ["tier", "model"])


class ModelMetrics:
    """The metrics of one model on one node, label values bound once."""

    def __init__(self, tier: str, model: str, sha256: str) -> None:
        self._labels = (tier, model)
        self._sha256 = sha256
        _model_info.labels(tier, model, sha256).set(1)
        self._queue = _queue_duration.labels(tier, model)
        self._compute = _compute_duration.labels(tier, model)
        self._batch = _batch_size.labels(tier, model)
        self._upload = _upload_bytes.labels(tier, model)
        self._batches: list[BatchRecord] = []
        self._ended: list[tuple[float, int, str]] = []
        """Requests: seconds, bytes of the body, and outcome."""
        _counting.add(self)

    def show_queue(self, queued_images: Callable[[], int]) -> None:
        """Show what this returns as the queue's length, as long as the process lives."""
        _queued_images.labels(*self._labels).set_function(queued_images)

    def close(self, *, last: bool, last_of_sha256: bool) -> None:
        """Show the version no longer; what it has counted stays.

        Args:
            last: the node has no other version of the model.
            last_of_sha256: it has no other version of the model with this sha256.
        """
        self.count()
        _counting.discard(self)
        with contextlib.suppress(KeyError):
            if last:
                _queued_images.remove(*self._labels)
            if last_of_sha256:
                _model_info.remove(*self._labels, self._sha256)

    def observe_batch(self, record: BatchRecord) -> None:
        """Count what was computed together."""
        self._batches.append(record)
        if len(self._batches) >= _MOST_PENDING:
            self.count()

    def observe_request(self, seconds: float, upload_bytes: int, error: BaseException | None) -> None:
        """Count one request, answered or not."""
        self._ended.append((seconds, upload_bytes, "ok" if error is None else _outcome_of(error)))
        if len(self._ended) >= _MOST_PENDING:
            self.count()

    def count(self) -> None:
        """Count all that was observed."""
        batches, self._batches = self._batches, []
        ended, self._ended = self._ended, []
        for record in batches:
            for run in record.runs:
                self._batch.observe(run.images)
                self._compute.observe(run.seconds)
            for waited_s in record.queue_s:
                self._queue.observe(waited_s)
        for seconds, upload_bytes, outcome in ended:
            self._upload.inc(upload_bytes)
            _requests(*self._labels, outcome).observe(seconds)


class _Shared(Protocol):
    @property
    def answered_images(self) -> Mapping[str, int]: ...

    @property
    def refused_requests(self) -> Mapping[str, int]: ...

    def queued_images_of(self, share: str) -> int: ...


class ShareMetrics(Collector):
    """Work of a node by the scheduler from which it comes. Only a node with several schedulers has these metrics.

    Args:
        shares: names of the schedulers, and the share of all other requests.
        runners: gives the runners of the node's models.
    """

    def __init__(self, shares: Sequence[str], runners: Callable[[], Sequence[_Shared]]) -> None:
        self._shares = shares
        self._runners = runners

    @contextmanager
    def shown(self) -> Iterator[None]:
        """`/metrics` has them within this context."""
        REGISTRY.register(self)
        try:
            yield
        finally:
            REGISTRY.unregister(self)

    def describe(self) -> tuple[CounterMetricFamily, CounterMetricFamily, GaugeMetricFamily]:
        """The metrics without any values."""
        return (
            CounterMetricFamily("terrace_share_images", "Images answered, by their scheduler.", labels=["scheduler"]),
            CounterMetricFamily(
                "terrace_share_refused_requests", "Requests refused, by their scheduler.", labels=["scheduler"]
            ),
            GaugeMetricFamily("terrace_share_queued_images", "Images that wait, by scheduler.", labels=["scheduler"]),
        )

    def collect(self) -> Iterable[Metric]:
        answered, refused, queued = self.describe()
        runners = self._runners()
        for share in self._shares:
            labels = ["others" if share == OTHERS else share]
            answered.add_metric(labels, sum(runner.answered_images[share] for runner in runners))
            refused.add_metric(labels, sum(runner.refused_requests[share] for runner in runners))
            queued.add_metric(labels, sum(runner.queued_images_of(share) for runner in runners))
        return answered, refused, queued


def _outcome_of(error: BaseException) -> str:
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
