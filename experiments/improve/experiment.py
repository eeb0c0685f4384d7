"""`terrace experiment improve`: a fleet learns from its own upper tiers; drift, liars, a wrong teacher, own heads.

The same devices, host and strategy as in `terrace train improve`, in one process and on virtual time, with real
gradients. The table `drift` uses the networks that ship and CIFAR-100; the others use digits.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.harness import Experiment, Options, Record, Run, Table, cell, option
from experiments.improve.drift import BLUR, CONTRAST
from tierkit.errors import InvalidInput
from tierkit.extras import training_extra

__all__ = ["IMPROVE_LOOP", "TABLES", "missed"]

TABLES = ("drift", "poison", "teacher", "personal", "leak")
_FEWEST_DIGITS = 4_000
_RUNS = 20
"""Runs with liars."""


class Amount(Options):
    """Options of the experiment."""

    seeds: int = option(
        3, "Runs of each line of `drift` and `teacher`; `personal` has two more.", quick=1, min=1, max=16
    )
    only: list[str] | None = option(None, f"A table; may be repeated. Default: {', '.join(TABLES)}.", metavar="TABLE")
    images: int = option(10_000, "Test images of CIFAR-100.", quick=1_000, min=500, max=10_000)
    steps: int = option(1_280, "Steps of all devices together.", quick=64, min=8, max=100_000)
    runs: int = option(_RUNS, "Runs of `poison`, with each kind of lie in turn.", quick=4, min=1, max=1_000)
    search: int = option(300, "Steps of each attack of `leak`.", quick=5, min=1, max=100_000)
    data: Path | None = option(
        None, "Folder that holds cifar-100-python/ and mnist/.", envvar="TERRACE_DATA", metavar="DIRECTORY"
    )


class Improve(Experiment):
    """Learning from the answers of upper tiers: the gain, and the harm that liars can do."""

    name = "improve"
    options = Amount
    ignores = frozenset({"tasks"})
    profile = None
    repeats = ("runs", "runs that differ in their seed")
    quick = "{images:,} images rather than 10,000, {steps:,} steps rather than 1,280, one seed"

    async def measure(self, run: Run, chosen: Amount) -> None:
        wanted = chosen.only or list(TABLES)
        if wrong := [name for name in wanted if name not in TABLES]:
            raise InvalidInput(f"there is no table {wrong[0]!r}; there are {', '.join(TABLES)}")
        with training_extra("learning from the answers of upper tiers"):
            from experiments.improve.running import lines
        run.config |= {
            "only": wanted,
            "images": chosen.images,
            "steps": chosen.steps,
            "seeds": chosen.seeds,
            "blur": BLUR,
            "contrast": CONTRAST,
        }
        todo: Sequence[tuple[str, Callable[[], dict[str, Any]]]] = await asyncio.to_thread(
            lines, wanted, chosen, run.request.seed, run.folder
        )
        run.expect(len(todo))
        for label, measure in todo:
            with run.step(label):
                run.add(**await asyncio.to_thread(measure))

    def rows(self, record: Record) -> list[dict[str, Any]]:
        quick = record["config"]["quick"]
        return [
            {
                "table": table,
                "line": line,
                "runs": len(points),
                **_means(points),
                "missed": [] if quick else missed(table, points),
            }
            for (table, line), points in _grouped(record["points"])
        ]

    def table(self, record: Record) -> Table:
        return Table(
            headings="table | line | n | own pictures, % | clean pictures, % | result | target",
            rows=[_row(row) for row in self.rows(record)],
        )


def _grouped(points: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, str], list[Mapping[str, Any]]]]:
    places: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for point in points:
        places.setdefault((point["table"], point["line"]), []).append(point)
    yield from places.items()


def _means(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of all numbers, counts of what is true."""
    found: dict[str, Any] = {}
    for name, first in points[0].items():
        values = [point[name] for point in points if point[name] is not None]
        if isinstance(first, bool):
            found[name] = sum(values)
        elif isinstance(first, int | float) and name != "seed":
            found[name] = statistics.fmean(values)
            found[f"{name}_spread"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return found


def missed(table: str, points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The targets that the runs of a line miss."""
    mean = _means(points)
    if table == "drift":
        if points[0]["line"] != "answers from above":
            return []
        reached = {
            "half of the lost points": mean["recovered"] >= 0.5,
            "escalations -20 %": mean["new_up"] <= 0.8 * mean["old_up"],
            "at most 1 point on clean pictures": mean["new_clean"] >= mean["old_clean"] - 0.01,
        }
    elif table == "poison":
        reached = {"no worse release": not mean["worse_released"]}
    elif table == "personal":
        reached = {
            "own data +3 points": mean["new_own"] >= mean["old_own"] + 0.03,
            "general data -3 points": mean["new_general"] >= mean["old_general"] - 0.03,
        }
    else:
        reached = {}
    return [words for words, good in reached.items() if not good]


def _row(row: Mapping[str, Any]) -> list[str]:
    if row["table"] == "leak":
        return _leak_row(row)
    own, clean = ("old_own", "new_own"), ("old_clean", "new_clean")
    if row["table"] == "personal":
        clean = ("old_general", "new_general")
        result = f"{row['used']:.1f} of {row['devices']:.0f} devices use their head"
    elif row["table"] == "drift":
        result = (
            f"{row['recovered']:.0%} of the loss is back; {row['old_up']:.1%} went up, now {row['new_up']:.1%}; "
            f"share {row['share']:.2f}"
        )
    else:
        result = f"{row['passes']} of {row['runs']} pass the gate"
        if row["table"] == "poison":
            result += f", {row['worse_released']} of them worse; {row['caught']:.1f} of 3 liars found"
        else:
            result += f"; the class changes by {100 * row['change_class']:+.1f} points"
    return [
        row["table"],
        row["line"],
        str(row["runs"]),
        _change(row, *own, "change_own"),
        _change(row, *clean, "change_clean"),
        result,
        "; ".join(f"missed: {each}" for each in row["missed"]) or "reached",
    ]


def _leak_row(row: Mapping[str, Any]) -> list[str]:
    """Show what an attacker reads with the update, and guesses without it."""
    seen = (f"SSIM {row[f'{name}ssim']:.2f}, {row[f'recognised{which}']:.0%} recognised" for name, which in _ATTACKERS)
    found, blind = seen
    result = f"{found}; without the update {blind}; of the originals {row['recognised_originals']:.0%}"
    return [row["table"], row["line"], str(row["runs"]), "", "", result, "reported"]


_ATTACKERS = (("", ""), ("blind_", "_blind"))


def _change(row: Mapping[str, Any], before: str, after: str, change: str) -> str:
    if before in row:
        return (
            f"{cell(100 * row[before], '.1f')} -> {cell(100 * row[after], '.1f')} ± {100 * row[f'{after}_spread']:.1f}"
        )
    return f"{100 * row[change]:+.1f} ± {100 * row[f'{change}_spread']:.1f}"


IMPROVE_LOOP = Improve()
