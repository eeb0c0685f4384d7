"""A server that runs and answers correctly, and the figures of one window of load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.contenders import Contender, Program
from benchmarks.peers.environments import installed_version, interpreter_of
from benchmarks.peers.requests import check_answer, make_target, random_images
from experiments.bench import load as bench_load
from experiments.bench.http import Connection, ConnectionBroken, Origin, Reply
from experiments.bench.load import Closed, Level, LoadPlan, measure
from experiments.bench.report import error_text
from experiments.bench.targets import Target
from experiments.harness import Run, option
from experiments.processes import Cores, ServerProcesses, running
from models.manifest import ModelEntry
from models.session import load_model, verify_file
from tierkit.errors import SetupError, TerraceError, UpstreamError
from tierkit.http.address import free_port
from tierkit.tensors import Array

__all__ = [
    "LOADS",
    "REQUEST_S",
    "Installed",
    "Load",
    "Network",
    "Servers",
    "Serving",
    "install",
    "loaded",
    "serving",
]

Load = tuple[int, int]
"""Images of a request, and requests under way."""

LOADS: Sequence[Load] = ((50, 4), (50, 1), (1, 64), (1, 1))

REQUEST_S = 20.0
_START_S = 90.0
_POLL_S = 0.02
_LOOPBACK = "127.0.0.1"
_FIRST_BATCH = 50


class Servers(Cores):
    """Options of all comparisons."""

    venvs: Path | None = option(None, "Where the environments lie. Default: ~/.cache/terrace/peers.", file_okay=False)
    models: Path | None = option(None, "Model set. Default: the networks that come with Terrace.", file_okay=False)


class Network:
    """A network that is served."""

    def __init__(self, entry: ModelEntry, folder: Path) -> None:
        self.name = entry.name
        self.sha256 = entry.sha256
        self.shape = entry.input_shape
        self.folder = folder.resolve()
        self._file = self.folder / verify_file(entry, folder).name
        self._model = load_model(entry, folder)

    def expected(self, images: Array) -> Array:
        """The right answer: logits of the network for a batch."""
        return self._model.run({"images": images}, ["logits"])["logits"]

    def fill(self, port: int) -> dict[str, str]:
        """Values for the words in braces of a contender's command."""
        return {"port": str(port), "model": self.name, "weights": str(self.folder)}

    def environment(self, port: int = 0) -> dict[str, str]:
        """Environment variables for `servers/common.py`."""
        return {
            "PEER_MODEL": str(self._file),
            "PEER_NAME": self.name,
            "PEER_SHAPE": ",".join(map(str, self.shape)),
            "PEER_PORT": str(port),
        }


class Installed(NamedTuple):
    """The environment of a program."""

    python: Path
    version: str


async def install(run: Run, programs: Sequence[Program], folder: Path | None) -> dict[str, Installed | TerraceError]:
    """See that every program has its environment; by name, or why it has none."""
    home = (folder or Path.home() / ".cache" / "terrace" / "peers").resolve()
    found: dict[str, Installed | TerraceError] = {}
    run.expect(len(programs))
    for program in programs:
        with run.step(f"{program.title}: environment"):
            try:
                python = await asyncio.to_thread(interpreter_of, program, home)
                found[program.name] = Installed(python, installed_version(python, program.distribution))
            except TerraceError as exc:
                found[program.name] = exc
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A contender that runs and gives right answers."""

    contender: Contender
    network: Network
    processes: ServerProcesses
    origin: Origin
    cold_start_s: float
    """Seconds from the start of its process to its first answer."""

    def target(self, batch: int) -> Target:
        """Requests of `batch` images each."""
        images = random_images(batch, self.network.shape)
        return make_target(self.origin, self.contender.protocol, self.network.name, images)

    async def window(self, target: Target, concurrency: int, plan: LoadPlan) -> Mapping[str, float | None]:
        """Figures of one window of load, and its cost to the server.

        Raises:
            UpstreamError: not every request was answered.
        """
        cpu_s = self.processes.cpu_s()
        level = await loaded(target, Closed(concurrency), plan)
        cpu_s = self.processes.cpu_s() - cpu_s
        summary = level.summary
        if summary.errors or not summary.answered:
            raise UpstreamError(f"not answered: {error_text(summary.errors) or 'nothing came'}")
        return {
            "images_per_s": summary.images_per_s,
            "p50_ms": summary.latency_ms["p50"],
            "p99_ms": summary.latency_ms["p99"],
            "cpu_us_per_image": cpu_s * 1e6 / (len(level.samples) * target.images),
            "generator_cpu": level.generator_cpu,
        }


async def loaded(target: Target, load: bench_load.Load, plan: LoadPlan) -> Level:
    """One level of load to its end."""
    level = await measure(target, load, plan)
    assert level is not None  # the event that stops it is never set
    return level


@asynccontextmanager
async def serving(contender: Contender, python: Path, network: Network, *, core: int | None) -> AsyncIterator[Serving]:
    """Start a contender; on exit it is gone.

    Raises:
        SetupError: it does not start.
        UpstreamError: it gives no right answer.
    """
    port = free_port()
    origin = Origin(_LOOPBACK, port)
    command = contender.filled(python, network.fill(port))
    started = time.perf_counter()
    with running(command, {**network.environment(port), **contender.environment}, core=core) as processes:
        images = random_images(_FIRST_BATCH, network.shape)
        first = make_target(origin, contender.protocol, network.name, images)
        reply = await _first_answer(first, processes)
        cold_start_s = time.perf_counter() - started
        check_answer(contender.protocol, reply, network.expected(images[0]))
        yield Serving(
            contender=contender, network=network, processes=processes, origin=origin, cold_start_s=cold_start_s
        )


async def _first_answer(target: Target, server: ServerProcesses) -> Reply:
    """Ask until the server answers with success.

    Raises:
        SetupError: it has ended, or takes too long; the message holds what it wrote.
    """
    deadline = time.monotonic() + _START_S
    said = "nothing listens"
    while True:
        if not server.alive:
            raise SetupError(f"it ended while it started: {server.log_tail()}")
        if time.monotonic() > deadline:
            raise SetupError(f"no answer within {_START_S:g} s ({said}): {server.log_tail()}")
        async with Connection(target.origin) as connection:
            try:
                reply = await connection.request(target.requests[0], timeout_s=REQUEST_S)
            except (ConnectionBroken, TimeoutError) as exc:
                said = str(exc) or "timeout"
            else:
                if reply.status == 200:
                    return reply
                said = f"{reply.status}: {reply.body[:200].decode(errors='replace')}"
        await asyncio.sleep(_POLL_S)
