"""`python -m benchmarks peers`: rounds over all servers, so that a slow minute of the machine hits each of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.peers.bare import BareLoop, bare_loop
from benchmarks.peers.contenders import CONTENDERS, TERRACE, Contender, choose
from benchmarks.peers.measuring import LOADS, REQUEST_S, Installed, Load, Network, Servers, Serving, install, serving
from experiments.bench.load import LoadPlan
from experiments.harness import Experiment, Point, Record, Run, Table, cell, grouped, option
from experiments.processes import Cores, check_cores, on_core
from models.manifest import load_manifest, weights_folder
from tierkit.errors import TerraceError, UpstreamError
from tierkit.types import Tier

__all__ = ["PEERS", "Timing", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Rounds and lengths of the windows."""

    rounds: int = 3
    window_s: float = 3.0
    warmup_s: float = 0.5
    bare_s: float = 0.5


_QUICK = Timing(window_s=1.5, warmup_s=0.3, bare_s=0.3)

Turn = tuple[Network, Sequence[Contender], Sequence[Load]]
"""A network, who serves it, and under which loads."""


class Chosen(Servers):
    """Servers, rounds and networks."""

    only: list[str] | None = option(
        None,
        f"Measure this one alone; may be repeated: {', '.join(contender.name for contender in CONTENDERS)}.",
        metavar="NAME",
    )
    rounds: int = option(3, "Rounds; a figure is their median.", quick=1, min=1, max=100)
    large: str | None = option(
        None, "Network that Terrace alone serves, beside the bare loop. Default: the edge's.", metavar="MODEL"
    )


async def compare(
    run: Run, turns: Sequence[Turn], timing: Timing, cores: Cores, installed: Mapping[str, Installed | TerraceError]
) -> None:
    """Measure all rounds. A contender that fails once is not started again.

    Args:
        installed: environment of each contender, or why it has none.
    """
    run.config |= {
        **asdict(timing),
        "networks": [{"name": network.name, "sha256": network.sha256} for network, _, _ in turns],
        "cores": {"server": cores.server_core, "load": cores.load_core},
    }
    run.expect(timing.rounds * sum(len(contenders) for _, contenders, _ in turns))
    failed: set[tuple[str, str]] = set()
    with ExitStack() as stack:
        loops = [
            stack.enter_context(bare_loop(network.environment(), core=cores.server_core)) for network, _, _ in turns
        ]
        stack.enter_context(on_core(cores.load_core))
        for number in range(timing.rounds):
            for (network, contenders, loads), bare in zip(turns, loops, strict=True):
                for contender in contenders:
                    key = network.name, contender.name
                    where = {"round": number, "network": network.name, "server": contender.name}
                    with run.step(f"round {number + 1} of {timing.rounds}, {network.name}, {contender.title}"):
                        if key in failed:
                            continue
                        try:
                            if isinstance(environment := installed[contender.name], TerraceError):
                                raise environment
                            starting = serving(contender, environment.python, network, core=cores.server_core)
                            async with starting as server:
                                figures = await _under_loads(server, loads, timing, bare)
                            figures["version"] = environment.version
                        except TerraceError as exc:
                            failed.add(key)
                            figures = {"failure": str(exc)}
                    run.add(**where, title=contender.title, **figures)


async def _under_loads(server: Serving, loads: Sequence[Load], timing: Timing, bare: BareLoop) -> dict[str, Any]:
    """Every load between two runs of the bare loop."""
    plan = LoadPlan(window_s=timing.window_s, warmup_s=timing.warmup_s, timeout_s=REQUEST_S)
    found = []
    for batch, concurrency in loads:
        target = server.target(batch)
        before = bare(batch, timing.bare_s)
        figures: Mapping[str, Any]
        try:
            figures = await server.window(target, concurrency, plan)
        except UpstreamError as exc:
            figures = {"failure": str(exc)}
        after = bare(batch, timing.bare_s)
        found.append(
            {
                "batch": batch,
                "concurrency": concurrency,
                **figures,
                "bare_images_per_s": (before.images_per_s + after.images_per_s) / 2,
                "bare_batch_ms": (before.batch_ms + after.batch_ms) / 2,
            }
        )
    memory = server.processes.peak_memory_bytes()
    return {"cold_start_s": server.cold_start_s, "peak_memory_bytes": memory, "loads": found}


# --- from the record ------------------------------------------------------------------------------------------------


_NO_LOAD = {"batch": None, "concurrency": None}


def _row(visits: Sequence[Point], own: Mapping[int, float | None]) -> dict[str, Any]:
    """Figures of one server. Ratios are taken within each round, and the median of the ratios counts: rounds lie
    minutes apart, and the speed of the machine drifts meanwhile.

    Args:
        own: images a second of Terrace's node, by round.
    """
    first, measured = visits[0], [visit for visit in visits if "images_per_s" in visit]
    of_bare = [visit["images_per_s"] / visit["bare_images_per_s"] for visit in measured]
    pairs = [(own.get(visit["round"]), visit["images_per_s"]) for visit in measured]
    return {
        "server": first["server"],
        "title": first["title"],
        "version": first.get("version"),
        "rounds": len(measured),
        "failure": next((visit["failure"] for visit in visits if "failure" in visit), ""),
        **{name: _median(visit[name] for visit in measured) for name in _FIGURES},
        "of_bare": _median(of_bare),
        "min_of_bare": min(of_bare, default=None),
        "max_of_bare": max(of_bare, default=None),
        "p50_above_bare_ms": _median(visit["p50_ms"] - visit["bare_batch_ms"] for visit in measured),
        "terrace_ratio": None
        if first["server"] == TERRACE.name
        else _median(mine / theirs for mine, theirs in pairs if mine is not None),
        "cold_start_s": _median(visit.get("cold_start_s") for visit in visits),
        "peak_memory_bytes": _median(visit.get("peak_memory_bytes") for visit in visits),
    }


_FIGURES = ("images_per_s", "p50_ms", "p99_ms", "cpu_us_per_image")


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _cells(row: Mapping[str, Any]) -> list[str]:
    memory, rate = row["peak_memory_bytes"], row["images_per_s"]
    return [
        f"{row['network']}, {row['images_per_request']} x {row['concurrency']}"
        if row["concurrency"]
        else row["network"],
        f"{row['title']} {row['version'] or ''}".strip(),
        f"unmeasured: {row['failure']}" if rate is None else f"{rate:,.0f}",
        "-" if rate is None else "{of_bare:.2f} ({min_of_bare:.2f} to {max_of_bare:.2f})".format(**row),
        cell(row["terrace_ratio"], ".2f"),
        "-" if rate is None else "{p50_ms:.2f} ({p99_ms:.2f})".format(**row),
        cell(row["p50_above_bare_ms"], ".2f"),
        cell(row["cpu_us_per_image"], ",.0f"),
        cell(row["cold_start_s"], ".1f"),
        cell(memory and memory / 2**20, ",.0f"),
    ]


class Peers(Experiment):
    """Terrace's node compared with other servers and a bare ONNX Runtime loop, one core for each side."""

    name = "peers"
    options = Chosen
    repeats = ("rounds", "rounds")
    quick = "windows of {window_s:g} s"
    ignores = frozenset({"seed", "tasks", "data"})
    profile = None

    async def measure(self, run: Run, chosen: Chosen) -> None:
        contenders = choose(chosen.only or [])
        check_cores(chosen)
        folder = chosen.models or weights_folder()
        manifest = load_manifest(folder)
        turns: list[Turn] = [(Network(manifest.default_for(Tier.END), folder), contenders, LOADS)]
        if TERRACE in contenders:
            entry = manifest.entry(chosen.large) if chosen.large else manifest.default_for(Tier.EDGE)
            turns.append(
                (Network(entry, folder), [TERRACE], LOADS[:2])
            )  # single images show no more of a large network
        timing = replace(_QUICK if run.request.quick else Timing(), rounds=chosen.rounds)
        await compare(run, turns, timing, chosen, await install(run, contenders, chosen.venvs))

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """One row for each server under each load, the fastest first; a single one for a server that never ran."""
        visits = [{**point, **load} for point in record["points"] for load in point.get("loads", [_NO_LOAD])]
        rows = []
        for (network, batch, concurrency), of_all in grouped(visits, "network", "batch", "concurrency").items():
            own = {visit["round"]: visit.get("images_per_s") for visit in of_all if visit["server"] == TERRACE.name}
            load = {"network": network, "images_per_request": batch, "concurrency": concurrency}
            found = [{**load, **_row(visits, own)} for visits in grouped(of_all, "server").values()]
            rows += sorted(found, key=lambda row: -(row["images_per_s"] or 0.0))
        return rows

    def table(self, record: Record) -> Table:
        return Table(
            headings=(
                "network, images x requests at once | server | images/s | of bare (range) | Terrace / it | "
                "p50 (p99) ms | p50 above bare ms | CPU us/image | cold start s | peak MiB"
            ),
            spare=("peak MiB", "cold start s", "p50 above bare ms", "p50 (p99) ms"),
            rows=[_cells(row) for row in self.rows(record)],
        )


PEERS = Peers()
