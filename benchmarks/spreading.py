"""The time until a release reaches all nodes on virtual time, and the bytes that the scheduler sends itself: there, and
to real nodes on this machine.

The scheduler's own service decides who copies from whom (`scheduler.releases.spreading`). Links are virtual: a machine
sends and receives one chunk at a time, at its own speed. The formula is the tree of the volunteers' platform of 2018: a
machine has the whole file before it sends, so a release takes ceil(log2(M + 1)) copies one after the other.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.releases.load import fleet_of_releases
from benchmarks.releases.networks import base_set, variant
from experiments.harness import Experiment, Options, Record, Run, Table, option
from experiments.plots import Figures, formula, measured
from experiments.testbed import read_metrics
from models.manifest import NamedFile, WeightsFile, load_manifest
from scheduler.core.fleet import Ledger
from scheduler.releases.spreading import Spreading, chunk_bytes_of
from scheduler.settings import SchedulerSettings
from tierkit.types import Tier
from tierkit.virtual_time import VirtualLoop
from tierkit.wire.copies import CopyAnswer, CopyReport
from tierkit.wire.messages import ModelOffer, Registration

__all__ = ["SPREADING", "ReleaseCase", "missed", "spread"]

_SHA256 = "ab" * 32
_CONNECT_S = 3.0
"""Seconds until a node that cannot be reached is given up."""
_TOLD_S, _AGAIN_S = 2.0, 1.0
_AT_ONCE = 2
_MOST_FAILURES = 3
_LOOK_S = 0.1
_VIRTUAL = {"median_s": 1, "formula_s": 1, "ratio": 2, "scheduler_only_s": 0}
"""Figures of virtual time only, and the digits that are shown of them."""
_ALIKE = "all alike"
_SIZES = (1, 3, 7, 15, 31, 63, 255)
"""Machines on the curve. A tree of whole copies reaches them in 1, 2, 3, 4, 5, 6 and 8 turns."""
_LIMIT = 2.0
"""Most times as long as the formula says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCase:
    """A release and the machines that get it."""

    name: str
    devices: int
    size_bytes: int = 20_000_000
    bits_per_s: float = 100e6
    """The speed of each machine, in each direction."""
    latency_s: float = 0.01
    slow: int = 0
    """Machines with a hundredth of that speed, whose own time does not count."""
    liars: int = 0
    """Machines that say they have the file, and send something else."""
    unreachable: float = 0.0
    """Share of the machines to which no other can connect."""
    sites: int = 1
    judged: bool = True

    @property
    def copy_s(self) -> float:
        """One copy over one link."""
        return 8 * self.size_bytes / self.bits_per_s

    @property
    def formula_s(self) -> float:
        return self.copy_s * math.ceil(math.log2(self.devices + 1))


@dataclass(slots=True)
class _Machine:
    bits_per_s: float
    lies: bool = False
    reachable: bool = True
    have: set[int] = field(default_factory=set)
    sends_from: float = 0.0
    """Its link is free from then on; `receives_from` in the other direction."""
    receives_from: float = 0.0
    sent: int = 0
    came: asyncio.Event = field(default_factory=asyncio.Event)


class _World:
    def __init__(self, case: ReleaseCase, seed: int) -> None:
        self.case, self.chance = case, random.Random(seed)
        self.loop = VirtualLoop()  # type: ignore[abstract]  # no I/O
        each = self.chunk_bytes = chunk_bytes_of(case.size_bytes)
        self.chunks = [min(each, case.size_bytes - start) for start in range(0, case.size_bytes, each)]
        devices = Ledger(SchedulerSettings().detector_times)
        file = NamedFile(name="net", file="net.onnx", sha256=_SHA256, size_bytes=case.size_bytes)
        self.spreading = Spreading(devices, lambda name, sha256: file, _path, b"", clock=self.loop.time)
        self.scheduler = _Machine(case.bits_per_s, have=set(range(len(self.chunks))))
        self.nodes: dict[str, _Machine] = {}
        for number in range(case.devices):
            site = f"site-{number % case.sites}" if case.sites > 1 else None
            devices.register(_registration(number, site), 0.0)
            speed = case.bits_per_s / 100 if number < case.slow else case.bits_per_s
            self.nodes[_url(number)] = _Machine(speed, reachable=number >= case.unreachable * case.devices)
        for machine in list(self.nodes.values())[: case.liars]:
            machine.lies = True

    def run(self) -> list[float]:
        """Seconds until each machine has the file."""
        return self.loop.run(self._all())

    async def _all(self) -> list[float]:
        ticking = asyncio.create_task(self.spreading.run())
        for number in range(self.case.liars):
            await self._told(number, got=True)
        seconds = await asyncio.gather(*(self._node(number) for number in range(self.case.liars, self.case.devices)))
        ticking.cancel()
        return seconds[max(0, self.case.slow - self.case.liars) :]

    async def _told(self, number: int, **news: Any) -> CopyAnswer:
        await asyncio.sleep(2 * self.case.latency_s)
        report = CopyReport(incarnation=_incarnation(number), name="net", sha256=_SHA256, **news)
        return await self.spreading.told(_node_id(number), report)

    async def _node(self, number: int) -> float:
        """Copy in the way of a real node (`NetworkCopies`)."""
        machine, failures, news = self.nodes[_url(number)], 0, dict[str, Any]()
        while failures < _MOST_FAILURES:
            asked = self.loop.time()
            answer, news = await self._told(number, waits=not news, **news), {}
            if not answer.go:
                await asyncio.sleep(max(0.0, asked + _AGAIN_S - self.loop.time()) + self.chance.random())
                continue
            began, before = self.loop.time(), len(machine.have)
            outcome = await self._copied(number, machine, answer)
            if outcome == "whole":
                rate = (len(machine.have) - before) * self.chunk_bytes / max(0.01, self.loop.time() - began)
                done = self.loop.time()
                await self._told(number, got=True, bytes_per_s=rate)
                return done
            if outcome != "ended":
                failures += 1
                news = {"failed": outcome, "failed_source": answer.source}
        await self._told(number, ended=True)
        await self._fetched(machine, self.scheduler)
        return self.loop.time()

    async def _copied(self, number: int, machine: _Machine, answer: CopyAnswer) -> str:
        source = self.scheduler if answer.source is None else self.nodes[answer.source]
        copying = asyncio.create_task(self._fetched(machine, source))
        while True:
            await asyncio.wait({copying}, timeout=_TOLD_S)
            if copying.done():
                return await copying
            now = await self._told(number, waits=False)
            if (now.go, now.source) != (True, answer.source):
                copying.cancel()
                await asyncio.wait({copying})
                return "ended"

    async def _fetched(self, machine: _Machine, source: _Machine) -> str:
        if not source.reachable:
            await asyncio.sleep(_CONNECT_S)
            return "gone"
        missing = iter([chunk for chunk in range(len(self.chunks)) if chunk not in machine.have])

        async def some() -> str:
            for chunk in missing:
                while chunk not in source.have and not source.lies:
                    await source.came.wait()
                await self._transferred(machine, source, self.chunks[chunk])
                if source.lies:
                    return "wrong"
                machine.have.add(chunk)
                came, machine.came = machine.came, asyncio.Event()
                came.set()
            return "whole"

        outcomes = await asyncio.gather(*(some() for _ in range(_AT_ONCE)))
        return max(outcomes)  # "wrong" comes after "whole"

    async def _transferred(self, machine: _Machine, source: _Machine, size: int) -> None:
        begins = max(self.loop.time(), source.sends_from)
        source.sends_from = begins + 8 * size / source.bits_per_s
        machine.receives_from = max(begins, machine.receives_from) + 8 * size / machine.bits_per_s
        source.sent += size
        ends = max(source.sends_from, machine.receives_from) + self.case.latency_s
        await asyncio.sleep(ends - self.loop.time())


def spread(case: ReleaseCase, seed: int = 0) -> dict[str, Any]:
    """Seconds until the last machine has the file, and who has sent how much."""
    world = _World(case, seed)
    seconds = world.run()
    return {
        "name": case.name,
        "devices": case.devices,
        "size_bytes": case.size_bytes,
        "seconds": max(seconds),
        "median_s": statistics.median(seconds),
        "formula_s": case.formula_s,
        "scheduler_only_s": case.copy_s * case.devices,
        "ratio": max(seconds) / case.formula_s,
        "scheduler_copies": world.scheduler.sent / case.size_bytes,
        "judged": case.judged,
    }


def cases(devices: int, many: int, size_bytes: int) -> list[ReleaseCase]:
    """Return all cases to measure."""
    sizes = sorted({size for size in _SIZES if size < many} | {devices, many})
    return [
        *(ReleaseCase(name=_ALIKE, devices=size, size_bytes=size_bytes) for size in sizes),
        ReleaseCase(name="one is slow", devices=devices, size_bytes=size_bytes, slow=1),
        ReleaseCase(name="one lies", devices=devices, size_bytes=size_bytes, liars=1),
        ReleaseCase(name="a tenth cannot be reached", devices=devices, size_bytes=size_bytes, unreachable=0.1),
        ReleaseCase(name="no two in one site", devices=devices, size_bytes=size_bytes, sites=devices, judged=False),
    ]


async def _path(file: WeightsFile) -> Path:
    raise AssertionError("virtual nodes ask for no plan, so no chunk is read")


def _node_id(number: int) -> str:
    return f"end-{number}"


def _incarnation(number: int) -> str:
    return f"process-{number}"


def _url(number: int) -> str:
    return f"http://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8071"


def _registration(number: int, site: str | None) -> Registration:
    return Registration(
        node_id=_node_id(number),
        incarnation=_incarnation(number),
        tier=Tier.END,
        url=_url(number),
        site=site,
        models=(ModelOffer(name="net", sha256="cd" * 32, ms_per_image=1.0),),
        follows=True,
        version="0",
    )


def missed(point: Mapping[str, Any]) -> list[str]:
    """Targets that a measurement misses, one sentence each."""
    if point["judged"] and point["ratio"] > _LIMIT:
        return [f"it takes {point['ratio']:.2f} times as long as the formula says, and at most {_LIMIT:g} are allowed"]
    return []


async def _real(folder: Path, nodes: int) -> dict[str, Any]:
    """A release with another end network, on a fleet of processes."""
    base = await asyncio.to_thread(base_set, folder / "base", "good")
    models = await asyncio.to_thread(variant, base, folder / "other", 1)
    size = load_manifest(models).default_for(Tier.END).size_bytes
    async with fleet_of_releases(folder, base, ends=nodes, edges=1, clouds=0) as fleet:
        before = await _sent(fleet.client.url)
        release = (await fleet.client.create_release("other", models)).release
        began = time.monotonic()
        await fleet.client.promote_release(release)
        while (now := await fleet.client.releases()).rollout is not None or now.in_force != release:
            fleet.check()
            await asyncio.sleep(_LOOK_S)
        seconds = time.monotonic() - began
        sent = {sender: value - before[sender] for sender, value in (await _sent(fleet.client.url)).items()}
    return {
        "name": "real nodes",
        "devices": nodes,
        "size_bytes": size,
        "seconds": seconds,
        "scheduler_copies": sent["scheduler"] / size,
        "node_copies": sent["nodes"] / size,
        "judged": False,
    }


async def _sent(url: str) -> dict[str, float]:
    """Bytes of networks by their sender."""
    found = re.findall(
        r'^terrace_scheduler_network_bytes_total\{sender="(\w+)"\} (\S+)$', await read_metrics(url), re.M
    )
    return {sender: float(value) for sender, value in found}


class SpreadingOptions(Options):
    """Sizes of the fleet and of the release."""

    devices: int = option(100, "Machines that get the release.", min=2, max=10_000)
    many: int = option(1000, "Machines of the large fleet.", quick=200, min=2, max=10_000)
    megabytes: int = option(20, "Size of the release.", min=1, max=1000)
    nodes: int = option(8, "Real nodes on this machine.", quick=4, min=2, max=100)


class SpreadingOfReleases(Experiment):
    """Spreading of a release over many nodes."""

    name = "spreading"
    options = SpreadingOptions
    quick = "200 machines in the large fleet rather than 1,000, 4 real nodes rather than 8"
    ignores = frozenset({"seed", "tasks", "data"})
    profile = None

    async def measure(self, run: Run, chosen: SpreadingOptions) -> None:
        todo = cases(chosen.devices, chosen.many, chosen.megabytes * 1_000_000)
        run.config |= {"devices": chosen.devices, "many": chosen.many, "megabytes": chosen.megabytes}
        run.config |= {"nodes": chosen.nodes}
        run.expect(len(todo) + 1)
        for case in todo:
            with run.step(case.name):
                run.add(**await asyncio.to_thread(spread, case))
        with run.step("real nodes"):
            run.add(**await _real(run.folder / "state", chosen.nodes))

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [{**point, "missed": missed(point)} for point in record["points"]]

    def table(self, record: Record) -> Table:
        headings = (
            "machines | case | the last has it after, s | half have it, s | formula, s | ratio | scheduler only, s | "
            "copies that the scheduler sends | targets"
        )
        rows = [
            [
                f"{row['devices']:,}",
                row["name"],
                f"{row['seconds']:.1f}",
                *(f"{row[name]:.{digits}f}" if name in row else "" for name, digits in _VIRTUAL.items()),
                f"{row['scheduler_copies']:.1f}",
                "; ".join(row["missed"]) or ("met" if row["judged"] else "not judged"),
            ]
            for row in self.rows(record)
        ]
        return Table(headings=headings, rows=rows)

    def draw(self, record: Record, figures: Figures) -> None:
        """Seconds against machines: the curve that section 5.3 of the tree's source derives."""
        rows = [row for row in self.rows(record) if row["name"] == _ALIKE]
        (axes,) = figures.panels(
            "spreading",
            [f"{rows[0]['size_bytes'] / 1e6:g} MB to machines with equal links, virtual time"],
            xlabel="machines",
            ylabel="time until the last one has it (s)",
            finding=f"{rows[-1]['devices']:,} machines have it after {rows[-1]['seconds']:.0f} s; "
            f"a tree of whole copies needs {rows[-1]['formula_s']:.0f} s",
        )
        places = [row["devices"] for row in rows]
        axes.plot(places, [row["scheduler_only_s"] for row in rows], label="the scheduler by itself", **formula(0))
        axes.plot(places, [row["formula_s"] for row in rows], label="tree of whole copies", **formula(1))
        axes.plot(places, [row["seconds"] for row in rows], label="Terrace", **measured(2))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend(frameon=False)


SPREADING = SpreadingOfReleases()
