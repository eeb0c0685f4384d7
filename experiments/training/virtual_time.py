"""Whether a run on virtual time takes as long as the same run of real processes.

Each run trains with a real host and four real workers, each of which rests after each step until it has had a quarter
of a core. The simulation is given what a step costs: the processor time that the workers of this very run used for one;
and from elsewhere what a request takes when nobody else asks that host, and what the disk takes. The rest it must find:
how the workers share the steps, wait for the host and for each other, in which order updates come, and how the last
units end.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.harness import Experiment, Options, Record, Run, Table, grouped, option
from experiments.training.cases import Judged
from tierkit.extras import training_extra

__all__ = ["VIRTUAL_TIME", "judge"]

WORKERS, SHARE = 4, 0.25
EPOCHS = {"downpour": 6, "fedavg": 15}
"""Of the runs of each strategy."""
_OFTEN, _BEFORE = "downpour", 2
"""By which strategy the time of a request is measured, in this many epochs: one with an exchange each step."""
_WITHIN = 0.1


class Chosen(Options):
    """How many runs, and how long ones."""

    runs: int = option(5, "Runs of each strategy, seeds from --seed on.", quick=1, min=1, max=100)
    epochs: int | None = option(
        None,
        f"Of each run. Default: {', '.join(f'{count} with {name}' for name, count in EPOCHS.items())}; 1 with --quick.",
        min=1,
        max=1_000,
    )
    data: Path | None = option(None, "Folder that holds mnist/.", envvar="TERRACE_DATA", metavar="DIRECTORY")


class VirtualTime(Experiment):
    """Whether training on virtual time takes as long as on real workers with a quarter of a core each."""

    name = "virtual-time"
    options = Chosen
    ignores = frozenset({"tasks"})
    profile = None
    repeats = ("runs", "runs that differ in their seed")
    quick = "one run of one epoch rather than 5 runs of more"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        with training_extra("training on the fleet", "learn"):
            from experiments.training.real import real_run, request_steps, virtual_run
            from experiments.training.running import NETWORK
        seeds = range(run.request.seed, run.request.seed + chosen.runs)
        run.config |= {"network": NETWORK, "workers": WORKERS, "cores": SHARE, "seeds": list(seeds)}
        run.expect(1 + 2 * len(EPOCHS) * len(seeds))
        of_all: Any = {"workers": WORKERS, "share": SHARE, "data": chosen.data}
        with run.step("the time of a request"):
            request = await request_steps(_OFTEN, epochs=1 if run.request.quick else _BEFORE, **of_all)
        for seed in seeds:
            for name, usual in EPOCHS.items():
                epochs = chosen.epochs or (1 if run.request.quick else usual)
                with run.step(f"{name}: {WORKERS} real workers"):
                    real = await real_run(name, seed, epochs=epochs, give_way=True, **of_all)
                given = {what: real[what] for what in ("step_s", "spread", "sync_s")}
                with run.step(f"{name}: on virtual time"):
                    virtual = await asyncio.to_thread(
                        virtual_run,
                        name,
                        seed,
                        workers=WORKERS,
                        epochs=epochs,
                        serve_s=request * real["step_s"],
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
                        "serve_s": request * real["step_s"],
                        **real,
                    }
                )

    def rows(self, record: Record) -> list[dict[str, Any]]:
        quick = record["config"]["quick"]
        verdicts = {name: judge(line) for (name,), line in grouped(record["points"], "strategy").items()}
        runs = {name: len(line) for (name,), line in grouped(record["points"], "strategy").items()}
        return [
            {
                **{name: value for name, value in point.items() if name not in ("seen", "around", "passed_over")},
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
            headings="strategy | n | real, s | virtual, s | virtual / real | step, ms | "
            "request, ms | disk, ms | cores of a worker | target",
            rows=[_shown(line) for line in grouped(self.rows(record), "strategy").values()],
            spare=("disk, ms", "request, ms", "step, ms"),
        )


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
