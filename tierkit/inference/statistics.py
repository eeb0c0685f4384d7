"""Counts and durations of one model's requests and batches, in the words of Triton's statistics extension.

Updated on the event loop only, once per batch, so that no lock is needed; and added up only when somebody asks, or
some dozens of batches have come together: code that has just run takes a fraction of the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["BatchRecord", "ModelRun", "ModelStatistics"]


_TOGETHER = 64
"""Batches that are added up at once."""


class ModelRun(NamedTuple):
    """One call of the model."""

    images: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """What the requests that were computed together cost; seconds."""

    queue_s: Sequence[float]
    """One entry for each request of the batch: from its arrival to the start of the batch."""
    input_s: float
    """Joining the requests' inputs."""
    runs: Sequence[ModelRun]
    """One, or several where a request is larger than the largest batch."""
    output_s: float
    """Dividing the outputs among the requests."""

    @property
    def images(self) -> int:
        return sum(run.images for run in self.runs)

    @property
    def infer_s(self) -> float:
        """In the model."""
        return sum(run.seconds for run in self.runs)


@dataclass(slots=True)
class _Duration:
    count: int = 0
    total_s: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.total_s += seconds

    def as_json(self) -> dict[str, int]:
        return {"count": self.count, "ns": round(self.total_s * 1e9)}


@dataclass(slots=True)
class _BatchDurations:
    input: _Duration = field(default_factory=_Duration)
    infer: _Duration = field(default_factory=_Duration)
    output: _Duration = field(default_factory=_Duration)

    def add(self, count: int, *, input_s: float, infer_s: float, output_s: float) -> None:
        """Count as many as took so long each."""
        self.input.add(input_s * count, count)
        self.infer.add(infer_s * count, count)
        self.output.add(output_s * count, count)

    def as_json(self) -> dict[str, Any]:
        return {
            "compute_input": self.input.as_json(),
            "compute_infer": self.infer.as_json(),
            "compute_output": self.output.as_json(),
        }


@dataclass(slots=True)
class ModelStatistics:
    """Since the model was ready."""

    _images: int = 0
    _executions: int = 0
    _last_inference_ms: int = 0
    """Wall clock, milliseconds since 1970."""
    _success: _Duration = field(default_factory=_Duration)
    _fail: _Duration = field(default_factory=_Duration)
    _queue: _Duration = field(default_factory=_Duration)
    _requests: _BatchDurations = field(default_factory=_BatchDurations)
    _by_size: dict[int, _BatchDurations] = field(default_factory=dict)
    _new: list[BatchRecord] = field(default_factory=list)

    def add_batch(self, record: BatchRecord) -> None:
        """Count a batch that succeeded just now, and its requests."""
        self._last_inference_ms = time.time_ns() // 1_000_000
        self._new.append(record)
        if len(self._new) >= _TOGETHER:
            self._add_up()

    @property
    def images(self) -> int:
        """Images answered."""
        self._add_up()
        return self._images

    def _add_up(self) -> None:
        new, self._new = self._new, []
        for record in new:
            self._add(record)

    def _add(self, record: BatchRecord) -> None:
        requests = len(record.queue_s)
        queue_s = sum(record.queue_s)
        images, infer_s = record.images, record.infer_s
        self._images += images
        self._executions += len(record.runs)
        self._queue.add(queue_s, requests)
        self._success.add(queue_s + requests * (record.input_s + infer_s + record.output_s), requests)
        self._requests.add(requests, input_s=record.input_s, infer_s=infer_s, output_s=record.output_s)
        for run in record.runs:
            share = run.images / images
            self._by_size.setdefault(run.images, _BatchDurations()).add(
                1, input_s=record.input_s * share, infer_s=run.seconds, output_s=record.output_s * share
            )

    def add_failure(self, seconds: float) -> None:
        """Count a request that failed or was refused, `seconds` after it came."""
        self._fail.add(seconds)

    def as_json(self) -> dict[str, Any]:
        """The model's entry of the extension's answer, without its name and version."""
        self._add_up()
        return {
            "last_inference": self._last_inference_ms,
            "inference_count": self._images,
            "execution_count": self._executions,
            "inference_stats": {
                "success": self._success.as_json(),
                "fail": self._fail.as_json(),
                "queue": self._queue.as_json(),
                **self._requests.as_json(),
                "cache_hit": _Duration().as_json(),
                "cache_miss": _Duration().as_json(),
            },
            "batch_stats": [
                {"batch_size": size, **durations.as_json()} for size, durations in sorted(self._by_size.items())
            ],
        }
