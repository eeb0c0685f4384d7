"""The server's own times, from two looks at the statistics extension of the Open Inference Protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ServerTimes", "read_counters", "server_times"]

_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimes:
    """Means per request over an interval; milliseconds."""

    queue_ms: float
    compute_input_ms: float
    compute_infer_ms: float
    compute_output_ms: float
    batch_images: float | None
    """Images per execution of the model: how much dynamic batching there was."""

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.compute_input_ms + self.compute_infer_ms + self.compute_output_ms


Counters = Mapping[str, int]


def read_counters(body: bytes) -> Counters | None:
    """Counters of a statistics answer, all versions of the model added up; None where it is not one."""
    try:
        entries: list[dict[str, Any]] = json.loads(body)["model_stats"]
        counters = dict.fromkeys(["images", "executions", *_PHASES, *(f"{phase}_count" for phase in _PHASES)], 0)
        for entry in entries:
            counters["images"] += int(entry.get("inference_count", 0))
            counters["executions"] += int(entry.get("execution_count", 0))
            for phase in _PHASES:
                duration = entry["inference_stats"][phase]
                counters[phase] += int(duration.get("ns", 0))
                counters[f"{phase}_count"] += int(duration.get("count", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return counters


def server_times(before: Counters, after: Counters) -> ServerTimes | None:
    """What happened between two looks; None where nothing did, or where the server started anew in between."""
    delta = {name: after[name] - before[name] for name in after}
    if delta["queue_count"] <= 0 or min(delta.values()) < 0:
        return None

    def mean_ms(phase: str) -> float:
        count = delta[f"{phase}_count"]
        return delta[phase] / count / 1e6 if count else 0.0

    return ServerTimes(
        queue_ms=mean_ms("queue"),
        compute_input_ms=mean_ms("compute_input"),
        compute_infer_ms=mean_ms("compute_infer"),
        compute_output_ms=mean_ms("compute_output"),
        batch_images=delta["images"] / delta["executions"] if delta["executions"] else None,
    )
