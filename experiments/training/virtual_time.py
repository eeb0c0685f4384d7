"""Whether a run on virtual time takes as long as the same run of real processes.

Each run trains with a real host and four real workers, each of which a control group of the system holds to a quarter
of a core. What the simulation is given comes from elsewhere: a step from four such workers with a host of their own,
right before and right after the run, a request from the processor time of a host that is kept busy. So the two agree if
what the simulation adds is right: that workers share the work, wait for the host and for each other, and that the last
units end as they do.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.harness import Experiment, Options, Record, Run, Table, grouped, option
from experiments.training.cases import Judged
from tierkit.errors import SetupError
from tierkit.extras import training_extra

__all__ = ["MOST_DRIFT", "VIRTUAL_TIME", "Seen", "drifted", "judge", "of_a_step", "thinned"]

Seen = tuple[float, int]
"""Seconds since a run's first unit of work, and its updates by then."""

WORKERS, SHARE = 4, 0.25
EPOCHS = {"downpour": 6, "fedavg": 15}
"""Of the runs of each strategy: at least 20 s."""
_WITHIN = 0.1
MOST_DRIFT = 0.05
"""Between what a step takes before a run and after it. More, and the machine's speed has changed: the run is done
again."""
_WARM_S = 1.5
"""A first step takes longer than all others."""
_KEPT_S = 1.0
"""Between two looks at a run that the record keeps."""


class Chosen(Options):
    """How many runs, and how long ones."""

    runs: int = option(5, "Runs of each strategy, seeds from --seed on.", quick=1, min=1, max=100)
    epochs: int | None = option(
        None,
        f"Of each run. Default: {', '.join(f'{count} with {name}' for name, count in EPOCHS.items())}; 1 with --quick.",
        min=1,
        max=1_000,
    )
    alone_s: float = option(8.0, "How long workers run that have a host each.", quick=4.0, min=2.0, max=100.0)
    again: int = option(
        3, "How often a run is done again while the machine's speed changes around it.", quick=0, min=0, max=100
    )
    exchanges: int = option(1_000, "Exchanges by which the cost of a host is measured.", quick=100, min=4, max=100_000)
    data: Path | None = option(None, "Folder that holds mnist/.", envvar="TERRACE_DATA", metavar="DIRECTORY")


class VirtualTime(Experiment):
    """Whether training on virtual time takes as long as on real workers with a quarter of a core each."""

    name = "virtual-time"
    options = Chosen
    ignores = frozenset({"tasks"})
    profile = None
    repeats = ("runs", "runs that differ in their seed, each with a measurement of its own of what a step takes")
    quick = "one run of one epoch rather than 5 runs of more"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        with training_extra("training on the fleet", "learn"):
            from experiments.training.real import virtual_run
            from experiments.training.running import NETWORK, serve_s
        seeds = range(run.request.seed, run.request.seed + chosen.runs)
        run.config |= {"network": NETWORK, "workers": WORKERS, "cores": SHARE, "seeds": list(seeds)}
        run.config |= {"alone_s": chosen.alone_s, "exchanges": chosen.exchanges, "most_drift": MOST_DRIFT}
        run.expect(len(EPOCHS) * (1 + 4 * len(seeds)))
        core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        flags = ["--network", NETWORK, *([] if chosen.data is None else ["--data", str(chosen.data.absolute())])]
        costs = {}
        for name in EPOCHS:
            with run.step(f"the cost of a host with {name}"):
                costs[name] = await serve_s(name, flags, exchanges=chosen.exchanges, core=core)
        for seed in seeds:
            for name, usual in EPOCHS.items():
                epochs = chosen.epochs or (1 if run.request.quick else usual)
                real, around, passed_over = await self._between(run, chosen, name, seed, epochs, costs[name])
                given = {what: statistics.fmean(each[what] for each in around) for what in ("step_s", "sync_s")}
                with run.step(f"{name}: on virtual time"):
                    virtual = await asyncio.to_thread(
                        virtual_run,
                        name,
                        seed,
                        workers=WORKERS,
                        epochs=epochs,
                        serve_s=costs[name],
                        **given,
                        data=chosen.data,
                    )
                run.add(
                    **{
                        "strategy": name,
                        "workers": WORKERS,
                        "seed": seed,
                        "epochs": epochs,
                        "virtual_seconds": virtual["virtual_seconds"],
                        "virtual_updates": virtual["updates"],
                        "serve_s": costs[name],
                        "drift": drifted(*(each["step_s"] for each in around)),
                        "around": around,
                        "passed_over": passed_over,
                        **given,
                        **real,
                    }
                )

    async def _between(
        self, run: Run, chosen: Chosen, name: str, seed: int, epochs: int, serve_s: float
    ) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
        """A real run; what a step took right before and right after it; and the runs before it, which were passed over
        since the machine's speed changed around them, whatever came of them."""
        from experiments.training.real import real_run, step_s

        async def step() -> dict[str, Any]:
            with run.step(f"{name}: what a step takes workers with a host each"):
                return await step_s(
                    name, seed, workers=WORKERS, share=SHARE, serve_s=serve_s, enough_s=chosen.alone_s, data=chosen.data
                )

        passed_over: list[dict[str, Any]] = []
        after = await step()
        while True:
            before = after
            with run.step(f"{name}: {WORKERS} real workers"):
                real = await real_run(name, seed, workers=WORKERS, share=SHARE, epochs=epochs, data=chosen.data)
            after = await step()
            drift = drifted(before["step_s"], after["step_s"])
            if drift <= MOST_DRIFT or len(passed_over) == chosen.again:
                return real, [before, after], passed_over
            passed_over.append({"drift": drift, "seconds": real["seconds"], "around": [before, after]})
            run.expect(2)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        quick = record["config"]["quick"]
        verdicts = {name: judge(line) for (name,), line in grouped(record["points"], "strategy").items()}
        runs = {name: len(line) for (name,), line in grouped(record["points"], "strategy").items()}
        return [
            {
                **{name: value for name, value in point.items() if name not in ("seen", "around", "passed_over")},
                "done_again": len(point.get("passed_over", ())),
                "ratio": point["virtual_seconds"] / point["seconds"],
                "runs": runs[point["strategy"]],
                "targets": [verdicts[point["strategy"]].words],
                # A quick run is so short that its begin and end are much of it.
                "missed": [] if quick or verdicts[point["strategy"]].reached else [verdicts[point["strategy"]].words],
            }
            for point in record["points"]
        ]

    def table(self, record: Record) -> Table:
        return Table(
            headings="strategy | n | real, s | virtual, s | virtual / real | step, ms | drift, % | done again | "
            "request, ms | disk, ms | cores of a worker | target",
            rows=[_shown(line) for line in grouped(self.rows(record), "strategy").values()],
            spare=("disk, ms", "request, ms", "step, ms"),
        )


def of_a_step(seen: Sequence[Seen], *, steps: int, host_s: float) -> float:
    """What a step takes a worker that is alone with a host: what its updates took, without what the host did meanwhile.

    Args:
        seen: of its run. What it does at first does not count.
        steps: of an update.
        host_s: what the host takes for an update, and for the weights that come before it.

    Raises:
        SetupError: it was too short to tell.
    """
    first = next((each for each in seen if each[0] >= _WARM_S), None)
    if first is None or seen[-1][1] == first[1]:
        raise SetupError(f"a worker alone did too few updates after its first {_WARM_S:g} s: let it run for longer")
    seconds, updates = seen[-1][0] - first[0], seen[-1][1] - first[1]
    return (seconds / updates - host_s) / steps


def drifted(before: float, after: float) -> float:
    """By which share of their mean two measurements of the same differ."""
    return abs(after - before) / ((before + after) / 2)


def thinned(seen: Sequence[Seen]) -> list[Seen]:
    """One of about every second, and the last."""
    kept: list[Seen] = []
    for each in seen:
        if not kept or each[0] >= kept[-1][0] + _KEPT_S:
            kept.append(each)
    if kept and kept[-1] != seen[-1]:
        kept.append(seen[-1])
    return kept


def judge(line: Sequence[Any]) -> Judged:
    """The target of the runs of a strategy: each one within 10 %."""
    worst = max((each["virtual_seconds"] / each["seconds"] for each in line), key=lambda ratio: abs(ratio - 1))
    return Judged(
        words=f"farthest from 1: {worst:.3f} (each run within {100 * _WITHIN:g} %)", reached=abs(worst - 1) <= _WITHIN
    )


def _shown(line: Sequence[Any]) -> list[str]:
    row = line[0]
    return [
        row["strategy"],
        str(len(line)),
        _mean([each["seconds"] for each in line], ".2f"),
        _mean([each["virtual_seconds"] for each in line], ".2f"),
        _mean([each["ratio"] for each in line], ".3f"),
        _mean([1e3 * each["step_s"] for each in line], ".2f"),
        _mean([1e2 * each["drift"] for each in line if "drift" in each], ".1f"),
        str(sum(each.get("done_again", 0) for each in line)),
        _mean([1e3 * each["serve_s"] for each in line], ".2f"),
        _mean([1e3 * each["sync_s"] for each in line], ".2f"),
        _mean([share for each in line for share in each["cores"]], ".3f"),
        "; ".join(f"missed: {each}" if each in row["missed"] else each for each in row["targets"]),
    ]


def _mean(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation."""
    if not values:
        return "-"
    spread = f" ± {format(statistics.stdev(values), form)}" if len(values) > 1 else ""
    return format(statistics.fmean(values), form) + spread


VIRTUAL_TIME = VirtualTime()
