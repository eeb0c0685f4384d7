"""`terrace experiment data-tree`: how long training images take to a thousand workers, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from experiments.harness import Experiment, Options, Record, Run, Table, cell, option
from experiments.training.cases import Judged
from experiments.training.spreading import formula_s, spread
from training.data.tree import DEEPEST

__all__ = ["DATA_TREE", "LINES", "Line", "judge"]

SEGMENT_S = 10.0
"""1 GB at 100 MB/s, the source's example."""
_NOTICE_S = 3.0
"""Until a receiver notices that its source is dead: as long as it waits for a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One way to spread a file."""

    name: str
    deepest: int = 1
    chunked: bool = False
    serve: bool = True
    killing: bool = False
    """Whether every other machine that is sending dies when three quarters of the time are over."""


LINES = (
    Line(name="one source", serve=False),
    Line(name="tree of 2018"),
    Line(name="chains of chunks", deepest=DEEPEST, chunked=True),
    Line(name="tree of 2018, half of the senders killed", killing=True),
    Line(name="chains of chunks, half of the senders killed", deepest=DEEPEST, chunked=True, killing=True),
)


class Chosen(Options):
    """How many machines."""

    receivers: int = option(1_000, "Machines beside the host.", quick=80, min=1, max=5_000)
    chunks: int = option(100, "Chunks of the file, where it has any.", min=1, max=10_000)


class DataTree(Experiment):
    """How long 1 GB takes to a thousand machines, 100 MB/s each, on virtual time: one source, the tree, and chains."""

    name = "data-tree"
    options = Chosen
    ignores = frozenset({"tasks", "seed"})
    profile = None
    repeats = ("runs", "runs; nothing is drawn by chance")
    quick = "{receivers:,} machines rather than 1,000"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        run.config |= {"receivers": chosen.receivers, "chunks": chosen.chunks, "segment_s": SEGMENT_S}
        run.config["notice_s"] = _NOTICE_S
        run.expect(len(LINES))
        for line in LINES:
            with run.step(line.name):
                chunks = chosen.chunks if line.chunked else 1
                formula = formula_s(chosen.receivers, deepest=line.deepest, chunks=chunks, segment_s=SEGMENT_S)
                found = await asyncio.to_thread(
                    spread,
                    chosen.receivers,
                    chunks=chunks,
                    segment_s=SEGMENT_S,
                    deepest=line.deepest,
                    serve=line.serve,
                    kill_at_s=0.75 * formula if line.killing else None,
                    notice_s=_NOTICE_S,
                )
            run.add(**{**asdict(line), "receivers": chosen.receivers, "formula_s": formula, **asdict(found)})

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [
            {
                **point,
                "steps": point["seconds"] / record["config"]["segment_s"],
                "targets": [judged.words for judged in judge(point)],
                "missed": [judged.words for judged in judge(point) if not judged.reached],
            }
            for point in record["points"]
        ]

    def table(self, record: Record) -> Table:
        return Table(
            headings="way | machines | last one, s | mean, s | steps of 10 s | sent by the host, GB | killed | target",
            rows=[
                [
                    row["name"],
                    f"{row['receivers']:,}",
                    cell(row["seconds"], ",.1f"),
                    cell(row["mean_s"], ",.1f"),
                    cell(row["steps"], ",.1f"),
                    cell(row["sent_by_host"], ",.1f"),
                    str(row["killed"]),
                    "; ".join(f"missed: {each}" if each in row["missed"] else each for each in row["targets"]),
                ]
                for row in self.rows(record)
            ],
            spare=("target",),
        )


def judge(point: Mapping[str, Any]) -> list[Judged]:
    """The targets of a line, set before the run."""
    alive = point["receivers"] - point["killed"]
    found = []
    if point["killing"]:
        found.append(Judged(words=f"{point['got']:,} of {alive:,} have all (all)", reached=point["got"] == alive))
    elif point["serve"]:
        ratio, most = point["seconds"] / point["formula_s"], 1.2 if point["chunked"] else 1.0
        words = f"{ratio:.3f} of the formula, {point['formula_s']:,.1f} s (at most {most:g})"
        found.append(Judged(words=words, reached=ratio <= most + 1e-9))
    return found


DATA_TREE = DataTree()
