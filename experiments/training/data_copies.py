"""`terrace experiment data-copies`: a file that spreads over eight real processes with paced links, from one source, by
the tree, in chains, and by libtorrent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from experiments.harness import Experiment, Options, Record, Run, Table, grouped, option
from experiments.peers.contenders import Program
from experiments.peers.measuring import install
from experiments.peers.processes import ServerProcesses, running
from experiments.training.cases import Judged
from experiments.training.spreading import formula_s
from tierkit.errors import SetupError, TerraceError
from tierkit.http.address import free_port
from training.data.tree import DEEPEST

__all__ = ["DATA_COPIES", "LINES", "Line", "judge"]

_SCRIPTS = Path(__file__).parent / "contenders"
_CHUNK_BYTES = 256 * 1024
_START_S, _COPY_S, _POLL_S = 120.0, 300.0, 0.01

LIBTORRENT = Program(
    name="libtorrent",
    title="libtorrent",
    command=(str(_SCRIPTS / "copy_libtorrent.py"),),
    requirements=("libtorrent==2.1.1",),
    distribution="libtorrent",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One way to spread the file."""

    name: str
    deepest: int
    """0: nobody but the source sends."""
    killing: bool = False
    """Whether every other machine that sends is killed after 0.4 of what the formula says."""
    rival: bool = False


LINES = (
    Line(name="one source", deepest=0),
    Line(name="tree of 2018", deepest=1),
    Line(name="chains of chunks", deepest=DEEPEST),
    Line(name="libtorrent", deepest=0, rival=True),
    Line(name="chains of chunks, half of the senders killed", deepest=DEEPEST, killing=True),
    Line(name="libtorrent, half of the machines killed", deepest=0, rival=True, killing=True),
)


class Chosen(Options):
    """How much, how fast, how often."""

    machines: int = option(8, "Processes that receive.", min=1, max=64)
    megabytes: float = option(16.0, "Size of the file.", quick=2.0, min=0.5, max=1_000.0)
    rate: float = option(4.0, "Megabytes a second of each machine's link.", min=0.1, max=1_000.0)
    rounds: int = option(5, "Rounds, each with all ways.", quick=1, min=1, max=100)
    venvs: Path | None = option(None, "Where the environments lie. Default: ~/.cache/terrace/peers.", file_okay=False)


class DataCopies(Experiment):
    """How long a file takes to eight real processes with paced links: one source, the tree, chains, and libtorrent."""

    name = "data-copies"
    options = Chosen
    ignores = frozenset({"tasks", "seed"})
    profile = None
    repeats = ("rounds", "rounds")
    quick = "{megabytes:g} MB rather than 16, one round rather than 5"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        run.config |= {name: getattr(chosen, name) for name in ("machines", "megabytes", "rate", "rounds")}
        run.expect(len(LINES) * chosen.rounds)
        installed = (await install(run, [LIBTORRENT], chosen.venvs))[LIBTORRENT.name]
        for number in range(chosen.rounds):
            for line in LINES:
                with run.step(f"round {number + 1}, {line.name}"):
                    figures: dict[str, Any]
                    try:
                        if line.rival and isinstance(installed, TerraceError):
                            raise installed
                        python = installed.python if line.rival and not isinstance(installed, TerraceError) else None
                        folder = run.folder / f"{number}-{LINES.index(line)}"
                        figures = await _copied(line, chosen, folder, python)
                    except TerraceError as exc:
                        figures = {"failure": str(exc)}
                run.add(**{"name": line.name, "killing": line.killing, "rival": line.rival, "round": number, **figures})
        if not isinstance(installed, TerraceError):
            run.config["libtorrent"] = installed.version

    def rows(self, record: Record) -> list[dict[str, Any]]:
        rows = []
        for (name,), points in grouped(record["points"], "name").items():
            judged = [] if record["config"]["quick"] else judge(points)
            whole = [point for point in points if "seconds" in point]
            rows.append(
                {
                    "name": name,
                    "rounds": len(whole),
                    "failure": next((point["failure"] for point in points if "failure" in point), ""),
                    "seconds": [point["seconds"] for point in whole],
                    "formula_s": whole[0]["formula_s"] if whole else None,
                    "killed": sum(point["killed"] for point in whole),
                    "targets": [each.words for each in judged],
                    "missed": [each.words for each in judged if not each.reached],
                }
            )
        return rows

    def table(self, record: Record) -> Table:
        return Table(
            headings="way | rounds | last machine, s | formula, s | killed | target",
            rows=[
                [
                    row["name"],
                    str(row["rounds"]),
                    _spread(row["seconds"]) if row["seconds"] else f"unmeasured: {row['failure']}",
                    "-" if row["formula_s"] is None else f"{row['formula_s']:.2f}",
                    str(row["killed"]),
                    "; ".join(f"missed: {each}" if each in row["missed"] else each for each in row["targets"]),
                ]
                for row in self.rows(record)
            ],
        )


def judge(points: Sequence[Mapping[str, Any]]) -> list[Judged]:
    """The targets of a line, set before the run: the median of the rounds takes at most 1.2 times what the formula
    says, and all machines that live have all."""
    found = []
    whole = [point for point in points if "seconds" in point]
    lost = sum(point["alive"] - point["got"] for point in whole)
    complete = len(whole) == len(points)
    if points[0]["killing"]:
        words = f"{lost} machines without, of those that lived, in {len(whole)} of {len(points)} rounds (none)"
        return [] if points[0]["rival"] else [Judged(words=words, reached=complete and not lost)]
    if whole and whole[0]["formula_s"] is not None:
        ratio = statistics.median(point["seconds"] / point["formula_s"] for point in whole)
        words = f"{ratio:.3f} of the formula (at most 1.2)"
        found.append(Judged(words=words, reached=ratio <= 1.2 and complete))
    return found


async def _copied(line: Line, chosen: Chosen, folder: Path, python: Path | None) -> dict[str, Any]:
    """One run of a line; what came of it.

    Raises:
        SetupError: a process ended before its time, or it took too long.
    """
    await asyncio.to_thread(folder.mkdir)
    size, rate = int(chosen.megabytes * 1e6), chosen.rate * 1e6
    segment_s = size / rate
    formula = None
    if not line.rival:
        chunks = -(-size // _CHUNK_BYTES) if line.deepest > 1 else 1
        formula = (
            formula_s(chosen.machines, deepest=line.deepest, chunks=chunks, segment_s=segment_s)
            if line.deepest
            else chosen.machines * segment_s
        )
    with contextlib.ExitStack() as stack:
        go = folder / "go"
        common = {"size": size, "rate": rate, "go": go}
        source, machines, url = await _started(line, chosen, folder, python, common, stack)
        began = time.monotonic()
        go.touch()
        killed: list[str] = []
        done: dict[str, float] = {}
        kill_at = began + 0.4 * (formula or segment_s) if line.killing else float("inf")
        while len(done) < len(machines) - len(killed):
            now = time.monotonic()
            if now > kill_at:
                kill_at = float("inf")
                killed = await _senders(url, machines) if url else list(machines)[::2]
                killed = [name for name in killed if name not in done]
                for name in killed:
                    machines[name].process.kill()
            for name, process in machines.items():
                if name in killed or name in done:
                    continue
                told = _told(process, "done")
                if told is not None:
                    done[name] = float(told) - began
                elif not process.alive:
                    raise SetupError(f"{name} ended before it had all: {process.log_tail()}")
            if not source.alive or now - began > _COPY_S:
                raise SetupError(f"{len(done)} of {len(machines)} have all after {now - began:.0f} s")
            await asyncio.sleep(_POLL_S)
    alive = len(machines) - len(killed)
    return {
        "seconds": max(done.values()),
        "mean_s": statistics.fmean(done.values()),
        "formula_s": formula,
        "killed": len(killed),
        "alive": alive,
        "got": len(done),
    }


async def _started(
    line: Line,
    chosen: Chosen,
    folder: Path,
    python: Path | None,
    common: Mapping[str, Any],
    stack: contextlib.ExitStack,
) -> tuple[ServerProcesses, dict[str, ServerProcesses], str]:
    """The source, the machines by their names, and the source's URL where it has one; all wait for the sign."""
    names = [f"machine-{number}" for number in range(chosen.machines)]

    def start(role: str, place: str, **more: Any) -> ServerProcesses:
        script = "copy_libtorrent.py" if line.rival else "copy_terrace.py"
        flags = {"role": role, "folder": folder / place, **common, **more}
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        return stack.enter_context(
            running([str(python or sys.executable), str(_SCRIPTS / script), *words], {}, core=None)
        )

    if line.rival:
        ports = _ports(chosen.machines + 1)
        more = {"torrent": folder / "torrent", "ports": ",".join(map(str, ports))}
        source = start("source", "source", port=ports[0], **more)
        await _ready([source])
        machines = {
            name: start("machine", name, port=port, **more) for name, port in zip(names, ports[1:], strict=True)
        }
        url = ""
    else:
        source = start("source", "source", deepest=line.deepest)
        (url,) = await _ready([source])
        machines = {name: start("machine", name, name=name, url=url, deepest=line.deepest) for name in names}
    await _ready(list(machines.values()))
    return source, machines, url


def _ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = free_port()
        if port not in found:
            found.append(port)
    return found


async def _ready(processes: Sequence[ServerProcesses]) -> list[str]:
    deadline = time.monotonic() + _START_S
    while True:
        told = [_told(process, "ready") for process in processes]
        if all(each is not None for each in told):
            return [str(each) for each in told]
        for process in processes:
            if not process.alive or time.monotonic() > deadline:
                raise SetupError(f"a machine did not become ready: {process.log_tail()}")
        await asyncio.sleep(_POLL_S)


async def _senders(url: str, machines: Mapping[str, ServerProcesses]) -> list[str]:
    """Every other machine that sends something now."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/data") as answer:
        view = await answer.json()
    senders = {each["source"] for each in view if each["source"]}
    return [name for name in machines if name in senders][::2]


def _told(process: ServerProcesses, what: str) -> Any:
    """What a process has said under this name; None while it has not."""
    for found in _objects(process.output()):
        if what in found:
            return found[what]
    return None


def _objects(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


DATA_COPIES = DataCopies()
