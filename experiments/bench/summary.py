"""From samples to figures. Pure: every number here can be worked out by hand.

Which requests a figure counts is the difference between the two loops. A closed loop's window holds what finished in
it. An open loop's latencies count the requests that were due in the window, however late they finished, because a
server that falls behind must not hide the requests that it kept waiting. Its throughput counts what finished in the
window.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "ANSWERED",
    "FALLBACK",
    "OK",
    "PERCENTILES",
    "Sample",
    "Summary",
    "Window",
    "percentile",
    "summarise",
]

OK = "ok"
FALLBACK = "fallback"
"""Answered, but the coarse answer stands because no upper tier gave a finer one."""

ANSWERED = frozenset({OK, FALLBACK})
"""Outcomes that count as answers; any other outcome names what went wrong ("503", "timeout", "connection")."""

PERCENTILES = (50, 90, 95, 99, 99.9)
"""Percentiles that are reported."""


class Sample(NamedTuple):
    """One request; `time.perf_counter` seconds."""

    due: float
    """Time when it should have been sent. In a closed loop, the time of its turn."""
    sent: float
    first: float
    """Time when the first byte of the answer's body had arrived."""
    done: float
    outcome: str


@dataclass(frozen=True, slots=True)
class Window:
    """The measured interval, `time.perf_counter` seconds: begin included, end excluded."""

    begin: float
    end: float

    @property
    def length_s(self) -> float:
        return self.end - self.begin

    def __contains__(self, moment: float) -> bool:
        return self.begin <= moment < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One level of load. Latencies count answered requests, in milliseconds from when a request was due."""

    window_s: float
    requests: int
    """Requests that the latencies and the errors are counted over."""
    answered: int
    fallbacks: int
    errors: Mapping[str, int]
    """Number of errors by HTTP status, "timeout" or "connection". They are never part of latency or throughput."""
    images_per_s: float
    requests_per_s: float
    """Answered within the window."""
    goodput_images_per_s: float
    """Like `images_per_s`, but only requests that met the deadline; the same figure without a deadline."""
    offered_per_s: float | None
    """Requests due per second of an open loop."""
    latency_ms: Mapping[str, float | None]
    """"mean" and one entry for each percentile, such as "p99"; None without answers."""
    first_ms: Mapping[str, float | None]
    """Latency until the first byte of the answer's body, in the same form."""
    send_ms: float | None
    """Mean delay before a request was on its way: waiting for a free connection, connecting, writing."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank).

    Args:
        ordered: ascending, at least one value.
        percent: in the interval (0, 100].
    """
    # Rounded first: 99 % of 1000 is 990.0000000000001 in floating point, and its ceiling a rank too far.
    return ordered[max(0, math.ceil(round(percent / 100 * len(ordered), 9)) - 1)]


def summarise(
    samples: Sequence[Sample],
    window: Window,
    *,
    images: int,
    open_loop: bool,
    deadline_s: float = math.inf,
) -> Summary:
    """The figures of one level.

    Args:
        samples: of warm-up, window and after, in any order.
        window: what is measured.
        images: per request.
        open_loop: which requests belong to the window: those due in it (open) or those finished in it (closed).
        deadline_s: for goodput.
    """
    counted = [sample for sample in samples if (sample.due if open_loop else sample.done) in window]
    answered = [sample for sample in counted if sample.outcome in ANSWERED]
    finished = [sample.done for sample in samples if sample.done in window and sample.outcome in ANSWERED]
    in_time = sum(sample.done - sample.due <= deadline_s for sample in answered)
    requests_per_s = len(finished) / window.length_s
    return Summary(
        window_s=window.length_s,
        requests=len(counted),
        answered=len(answered),
        fallbacks=sum(sample.outcome == FALLBACK for sample in answered),
        errors=dict(Counter(sample.outcome for sample in counted if sample.outcome not in ANSWERED).most_common()),
        images_per_s=requests_per_s * images,
        requests_per_s=requests_per_s,
        goodput_images_per_s=(
            requests_per_s * images if math.isinf(deadline_s) else in_time / window.length_s * images
        ),
        offered_per_s=len(counted) / window.length_s if open_loop else None,
        latency_ms=_distribution([sample.done - sample.due for sample in answered]),
        first_ms=_distribution([sample.first - sample.due for sample in answered]),
        send_ms=1000 * sum(sample.sent - sample.due for sample in answered) / len(answered) if answered else None,
    )


def _distribution(seconds: list[float]) -> dict[str, float | None]:
    names = [f"p{percent:g}" for percent in PERCENTILES]
    if not seconds:
        return dict.fromkeys(["mean", *names])
    seconds.sort()
    ranked = (1000 * percentile(seconds, percent) for percent in PERCENTILES)
    return {"mean": 1000 * sum(seconds) / len(seconds), **dict(zip(names, ranked, strict=True))}
