"""The server's own times, from two looks at the statistics extension of the Open Inference Protocol."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Counters", "ServerTimes", "read_counters", "server_times"]

_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")

Counters = Mapping[str, int]


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


def read_counters(body: bytes) -> Counters | None:
    """Counters of a statistics answer, all versions of the model added up; None where it is not one."""
    counters: Counter[str] = Counter()
    try:
        for entry in json.loads(body)["model_stats"]:
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
    delta = Counter(after)
    delta.subtract(before)
    if delta["queue_count"] <= 0 or min(delta.values()) < 0:
        return None
    means = {f"{phase}_ms": delta[phase] / (delta[f"{phase}_count"] or 1) / 1e6 for phase in _PHASES}
    batch_images = delta["images"] / delta["executions"] if delta["executions"] else None
    return ServerTimes(**means, batch_images=batch_images)
