"""`terrace train simulate`: a run of a network on the virtual machines of `training.virtual`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from models.data import ImageSet
from models.training.config import TrainConfig
from models.training.data import TrainingData
from tierkit.errors import InvalidInput
from training.cheating import Cheat
from training.learner import FlatLearner
from training.messages import MOST_LOSS
from training.payloads import Format, format_of_weights, pack, packed_bytes, unpack
from training.strategies.build import build_strategy
from training.strategies.config import BatchConfig, HostedConfig
from training.strategies.lbfgs import check_lbfgs
from training.strategies.protocol import Strategy
from training.units import Computed, Flat, Sends, Update
from training.virtual import Conditions, Link, SimulatedWorker, draw_faults, simulate

__all__ = ["Machines", "run_simulation"]

_PROBES = 5
_FAULT_LEASES = 2
"""Longest fault, in leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Workers, host and links of a simulated run."""

    workers: int
    slow: Sequence[float] = ()
    """Factors by which the first workers are slower, one number for each."""
    step_s: float | None = None
    """Seconds per step of a worker that is not slow; by default the time measured here."""
    serve_s: float | None = None
    """Seconds that the host takes for an update; by default the time measured here."""
    sync_s: float = 0.0
    """Seconds that the host's disk takes to keep updates."""
    spread: float = 0.0
    """See `training.virtual.Conditions`."""
    link: Link = field(default_factory=Link)
    wire: Format = "fp32"
    """Number format in which updates are sent."""
    leave_after_s: Sequence[float] = ()
    """Times when the last workers die, one number for each."""
    stays_s: float | None = None
    """Mean seconds until another worker takes the place of a worker; see `SimulatedWorker`."""
    faults: int = 0
    """Number of faults of updates; see `training.virtual.draw_faults`. Some last longer than a lease."""
    cheat: Cheat = "sign-flip"
    """Kind of cheating of the last workers."""
    cheaters: int = 0
    """Number of workers that cheat."""
    own: Sequence[TrainingData] = ()
    """Images that the workers draw from, one for each; without them, all draw from the run's."""
    gradients: bool = True
    """True if they are computed. Without them the times are the same, and there is no accuracy."""


def run_simulation(
    config: TrainConfig,
    choice: HostedConfig,
    images: tuple[TrainingData, ImageSet],
    machines: Machines,
    watch: Callable[[int, int, float], None] = lambda done, steps, now: None,
) -> dict[str, Any]:
    """Train to the end and return the results.

    Args:
        watch: called after each update with the steps done, all steps of the run, and the virtual time.

    Raises:
        Unavailable: all workers died.
        InvalidInput: there are fewer updates than faults, workers die too soon, or the weights no longer give a
            meaningful loss. It is also raised if the strategy cannot train this network or judge this number of updates
            together.
    """
    if isinstance(choice, BatchConfig):
        check_lbfgs(config, machines.wire)
    data, test = images
    learner, wire = FlatLearner(config, data, strategy=choice), machines.wire
    weights, buffers = learner.weights(), learner.buffers()

    def start() -> Strategy:
        return build_strategy(choice, (weights, buffers), learner, workers=machines.workers, lease_s=lease_s)

    step_s = _step_s(learner, choice) if machines.step_s is None else machines.step_s
    slowest = step_s * max([1.0, *machines.slow]) * (1 + machines.spread)
    both_ways = (packed_bytes(len(weights), len(buffers), each) for each in (wire, format_of_weights(wire)))
    # Three times what an update of the slowest worker takes, so that none is given up that lives.
    lease_s = 3 * (slowest * choice.period + sum(map(machines.link.seconds, both_ways))) + 1.0
    serve_s = _serve_s(start(), wire) if machines.serve_s is None else machines.serve_s
    strategy = start()
    leaving = dict(zip(reversed(range(machines.workers)), machines.leave_after_s, strict=False))
    crew = [
        SimulatedWorker(
            name=f"w{number}",
            step_s=step_s * (machines.slow[number] if number < len(machines.slow) else 1.0),
            link=machines.link,
            leaves_after_s=leaving.get(number),
            cheat=machines.cheat if number >= machines.workers - machines.cheaters else None,
            stays_s=machines.stays_s,
            data=machines.own[number] if machines.own else None,
        )
        for number in range(machines.workers)
    ]
    learner.load(weights, buffers)
    began, accuracy, loss = time.monotonic(), None, None
    found = simulate(
        strategy,
        learner if machines.gradients else _Still(weights, buffers),
        crew,
        Conditions(
            wire=wire,
            serve_s=serve_s,
            sync_s=machines.sync_s,
            spread=machines.spread,
            seed=config.seed,
            faults=draw_faults(
                machines.faults,
                updates=-(-learner.steps // choice.period),
                longest_s=_FAULT_LEASES * lease_s,
                seed=config.seed,
            ),
        ),
        lambda done, now: watch(done, learner.steps, now),
    )
    if machines.gradients:
        accuracy, loss = learner.evaluated(strategy.weights, strategy.buffers, test)
        if not loss <= MOST_LOSS:
            raise InvalidInput(
                f"the loss of the weights is {loss:.3g} at the end, which is not finite or above {MOST_LOSS:g}: lower "
                "the learning rate, in the network's configuration or the strategy's"
            )
    if strategy.failure and machines.gradients:
        raise InvalidInput(strategy.failure)
    return {
        "network": config.name,
        "workers": machines.workers,
        "seed": config.seed,
        "wire": wire,
        "accuracy": accuracy,
        "test_loss": loss,
        "seconds": time.monotonic() - began,
        "epochs": config.all_epochs,
        "worker_step_s": statistics.fmean(seconds / steps for seconds, steps in found.spent.values()),
        "cheat": machines.cheat if machines.cheaters else None,
        "cheaters": machines.cheaters,
        **{name: figure for name, figure in asdict(found).items() if name != "spent"},
        **strategy.results(),
        "step_s": step_s,
        "serve_s": serve_s,
    }


class _Still:
    """Replaces a learner if only time matters."""

    def __init__(self, weights: Flat, buffers: Flat) -> None:
        self._nothing, self._buffers = np.zeros_like(weights), buffers
        self.moments = None

    def load(self, weights: Flat, buffers: Flat) -> None:
        pass

    def weights(self) -> Flat:
        return self._nothing

    def measured(self, weights: Flat, buffers: Flat) -> tuple[float, float]:
        return 0.0, 0.0

    def compute(self, steps: range, sends: Sends, rate: float | None = None) -> Computed:
        return Computed(values=self._nothing, buffers=self._buffers, loss=0.0)


def _step_s(learner: FlatLearner, choice: HostedConfig) -> float:
    """Median time of a step on this machine."""

    def once(step: int) -> float:
        began = time.perf_counter()
        learner.compute(range(step, step + 1), choice.sends)
        return time.perf_counter() - began

    return statistics.median([once(step) for step in range(min(_PROBES + 1, learner.steps))][1:] or [once(0)])


def _serve_s(strategy: Strategy, wire: Format) -> float:
    """Median time in which this machine unpacks an update of nothing and brings it into the weights."""
    spent = []
    lengths = {"values": len(strategy.weights), "buffers": len(strategy.buffers)}
    body = pack(np.zeros_like(strategy.weights), np.zeros_like(strategy.buffers), wire)
    for _ in range(_PROBES):
        lease = strategy.grant("probe", 0.0)
        if lease is None:
            break
        began = time.perf_counter()
        values, buffers = unpack(body, **lengths)
        computed = Computed(values=values, buffers=buffers, loss=0.0)
        strategy.take(Update(lease=lease.number, worker="probe", steps=lease.unit.span, computed=computed), 0.0)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)
