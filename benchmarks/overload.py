"""Overload: goodput of a node when far more is asked of it than it can do.

A closed loop saturates a node, an open loop asks for a multiple of that, and a closed loop saturates it again. The
goodput of the overload is compared with the mean of the two, because the speed of a machine drifts. Meanwhile its
memory is watched and its health asked for. Server and load have a core each.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.measuring import loaded
from benchmarks.peers.requests import infer_target
from experiments.bench.http import Connection, encode_http
from experiments.bench.load import Closed, Level, Load, LoadPlan, Open
from experiments.bench.summary import OK, percentile
from experiments.bench.targets import Target
from experiments.harness import Experiment, Record, Run, Table, option
from experiments.processes import Cores, check_cores, cpu_s, on_core, resident_bytes, serving
from experiments.testbed import BATCH
from models.manifest import load_manifest, weights_folder
from tierkit.errors import InvalidInput
from tierkit.settings import NodeSettings
from tierkit.types import Tier

__all__ = ["OVERLOAD", "missed", "read_case"]

_CONCURRENCY = 8
_ANSWER_S = 60.0
_WATCH_S = 0.25
_REFUSED = "503"
_FACTORS = {Tier.END: 2.0, Tier.EDGE: 16.0}
"""Load on each tier, as a multiple of the capacity of its network."""

_LEAST_GOODPUT = 0.9
"""Smallest goodput, as a share of the throughput at saturation."""
_MOST_REFUSAL_MS = 50.0
"""Most milliseconds from a request's first byte to its 503 at p99."""
_MOST_HEALTH_MS = 50.0


class Chosen(Cores):
    """Networks, factors and length of the overload."""

    seconds: float = option(60.0, "Length of the overload.", min=1, max=3600)
    only: list[str] | None = option(None, "This case in place of the two; may be repeated.", metavar="MODEL=FACTOR")
    models: Path | None = option(None, "Model set. Default: the networks that come with Terrace.", file_okay=False)


async def _one(target: Target, pid: int, factor: float, seconds: float, queue_bytes: int) -> dict[str, Any]:
    calm, stormy = LoadPlan(window_s=min(10.0, seconds)), LoadPlan(window_s=seconds, warmup_s=2.0, timeout_s=_ANSWER_S)
    before, before_per_cpu = await _level(pid, target, Closed(_CONCURRENCY), calm)
    capacity = before.summary.images_per_s
    calm_bytes = resident_bytes(pid)
    async with _watched(pid, target) as watch:
        storm, storm_per_cpu = await _level(pid, target, Open(factor * capacity / BATCH), stormy)
    after, after_per_cpu = await _level(pid, target, Closed(_CONCURRENCY), calm)
    saturation = (capacity + after.summary.images_per_s) / 2
    refusals_ms = sorted((s.done - s.sent) * 1000 for s in storm.samples if s.outcome == _REFUSED)
    outcomes = Counter(sample.outcome for sample in storm.samples)
    samples: dict[str, Sequence[float]] = {
        "resident_bytes": watch.resident_bytes,
        "health_ms": watch.health_ms,
        "refusal_ms": refusals_ms,
        "answer_ms": [(s.done - s.due) * 1000 for s in storm.samples if s.outcome == OK],
    }
    return {
        "saturation_images_per_s": saturation,
        "offered_images_per_s": (storm.summary.offered_per_s or 0.0) * BATCH,
        "goodput_images_per_s": storm.summary.images_per_s,
        "goodput_ratio": storm.summary.images_per_s / saturation,
        # By the server's processor time: a machine that does other work as well does not spoil this one.
        "goodput_per_cpu_ratio": storm_per_cpu / ((before_per_cpu + after_per_cpu) / 2),
        "requests": len(storm.samples),
        "refused": len(refusals_ms),
        "unanswered": {name: count for name, count in outcomes.items() if name not in (OK, _REFUSED)},
        "refusal_p50_ms": percentile(refusals_ms, 50) if refusals_ms else None,
        "refusal_p99_ms": percentile(refusals_ms, 99) if refusals_ms else None,
        "health_max_ms": max(watch.health_ms),
        "memory_growth_bytes": max(0, max(watch.resident_bytes) - calm_bytes),
        # A full queue, and one request on each connection.
        "memory_bound_bytes": queue_bytes + LoadPlan().max_connections * len(target.requests[0]),
        # Tens of thousands of them: the digits behind a microsecond would be most of the record.
        "samples": {name: [round(value, 3) for value in values] for name, values in samples.items()},
    }


async def _level(pid: int, target: Target, load: Load, plan: LoadPlan) -> tuple[Level, float]:
    """One level of load, and the images that the node answered in a second of its CPU time."""
    began_s = cpu_s(pid)
    level = await loaded(target, load, plan)
    answered = sum(sample.outcome == OK for sample in level.samples) * target.images
    return level, answered / max(cpu_s(pid) - began_s, 1 / os.sysconf("SC_CLK_TCK"))


@dataclass(slots=True)
class _Watch:
    resident_bytes: list[int] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)


@contextlib.asynccontextmanager
async def _watched(pid: int, target: Target) -> AsyncIterator[_Watch]:
    """Memory of the node and the time of its health checks meanwhile."""
    watch = _Watch()
    question = encode_http("GET", target.origin, "/readyz")

    async def look() -> None:
        async with Connection(target.origin) as connection:
            while True:
                watch.resident_bytes.append(resident_bytes(pid))
                asked = time.perf_counter()
                await connection.request(question, timeout_s=_ANSWER_S)
                watch.health_ms.append((time.perf_counter() - asked) * 1000)
                await asyncio.sleep(_WATCH_S)

    task = asyncio.create_task(look(), name="watch")
    try:
        yield watch
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def read_case(text: str) -> tuple[str, float]:
    """Read "model=factor".

    Raises:
        InvalidInput: it is not that.
    """
    model, _, factor = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if model and 0 < float(factor) < math.inf:
            return model, float(factor)
    raise InvalidInput(f"{text!r} is not a case: write MODEL=FACTOR, such as mobilenet-v1-0.5=2")


# --- from the record ------------------------------------------------------------------------------------------------


def missed(point: Mapping[str, Any]) -> list[str]:
    """Targets that a measurement misses, one sentence each."""
    found = []
    if point["goodput_ratio"] < _LEAST_GOODPUT:
        found.append(f"goodput is {point['goodput_ratio']:.2f} of saturation, below {_LEAST_GOODPUT:g}")
    if point["unanswered"]:
        found.append(f"requests without an answer: {point['unanswered']}")
    if not point["refused"]:
        found.append("nothing was refused: this was no overload")
    elif point["refusal_p99_ms"] > _MOST_REFUSAL_MS:
        found.append(f"p99 of refusals is {point['refusal_p99_ms']:.0f} ms, above {_MOST_REFUSAL_MS:g} ms")
    if point["health_max_ms"] > _MOST_HEALTH_MS:
        found.append(f"a health check took {point['health_max_ms']:.0f} ms, above {_MOST_HEALTH_MS:g} ms")
    if point["memory_growth_bytes"] > point["memory_bound_bytes"]:
        found.append(
            f"memory grew by {_mebibytes(point['memory_growth_bytes'])} MiB, "
            f"beyond the bound of {_mebibytes(point['memory_bound_bytes'])} MiB"
        )
    return found


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.1f}"


_LINES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "saturation_images_per_s": ("saturation, images/s", "{:,.0f}".format),
    "offered_images_per_s": ("asked for, images/s", "{:,.0f}".format),
    "goodput_images_per_s": ("goodput, images/s", "{:,.0f}".format),
    "goodput_ratio": ("goodput / saturation", "{:.2f}".format),
    "goodput_per_cpu_ratio": ("the same for each second of the server's CPU time", "{:.2f}".format),
    "requests": ("requests", "{:,}".format),
    "refused": ("refused with 503", "{:,}".format),
    "unanswered": ("neither 200 nor 503", lambda outcomes: f"{sum(outcomes.values()):,}"),
    "refusal_p50_ms": ("p50 of a 503, ms", "{:.1f}".format),
    "refusal_p99_ms": ("p99 of a 503, ms", "{:.1f}".format),
    "health_max_ms": ("slowest health check, ms", "{:.1f}".format),
    "memory_growth_bytes": ("memory grew by, MiB", _mebibytes),
    "memory_bound_bytes": ("and may by, MiB", _mebibytes),
    "missed": ("targets", lambda sentences: "; ".join(sentences) or "all reached"),
}


class Overload(Experiment):
    """Goodput of a node when 2 times (end network) or 16 times (edge) its capacity is asked for."""

    name = "overload"
    options = Chosen
    ignores = frozenset({"quick", "seed", "tasks", "data"})
    profile = None

    async def measure(self, run: Run, chosen: Chosen) -> None:
        check_cores(chosen)
        folder = chosen.models or weights_folder()
        manifest = load_manifest(folder)
        cases = [read_case(text) for text in chosen.only or ()]
        cases = cases or [(manifest.default_for(tier).name, factor) for tier, factor in _FACTORS.items()]
        run.config |= {"batch": BATCH, "seconds": chosen.seconds, "concurrency": _CONCURRENCY}
        run.expect(len(cases))
        for model, factor in cases:
            command = ["edge_node", "--model", model, "--models", str(folder)]
            with (
                run.step(f"{model} at {factor:g} times its capacity"),
                serving(command, core=chosen.server_core) as (url, server),
                on_core(chosen.load_core),
            ):
                shape = manifest.entry(model).input_shape
                target = infer_target(url, model, BATCH, shape)
                queue_bytes = NodeSettings().max_queue_images * math.prod(shape)
                point = await _one(target, server.process.pid, factor, chosen.seconds, queue_bytes)
            run.add(model=model, factor=factor, **point)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [
            {**{name: value for name, value in point.items() if name != "samples"}, "missed": missed(point)}
            for point in record["points"]
        ]

    def table(self, record: Record) -> Table:
        rows = self.rows(record)
        return Table(
            headings=" | ".join(["", *(f"{row['model']} at {row['factor']:g} times its capacity" for row in rows)]),
            rows=[
                [words, *("none" if row[name] is None else show(row[name]) for row in rows)]
                for name, (words, show) in _LINES.items()
            ],
        )


OVERLOAD = Overload()
