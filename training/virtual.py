"""A run on virtual time: the strategies as they are, with real gradients; machines and links are simulated.

A worker asks for a unit, fetches the weights, computes as long as its speed says, and sends; the host serves one
request after the other. Whatever is computed is computed at once, in this process: only its time is virtual. So a run
of a thousand workers needs the memory of one network, and the weights that are under way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tierkit.errors import Unavailable
from tierkit.virtual_time import VirtualLoop
from training.strategies.config import Sends
from training.strategies.protocol import Strategy
from training.units import Computed, Flat, Update

__all__ = ["Link", "Simulated", "SimulatedWorker", "simulate"]

_ASK_AGAIN_S = 0.05
_VALUE_BYTES = 4


class Steps(Protocol):
    """What computes; see `training.learner.FlatLearner`."""

    def load(self, weights: Flat, buffers: Flat) -> None: ...

    def weights(self) -> Flat: ...

    def compute(self, steps: range, sends: Sends) -> Computed: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between a worker and the host, the same both ways."""

    delay_s: float = 0.0
    """One way."""
    bytes_per_s: float | None = None

    def seconds(self, size: int) -> float:
        """Until a message has arrived."""
        return self.delay_s + (size / self.bytes_per_s if self.bytes_per_s else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorker:
    """A machine."""

    name: str
    step_s: float
    """What one step takes it."""
    link: Link = field(default_factory=Link)
    leaves_after_s: float | None = None
    """When it dies, without a word."""


@dataclass(slots=True)
class Simulated:
    """What came of a run."""

    virtual_seconds: float = 0.0
    updates: int = 0
    bytes_sent: int = 0
    """By workers: their updates."""
    bytes_received: int = 0
    """By workers: the weights."""
    faults: int = 0
    """Workers that died, and updates that were not taken."""
    losses: list[float] = field(default_factory=list)
    """Of the updates, in their order."""
    staleness: list[int] = field(default_factory=list)
    """Of each update: how often the weights had changed since those that it comes from."""


def simulate(
    strategy: Strategy,
    learner: Steps,
    sends: Sends,
    workers: Sequence[SimulatedWorker],
    *,
    serve_s: float = 0.0,
    spread: float = 0.0,
    seed: int = 0,
    watch: Callable[[int, float], None] = lambda done, now: None,
) -> Simulated:
    """Train to the end of the run.

    Args:
        serve_s: what the host takes for an update; a fetch takes it as long.
        spread: a worker's steps take from `1 - spread` to `1 + spread` of its own time, drawn anew for each update.
        watch: called with the steps that are done, and the virtual time.

    Raises:
        Unavailable: all workers died.
    """
    loop, result, draw = VirtualLoop(), Simulated(), random.Random(seed)  # type: ignore[abstract]  # no I/O
    size = _VALUE_BYTES * (len(strategy.weights) + len(strategy.buffers))
    host_free = 0.0

    async def served() -> None:
        """Wait for one's turn at the host, and for its work."""
        nonlocal host_free
        host_free = max(host_free, loop.time()) + serve_s
        await loop.until(host_free)

    async def work(worker: SimulatedWorker) -> None:
        while not strategy.finished:
            await loop.until(loop.time() + worker.link.delay_s)
            await served()
            lease = strategy.grant(worker.name, loop.time())
            if lease is None:
                await loop.until(loop.time() + worker.link.delay_s + _ASK_AGAIN_S)
                continue
            weights, buffers = strategy.weights.copy(), strategy.buffers.copy()
            result.bytes_received += size
            await loop.until(loop.time() + worker.link.seconds(size))
            for part in lease.unit.parts():
                pace = 1 + spread * draw.uniform(-1, 1)
                await loop.until(loop.time() + worker.step_s * len(part) * pace)
                learner.load(weights, buffers)
                found = learner.compute(part, sends)
                weights, buffers = learner.weights(), found.buffers
                result.bytes_sent += size
                await loop.until(loop.time() + worker.link.seconds(size))
                await served()
                update = Update(lease=lease.number, worker=worker.name, steps=part, computed=found)
                age = strategy.version - lease.unit.version
                if strategy.take(update, loop.time()) != "taken":
                    result.faults += 1
                    break
                result.updates += 1
                result.losses.append(found.loss)
                result.staleness.append(age)
                result.virtual_seconds = loop.time()
                watch(strategy.leases.done, loop.time())

    async def live(worker: SimulatedWorker) -> None:
        task = asyncio.ensure_future(work(worker))
        if worker.leaves_after_s is not None:
            loop.at(worker.leaves_after_s, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            result.faults += 1

    async def main() -> None:
        await asyncio.gather(*(live(worker) for worker in workers))
        if not strategy.finished:
            raise Unavailable("all workers died before the end of the run")

    loop.run(main())
    return result
