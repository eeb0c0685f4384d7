"""How many heartbeats a second one scheduler takes, and what each costs it.

The scheduler is a process of its own, on a core of its own. So many end devices are registered, each with its own
connection, as real ones have; they beat in turn, 16 at a time, each as soon as the scheduler has answered. So its core
is full, and the rate is what one core can do; no pause lets its code leave the processor's caches, as between the
heartbeats of a small fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

from experiments.bench.http import Connection, Origin, encode_http
from experiments.durability import IDLE, null_node
from experiments.harness import MOST_RUNS, Experiment, Record, Run, Table, grouped, option
from experiments.peers.processes import Cores, ServerProcesses, check_cores, on_core, serving
from experiments.record import ranged
from tierkit.errors import ServiceFailed
from tierkit.types import Tier

__all__ = ["BEATS"]

_AT_A_TIME = 16
_SPARE_CONNECTIONS = 64
_ANSWER_S = 10.0
_JSON = {"Content-Type": "application/json"}
_NOWHERE = 9
"""The port of the nodes, to which no request is sent."""
_TIMES = ("--heartbeat-s", "2", "--suspect-s", "5", "--lease-s", "30")
"""As a large fleet has them: no node is suspect while the others register."""


async def _ask(connection: Connection, question: bytes, status: int) -> None:
    reply = await connection.request(question, timeout_s=_ANSWER_S)
    if reply.status != status:
        raise ServiceFailed(f"the scheduler answered {reply.status} where {status} was expected: {reply.body[:200]!r}")


async def _one(url: str, server: ServerProcesses, nodes: int, seconds: float) -> tuple[float, float, float]:
    """Heartbeats a second, milliseconds of the scheduler's processor time for each, and MiB of its memory at most."""
    origin = Origin.parse(url)
    beat = IDLE.model_dump_json().encode()
    async with contextlib.AsyncExitStack() as stack:
        ways: list[tuple[Connection, bytes]] = []
        for number in range(nodes):
            node_id = f"end-{number}"
            registration = null_node(node_id, Tier.END, _NOWHERE).model_dump_json().encode()
            connection = await stack.enter_async_context(Connection(origin))
            await _ask(connection, encode_http("POST", origin, "/v1/devices", _JSON, registration), 200)
            ways.append((connection, encode_http("POST", origin, f"/v1/devices/{node_id}/heartbeat", _JSON, beat)))

        async def beat_until(end: float, mine: Sequence[tuple[Connection, bytes]]) -> int:
            count = 0
            while time.perf_counter() < end:
                for connection, question in mine:
                    await _ask(connection, question, 204)
                    count += 1
            return count

        begun, cpu_begun = time.perf_counter(), server.cpu_s()
        counts = await asyncio.gather(
            *(beat_until(begun + seconds, ways[first::_AT_A_TIME]) for first in range(min(_AT_A_TIME, nodes)))
        )
        spent, cpu = time.perf_counter() - begun, server.cpu_s() - cpu_begun
    return sum(counts) / spent, 1000 * cpu / sum(counts), server.peak_memory_bytes() / 2**20


class Chosen(Cores):
    """Which fleets beat, for how long, and where."""

    nodes: list[int] = option([100, 1000], "Nodes that beat; may be repeated.", quick=[100], min=1, max=10_000)
    seconds: float = option(5.0, "Length of a run.", quick=1.0, min=0.1, max=3600)
    repeats: int = option(3, "Runs of each number of nodes.", min=1, max=MOST_RUNS)


class Beats(Experiment):
    """How many heartbeats a second one scheduler takes."""

    name = "beats"
    options = Chosen
    repeats = ("n", "runs")
    quick = "{seconds:g} s each"
    ignores = frozenset({"seed", "tasks", "data"})
    profile = None

    async def measure(self, run: Run, chosen: Chosen) -> None:
        check_cores(chosen)
        run.config |= {"seconds": chosen.seconds, "at_a_time": _AT_A_TIME}
        run.expect(chosen.repeats * len(chosen.nodes))
        for _, size in product(range(chosen.repeats), chosen.nodes):
            with run.step(f"{size} nodes"), tempfile.TemporaryDirectory(prefix="terrace-beats-") as state:
                flags = ["--state", state, "--max-connections", str(size + _SPARE_CONNECTIONS)]
                command = ["terrace", "scheduler", *_TIMES, *flags]
                with serving(command, core=chosen.server_core) as (url, server), on_core(chosen.load_core):
                    rate, cpu_ms, memory_mib = await _one(url, server, size, chosen.seconds)
            run.add(nodes=size, beats_per_s=rate, cpu_ms_per_beat=cpu_ms, memory_mib=memory_mib)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [
            {
                "nodes": nodes,
                "n": len(points),
                **ranged("beats_per_s", [point["beats_per_s"] for point in points], 1),
                "cpu_ms_per_beat": round(median(point["cpu_ms_per_beat"] for point in points), 3),
                "memory_mib": round(median(point["memory_mib"] for point in points), 1),
            }
            for (nodes,), points in grouped(record["points"], "nodes").items()
        ]

    def table(self, record: Record) -> Table:
        return Table(
            headings="nodes | heartbeats/s, median | range | ms of processor each | memory, MiB",
            rows=[
                [
                    f"{row['nodes']:,}",
                    f"{row['beats_per_s']:,.0f}",
                    f"{row['min_beats_per_s']:,.0f} to {row['max_beats_per_s']:,.0f}",
                    f"{row['cpu_ms_per_beat']:.2f}",
                    f"{row['memory_mib']:,.0f}",
                ]
                for row in self.rows(record)
            ],
        )


BEATS = Beats()
