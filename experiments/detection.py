"""Time from a node's end to the verdict "dead", measured with real processes.

    python -m experiments.detection --times 20 --mode stop --out runs
    python -m experiments.detection --times 20 --mode kill --intervals 0.05,0.1,0.25,0.5,1,2 --out runs

A scheduler and end nodes run on this machine. One end node after the other is stopped (SIGSTOP: silent, its sockets
stay open) or killed (SIGKILL), at a random moment between two heartbeats, and the device list is read until it says
"dead". Then the node goes on (SIGCONT) or is started again, and the next one has its turn when all are alive.

Each sample counts from the signal to the answer of the device list that says so first, so it is at most one reading
(a few milliseconds) too long. `false_deaths` are deaths that nobody caused, by the log of the scheduler. With
`--intervals`, each heartbeat interval is measured with a scheduler of its own whose other times grow with it,
and so is what the heartbeats cost: processor time of the scheduler and of one node while nothing else happens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from experiments.record import RunRecord
from scheduler.settings import SchedulerSettings
from tierkit.errors import DeadlineExceeded
from tierkit.fleet import SCHEDULER, Fleet, FleetPlan, RunningService, ServicePlan, launch
from tierkit.types import Health, Tier

__all__ = ["Mode", "main", "percentile", "times_for"]

_READ_S = 0.002
_BUDGET_S = 60.0
_COST_S = 10.0
_LOG_S = 0.5
"""How far the scheduler's log may be behind its device list."""


class Mode(StrEnum):
    """How a node ends."""

    STOP = "stop"
    KILL = "kill"


@dataclass
class Measured:
    """One heartbeat interval."""

    detection_s: list[float] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    """What the scheduler said of each, those included that nobody caused."""
    false_deaths: int = 0
    scheduler_cpu_percent: float = 0.0
    node_cpu_percent: float = 0.0


def times_for(heartbeat_s: float | None) -> dict[str, float]:
    """Settings of the scheduler for a heartbeat interval: `suspect_s` and `lease_s` in the proportions of the defaults,
    but never below them, for what delays a heartbeat does not get shorter with the interval. None: the defaults."""
    if heartbeat_s is None:
        return {}
    default = SchedulerSettings()
    factor = max(1.0, heartbeat_s / default.heartbeat_s)
    return {
        "heartbeat_s": heartbeat_s,
        "suspect_s": factor * default.suspect_s,
        "lease_s": factor * default.lease_s,
    }


def percentile(samples: list[float], share: float) -> float:
    """The smallest sample that so great a share of all (0 to 1) does not exceed."""
    ranked = sorted(samples)
    return ranked[max(0, -int(-share * len(ranked) // 1) - 1)]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _device(http: httpx.AsyncClient, node_id: str) -> dict[str, Any]:
    devices = (await http.get("/v1/devices")).raise_for_status().json()["devices"]
    return next(
        (device for device in devices if device["node_id"] == node_id), {"health": "", "reason": "", "reached": False}
    )


async def _until(http: httpx.AsyncClient, node_id: str, health: Health) -> dict[str, Any]:
    """The node's entry once it has this health; an alive one has been reached by the scheduler as well."""
    deadline = time.monotonic() + _BUDGET_S
    while (device := await _device(http, node_id))["health"] != health or not (
        device["reached"] or health is Health.DEAD
    ):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{node_id} is {device['health']} and not {health} after {_BUDGET_S:g} s")
        await asyncio.sleep(_READ_S)
    return device


async def _end_one(fleet: Fleet, http: httpx.AsyncClient, node: RunningService, mode: Mode) -> float:
    """Seconds to the verdict; the node is back when this returns."""
    began = time.perf_counter()
    node.process.send_signal(signal.SIGSTOP if mode is Mode.STOP else signal.SIGKILL)
    try:
        await _until(http, node.name, Health.DEAD)
        seconds = time.perf_counter() - began
    finally:
        if mode is Mode.STOP:
            node.process.send_signal(signal.SIGCONT)
    if mode is Mode.KILL:
        await fleet.restart(node.name, budget_s=_BUDGET_S)
    await _until(http, node.name, Health.ALIVE)
    return seconds


async def _cost(fleet: Fleet, names: list[str]) -> dict[str, float]:
    """Processor time in percent of one core, by service, over a while in which only heartbeats happen."""
    pids = {name: fleet.services[name].process.pid for name in names}
    before, began = {name: _cpu_s(pid) for name, pid in pids.items()}, time.perf_counter()
    await asyncio.sleep(_COST_S)
    elapsed_s = time.perf_counter() - began
    return {name: 100 * (_cpu_s(pid) - before[name]) / elapsed_s for name, pid in pids.items()}


async def _measure(mode: Mode, times: int, nodes: int, heartbeat_s: float | None, chance: random.Random) -> Measured:
    measured = Measured()
    deaths: list[str] = []

    def on_line(name: str, line: str) -> None:
        if name == SCHEDULER and " is dead: " in line:
            deaths.append(line)

    with tempfile.TemporaryDirectory(prefix="terrace-detection-") as folder:
        settings = {name: f"{value:g}" for name, value in times_for(heartbeat_s).items()}
        scheduler = ServicePlan(
            name=SCHEDULER, kind=SCHEDULER, settings={**settings, "port": "0", "state": f"{folder}/state"}
        )
        names = [f"end-{number}" for number in range(1, nodes + 1)]
        plan = FleetPlan(services=(scheduler, *(ServicePlan(name=name, kind=Tier.END) for name in names)))
        async with launch(plan, Path(folder), on_line=on_line, start_s=_BUDGET_S) as fleet:
            await fleet.join(budget_s=_BUDGET_S)
            async with httpx.AsyncClient(base_url=fleet.scheduler_url, timeout=_BUDGET_S, trust_env=False) as http:
                if heartbeat_s is not None:
                    cost = await _cost(fleet, [SCHEDULER, names[0]])
                    measured.scheduler_cpu_percent, measured.node_cpu_percent = cost[SCHEDULER], cost[names[0]]
                for turn in range(times):
                    # Some heartbeats for the detector to learn from, and any moment between two of them.
                    await asyncio.sleep((heartbeat_s or SchedulerSettings().heartbeat_s) * chance.uniform(3, 5))
                    node = fleet.services[names[turn % nodes]]
                    seconds = await _end_one(fleet, http, node, mode)
                    measured.detection_s.append(seconds)
                await asyncio.sleep(_LOG_S)
                # Here and not at the end: a node that is told to stop closes its socket, and may be found dead by that.
                measured.false_deaths, measured.deaths = len(deaths) - times, list(deaths)
    return measured


def _summary(measured: Measured, mode: Mode, heartbeat_s: float | None) -> dict[str, Any]:
    samples = measured.detection_s
    summary: dict[str, Any] = {
        "mode": mode,
        "heartbeat_s": heartbeat_s or SchedulerSettings().heartbeat_s,
        "n": len(samples),
        "p50_s": round(percentile(samples, 0.5), 4),
        "p99_s": round(percentile(samples, 0.99), 4),
        "max_s": round(max(samples), 4),
        "false_deaths": measured.false_deaths,
    }
    if heartbeat_s is not None:
        summary["scheduler_cpu_percent"] = round(measured.scheduler_cpu_percent, 2)
        summary["node_cpu_percent"] = round(measured.node_cpu_percent, 2)
    return summary


def main(
    times: Annotated[int, typer.Option(min=1, help="How often a node ends, for each interval.")] = 20,
    mode: Annotated[Mode, typer.Option(help="stop: SIGSTOP, the node falls silent; kill: SIGKILL.")] = Mode.STOP,
    nodes: Annotated[int, typer.Option(min=1, help="End nodes of the fleet.")] = 2,
    intervals: Annotated[str, typer.Option(help="Heartbeat intervals in seconds, comma-separated.")] = "",
    seed: Annotated[int, typer.Option(help="Of the moments at which nodes end.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the record.")] = Path("runs"),
) -> None:
    """Measure how soon a silent or killed node is dead in the device list."""
    chance = random.Random(seed)
    samples: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    deaths: dict[str, list[str]] = {}
    swept: list[float | None] = [float(text) for text in intervals.split(",") if text.strip()]
    for heartbeat_s in swept or [None]:
        measured = asyncio.run(_measure(mode, times, nodes, heartbeat_s, chance))
        row = _summary(measured, mode, heartbeat_s)
        name = f"heartbeat_{row['heartbeat_s']:g}_s_detection_s"
        samples[name], deaths[name] = measured.detection_s, measured.deaths
        rows.append(row)
        typer.echo(json.dumps(row))
    record = RunRecord(
        experiment=f"detection-{mode}",
        config={"times": times, "mode": mode, "nodes": nodes, "load_average": os.getloadavg(), "cost_s": _COST_S},
        samples=samples,
        results={"rows": rows, "deaths": deaths},
        seed=seed,
    )
    typer.echo(f"record: {record.write(out)}")


if __name__ == "__main__":
    typer.run(main)
