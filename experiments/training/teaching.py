"""The table of a teacher: workers train the end tier's network with the answers of the edge tier's, on virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.harness import Table, cell

__all__ = ["LESSONS", "OF_IMAGES", "STUDENT", "TAUGHT", "TEACHER", "Lesson", "taught_table"]

TAUGHT = "teacher"
"""Name of the table. It trains on CIFAR-100, so it is made by itself."""
STUDENT, TEACHER = "mobilenet-v1-0.5", "wrn-16-4"
OF_IMAGES = 10
"""The table uses a tenth of `--images`, so that it ends within ten minutes."""

_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A line of the table."""

    name: str
    workers: int
    taught: bool = True
    """True with the teacher's answers; else the network learns from the labels only."""


LESSONS = (
    Lesson(name="one machine", workers=1),
    Lesson(name="four workers", workers=4),
    Lesson(name="four workers, labels only", workers=4, taught=False),
)


def taught_table(rows: Sequence[_Row]) -> Table:
    """One line for each lesson.

    Args:
        rows: of `experiments.training.school.School.give`.
    """
    lines: dict[str, list[_Row]] = {}
    for row in rows:
        lines.setdefault(row["lesson"], []).append(row)
    single = {row["seed"]: row["virtual_seconds"] for row in lines.get(LESSONS[0].name, ())}
    return Table(
        headings="lesson | workers | n | coarse accuracy, % | steps | virtual s | times as fast as one machine | MB",
        rows=[
            [
                name,
                str(line[0]["workers"]),
                str(len(line)),
                cell(100 * _mean(line, "accuracy"), ".2f"),
                f"{line[0]['steps']:,}",
                cell(_mean(line, "virtual_seconds"), ",.1f"),
                cell(_times(line, single), ".2f"),
                cell((_mean(line, "bytes_sent") + _mean(line, "bytes_received")) / 1e6, ",.1f"),
            ]
            for name, line in lines.items()
        ],
    )


def _mean(line: Sequence[_Row], name: str) -> float:
    return statistics.fmean(row[name] for row in line)


def _times(line: Sequence[_Row], single: Mapping[int, float]) -> float | None:
    found = [single[row["seed"]] / row["virtual_seconds"] for row in line if row["seed"] in single]
    return statistics.fmean(found) if found else None
