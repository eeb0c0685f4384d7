"""Counts and durations of one model's requests and batches, in the words of Triton's statistics extension.

Updated on the event loop only, once per batch, so that no lock is needed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct

__all__ = ["BatchRecord", "ModelRun", "ModelStatistics"]

_MOST_PENDING = 64
"""Batches that are counted together: one after the other they take twice as long."""
_COMPUTE = ("compute_input", "compute_infer", "compute_output")


class ModelRun(NamedTuple):
    """One call of the model."""

    images: int
    seconds: float


class BatchRecord(Struct, frozen=True, kw_only=True):
    """Cost of the requests that were computed together, in seconds."""

    queue_s: Sequence[float]
    """One entry for each request of the batch: from its arrival to the start of the batch."""
    input_s: float
    """Joining the requests' inputs."""
    runs: Sequence[ModelRun]
    """One, or several where a request is larger than the largest batch."""
    output_s: float
    """Dividing the outputs among the requests."""
    images: int
    infer_s: float
    """Seconds in the model."""
    compute_s: float
    """The same as if the batch had all cores of the node."""


class _Durations(defaultdict[str, list[float]]):
    """Number and total seconds of each kind of work."""

    def __init__(self) -> None:
        super().__init__(lambda: [0, 0.0])

    def add(self, kind: str, count: int, total_s: float) -> None:
        known = self[kind]
        known[0] += count
        known[1] += total_s

    def as_json(self, *kinds: str) -> dict[str, dict[str, int]]:
        found = {kind: self.get(kind, (0, 0.0)) for kind in kinds}
        return {kind: {"count": int(count), "ns": round(total_s * 1e9)} for kind, (count, total_s) in found.items()}


class ModelStatistics:
    """Statistics since the model was ready."""

    def __init__(self) -> None:
        self.images = 0
        """Images answered."""
        self._pending: list[BatchRecord] = []
        """Batches of which only the images are counted so far."""
        self._executions = 0
        self._last_inference_ms = 0
        """Wall clock, milliseconds since 1970."""
        self._requests = _Durations()
        self._by_size: dict[int, _Durations] = {}

    def add_batch(self, record: BatchRecord) -> None:
        """Count a batch that succeeded just now, and its requests."""
        self.images += record.images
        self._last_inference_ms = time.time_ns() // 1_000_000
        self._pending.append(record)
        if len(self._pending) >= _MOST_PENDING:
            self._count()

    def _count(self) -> None:
        pending, self._pending = self._pending, []
        for record in pending:
            self._count_batch(record)

    def _count_batch(self, record: BatchRecord) -> None:
        requests, queue_s, images = len(record.queue_s), sum(record.queue_s), record.images
        parts_s = (record.input_s, record.infer_s, record.output_s)
        self._executions += len(record.runs)
        self._requests.add("queue", requests, queue_s)
        self._requests.add("success", requests, queue_s + requests * sum(parts_s))
        for kind, seconds in zip(_COMPUTE, parts_s, strict=True):
            self._requests.add(kind, requests, requests * seconds)
        for run in record.runs:
            share = run.images / images
            durations = self._by_size.get(run.images)
            if durations is None:
                durations = self._by_size[run.images] = _Durations()
            run_s = (record.input_s * share, run.seconds, record.output_s * share)
            for kind, seconds in zip(_COMPUTE, run_s, strict=True):
                durations.add(kind, 1, seconds)

    def add_failure(self, seconds: float) -> None:
        """Count a request that failed or was refused, `seconds` after it came."""
        self._requests.add("fail", 1, seconds)

    def as_json(self) -> dict[str, Any]:
        """The model's entry of the extension's answer, without its name and version."""
        self._count()
        return {
            "last_inference": self._last_inference_ms,
            "inference_count": self.images,
            "execution_count": self._executions,
            "inference_stats": self._requests.as_json("success", "fail", "queue", *_COMPUTE, "cache_hit", "cache_miss"),
            "batch_stats": [
                {"batch_size": size, **durations.as_json(*_COMPUTE)}
                for size, durations in sorted(self._by_size.items())
            ],
        }
