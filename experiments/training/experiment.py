"""Training on virtual time: real gradients, and machines and links that are simulated.

What a step takes, and what a host takes for a request, is measured first, as processor time: of the network's own step
and of a host process. All else is the virtual clock of `training.virtual`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
from pathlib import Path
from typing import Any

from experiments.harness import Experiment, Options, Record, Run, Table, cell, option
from experiments.plots import Figures, measured, paper
from experiments.training.cases import LINK_BYTES_PER_S, LINK_DELAY_S, TABLES, Case, cases, judge, key, source_s
from experiments.training.compared import compared
from experiments.training.shares import NETWORKS, SHARES, shares_table
from experiments.training.teaching import LESSONS, STUDENT, TAUGHT, TEACHER, taught_table
from tierkit.errors import InvalidInput
from tierkit.extras import training_extra
from training.strategies.config import ServerConfig

__all__ = ["TRAINING"]

_MOST_SEEDS = 20
"""Most seeds, because the exact test looks at all signs of their differences."""


_HEADINGS = (
    *("table", "strategy", "workers", "n", "accuracy, %", "loss", "virtual s an epoch", "source, s"),
    *("updates", "MB sent", "targets"),
)


class _Stopped(Exception):
    """The run is to end."""


class Chosen(Options):
    """Tables to make, and the number of runs."""

    seeds: int = option(5, "Runs of each line, from --seed on.", quick=1, min=1, max=_MOST_SEEDS)
    only: list[str] | None = option(
        None,
        f"A table; may be repeated. Default: {', '.join(TABLES)}. Only if named: {SHARES}, which trains nothing, and "
        f"{TAUGHT}, on CIFAR-100.",
        metavar="TABLE",
    )
    images: int = option(60_000, "Images to train on, some held out.", quick=6_000, min=240, max=60_000)
    faults: int = option(1_000, "Faults in all runs together.", quick=20, min=2, max=100_000)
    exchanges: int = option(1_000, "Exchanges by which the cost of a host is measured.", quick=100, min=4, max=100_000)
    real: bool = option(
        False, "Run each line of the table 'strategies' once with processes on this machine as well, for its seconds."
    )
    data: Path | None = option(None, "Folder that holds mnist/.", envvar="TERRACE_DATA", metavar="DIRECTORY")


class Training(Experiment):
    """Cost of delay, slow workers, few bytes, faults, cheaters and workers that come and go, on virtual time."""

    name = "training"
    options = Chosen
    ignores = frozenset({"tasks"})
    profile = None
    repeats = ("runs", "runs that differ in their seed")
    quick = "{images:,} images rather than 60,000, one seed rather than 5, {faults} faults rather than 1,000"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        if chosen.only == [SHARES]:
            await _measure_shares(run, chosen)
            return
        if chosen.only == [TAUGHT]:
            await _measure_lessons(run, chosen)
            return
        wrong = [name for name in chosen.only or () if name not in TABLES]
        if wrong:
            raise InvalidInput(
                f"there is no table {wrong[0]!r}; there are {', '.join(TABLES)}, and {SHARES} or {TAUGHT} by itself"
            )
        with training_extra("training on the fleet", "learn"):
            from experiments.training.running import NETWORK, Bench, serve_s
        lines = cases(chosen.only or TABLES)
        seeds = range(run.request.seed, run.request.seed + chosen.seeds)
        faulty = len(seeds) * sum(line.faulty for line in lines)
        run.config |= {
            "network": NETWORK,
            "seeds": list(seeds),
            "only": list(chosen.only or TABLES),
            "images": chosen.images,
            "faults": chosen.faults,
            "link_delay_s": LINK_DELAY_S,
            "link_bytes_per_s": LINK_BYTES_PER_S,
        }
        plain = sum(line.table == "strategies" and not line.lost and line.cheat is None for line in lines)
        run.expect(3 + sum(1 if line.once else len(seeds) for line in lines) + (plain if chosen.real else 0))
        with run.step("reading the images, and the time of a step"):
            bench = await asyncio.to_thread(Bench, chosen.data, chosen.images, run.folder)
        core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        costs = {}
        for name in ("downpour", "dc-adaptive"):
            with run.step(f"the cost of a host with {name}"):
                costs[name] = await serve_s(name, bench.host_flags, exchanges=chosen.exchanges, core=core)
        real: dict[str, float | None] = {}
        for line in lines if chosen.real else ():
            if line.table == "strategies" and not line.lost and line.cheat is None:
                with run.step(f"{line.name} with processes"):
                    real[line.name] = await bench.real_seconds(line, run.request.seed)
        stop = threading.Event()

        def watch() -> None:
            if stop.is_set():
                raise _Stopped

        for line in lines:
            cost = costs["dc-adaptive" if _compensates(line) else "downpour"]
            for seed in seeds[:1] if line.once else seeds:
                with run.step(f"{line.table}: {line.words}, {line.workers} workers"):
                    try:
                        found = await (
                            bench.run_processes(line, seed)
                            if line.by_processes
                            else asyncio.to_thread(
                                bench.run,
                                line,
                                seed,
                                serve_s=cost,
                                faults=chosen.faults // max(1, faulty),
                                watch=watch,
                            )
                        )
                    except asyncio.CancelledError:
                        stop.set()
                        raise
                run.add(
                    **{
                        "table": line.table,
                        "strategy": line.name,
                        "scaling": line.scaling,
                        "slow": list(line.slow),
                        "faulty": line.faulty,
                        "stays_s": line.stays_s,
                        "lost": line.lost,
                        "real_seconds": real.get(line.name) if not (line.lost or line.cheat) else None,
                        **found,
                    }
                )

    def rows(self, record: Record) -> list[dict[str, Any]]:
        if record["config"].get("only") in ([SHARES], [TAUGHT]):
            return list(record["points"])
        points = [{**point, "slow": tuple(point["slow"])} for point in record["points"]]
        verdicts = judge(points)
        runs = {place: sum(key(point) == place for point in points) for place in verdicts}
        return [
            {
                **point,
                "slow": list(point["slow"]),
                "runs": runs[key(point)],
                "targets": [judged.words for judged in verdicts[key(point)]],
                # A quick run is too short to reach anything.
                "missed": []
                if record["config"]["quick"]
                else [judged.words for judged in verdicts[key(point)] if not judged.reached],
            }
            for point in points
        ]

    def table(self, record: Record) -> Table:
        if record["config"].get("only") == [SHARES]:
            return shares_table(self.rows(record))
        if record["config"].get("only") == [TAUGHT]:
            return taught_table(self.rows(record))
        if record["config"].get("only") == ["strategies"]:
            return compared(self.rows(record))
        lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in self.rows(record):
            lines.setdefault(key({**row, "slow": tuple(row["slow"])}), []).append(row)
        rows = [_shown(line) for line in lines.values()]
        # Older records have no loss, and the source has no times of most tables.
        empty = {name for name, column in zip(_HEADINGS, zip(*rows, strict=True), strict=True) if set(column) == {"-"}}
        used = [number for number, name in enumerate(_HEADINGS) if name not in empty & {"loss", "source, s"}]
        return Table(
            headings=" | ".join(_HEADINGS[number] for number in used),
            rows=[[row[number] for number in used] for row in rows],
            spare=("MB sent", "updates"),
        )

    def draw(self, record: Record, figures: Figures) -> None:
        """Figure 16 of the source, with its table 2: seconds of an epoch against the number of nodes."""
        rows = [row for row in self.rows(record) if row.get("table") == "scaling" and source_s(row) is not None]
        if not rows:
            return
        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            nodes = row["workers"] + 1
            same = [other["epoch_seconds"] for other in rows if _place(other) == _place(row)]
            lines.setdefault(row["strategy"], {})[nodes] = statistics.fmean(same)
        longest = max(mine[max(mine)] / mine[min(mine)] for mine in lines.values())
        (axes,) = figures.panels(
            "training-scaling",
            [f"each worker goes through all images; mean of {rows[0]['runs']}"],
            xlabel="nodes, the host among them",
            ylabel="time of an epoch (s)",
            finding=f"From {min(lines[rows[0]['strategy']])} to {max(lines[rows[0]['strategy']])} nodes an epoch takes "
            f"at most {longest - 1:.1%} longer",
        )
        for number, (name, mine) in enumerate(lines.items()):
            line = {row["workers"] + 1: row for row in rows if row["strategy"] == name}
            axes.plot(list(mine), list(mine.values()), label=name, **measured(number))
            axes.plot(list(line), [source_s(row) for row in line.values()], label=f"{name}, source", **paper(number))
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)


async def _measure_shares(run: Run, chosen: Chosen) -> None:
    with training_extra("training on the fleet", "learn"):
        from experiments.training.layers import shares
    run.config |= {"only": [SHARES], "images": chosen.images, "faults": chosen.faults}
    run.expect(len(NETWORKS))
    for name in NETWORKS:
        with run.step(name):
            run.add(**await asyncio.to_thread(shares, name))


async def _measure_lessons(run: Run, chosen: Chosen) -> None:
    with training_extra("training on the fleet", "learn"):
        from experiments.training.school import School, read_classroom
    seeds = range(run.request.seed, run.request.seed + chosen.seeds)
    run.config |= {"only": [TAUGHT], "network": STUDENT, "teacher": TEACHER, "seeds": list(seeds)}
    run.config |= {"images": chosen.images, "faults": chosen.faults}
    run.config |= {"link_delay_s": LINK_DELAY_S, "link_bytes_per_s": LINK_BYTES_PER_S}
    run.expect(1 + len(seeds) * len(LESSONS))
    with run.step(f"asking {TEACHER}"):
        room = await asyncio.to_thread(read_classroom, chosen.data, chosen.images)
        school = await asyncio.to_thread(School, room)
    stop = threading.Event()

    def watch() -> None:
        if stop.is_set():
            raise _Stopped

    for seed in seeds:
        for lesson in LESSONS:
            with run.step(f"{lesson.name}, seed {seed}"):
                try:
                    run.add(**await asyncio.to_thread(school.give, lesson, seed, watch))
                except asyncio.CancelledError:
                    stop.set()
                    raise


def _compensates(line: Case) -> bool:
    return isinstance(line.strategy, ServerConfig) and line.strategy.rule.startswith("dc-")


def _place(row: dict[str, Any]) -> tuple[str, int]:
    return row["strategy"], row["workers"]


def _shown(line: list[dict[str, Any]]) -> list[str]:
    row = line[0]
    words = row["strategy"]
    if row["slow"]:
        words += f", one {row['slow'][0]:g} times slower"
    if row["faulty"]:
        words += ", with faults"
    if row.get("cheat"):
        words += f", {row['cheat']}"
    if row.get("stays_s") is not None:
        words += f", each stays {row['stays_s']:g} s"
    if row.get("lost"):
        words += ", one lost"
    missed = set(row["missed"])
    return [
        f"{row['table']}, {row['scaling']}" if row["table"] == "scaling" else row["table"],
        words,
        str(row["workers"]),
        str(len(line)),
        _mean(line, "accuracy", 100, ".2f"),
        _mean(line, "test_loss", 1, ".3f"),
        _mean(line, "epoch_seconds", 1, ".3f"),
        cell(source_s(row), ".2f"),
        f"{statistics.fmean(each['updates'] for each in line):,.0f}",
        f"{statistics.fmean(each['bytes_sent'] for each in line) / 1e6:,.1f}",
        "; ".join(f"missed: {each}" if each in missed else each for each in row["targets"]),
    ]


def _mean(line: list[dict[str, Any]], name: str, unit: float, form: str) -> str:
    """Mean and standard deviation."""
    values = [unit * row[name] for row in line if row.get(name) is not None]
    if not values:
        return cell(None, form)
    spread = f" ± {format(statistics.stdev(values), form)}" if len(values) > 1 else ""
    return format(statistics.fmean(values), form) + spread


TRAINING = Training()
