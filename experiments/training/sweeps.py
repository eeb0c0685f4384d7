"""The three sweeps of the volunteers' platform of 2018 (its section 5.1): rate, epochs and batch size, with 0, 1 and 2
workers beside the host, which is a worker itself.

There each worker goes through all images as often as the host alone would, so more workers do more work. Beside each
figure stands what the same machines have reached after as much work, all together, as the host does alone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.harness import Experiment, Options, Record, Run, Table, grouped, option
from experiments.training.cases import Judged, p_value
from tierkit.errors import InvalidInput
from tierkit.extras import training_extra

__all__ = ["SWEEPS", "WORKERS", "Trained", "judge", "trainings"]

WORKERS = (0, 1, 2)
"""Beside the host."""
RATE, EPOCHS, BATCH = 0.2, 10, 100
"""The source's defaults. It does not list them; its three tables have the same row where they meet, at these values."""
STEP_S, SERVE_S, SPREAD = 0.0014, 0.0002, 0.1
"""Of a machine and of the host. They decide in which order updates come, and about no figure else."""

_SOURCE: dict[str, dict[float, tuple[float, float, float]]] = {
    "rate": {
        0.1: (0.82, 0.86, 0.89),
        0.2: (0.86, 0.88, 0.91),
        0.3: (0.87, 0.90, 0.92),
        0.4: (0.89, 0.90, 0.92),
        0.5: (0.89, 0.91, 0.93),
        1.0: (0.91, 0.93, 0.95),
    },
    "epochs": {
        1: (0.62, 0.72, 0.80),
        2: (0.72, 0.80, 0.83),
        3: (0.77, 0.82, 0.85),
        4: (0.80, 0.85, 0.88),
        5: (0.82, 0.86, 0.90),
        8: (0.85, 0.88, 0.91),
        10: (0.86, 0.88, 0.91),
        15: (0.88, 0.90, 0.93),
        20: (0.89, 0.91, 0.94),
    },
    "batch": {
        100: (0.86, 0.88, 0.91),
        200: (0.82, 0.86, 0.92),
        300: (0.78, 0.82, 0.85),
        400: (0.75, 0.80, 0.84),
        500: (0.72, 0.77, 0.81),
        1000: (0.62, 0.72, 0.77),
    },
}
"""Its accuracies by the value that is varied, with 0, 1 and 2 workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One training run, which several rows of the tables may be taken from: the rate is constant, so a run of 20 epochs
    has been the run of 10 epochs before."""

    rate: float
    batch: int
    workers: int
    """Beside the host."""
    epochs: tuple[int, ...] = field(default=(EPOCHS,))
    """After which it is measured: so many of each machine, and so many of all together."""


def trainings(sweeps: Sequence[str], most_values: int | None = None) -> list[Trained]:
    """The runs that these sweeps need.

    Args:
        most_values: of each sweep, its first ones.
    """
    wanted: dict[tuple[float, int], set[int]] = {}
    for sweep in sweeps:
        for value in list(_SOURCE[sweep])[:most_values]:
            rate, epochs, batch = _settings(sweep, value)
            wanted.setdefault((rate, batch), set()).add(epochs)
    return [
        Trained(rate=rate, batch=batch, workers=workers, epochs=tuple(sorted(epochs)))
        for (rate, batch), epochs in wanted.items()
        for workers in WORKERS
    ]


def _settings(sweep: str, value: float) -> tuple[float, int, int]:
    """Rate, epochs and batch size of a row."""
    return (
        value if sweep == "rate" else RATE,
        int(value) if sweep == "epochs" else EPOCHS,
        int(value) if sweep == "batch" else BATCH,
    )


class Chosen(Options):
    """How many runs."""

    seeds: int = option(5, "Runs of each line, from --seed on.", quick=1, min=1, max=16)
    only: list[str] | None = option(
        None, f"A sweep; may be repeated. Default: all, {', '.join(_SOURCE)}.", metavar="SWEEP"
    )
    values: int | None = option(None, "Rows of each sweep, its first ones. Default: all; 1 with --quick.", min=1, max=9)
    images: int = option(60_000, "Images to train on, some held out.", quick=6_000, min=240, max=60_000)
    processes: int = option(2, "Runs that are computed at a time, each in a process of its own.", min=1, max=256)
    data: Path | None = option(None, "Folder that holds mnist/.", envvar="TERRACE_DATA", metavar="DIRECTORY")


class Sweeps(Experiment):
    """The volunteers' platform of 2018: what rate, epochs and batch size do with 0, 1 and 2 workers beside the host."""

    name = "training-sweeps"
    options = Chosen
    ignores = frozenset({"tasks"})
    profile = None
    repeats = ("runs", "runs that differ in their seed")
    quick = "{images:,} images rather than 60,000, one seed rather than 5, one value of each sweep"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        wrong = [name for name in chosen.only or () if name not in _SOURCE]
        if wrong:
            raise InvalidInput(f"there is no sweep {wrong[0]!r}; there are {', '.join(_SOURCE)}")
        with training_extra("training on the fleet", "learn"):
            from experiments.training.sweeping import NETWORK, STRATEGY, train
        names = [name for name in _SOURCE if name in (chosen.only or _SOURCE)]
        lines = trainings(names, chosen.values or (1 if run.request.quick else None))
        seeds = range(run.request.seed, run.request.seed + chosen.seeds)
        run.config |= {
            "network": NETWORK,
            "strategy": STRATEGY,
            "seeds": list(seeds),
            "only": names,
            "images": chosen.images,
            "step_s": STEP_S,
            "serve_s": SERVE_S,
            "spread": SPREAD,
        }
        run.expect(len(lines) * len(seeds))
        loop = asyncio.get_running_loop()
        free = asyncio.Semaphore(chosen.processes)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(chosen.processes, mp_context=context) as pool:

            async def once(line: Trained, seed: int) -> None:
                async with free:
                    words = f"rate {line.rate:g}, batch {line.batch}, {line.workers} workers, seed {seed}"
                    with run.step(words):
                        found = await loop.run_in_executor(pool, train, line, seed, chosen.images, chosen.data)
                run.add(rate=line.rate, batch=line.batch, workers=line.workers, seed=seed, measured=found)

            try:
                async with asyncio.TaskGroup() as group:
                    for seed in seeds:
                        for line in lines:
                            group.create_task(once(line, seed))
            except BaseException as exc:
                pool.shutdown(cancel_futures=True)
                raise (exc.exceptions[0] if isinstance(exc, ExceptionGroup) else exc) from None

    def rows(self, record: Record) -> list[dict[str, Any]]:
        points = sorted(record["points"], key=lambda point: point["seed"])  # they end in any order
        lines = grouped(points, "rate", "batch", "workers")
        rows = []
        for sweep in record["config"]["only"]:
            for value, source in _SOURCE[sweep].items():
                rate, epochs, batch = _settings(sweep, value)
                found = {
                    workers: [
                        each for point in lines.get((rate, batch, workers), ()) for each in _measured(point, epochs)
                    ]
                    for workers in WORKERS
                }
                if not all(found.values()):
                    continue
                own = {str(w): [each["own"] for each in line] for w, line in found.items()}
                equal = {str(w): [each["equal"] for each in line] for w, line in found.items()}
                judged = judge(own)
                rows.append(
                    {
                        "sweep": sweep,
                        "value": value,
                        "runs": min(map(len, own.values())),
                        "source": list(source),
                        "accuracy": own,
                        "equal_work": equal,
                        "targets": [judged.words],
                        "missed": [] if record["config"]["quick"] or judged.reached else [judged.words],
                    }
                )
        return rows

    def table(self, record: Record) -> Table:
        return Table(
            headings="sweep | value | n | source, % | 0 workers, % | 1 worker, % | 2 workers, % "
            "| 1 worker, equal work, % | 2 workers, equal work, % | target",
            rows=[
                [
                    row["sweep"],
                    format(row["value"], "g"),
                    str(row["runs"]),
                    " / ".join(f"{100 * each:.0f}" for each in row["source"]),
                    *(_mean(row["accuracy"][str(workers)]) for workers in WORKERS),
                    *(_mean(row["equal_work"][str(workers)]) for workers in WORKERS[1:]),
                    "; ".join(f"missed: {each}" if each in row["missed"] else each for each in row["targets"]),
                ]
                for row in self.rows(record)
            ],
            spare=("target",),
        )


def judge(accuracies: Mapping[str, Sequence[float]]) -> Judged:
    """The target of a row, as the source has it: with each worker more the accuracy is higher, in the mean over seeds
    and by the exact one-sided test of the paired differences with p < 0.05.

    Args:
        accuracies: by the number of workers, of the same seeds in the same order.
    """
    words, reached = [], True
    for fewer, more in pairwise(WORKERS):
        pairs = zip(accuracies[str(more)], accuracies[str(fewer)], strict=True)
        differences = [high - low for high, low in pairs]
        mean, chance = statistics.fmean(differences), p_value(differences)
        words.append(f"{100 * mean:+.2f} (p = {chance:.3f})")
        reached = reached and mean > 0 and chance < 0.05
    return Judged(words=f"{', then '.join(words)} points with each worker more", reached=reached)


def _measured(point: Mapping[str, Any], epochs: int) -> list[Mapping[str, float]]:
    """What a run had reached by then, if it came so far: `own` after so many epochs of each machine, `equal` after so
    many of all."""
    return [point["measured"][str(epochs)]] if str(epochs) in point["measured"] else []


def _mean(values: Sequence[float]) -> str:
    """Mean and standard deviation, in percent."""
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{spread}"


SWEEPS = Sweeps()
