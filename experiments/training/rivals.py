"""`terrace experiment training-rivals`: Terrace, hivemind and Flower train one network to one accuracy, in turns.

Each is a script below `contenders/` that runs in an environment of its own, reads the same images and the same first
weights, and ends with one line of JSON. A slow minute of the machine hits all of them: a round has one run of each, and
ratios are taken within a round.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.harness import Experiment, Options, Point, Record, Run, Table, cell, grouped, option
from experiments.peers.contenders import Program
from experiments.peers.environments import installed_version
from experiments.peers.measuring import install
from experiments.peers.processes import running
from tierkit.errors import SetupError, TerraceError
from tierkit.extras import training_extra

__all__ = ["RIVALS", "TRAINERS", "Choice", "fastest", "ratios", "result_of", "turns"]

_SCRIPTS = Path(__file__).parent / "contenders"
_FLAGS = ("data", "rate", "period", "seed", "workers", "accuracy")

_WORKERS = 4
_RUN_S = 180.0
"""For a run to reach the accuracy, from the start of its processes on."""
_POLL_S = 0.05
_TRIAL_SEED = 1_000
"""Added to the seeds of trials, so that no round repeats one."""
_TORCH = "torch==2.13.0"
_RATES = (0.05, 0.1, 0.2)
_TARGET = 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What is tuned."""

    rate: float
    """Learning rate of a worker, from the first step to the last."""
    period: int
    """Steps of a worker between two exchanges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer(Program):
    """One contender, and the steps between two exchanges among which it has the choice."""

    periods: tuple[int, ...]

    @property
    def choices(self) -> list[Choice]:
        """All that it is tried with; that in the middle of the list stands for them where nothing is tried."""
        return [Choice(rate, period) for rate in _RATES for period in self.periods]


def _script(name: str) -> tuple[str, ...]:
    flags = [word for flag in _FLAGS for word in (f"--{flag}", f"{{{flag}}}")]
    return (str(_SCRIPTS / f"train_{name}.py"), *flags)


TERRACE = Trainer(
    name="terrace", title="Terrace", command=_script("terrace"), distribution="terrace", periods=(25, 50, 100)
)

TRAINERS: tuple[Trainer, ...] = (
    TERRACE,
    Trainer(
        name="hivemind",
        title="hivemind",
        command=_script("hivemind"),
        requirements=("hivemind==1.1.12", _TORCH, "numpy"),
        distribution="hivemind",
        # It averages at most every 3 s or so: with fewer steps its peers wait for each other.
        periods=(250, 500, 1000),
    ),
    Trainer(
        name="flower",
        title="Flower",
        command=_script("flower"),
        requirements=("flwr==1.42.0", _TORCH, "numpy"),
        distribution="flwr",
        environment={"FLWR_TELEMETRY_ENABLED": "0"},
        periods=(25, 50, 100),
    ),
)


class Chosen(Options):
    """How often, and to where."""

    rounds: int = option(5, "Runs of each, from --seed on.", quick=1, min=1, max=100)
    trials: int = option(
        1, "Runs of each with each of its rates and periods, of which it keeps the fastest.", quick=0, min=0, max=10
    )
    accuracy: float = option(0.96, "On the images held out, at which a run ends.", quick=0.9, min=0.2, max=0.97)
    venvs: Path | None = option(None, "Where the environments lie. Default: ~/.cache/terrace/peers.", file_okay=False)
    data: Path | None = option(None, "Folder that holds mnist/.", envvar="TERRACE_DATA", metavar="DIRECTORY")


class Rivals(Experiment):
    """Terrace beside hivemind and Flower: the time in which four workers train MNIST to 0.96."""

    name = "training-rivals"
    options = Chosen
    ignores = frozenset({"tasks"})
    profile = None
    repeats = ("rounds", "rounds")
    quick = "{rounds} rounds rather than 5, to {accuracy:g}, nothing tuned"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        with training_extra("training on the fleet", "learn"):
            from experiments.training.running import NETWORK, write_task
        run.config |= {
            "network": NETWORK,
            "workers": _WORKERS,
            "threads": 1,
            "rounds": chosen.rounds,
            "trials": chosen.trials,
            "accuracy": chosen.accuracy,
            "choices": {trainer.name: [asdict(each) for each in trainer.choices] for trainer in TRAINERS},
        }
        tried = sum(len(trainer.choices) for trainer in TRAINERS)
        run.expect(chosen.trials * tried + chosen.rounds * len(TRAINERS))
        installed = await install(run, TRAINERS, chosen.venvs)
        run.config["torch"] = {
            name: installed_version(found.python, "torch")
            for name, found in installed.items()
            if not isinstance(found, TerraceError)
        }

        async def once(trainer: Trainer, choice: Choice, seed: int, words: str, **where: Any) -> None:
            with run.step(f"{words}, {trainer.title}, rate {choice.rate:g}, {choice.period} steps"):
                task = run.folder / f"task-{seed}.npz"
                if not task.exists():
                    await asyncio.to_thread(write_task, chosen.data, seed, task)
                figures: Mapping[str, Any]
                try:
                    if isinstance(found := installed[trainer.name], TerraceError):
                        raise found
                    values = {
                        "data": str(task.absolute()),
                        **{name: str(value) for name, value in asdict(choice).items()},
                        "seed": str(seed),
                        "workers": str(_WORKERS),
                        "accuracy": str(chosen.accuracy),
                    }
                    where["version"] = found.version
                    figures = await _trained(trainer, found.python, values, chosen.data)
                except TerraceError as exc:
                    figures = {"failure": str(exc)}
            run.add(**where, trainer=trainer.name, title=trainer.title, seed=seed, **asdict(choice), **figures)

        first = run.request.seed
        for number in range(chosen.trials):
            for trainer in TRAINERS:
                for choice in trainer.choices:
                    await once(trainer, choice, first + _TRIAL_SEED + number, "trial", kind="trial")
        kept = {trainer.name: fastest(trainer, run.points) for trainer in TRAINERS}
        for number in range(chosen.rounds):
            for trainer in turns(TRAINERS, number):
                words = f"round {number + 1} of {chosen.rounds}"
                await once(trainer, kept[trainer.name], first + number, words, kind="round", round=number)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        measured = [point for point in record["points"] if point["kind"] == "round"]
        shares = ratios(measured)
        return [
            _row(points, shares.get(name), record["config"]["rounds"], quick=record["config"]["quick"])
            for (name,), points in grouped(measured, "trainer").items()
        ]

    def table(self, record: Record) -> Table:
        return Table(
            headings=f"trained by | rate | steps between exchanges | rounds | s to {record['config']['accuracy']:g} | "
            "updates | Terrace's time, of theirs | target",
            rows=[_shown(row) for row in self.rows(record)],
            spare=("updates", "rounds"),
        )


async def _trained(trainer: Trainer, python: Path, values: Mapping[str, str], data: Path | None) -> dict[str, Any]:
    """What a run ended with.

    Raises:
        SetupError: it ended without a result, or did not get there in time.
    """
    with running(trainer.filled(python, values), _environment(trainer, data), core=None) as processes:
        try:
            async with asyncio.timeout(_RUN_S):
                while True:
                    alive = processes.alive  # asked first: what it wrote before its end is all there is
                    if (found := result_of(processes.output())) is not None:
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


def fastest(trainer: Trainer, points: Iterable[Point]) -> Choice:
    """What it reached the accuracy with in the least time, the median of all trials; a trial that failed took for ever.
    Where none reached it, the middle of its list."""
    seconds: dict[Choice, list[float]] = {}
    for point in points:
        if point["kind"] == "trial" and point["trainer"] == trainer.name:
            choice = Choice(point["rate"], point["period"])
            seconds.setdefault(choice, []).append(point.get("seconds", math.inf))
    best = min(seconds, key=lambda each: statistics.median(seconds[each]), default=None)
    if best is None or math.isinf(statistics.median(seconds[best])):
        return trainer.choices[len(trainer.choices) // 2]
    return best


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


def _row(points: Sequence[Point], shares: Sequence[float] | None, rounds: int, *, quick: bool) -> dict[str, Any]:
    first, reached = points[0], [point for point in points if "seconds" in point]
    seconds = [point["seconds"] for point in reached]
    failure = next((point["failure"] for point in points if "failure" in point), "")
    missed = []
    if first["trainer"] == TERRACE.name:
        if len(reached) < rounds:
            missed = [f"reached in {len(reached)} of {rounds} rounds"]
    elif shares is None:
        missed = ["not compared"]
    elif statistics.median(shares) > _TARGET:
        missed = [f"{statistics.median(shares):.3f} of {first['title']}'s time (at most {_TARGET:g})"]
    return {
        **{name: first.get(name) for name in ("trainer", "title", "version", "rate", "period")},
        "rounds": len(reached),
        "failure": failure,
        "seconds": statistics.median(seconds) if seconds else None,
        "min_seconds": min(seconds, default=None),
        "max_seconds": max(seconds, default=None),
        "updates": statistics.median(point["updates"] for point in reached) if reached else None,
        "ratio": statistics.median(shares) if shares else None,
        "min_ratio": min(shares, default=None) if shares else None,
        "max_ratio": max(shares, default=None) if shares else None,
        # A quick run is too short, and nothing is tuned, so nothing is judged.
        "target": _TARGET if shares and not quick else None,
        "missed": [] if quick else missed,
    }


def _shown(row: Mapping[str, Any]) -> list[str]:
    target = "" if row["target"] is None else f"at most {row['target']:g}"
    return [
        f"{row['title']} {row['version'] or ''}".strip(),
        f"{row['rate']:g}",
        str(row["period"]),
        str(row["rounds"]),
        f"unmeasured: {row['failure']}"
        if row["seconds"] is None
        else "{seconds:.2f} ({min_seconds:.2f} to {max_seconds:.2f})".format(**row),
        cell(row["updates"], ",.0f"),
        "-" if row["ratio"] is None else "{ratio:.3f} ({min_ratio:.3f} to {max_ratio:.3f})".format(**row),
        "; ".join(f"missed: {each}" for each in row["missed"]) or target,
    ]


RIVALS = Rivals()
