"""How many updates a second one host takes: four clients that compute nothing fetch weights and bring updates."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.harness import MOST_RUNS, Experiment, Record, Run, Table, grouped, option, spread_row
from experiments.peers.processes import Cores, check_cores, on_core
from experiments.record import spread
from models.training.config import CONFIGS
from tierkit.extras import training_extra

__all__ = ["UPDATES"]

_TARGET = 200
"""Updates a second of plain SGD, the median of the rounds."""
_HIDDEN = 1_040
"""Units of the hidden layer: 826,810 weights, 3.3 MB in fp32."""
_VALUES = 784 * _HIDDEN + _HIDDEN + 10 * _HIDDEN + 10
_NAME = "mnist-1040"


class Chosen(Cores):
    """How much is exchanged."""

    exchanges: int = option(1_000, "Updates of a round, for each strategy.", quick=40, min=4, max=100_000)
    rounds: int = option(5, "Rounds, each with all strategies.", quick=1, min=1, max=MOST_RUNS)
    data: Path | None = option(None, "Folder that holds mnist/.", envvar="TERRACE_DATA", metavar="DIRECTORY")


class Updates(Experiment):
    """How many updates a second a host takes on one core: 3.3 MB of weights, in bf16 over loopback."""

    name = "updates"
    options = Chosen
    ignores = frozenset({"tasks", "seed"})
    profile = None
    repeats = ("rounds", "rounds")
    quick = "{exchanges} updates rather than 1,000, one round rather than 5"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        check_cores(chosen)
        with training_extra("training on the fleet", "learn"):
            from experiments.training.running import exchanged, parts_ms
        text = (CONFIGS / "mnist-100.toml").read_text(encoding="utf-8")
        network = run.folder / f"{_NAME}.toml"
        network.write_text(text.replace('"mnist-100"', f'"{_NAME}"').replace("hidden = [100]", f"hidden = [{_HIDDEN}]"))
        strategies = {
            "sgd": "sgd",
            "downpour": "downpour",
            "dc-adaptive": "dc-adaptive",
        }
        flags = ["--network", str(network), "--wire", "bf16"]
        flags += [] if chosen.data is None else ["--data", str(chosen.data.absolute())]
        run.config |= {"exchanges": chosen.exchanges, "rounds": chosen.rounds, "hidden": _HIDDEN, "wire": "bf16"}
        run.expect(chosen.rounds * len(strategies))
        with on_core(chosen.server_core):
            run.config["parts_ms"] = await asyncio.to_thread(parts_ms, _VALUES, run.folder / "journal")
        shutil.rmtree(run.folder / "journal")
        for number in range(chosen.rounds):
            for name, strategy in strategies.items():
                with run.step(f"round {number + 1}: {name}"), on_core(chosen.load_core):
                    found = await exchanged(strategy, flags, exchanges=chosen.exchanges, core=chosen.server_core)
                    run.add(strategy=name, round=number, **asdict(found))

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """A row for each strategy: median and range of the rounds."""
        rows = []
        for (name,), points in grouped(record["points"], "strategy").items():
            rate = spread([point["updates"] / point["seconds"] for point in points])
            late = name == "sgd" and rate.median < _TARGET and not record["config"]["quick"]
            rows.append(
                {
                    "strategy": name,
                    "rounds": len(points),
                    "per_s": asdict(rate),
                    "cpu_ms": asdict(spread([1000 * point["cpu_s"] / point["updates"] for point in points])),
                    "system_ms": asdict(spread([1000 * point["system_s"] / point["updates"] for point in points])),
                    "missed": [f"{rate.median:.0f} updates a second < {_TARGET}"] if late else [],
                }
            )
        return rows

    def table(self, record: Record) -> Table:
        return Table(
            headings="strategy | n | updates a second | host, ms of its core for each | of them in the system",
            rows=[
                [
                    row["strategy"],
                    str(row["rounds"]),
                    _range(row["per_s"], ".0f"),
                    _range(row["cpu_ms"], ".2f"),
                    _range(row["system_ms"], ".2f"),
                ]
                for row in self.rows(record)
            ],
        )


def _range(spread: dict[str, Any], form: str) -> str:
    _, median, least_to_most, _ = spread_row("", spread, form)
    return f"{median} ({least_to_most})"


UPDATES = Updates()
