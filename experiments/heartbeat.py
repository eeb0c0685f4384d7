"""The heartbeat interval: how soon a silent or killed node is dead in the device list, and what the heartbeats cost.

A scheduler and end nodes run on this machine. One end node after the other is stopped (SIGSTOP: silent, its sockets
stay open) or killed (SIGKILL), at a random moment between two heartbeats, and the device list is read until it says
"dead". Then the node goes on (SIGCONT) or is started again, and the next one has its turn when all are alive. The other
times of the scheduler grow with the interval where it is longer than the default.

Each sample counts from the signal to the answer of the device list that says so first, so it is at most one reading
(a few milliseconds) too long. When the scheduler's log tells of more deaths of a node than it had turns, nobody caused
the others. The shutdown of the fleet does not count: a node that is told to stop closes its socket, and may be found
dead by that. The cost is measured while nothing else happens: processor time, and the bytes that a node reads and
writes.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any

from experiments.bench.summary import percentile
from experiments.harness import MOST_RUNS, Experiment, Options, Record, Run, Table, cell, grouped, option
from experiments.peers.processes import cpu_s
from experiments.plots import Figures, draw_ranges, measured
from experiments.profile import Profile
from experiments.testbed import Network, wait_for_devices
from scheduler.settings import SchedulerSettings
from tierkit.client import AsyncClient, Device
from tierkit.fleet import SCHEDULER, Fleet, RunningService
from tierkit.types import Health

__all__ = ["HEARTBEAT", "Chosen", "Mode", "times_for"]

_NODES = 2
_READ_S = 0.002
_BUDGET_S = 60.0
_COST_S, _QUICK_COST_S = 10.0, 2.0
_LOG_S = 0.5
"""How far the scheduler's log may be behind its device list."""
_CPU = ("scheduler_cpu_percent", "node_cpu_percent")
_DEAD = re.compile(r" (\S+) is dead: (.*)$")


class Mode(StrEnum):
    """How a node ends."""

    STOP = "stop"
    KILL = "kill"


def times_for(heartbeat_s: float) -> dict[str, float]:
    """Settings of the scheduler for a heartbeat interval: `suspect_s` and `lease_s` in the proportions of the defaults,
    but never below them, for what delays a heartbeat does not get shorter with the interval."""
    default = SchedulerSettings()
    factor = max(1.0, heartbeat_s / default.heartbeat_s)
    return {"heartbeat_s": heartbeat_s, "suspect_s": factor * default.suspect_s, "lease_s": factor * default.lease_s}


# --- measuring ------------------------------------------------------------------------------------------------------


class Chosen(Options):
    """Which intervals are measured, and how often."""

    times: int = option(20, "How often a node ends, for each interval.", quick=5, min=1, max=MOST_RUNS)
    interval: list[float] = option(
        [0.05, 0.1, 0.2, 0.5, 1.0, 2.0],
        "Heartbeat interval in seconds; may be repeated.",
        quick=[0.05, 0.2, 1.0],
        min=0.01,
        max=60,
    )
    mode: list[Mode] | None = option(None, "stop: SIGSTOP, it falls silent (default); kill: SIGKILL.")


async def _interval(
    run: Run, machines: Profile, networks: Sequence[Network], mode: Mode, heartbeat_s: float, chance: random.Random
) -> None:
    ended: Counter[str] = Counter()
    died: Counter[str] = Counter()
    deaths: list[dict[str, Any]] = []

    def watch(name: str, line: str) -> None:
        if name == SCHEDULER and (found := _DEAD.search(line)):
            died[found[1]] += 1
            deaths.append({"node": found[1], "reason": found[2], "caused": died[found[1]] <= ended[found[1]]})

    conditions = {"mode": mode, "heartbeat_s": heartbeat_s}
    settings = {name: f"{value:g}" for name, value in times_for(heartbeat_s).items()}
    starting = run.fleet(machines, networks, settings, expects_exits=mode is Mode.KILL, watch=watch)
    async with starting as (fleet, client):
        with run.step(f"{mode}, a heartbeat each {heartbeat_s:g} s"):
            names = [node.name for node in fleet.plan.nodes]
            run.add(
                kind="cost",
                **conditions,
                **await _cost(fleet.services[SCHEDULER], fleet.services[names[0]], run.config["cost_s"]),
            )
            for turn in range(run.config["times"]):
                # Some heartbeats for the detector to learn from, and any moment between two of them.
                await asyncio.sleep(heartbeat_s * chance.uniform(3, 5))
                victim = names[turn % len(names)]
                ended[victim] += 1
                seconds = await _end_one(fleet, client, fleet.services[victim], mode)
                run.add(kind="detection", **conditions, node=victim, seconds=seconds)
            await asyncio.sleep(_LOG_S)
            for death in deaths:
                run.add(kind="death", **conditions, **death)


async def _end_one(fleet: Fleet, client: AsyncClient, node: RunningService, mode: Mode) -> float:
    """Seconds to the verdict; the node is back when this returns."""
    began = time.perf_counter()
    node.process.send_signal(signal.SIGSTOP if mode is Mode.STOP else signal.SIGKILL)
    try:
        await _until(client, node.name, Health.DEAD)
        seconds = time.perf_counter() - began
    finally:
        if mode is Mode.STOP:
            node.process.send_signal(signal.SIGCONT)
    if mode is Mode.KILL:
        await fleet.restart(node.name, budget_s=_BUDGET_S)
    await _until(client, node.name, Health.ALIVE)
    return seconds


async def _until(client: AsyncClient, node_id: str, health: Health) -> None:
    """Until the node has this health; an alive one has been reached by the scheduler as well."""

    def lacking(devices: Sequence[Device]) -> str:
        device = next((device for device in devices if device.node_id == node_id), None)
        if device is not None and device.health is health and (device.reached or health is Health.DEAD):
            return ""
        return f"{node_id} is {device.health if device else 'not in the device list'} and not {health}"

    await wait_for_devices(client, lacking, _READ_S)


async def _cost(scheduler: RunningService, node: RunningService, while_s: float) -> dict[str, float]:
    """Processor time in percent of one core and bytes per second of a node, while only heartbeats happen."""
    pids = {"scheduler": scheduler.process.pid, "node": node.process.pid}
    before, began = {name: _spent(pid) for name, pid in pids.items()}, time.perf_counter()
    await asyncio.sleep(while_s)
    elapsed_s = time.perf_counter() - began
    after = {name: _spent(pid) for name, pid in pids.items()}
    figures = {f"{name}_cpu_percent": 100 * (after[name][0] - before[name][0]) / elapsed_s for name in pids}
    return {**figures, "node_bytes_per_s": (after["node"][1] - before["node"][1]) / elapsed_s}


def _spent(pid: int) -> tuple[float, int]:
    """Seconds of processor time, and bytes read and written, of a process so far."""
    io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return cpu_s(pid), int(io["rchar"]) + int(io["wchar"])


# --- from the record ------------------------------------------------------------------------------------------------


def _row(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = sorted(point["seconds"] for point in points if point["kind"] == "detection")
    cost = next((point for point in points if point["kind"] == "cost"), {})
    return {
        "mode": points[0]["mode"],
        "heartbeat_s": points[0]["heartbeat_s"],
        "n": len(seconds),
        "p50_s": round(percentile(seconds, 50), 4) if seconds else None,
        "p99_s": round(percentile(seconds, 99), 4) if seconds else None,
        "min_s": round(seconds[0], 4) if seconds else None,
        "max_s": round(seconds[-1], 4) if seconds else None,
        "false_deaths": sum(point["kind"] == "death" and not point["caused"] for point in points),
        "scheduler_cpu_percent": round(cost["scheduler_cpu_percent"], 2) if cost else None,
        "node_cpu_percent": round(cost["node_cpu_percent"], 2) if cost else None,
        "node_bytes_per_s": round(cost["node_bytes_per_s"]) if cost else None,
    }


def _scale(axes: Any, intervals: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(intervals, [f"{interval:g}" for interval in intervals])
    axes.minorticks_off()
    if axes.get_lines():  # there may be no point yet
        axes.set_ylim(0, 1.1 * axes.dataLim.y1 or None)
        axes.legend(frameon=False, fontsize=8)


class Heartbeat(Experiment):
    """The heartbeat interval against detection time and cost."""

    name = "heartbeat"
    options = Chosen
    ignores = frozenset({"tasks", "data"})
    repeats = ("n", "nodes")
    quick = "{times} times for each interval, fewer intervals unless chosen, costs over {cost_s:g} s"
    profile = "native"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        cost_s = _QUICK_COST_S if run.request.quick else _COST_S
        run.config |= {"times": chosen.times, "intervals_s": chosen.interval, "nodes": _NODES, "cost_s": cost_s}
        turns = list(product(chosen.interval, chosen.mode or [Mode.STOP]))
        run.expect(len(turns))
        chance = random.Random(run.request.seed)
        machines = run.profile.with_nodes(end=_NODES, edge=0, cloud=0)
        networks = await run.networks(machines)
        for heartbeat_s, mode in turns:
            await _interval(run, machines, networks, mode, heartbeat_s, chance)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [_row(points) for _, points in sorted(grouped(record["points"], "mode", "heartbeat_s").items())]

    def table(self, record: Record) -> Table:
        nodes = record["config"]["nodes"]
        return Table(
            headings="interval, s | node | n | median, s | p99, s | slowest, s | deaths nobody caused | "
            f"scheduler, % of a core for {nodes} nodes | node, % of a core | node, bytes/s",
            rows=[
                [
                    f"{row['heartbeat_s']:g}",
                    {Mode.STOP: "silent", Mode.KILL: "killed"}[Mode(row["mode"])],
                    str(row["n"]),
                    *(cell(row[name], ".2f") for name in ("p50_s", "p99_s", "max_s")),
                    str(row["false_deaths"]),
                    *(cell(row[name], ".1f") for name in _CPU),
                    cell(row["node_bytes_per_s"], ",d"),
                ]
                for row in self.rows(record)
            ],
        )

    def draw(self, record: Record, figures: Figures) -> None:
        rows = self.rows(record)
        intervals = sorted({row["heartbeat_s"] for row in rows})
        n = max(row["n"] for row in rows)
        title = f"median of {n}, and from the fastest to the slowest"
        (axes,) = figures.panels(
            "heartbeat", [title], xlabel="heartbeat interval (s)", ylabel="time until it is dead (s)"
        )
        for number, mode in enumerate(Mode):
            shown = [row for row in rows if row["mode"] == mode and row["n"]]
            if not shown:
                continue
            name = {Mode.STOP: "falls silent (SIGSTOP)", Mode.KILL: "killed (SIGKILL)"}[mode]
            fields = ("heartbeat_s", "p50_s", "min_s", "max_s")
            draw_ranges(axes, shown, fields, capsize=3, label=name, **measured(number))
        _scale(axes, intervals)
        (axes,) = figures.panels(
            "heartbeat-cost",
            [f"nothing but heartbeats, for {record['config']['cost_s']:g} s"],
            xlabel="heartbeat interval (s)",
            ylabel="processor time (% of a core)",
        )
        costs = list({row["heartbeat_s"]: row for row in rows if row["node_cpu_percent"] is not None}.values())
        for number, (name, label) in enumerate(zip(_CPU, (f"scheduler of {_NODES} nodes", "one node"), strict=True)):
            axes.plot(
                [row["heartbeat_s"] for row in costs], [row[name] for row in costs], label=label, **measured(number)
            )
        _scale(axes, intervals)


HEARTBEAT = Heartbeat()
