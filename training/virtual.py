"""A run on virtual time: the host's `TrainingRun` as it is, with real gradients; machines and links are simulated.

A worker asks for a unit, fetches the weights, computes for a time that depends on its speed, and sends. The host serves
one request after the other, and a request for a unit waits there until there is one. Results are computed immediately,
in this process: only their time is virtual. So a run of a thousand workers needs the memory of one network, of the
weights that are under way, and of the momentum that workers keep.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable
from zlib import crc32

import numpy as np

from tierkit.errors import Forbidden, InvalidInput, Unavailable
from tierkit.virtual_time import VirtualLoop
from training.cheating import ANSWERS_AT_ONCE, Cheat, Cheater, Plot
from training.host.run import TrainingRun
from training.masking import masked
from training.payloads import Format, format_of_weights, packed_bytes, rounded
from training.strategies.protocol import Strategy
from training.strategies.tournament import Tournament
from training.trust.recheck import Rechecks, Steps, is_sound
from training.units import Flat, UnitLease, Update, Verdict

if TYPE_CHECKING:
    from models.training.data import TrainingData

__all__ = ["Conditions", "FaultKind", "Link", "Simulated", "SimulatedWorker", "UpdateFault", "draw_faults", "simulate"]

_DEATHS, _DEATHS_EACH = 1_000, 100
"""Workers that die without an update in between, and for each machine: more, and a run would never end."""

FaultKind = Literal["death", "cut", "delay", "duplicate"]
"""Kinds of faults. "death": the worker dies with an update that it has not sent, and another process takes its place.
"cut": the connection breaks when half of the update is through, and the worker sends it again. "delay": the update
comes late. "duplicate": its answer is lost, and the worker sends it again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Link between a worker and the host, the same in both directions."""

    delay_s: float = 0.0
    """One way."""
    bytes_per_s: float | None = None

    def seconds(self, size: int) -> float:
        """Seconds until a message of this size has arrived."""
        return self.delay_s + (size / self.bytes_per_s if self.bytes_per_s else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorker:
    """A machine."""

    name: str
    step_s: float
    """Seconds per step."""
    link: Link = field(default_factory=Link)
    leaves_after_s: float | None = None
    """Time of its sudden death."""
    cheat: Cheat | None = None
    """Kind of cheating; None for an honest worker."""
    data: TrainingData | None = None
    """Images that only this worker has, from which its batches are drawn. None: the learner's."""
    stays_s: float | None = None
    """Mean time until it dies suddenly and another worker, with another name, takes its place at once, over and over.
    The time is drawn from an exponential distribution. None for a machine that stays.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFault:
    """Fault of one update."""

    kind: FaultKind
    seconds: float
    """Seconds until the worker is back, the update is sent again, or it arrives."""


def draw_faults(count: int, *, updates: int, longest_s: float, seed: int) -> dict[int, UpdateFault]:
    """Draw `count` faults among the first `updates` updates of a run, by the update's number, with equal shares of each
    kind.

    Raises:
        InvalidInput: there are fewer updates.
    """
    if count > updates:
        raise InvalidInput(f"{count:,} faults are more than the {updates:,} updates of the run")
    draw, kinds = random.Random(seed), get_args(FaultKind)
    hit = draw.sample(range(updates), count)
    return {
        update: UpdateFault(kind=kinds[number % len(kinds)], seconds=longest_s * draw.random())
        for number, update in enumerate(hit)
    }


@dataclass(slots=True)
class Simulated:
    """Result of a simulated run."""

    virtual_seconds: float = 0.0
    updates: int = 0
    bytes_sent: int = 0
    """Bytes of the updates that workers sent."""
    bytes_received: int = 0
    """Bytes of the weights that workers received."""
    faults: int = 0
    """Workers that died, the faults that were drawn, and other updates that were not taken."""
    twice: int = 0
    """Steps whose update was brought into the weights although it was there: none, if all is well."""
    missing: int = 0
    """Steps whose update is not in the weights at the end: none, if all is well."""
    spent: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Seconds from a worker's first request to its last update, and the steps of its updates, by worker."""
    loss: float | None = None
    """Mean of the last 100 updates; None for a run without any."""
    quarantined: list[str] = field(default_factory=list)
    """Workers that were told that they are barred, in this order."""
    rechecks: int = 0
    """Updates that the host has computed again."""
    staleness: float = 0.0
    """Mean number of times that the weights had changed since the version that an update comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions of a simulated run."""

    wire: Format = "fp32"
    """Format of the updates, with nothing left out and nothing compressed."""
    serve_s: float = 0.0
    """Seconds of the host for an update, and for a fetch."""
    sync_s: float = 0.0
    """Seconds of its disk to keep updates. Their answers wait for that, and so do others that come after them; updates
    that come meanwhile are kept together, the next time."""
    spread: float = 0.0
    """A worker's steps take from `1 - spread` to `1 + spread` of its time, drawn for each update."""
    seed: int = 0
    faults: Mapping[int, UpdateFault] = field(default_factory=dict)
    """Fault of each update that is hit, by its number in the order in which updates are ready to be sent."""


@runtime_checkable
class _Measures(Protocol):
    """A learner that can measure lineages; see `training.learner.FlatLearner`."""

    def measured(self, weights: Flat, buffers: Flat) -> tuple[float, float]: ...


@runtime_checkable
class _DrawsFrom(Protocol):
    """A learner that can take its batches from other images; see `training.learner.FlatLearner`."""

    def draw_from(self, data: TrainingData) -> None: ...


def simulate(
    strategy: Strategy,
    learner: Steps,
    workers: Sequence[SimulatedWorker],
    conditions: Conditions | None = None,
    watch: Callable[[int, float], None] = lambda done, now: None,
) -> Simulated:
    """Train to the end of the run.

    Raises:
        Unavailable: all workers died.
        InvalidInput: the weights have become such that nothing can be computed from them, or workers die before they
            have brought anything.
    """
    given = conditions or Conditions()
    wire, serve_s, sync_s, seed = given.wire, given.serve_s, given.sync_s, given.seed
    sends, masking = strategy.sends, strategy.masking
    loop, result, draw = VirtualLoop(), Simulated(), random.Random(seed)  # type: ignore[abstract]  # no I/O
    # Nobody is forgotten, however many come and go.
    run = TrainingRun(strategy, most_workers=math.inf)
    run.rechecks = Rechecks(strategy.trust, random.Random(seed + 1).random)
    plot = Plot(workers=len(workers), cheaters=sum(worker.cheat is not None for worker in workers))
    stays, came = random.Random(seed + 2), dict[str, float]()
    noise = np.random.default_rng(seed)
    moments: dict[str, Any] = {}
    lengths = len(strategy.weights), len(strategy.buffers)
    update_bytes, weights_bytes = packed_bytes(*lengths, wire), packed_bytes(*lengths, format_of_weights(wire))
    host_free, ready = 0.0, 0
    deaths = 0  # in a row
    sync_from, sync_until = 0.0, 0.0  # the last one that is due
    steps, applied = strategy.leases.left, set[int]()
    waiting: list[asyncio.Future[None]] = []

    async def served() -> None:
        """Wait for one's turn at the host, and for its work."""
        nonlocal host_free
        host_free = max(host_free, loop.time()) + serve_s
        await loop.until(host_free)

    async def kept(*, lasting: bool) -> None:
        """Wait for the disk before answering an update or another request."""
        nonlocal sync_from, sync_until
        if not sync_s:
            return
        if lasting and loop.time() >= sync_from:
            sync_from = max(loop.time(), sync_until)
            sync_until = sync_from + sync_s
        elif not lasting and loop.time() >= sync_from:  # what was written before; and what has come until then
            await loop.until(max(loop.time(), sync_until))
            if loop.time() > sync_from:
                return
        await loop.until(sync_until)

    def wake() -> None:
        """There may be a unit for those who wait."""
        for future in waiting:
            if not future.done():
                future.set_result(None)
        waiting.clear()

    async def granted(worker: SimulatedWorker) -> tuple[UnitLease, Flat, Flat] | None:
        """A unit with weights and buffers; None where the run has ended."""
        await served()
        waited = False
        while not strategy.finished:
            lease = run.grant(worker.name, worker.name, weights_bytes, loop.time())
            if lease is not None:
                start, buffers = strategy.start_of(lease)
                found = lease, rounded(start, format_of_weights(wire)), buffers.copy()
                if waited:
                    await served()
                await kept(lasting=False)
                return found
            waited = True
            waiting.append(loop.create_future())
            change = strategy.leases.next_change(loop.time())
            if change is not None:
                loop.at(change, wake)
            await waiting[-1]
        return None

    async def bring(worker: SimulatedWorker, update: Update, rate: float | None) -> Verdict:
        """Send an update; what became of it."""
        nonlocal deaths
        result.bytes_sent += update_bytes
        await loop.until(loop.time() + worker.link.seconds(update_bytes))
        await served()
        before = strategy.version
        verdict: Verdict = "late"
        with contextlib.suppress(Forbidden):  # it hears of that when it asks for work
            verdict = run.take(worker.name, update, update_bytes, {}, loop.time())
        if verdict == "taken":
            result.twice += len(applied.intersection(update.steps))
            applied.update(update.steps)
            deaths = 0
            _, done = result.spent.get(worker.name, (0.0, 0))
            result.spent[worker.name] = loop.time() - came[worker.name], done + len(update.steps)
            if (chosen := run.rechecks.taken(update)) is not None:  # that costs the host no time here
                right = run.rechecks.is_right(chosen, learner, sends, wire, masking)
                run.rechecks.done(chosen)
                run.rechecked(worker.name, right, loop.time())
                result.rechecks += 1
            watch(strategy.leases.done, loop.time())
        if run.doubtful:
            if not is_sound(learner, run.copies(), update.steps, sends, rate):
                raise InvalidInput(
                    f"after {strategy.version:,} updates the weights give no finite numbers any more: lower the "
                    "learning rate, in the network's configuration or the strategy's"
                )
            run.believe()
        if isinstance(strategy, Tournament):  # that costs the host no time here, either
            assert isinstance(learner, _Measures)
            while lineages := strategy.to_measure():
                scores = [learner.measured(*strategy.lineage(each)) for each in lineages]
                run.met(lineages, scores, loop.time())
        if run.is_news(verdict, before):
            wake()
        await kept(lasting=verdict != "duplicate")
        return verdict

    async def sent(worker: SimulatedWorker, update: Update, rate: float | None, fault: UpdateFault | None) -> None:
        """Send an update, whatever goes wrong."""
        kind, seconds = (None, 0.0) if fault is None else (fault.kind, fault.seconds)
        if kind == "cut":
            result.bytes_sent += update_bytes // 2
            seconds += worker.link.seconds(update_bytes // 2)
        if kind in ("death", "cut", "delay"):
            await loop.until(loop.time() + seconds)
        if kind == "death":
            return
        verdict = await bring(worker, update, rate)
        if kind == "duplicate":
            await loop.until(loop.time() + seconds)
            verdict = await bring(worker, update, rate)
        result.faults += fault is None and verdict not in ("taken", "duplicate")

    async def work(worker: SimulatedWorker) -> None:
        nonlocal ready
        cheater = None if worker.cheat is None else Cheater(worker.cheat, crc32(worker.name.encode()) + seed, plot)
        while not strategy.finished:
            await loop.until(loop.time() + worker.link.delay_s)
            try:
                found = await granted(worker)
            except Forbidden:
                result.quarantined.append(worker.name)
                return
            if found is None:
                return
            lease, weights, buffers = found
            result.bytes_received += weights_bytes
            await loop.until(loop.time() + worker.link.seconds(weights_bytes))
            pace = 0.0 if worker.cheat in ANSWERS_AT_ONCE else 1 + given.spread * draw.uniform(-1, 1)
            await loop.until(loop.time() + worker.step_s * lease.unit.steps * pace)
            learner.moments = moments.get(worker.name)
            learner.load(weights, buffers)
            if worker.data is not None:
                assert isinstance(learner, _DrawsFrom)
                learner.draw_from(worker.data)
            computed = learner.compute(lease.unit.span, sends, lease.unit.rate)
            moments[worker.name] = learner.moments
            fault = given.faults.get(ready)
            ready += 1
            honest = masked(computed, masking, noise)
            said = honest if cheater is None else cheater.sends(honest)
            came = dataclasses.replace(said, values=rounded(said.values, wire))
            result.faults += fault is not None
            update = Update(lease=lease.number, worker=worker.name, steps=lease.unit.span, computed=came)
            await sent(worker, update, lease.unit.rate, fault)

    async def live(worker: SimulatedWorker) -> None:
        nonlocal deaths
        for number in itertools.count():
            name = f"{worker.name}.{number}" if number else worker.name
            came[name] = loop.time()
            run.join(name, name, loop.time())
            task = asyncio.ensure_future(work(dataclasses.replace(worker, name=name)))
            if worker.stays_s is not None:
                loop.at(loop.time() + stays.expovariate(1 / worker.stays_s), task.cancel)
            elif worker.leaves_after_s is not None:
                loop.at(worker.leaves_after_s, task.cancel)
            try:
                await task
            except asyncio.CancelledError:
                result.faults += 1
                deaths += 1
                if deaths > _DEATHS + _DEATHS_EACH * len(workers):
                    raise InvalidInput(
                        f"{deaths:,} workers died without an update in between: let each stay for longer, since a "
                        f"step takes {worker.step_s:.3g} s"
                    ) from None
                moments.pop(name, None)
                if worker.stays_s is not None:
                    continue
            return

    async def main() -> None:
        await asyncio.gather(*(live(worker) for worker in workers))
        if not strategy.finished:
            raise Unavailable("all workers died, or were put in quarantine, before the end of the run")

    loop.run(main())
    result.missing = steps - len(applied)
    result.virtual_seconds, result.updates = run.totals.latest_at, run.totals.updates
    result.loss, result.staleness = run.loss, run.staleness
    return result
