"""`python -m benchmarks duel`: Terrace and one other server in short windows that take turns.

The rounds of the comparison lie a minute apart, and a shared machine drifts by several percent in that time: more than
separates two servers whose time is nearly all inference. Here both run at once on the server's core, one of them idle
while the other is asked, and windows of a second follow one another, the order turned round each time. So this suits
servers that use no processor time while no request comes. The bare loop has its turn in each round as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.peers.bare import bare_loop
from benchmarks.peers.contenders import CONTENDERS, TERRACE, choose
from benchmarks.peers.measuring import LOADS, REQUEST_S, Installed, Load, Network, Servers, install, serving
from experiments.bench.load import LoadPlan
from experiments.harness import Experiment, Point, Record, Run, Table, cell, grouped, option
from experiments.processes import Cores, check_cores, on_core
from models.manifest import load_manifest, weights_folder
from tierkit.errors import InvalidInput, TerraceError
from tierkit.types import Tier

__all__ = ["DUEL", "duel"]

_PLAN = LoadPlan(window_s=1.0, warmup_s=0.2, timeout_s=REQUEST_S)


class Chosen(Servers):
    """The other server, and how often both are measured."""

    peer: str = option(
        "fastapi",
        f"The other server: {', '.join(contender.name for contender in CONTENDERS if contender is not TERRACE)}.",
        metavar="NAME",
    )
    rounds: int = option(40, "Windows of each server under each load.", quick=2, min=1, max=100)


async def duel(
    run: Run,
    network: Network,
    pair: dict[str, Installed],
    loads: Sequence[Load],
    rounds: int,
    cores: Cores,
    plan: LoadPlan = _PLAN,
) -> None:
    """Measure both servers.

    Args:
        pair: their environments, by name.

    Raises:
        SetupError: one of them does not start.
        UpstreamError: one of them does not answer.
    """
    run.config |= {
        "network": network.name,
        "sha256": network.sha256,
        "rounds": rounds,
        "window_s": plan.window_s,
        "cores": {"server": cores.server_core, "load": cores.load_core},
    }
    run.expect(rounds * len(loads))
    async with AsyncExitStack() as stack:
        stack.enter_context(on_core(cores.load_core))
        bare = stack.enter_context(bare_loop(network.environment(), core=cores.server_core))
        servers = [
            await stack.enter_async_context(
                serving(contender, pair[contender.name].python, network, core=cores.server_core)
            )
            for contender in choose(list(pair))
        ]
        for batch, concurrency in loads:
            for number in range(rounds):
                with run.step(f"{batch} images, {concurrency} requests at once"):
                    alone = bare(batch, plan.window_s / 2).images_per_s
                    for server in servers[:: 1 if number % 2 == 0 else -1]:
                        figures = await server.window(server.target(batch), concurrency, plan)
                        where = {"batch": batch, "concurrency": concurrency, "round": number}
                        run.add(**where, server=server.contender.name, bare_images_per_s=alone, **figures)


# --- from the record ------------------------------------------------------------------------------------------------


def _row(points: Sequence[Point]) -> dict[str, Any]:
    """Row of one load: medians of the windows and of the ratios within each round, and the share of rounds that Terrace
    won.
    """
    rounds = [window for window in grouped(points, "round").values() if len(window) == 2]
    # Of each round Terrace's window first.
    pairs = [sorted(window, key=lambda point: point["server"] != TERRACE.name) for window in rounds]

    def median(ratio: Callable[[Point, Point], float]) -> float | None:
        return statistics.median(ratio(own, other) for own, other in pairs) if pairs else None

    return {
        "images_per_s": median(lambda own, other: own["images_per_s"]),
        "other_images_per_s": median(lambda own, other: other["images_per_s"]),
        "of_bare": median(lambda own, other: own["images_per_s"] / own["bare_images_per_s"]),
        "ratio": median(lambda own, other: own["images_per_s"] / other["images_per_s"]),
        "won": sum(own["images_per_s"] > other["images_per_s"] for own, other in pairs) / max(1, len(pairs)),
        "cpu_ratio": median(lambda own, other: other["cpu_us_per_image"] / own["cpu_us_per_image"]),
        "rounds": len(pairs),
    }


class Duel(Experiment):
    """Terrace's node and one other server in windows of a second that take turns."""

    name = "duel"
    options = Chosen
    repeats = ("rounds", "windows of each server")
    quick = "{rounds} rounds"
    ignores = frozenset({"seed", "tasks", "data"})
    profile = None

    async def measure(self, run: Run, chosen: Chosen) -> None:
        (peer,) = choose([chosen.peer])
        if peer is TERRACE:
            raise InvalidInput(f"a duel is with another server than {chosen.peer!r}")
        check_cores(chosen)
        folder = chosen.models or weights_folder()
        network = Network(load_manifest(folder).default_for(Tier.END), folder)
        run.config |= {"peer": peer.name, "title": peer.title}
        pair: dict[str, Installed] = {}
        for name, installed in (await install(run, [TERRACE, peer], chosen.venvs)).items():
            if isinstance(installed, TerraceError):
                raise installed
            pair[name] = installed
        await duel(run, network, pair, LOADS, chosen.rounds, chosen)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [
            {
                "network": record["config"]["network"],
                "images_per_request": batch,
                "concurrency": concurrency,
                "other": record["config"]["peer"],
                **_row(points),
            }
            for (batch, concurrency), points in grouped(record["points"], "batch", "concurrency").items()
        ]

    def table(self, record: Record) -> Table:
        return Table(
            headings="network | images | requests at once | Terrace, images/s | of bare | "
            f"{record['config']['title']}, images/s | ratio | rounds won | ratio by CPU time | rounds",
            rows=[
                [
                    row["network"],
                    str(row["images_per_request"]),
                    str(row["concurrency"]),
                    cell(row["images_per_s"], ",.0f"),
                    cell(row["of_bare"], ".3f"),
                    cell(row["other_images_per_s"], ",.0f"),
                    cell(row["ratio"], ".3f"),
                    f"{row['won']:.0%}",
                    cell(row["cpu_ratio"], ".3f"),
                    str(row["rounds"]),
                ]
                for row in self.rows(record)
            ],
        )


DUEL = Duel()
