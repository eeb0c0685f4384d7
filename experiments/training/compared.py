"""The table of all strategies: what each costs, what a lost worker and a cheat do to it, and when to choose it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness import Table, cell
from experiments.training.cases import ONE_PROCESS, WIDE

__all__ = ["compared"]

_Rows = Sequence[Mapping[str, Any]]

_WHEN = {
    ONE_PROCESS: "whenever it is fast enough",
    "allreduce": "a large step, and a fast network between machines that stay",
    "gossip": "as allreduce, with many ranks or slow links: a rank sends the same whatever their number",
    "tournament": "you do not know the rate: it searches while it trains",
    "ensemble": "the images may not leave their machines, and N networks may answer",
    "fedavg": "slow links, workers that come and go",
    "fedavg, median": "volunteers whom you do not trust",
    "bmuf": "as fedavg, with workers that stay",
    "diloco": "as fedavg, over very slow links: rounds of 50 steps and more",
    "tournament, at a host": "as tournament, with volunteers: the host measures",
    "sgd": "few workers near the host",
    "downpour": "many workers of different speeds, each update at once",
    "dc-constant": "as sgd, with 8 workers or more",
    "dc-adaptive": "as sgd, with 8 workers or more, if no lambda is known",
    "average": "as fedavg, without rounds and their waits",
    "crowdsourced": "to compare with the volunteers' platform of 2018",
    "pipeline": "a network that does not fit in the memory of one machine",
    f"{ONE_PROCESS}{WIDE}": "whenever it is fast enough",
    f"allreduce{WIDE}": "as allreduce",
    f"factors{WIDE}": "wide dense layers and small batches, with few ranks",
    f"hybrid{WIDE}": "dense layers that have most of the parameters",
    "lbfgs": "few images or a large fleet, and the lowest loss on the training images",
}


def compared(rows: _Rows) -> Table:
    """One line for each strategy.

    Args:
        rows: of the table `strategies`.
    """
    calm: dict[str, list[Mapping[str, Any]]] = {}
    lost: dict[str, list[Mapping[str, Any]]] = {}
    cheated: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        place = lost if row.get("lost") else cheated if row.get("cheat") else calm
        place.setdefault(row["strategy"], []).append(row)
    return Table(
        headings="strategy | workers | n | accuracy, % | MB | virtual s | real s | faster than one process? | "
        "a lost worker costs | a cheat costs | choose it for",
        rows=[
            [
                name,
                str(line[0]["workers"]),
                str(len(line)),
                _spread([100 * row["accuracy"] for row in line]),
                f"{statistics.fmean(map(_carried, line)) / 1e6:,.1f}",
                cell(_mean(line, "virtual_seconds"), ".2f"),
                cell(line[0].get("real_seconds"), ".1f"),
                _faster(line, calm.get(_by_itself(name), [])),
                _of_lost(line, lost.get(name, [])),
                _of_cheat(line, cheated.get(name, [])),
                _WHEN[name],
            ]
            for name, line in calm.items()
        ],
        spare=("n", "workers", "MB", "choose it for"),
    )


def _by_itself(name: str) -> str:
    """The line of one process with the same network."""
    return ONE_PROCESS + (WIDE if name.endswith(WIDE) else "")


def _carried(row: Mapping[str, Any]) -> float:
    """Bytes over all links: with a host, updates and weights."""
    with_host = "step_bytes" not in row
    return float(row["bytes_sent"] + (row["bytes_received"] if with_host else 0))


def _faster(line: _Rows, one: _Rows) -> str:
    """Factor by which a run is faster than one process, on virtual and on real time."""
    if not one or line[0]["strategy"] == one[0]["strategy"]:
        return "-"
    found = []
    if (here := _mean(line, "virtual_seconds")) is not None and (whole := _mean(one, "virtual_seconds")) is not None:
        found.append(("virtual", whole / here))
    if line[0].get("real_seconds") and one[0].get("real_seconds"):
        found.append(("here", one[0]["real_seconds"] / line[0]["real_seconds"]))
    return (
        "; ".join(
            f"{place}: {f'{times:.1f} times' if times > 1 else f'no, one process is {1 / times:.1f} times as fast'}"
            for place, times in found
        )
        or "-"
    )


def _of_lost(line: _Rows, lost: _Rows) -> str:
    if lost:
        more_s = statistics.fmean(each["virtual_seconds"] for each in lost)
        more_s -= statistics.fmean(each["virtual_seconds"] for each in line)
        return f"{_points(line, lost)}, {more_s:+.2f} s"
    if line[0]["workers"] == 1:
        return "the run"
    epoch_s = _mean(line, "epoch_seconds")
    words = "a new start from the last epoch" + ("" if epoch_s is None else f": {epoch_s:.2f} s or less")
    return f"{words}; with `elastic`, no step" if line[0]["strategy"] == "allreduce" else words


def _of_cheat(line: _Rows, cheated: _Rows) -> str:
    if not cheated:
        return "-"
    diverged = sum(bool(row.get("diverged")) or row["accuracy"] is None for row in cheated)
    if diverged:
        return f"everything: {diverged} of {len(cheated)} runs diverge"
    return _points(line, cheated)


def _points(line: _Rows, other: _Rows) -> str:
    """Difference of the accuracies, seed by seed."""
    calm = {row["seed"]: row["accuracy"] for row in line}
    gaps = [100 * (row["accuracy"] - calm[row["seed"]]) for row in other if row["seed"] in calm]
    return f"{statistics.fmean(gaps):+.1f} points" if gaps else "-"


def _mean(line: _Rows, name: str) -> float | None:
    values = [row[name] for row in line if row[name] is not None]
    return statistics.fmean(values) if values else None


def _spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"
