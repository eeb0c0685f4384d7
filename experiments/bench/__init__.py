"""Load generator for Open Inference Protocol servers and Terrace's own endpoints: closed and open loop, one core.

    target = await oip_target("http://127.0.0.1:8000", "mobilenet", InputPlan(batch_size=50))
    level = await measure(target, Closed(4), Plan(window_s=5.0), stop=asyncio.Event())
    level.summary.images_per_s, level.summary.latency_ms["p99"]

The command is `terrace bench`; `docs/benchmarking.md` says how to read what it prints.
"""

from experiments.bench.http import Connection, ConnectionBroken, Origin, Reply
from experiments.bench.inputs import InputPlan
from experiments.bench.levels import Closed, Level, Open, Plan, measure
from experiments.bench.summary import Sample, Summary, Window, summarise
from experiments.bench.targets import Target, classify_target, oip_target, tasks_target

__all__ = [
    "Closed",
    "Connection",
    "ConnectionBroken",
    "InputPlan",
    "Level",
    "Open",
    "Origin",
    "Plan",
    "Reply",
    "Sample",
    "Summary",
    "Target",
    "Window",
    "classify_target",
    "measure",
    "oip_target",
    "summarise",
    "tasks_target",
]
