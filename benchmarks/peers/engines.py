"""`python -m benchmarks engines`: a cloud node with each engine, one after the other, in rounds.

What computes has the server's core: the node itself with `onnx`, the other server with `oip`, whose node then shares
the core of the load, as it would have another machine. Ray's processes may use both cores: the node, and its
cluster.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peers.contenders import MLSERVER_JSON, TERRACE, Contender, choose, cloud_node
from benchmarks.peers.measuring import REQUEST_S, Installed, Load, Network, Servers, install, serving
from experiments.bench.load import LoadPlan
from experiments.harness import Experiment, Record, Run, Table, cell, grouped, option
from experiments.processes import Cores, check_cores, on_core, running
from models.manifest import load_manifest, weights_folder
from tierkit.errors import MissingExtra, SetupError, TerraceError
from tierkit.http.address import free_port
from tierkit.types import Tier

__all__ = ["CHOICES", "ENGINES", "Choice", "compare"]

_LOADS: Sequence[Load] = ((1, 1), (50, 1), (50, 6))
_PLAN = LoadPlan(window_s=3.0, warmup_s=1.0, timeout_s=REQUEST_S)
_QUICK = LoadPlan(window_s=0.5, warmup_s=0.2, timeout_s=REQUEST_S)
_START_S = 90.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to compute the network behind a cloud node."""

    title: str
    engine: str
    flags: tuple[str, ...] = ()
    """Flags of `terrace cloud`, in addition to `--engine`."""
    upstream: Contender | None = None
    """The server that computes; its address goes to `--upstream`."""


CHOICES: tuple[Choice, ...] = (
    Choice(title="onnx", engine="onnx"),
    Choice(title="oip: another Terrace node", engine="oip", upstream=TERRACE),
    *(
        Choice(title=f"oip: {peer.title}", engine="oip", upstream=peer)
        for peer in (*choose(["pytriton"]), MLSERVER_JSON)
    ),
    Choice(title="ray: 1 replica", engine="ray", flags=("--address", "local", "--replicas", "1")),
    Choice(title="ray: 2 replicas", engine="ray", flags=("--address", "local", "--replicas", "2")),
)


class Chosen(Servers):
    """Rounds, cores and environments."""

    rounds: int = option(3, "Rounds; a figure is their median.", quick=1, min=1, max=100)


async def compare(
    run: Run,
    choices: Sequence[Choice],
    network: Network,
    plan: LoadPlan,
    rounds: int,
    cores: Cores,
    installed: Mapping[str, Installed | TerraceError],
) -> None:
    """Measure all rounds. An engine that fails once is not started again.

    Args:
        installed: environment of each upstream, by its name, or why it has none.
    """
    run.config |= {
        "network": network.name,
        "sha256": network.sha256,
        "window_s": plan.window_s,
        "rounds": rounds,
        "cores": {"server": cores.server_core, "load": cores.load_core},
    }
    run.expect(rounds * len(choices))
    failed: set[str] = set()
    for number in range(rounds):
        for choice in choices:
            with run.step(f"round {number + 1} of {rounds}, {choice.title}"):
                if choice.title in failed:
                    continue
                figures: dict[str, Any]
                try:
                    figures = await _measured(choice, network, plan, cores, installed)
                except TerraceError as exc:
                    failed.add(choice.title)
                    figures = {"failure": str(exc)}
                run.add(round=number, engine=choice.title, **figures)


async def _measured(
    choice: Choice, network: Network, plan: LoadPlan, cores: Cores, installed: Mapping[str, Installed | TerraceError]
) -> dict[str, Any]:
    """One start of a node, under every load."""
    core: int | None = cores.server_core
    flags = choice.flags
    async with AsyncExitStack() as stack:
        if choice.engine == "ray":
            if importlib.util.find_spec("ray") is None:
                raise MissingExtra("ray", "a node with --engine ray")
            core = None
        if choice.upstream is not None:
            environment = installed[choice.upstream.name]
            if isinstance(environment, TerraceError):
                raise environment
            starting = _upstream(choice.upstream, environment.python, network, core=cores.server_core)
            flags = (*flags, "--upstream", await stack.enter_async_context(starting))
            core = cores.load_core
        contender = cloud_node(choice.title, ("--engine", choice.engine, *flags))
        node = await stack.enter_async_context(serving(contender, Path(sys.executable), network, core=core))
        loads = []
        with on_core(cores.load_core):
            for batch, concurrency in _LOADS:
                figures = await node.window(node.target(batch), concurrency, plan)
                loads.append({"batch": batch, "concurrency": concurrency, **figures})
        memory = node.processes.peak_memory_bytes()
        return {"cold_start_s": node.cold_start_s, "peak_memory_bytes": memory, "loads": loads}


@asynccontextmanager
async def _upstream(contender: Contender, python: Path, network: Network, *, core: int) -> AsyncIterator[str]:
    """The URL of a server that is ready.

    Raises:
        SetupError: it has ended, or takes too long; the message holds what it wrote.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = contender.filled(python, network.fill(port))
    with running(command, {**network.environment(port), **contender.environment}, core=core) as server:
        deadline = time.monotonic() + _START_S
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            while True:
                if not server.alive or time.monotonic() > deadline:
                    raise SetupError(f"{contender.title} did not become ready: {server.log_tail()}")
                try:
                    reply = await client.get(f"/v2/models/{network.name}/ready")
                except httpx.TransportError:
                    pass
                else:
                    if reply.is_success:
                        break
                await asyncio.sleep(_POLL_S)
        yield url


# --- from the record ------------------------------------------------------------------------------------------------


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _row(engine: str, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds in which the engine ran."""
    ran = [point for point in rounds if "loads" in point]
    loads = grouped([load for point in ran for load in point["loads"]], "batch", "concurrency")
    return {
        "engine": engine,
        "rounds": len(ran),
        "failure": next((point["failure"] for point in rounds if "failure" in point), ""),
        "cold_start_s": _median(point["cold_start_s"] for point in ran),
        "peak_memory_bytes": _median(point["peak_memory_bytes"] for point in ran),
        "loads": [
            {
                "images_per_request": batch,
                "concurrency": concurrency,
                "p50_ms": _median(load["p50_ms"] for load in found),
                "images_per_s": _median(load["images_per_s"] for load in found),
            }
            for (batch, concurrency), found in loads.items()
        ],
    }


class Engines(Experiment):
    """A cloud node with each engine: start, memory, latency, images a second."""

    name = "engines"
    options = Chosen
    repeats = ("rounds", "rounds")
    quick = "windows of {window_s:g} s"
    ignores = frozenset({"seed", "tasks", "data"})
    profile = None

    async def measure(self, run: Run, chosen: Chosen) -> None:
        check_cores(chosen)
        folder = chosen.models or weights_folder()
        network = Network(load_manifest(folder).default_for(Tier.CLOUD), folder)
        upstreams = [choice.upstream for choice in CHOICES if choice.upstream]
        installed = await install(run, upstreams, chosen.venvs)
        plan = _QUICK if run.request.quick else _PLAN
        await compare(run, CHOICES, network, plan, chosen.rounds, chosen, installed)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [_row(engine, rounds) for (engine,), rounds in grouped(record["points"], "engine").items()]

    def table(self, record: Record) -> Table:
        return Table(
            headings="engine | start of the node, s | its memory, MiB | 1 image, ms | 50 images, ms | "
            "images/s, 6 requests of 50 at once | rounds",
            rows=[_cells(row) for row in self.rows(record)],
        )


def _cells(row: Mapping[str, Any]) -> list[str]:
    if not row["rounds"]:
        return [row["engine"], f"unmeasured: {row['failure']}", *["-"] * 4, "0"]
    one, batch, busy = row["loads"]
    return [
        row["engine"],
        cell(row["cold_start_s"], ".1f"),
        cell(row["peak_memory_bytes"] / 2**20, ",.0f"),
        cell(one["p50_ms"], ".1f"),
        cell(batch["p50_ms"], ".1f"),
        cell(busy["images_per_s"], ",.0f"),
        str(row["rounds"]),
    ]


ENGINES = Engines()
