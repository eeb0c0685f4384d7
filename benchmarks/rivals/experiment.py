"""`python -m benchmarks training-rivals`: Terrace and others train one network to one accuracy, in turns.

Each is a script below `contenders/` that runs in a separate environment, reads the same images and the same first
weights, and ends with one line of JSON. A slow minute of the machine hits all of them: a round has one run of each, and
ratios are taken within a round.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import Program
from benchmarks.peers.environments import installed_version
from benchmarks.peers.measuring import install
from experiments.harness import Experiment, Options, Point, Record, Run, Table, cell, grouped, option
from experiments.processes import running
from tierkit.errors import SetupError, TerraceError
from tierkit.extras import training_extra

__all__ = ["RIVALS", "TRAINERS", "ratios", "result_of", "turns"]

_SCRIPTS = Path(__file__).parent / "contenders"
_FLAGS = ("data", "rate", "period", "seed", "workers", "accuracy")

_NETWORK = _SCRIPTS / "wrn-10-1.toml"
_WORKERS = 2
"""One for each core of the measuring machine: with a step of 50 ms and more, further workers would wait for a core, and
not for each other."""
_RUN_S = 150.0
"""Seconds for a run to reach the accuracy, from the start of its processes."""
_POLL_S = 0.05
_TORCH = "torch==2.13.0"
_RATE = 0.1
"""Learning rate of each worker, from the first step to the last."""
_MOST_OF_TORCH = 1.15
"""Largest median ratio of Terrace's time to the faster row of torch.distributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer(Program):
    """One contender."""

    period: int = 50
    """Steps of a worker between two exchanges, and between two measurements."""
    exchanges: str | None = None
    """Steps between two exchanges in the table, if they differ from the period."""


def _script(name: str, *more: str) -> tuple[str, ...]:
    flags = [word for flag in _FLAGS for word in (f"--{flag}", f"{{{flag}}}")]
    return (str(_SCRIPTS / f"train_{name}.py"), *flags, *more)


ALONE = Trainer(
    name="alone",
    title="one process, torch",
    command=_script("torch", "--how", "alone"),
    distribution="torch",
    exchanges="-",
)
ALL_REDUCE = Trainer(
    name="all-reduce",
    title="torch.distributed (gloo), all-reduce",
    command=_script("torch", "--how", "all-reduce"),
    distribution="torch",
    exchanges="1",
)
LOCAL = Trainer(
    name="local",
    title="torch.distributed (gloo), local SGD",
    command=_script("torch", "--how", "local"),
    distribution="torch",
)
TERRACE = Trainer(name="terrace", title="Terrace", command=_script("terrace"), distribution="terrace-inference")
FLOWER = Trainer(
    name="flower",
    title="Flower",
    command=_script("flower"),
    requirements=("flwr==1.42.0", _TORCH, "numpy"),
    distribution="flwr",
    environment={"FLWR_TELEMETRY_ENABLED": "0"},
)
HIVEMIND = Trainer(
    name="hivemind",
    title="hivemind",
    command=_script("hivemind"),
    requirements=("hivemind==1.1.12", _TORCH, "numpy"),
    distribution="hivemind",
    # It averages at most every 3 s or so: with fewer steps its peers wait for each other.
    period=100,
)
TRAINERS = (ALONE, ALL_REDUCE, LOCAL, TERRACE, FLOWER, HIVEMIND)


class Chosen(Options):
    """Rounds, target accuracy and folders."""

    rounds: int = option(5, "Runs of each, from --seed on.", quick=1, min=1, max=100)
    accuracy: float = option(0.36, "On the images held out, at which a run ends.", quick=0.2, min=0.1, max=0.6)
    venvs: Path | None = option(None, "Where the environments lie. Default: ~/.cache/terrace/peers.", file_okay=False)
    data: Path | None = option(None, "Folder that holds cifar-100-python/.", envvar="TERRACE_DATA", metavar="DIRECTORY")


class Rivals(Experiment):
    """Terrace, torch.distributed, Flower and hivemind: the time in which two workers reach an accuracy on CIFAR-100."""

    name = "training-rivals"
    options = Chosen
    ignores = frozenset({"tasks"})
    profile = None
    repeats = ("rounds", "rounds")
    quick = "{rounds} rounds rather than 5, to {accuracy:g}"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        with training_extra("training on the fleet", "learn"):
            from benchmarks.rivals.task import write_task
        run.config |= {
            "network": _NETWORK.stem,
            "workers": _WORKERS,
            "cores": os.cpu_count(),
            "threads": 1,
            "rounds": chosen.rounds,
            "accuracy": chosen.accuracy,
            "rate": _RATE,
        }
        run.expect(chosen.rounds * len(TRAINERS))
        installed = await install(run, TRAINERS, chosen.venvs)
        run.config["torch"] = {
            name: installed_version(found.python, "torch")
            for name, found in installed.items()
            if not isinstance(found, TerraceError)
        }

        first = run.request.seed
        await asyncio.to_thread(write_task, chosen.data, _NETWORK, range(first, first + chosen.rounds), run.folder)

        for number in range(chosen.rounds):
            for trainer in turns(TRAINERS, number):
                point = {"round": number, "trainer": trainer.name, "title": trainer.title, "seed": first + number}
                point |= {"rate": _RATE, "period": trainer.period}
                with run.step(f"round {number + 1} of {chosen.rounds}, {trainer.title}"):
                    figures: Mapping[str, Any]
                    try:
                        if isinstance(found := installed[trainer.name], TerraceError):
                            raise found
                        point["version"] = found.version
                        values = {
                            "data": str(run.folder.absolute()),
                            **{name: str(point[name]) for name in ("rate", "period", "seed")},
                            "workers": str(_WORKERS),
                            "accuracy": str(chosen.accuracy),
                        }
                        figures = await _trained(trainer, found.python, values, chosen.data)
                    except TerraceError as exc:
                        figures = {"failure": str(exc)}
                run.add(**point, **figures)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        shares = ratios(record["points"])
        lines = grouped(record["points"], "trainer").items()
        rows = [_row(points, shares.get(name)) for (name,), points in lines]
        rows.sort(key=lambda row: [trainer.name for trainer in TRAINERS].index(row["trainer"]))
        if not record["config"]["quick"]:  # too short to be judged
            _judge(rows, record["config"]["rounds"])
        return rows

    def table(self, record: Record) -> Table:
        return Table(
            headings=f"trained by | rate | steps between exchanges | rounds | s to {record['config']['accuracy']:g} | "
            "steps of each | ms a step | updates | Terrace's time, of theirs | target",
            rows=[_shown(row) for row in self.rows(record)],
            spare=("updates", "rounds", "steps of each"),
        )


async def _trained(trainer: Trainer, python: Path, values: Mapping[str, str], data: Path | None) -> dict[str, Any]:
    """Result of a run.

    Raises:
        SetupError: it ended without a result, or did not get there in time.
    """
    with running(trainer.filled(python, values), _environment(trainer, data), core=None) as processes:
        try:
            async with asyncio.timeout(_RUN_S):
                while True:
                    alive = processes.alive  # asked first: what it wrote before its end is all there is
                    if (found := result_of(processes.output())) is not None:
                        if trainer is not ALONE and not found["updates"]:
                            raise SetupError("it ended before its workers had exchanged anything")
                        return found
                    if not alive:
                        raise SetupError(f"{trainer.title} ended without a result: {processes.log_tail()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise SetupError(f"not reached within {_RUN_S:g} s: {processes.log_tail()}") from None


def _environment(trainer: Trainer, data: Path | None) -> dict[str, str]:
    return dict(trainer.environment) | ({} if data is None else {"TERRACE_DATA": str(data.absolute())})


def result_of(lines: Iterable[str]) -> dict[str, Any] | None:
    """The figures that a run has printed among its log; None while there are none."""
    for line in lines:
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and {"seconds", "accuracy", "updates"} <= found.keys():
                return found
    return None


def turns(trainers: Sequence[Trainer], number: int) -> list[Trainer]:
    """The order of a round: each begins in its turn."""
    at = number % len(trainers)
    return [*trainers[at:], *trainers[:at]]


# --- from the record ------------------------------------------------------------------------------------------------


def ratios(points: Iterable[Point]) -> dict[str, list[float]]:
    """Terrace's time as a share of each rival's, of the rounds in which both got there."""
    rounds = grouped((point for point in points if "seconds" in point), "round")
    found: dict[str, list[float]] = {}
    for points_of_round in rounds.values():
        seconds = {point["trainer"]: point["seconds"] for point in points_of_round}
        own = seconds.pop(TERRACE.name, None)
        for name, theirs in seconds.items():
            if own is not None:
                found.setdefault(name, []).append(own / theirs)
    return found


def _row(points: Sequence[Point], shares: Sequence[float] | None) -> dict[str, Any]:
    first, reached = points[0], [point for point in points if "seconds" in point]
    seconds = [point["seconds"] for point in reached]

    def median(figure: Callable[[Point], float]) -> float | None:
        return statistics.median(map(figure, reached)) if reached else None

    return {
        **{name: first.get(name) for name in ("trainer", "title", "version", "rate", "period")},
        "rounds": len(reached),
        "failure": next((point["failure"] for point in points if "failure" in point), ""),
        "seconds": statistics.median(seconds) if seconds else None,
        "min_seconds": min(seconds, default=None),
        "max_seconds": max(seconds, default=None),
        "steps": median(lambda point: point["steps"]),
        "step_ms": median(lambda point: 1000 * point["ended_s"] / point["steps"]),
        "updates": median(lambda point: point["updates"]),
        "ratio": statistics.median(shares) if shares else None,
        "min_ratio": min(shares, default=None) if shares else None,
        "max_ratio": max(shares, default=None) if shares else None,
        "target": "",
        "missed": [],
    }


def _judge(rows: Sequence[dict[str, Any]], rounds: int) -> None:
    """Add the target to each row, and why it is missed."""
    of_torch = [row for row in rows if row["trainer"] in (ALL_REDUCE.name, LOCAL.name)]
    better = min((row for row in of_torch if row["seconds"] is not None), key=lambda row: row["seconds"], default=None)
    for row in rows:
        compared = row is better or row["trainer"] in (FLOWER.name, HIVEMIND.name)
        if row["trainer"] == TERRACE.name and row["rounds"] < rounds:
            row["missed"] = [f"reached in {row['rounds']} of {rounds} rounds"]
        elif (compared or row["seconds"] is None) and row["ratio"] is None:
            row["missed"] = ["not compared"]
        elif row is better:
            row["target"] = f"median at most {_MOST_OF_TORCH:g}"
            if row["ratio"] > _MOST_OF_TORCH:
                row["missed"] = [f"{row['ratio']:.3f} of the time of {row['title']} (at most {_MOST_OF_TORCH:g})"]
        elif compared:
            row["target"] = "below 1 in each round"
            if row["max_ratio"] >= 1 or row["rounds"] < rounds:
                row["missed"] = [
                    f"{row['max_ratio']:.3f} of {row['title']}'s time (below 1 in each of {rounds} rounds)"
                ]


def _shown(row: Mapping[str, Any]) -> list[str]:
    exchanges = {trainer.name: trainer.exchanges for trainer in TRAINERS}[row["trainer"]]
    return [
        f"{row['title']} {row['version'] or ''}".strip(),
        f"{row['rate']:g}",
        exchanges or str(row["period"]),
        str(row["rounds"]),
        f"unmeasured: {row['failure']}"
        if row["seconds"] is None
        else "{seconds:.2f} ({min_seconds:.2f} to {max_seconds:.2f})".format(**row),
        cell(row["steps"], ",.0f"),
        cell(row["step_ms"], ".1f"),
        cell(row["updates"], ",.0f"),
        "-" if row["ratio"] is None else "{ratio:.3f} ({min_ratio:.3f} to {max_ratio:.3f})".format(**row),
        "; ".join(f"missed: {each}" for each in row["missed"]) or row["target"],
    ]


RIVALS = Rivals()
