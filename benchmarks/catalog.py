"""All benchmarks by name."""

from __future__ import annotations

from benchmarks.cascade.experiment import CASCADE
from benchmarks.durability import DURABILITY
from benchmarks.main_job import MAIN_JOB
from benchmarks.observations.experiment import OBSERVATIONS
from benchmarks.observations.sinks import SINKS
from benchmarks.overload import OVERLOAD
from benchmarks.peers.duel import DUEL
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.experiment import PEERS
from benchmarks.photographs import PHOTOGRAPHS
from benchmarks.releases.experiment import RELEASES
from benchmarks.rivals.experiment import RIVALS
from benchmarks.road.experiment import ROAD
from benchmarks.shares import SHARES
from benchmarks.sites import SITES
from benchmarks.sources import SOURCES
from benchmarks.spreading import SPREADING
from experiments.harness import Experiment

__all__ = ["BENCHMARKS"]

BENCHMARKS: dict[str, Experiment] = {
    benchmark.name: benchmark
    for benchmark in (
        PEERS,
        DUEL,
        CASCADE,
        ENGINES,
        MAIN_JOB,
        OBSERVATIONS,
        OVERLOAD,
        DURABILITY,
        PHOTOGRAPHS,
        RELEASES,
        RIVALS,
        ROAD,
        SHARES,
        SINKS,
        SITES,
        SOURCES,
        SPREADING,
    )
}
