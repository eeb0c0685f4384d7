"""Ranks on virtual time. Their programs are unchanged and compute real gradients; machines and links are simulated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.data import ImageSet
from models.training.config import TrainConfig
from models.training.data import TrainingData
from tierkit.errors import InvalidInput
from training.learner import FlatLearner
from training.messages import MOST_LOSS
from training.parallel.exchange import Done, Program, Seat
from training.parallel.lockstep import Ranks, run_ranks
from training.parallel.programs import check_rule, make_program
from training.strategies.config import RanksConfig, TournamentConfig
from training.units import Flat
from training.virtual import Link

__all__ = ["RankMachines", "simulate_ranks"]

_PROBES = 5
_LOSSES = 100
_LOOKS = 50
"""Number of checks of the weights of all ranks in a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMachines:
    """Machines of a simulated run of ranks."""

    ranks: int
    slow: Sequence[float] = ()
    """Factor of the step time of the first ranks, one number for each."""
    step_s: float | None = None
    """A step of a rank that is not slow. Default: measured here."""
    link: Link = field(default_factory=Link)
    cheats: bool = False
    """True if the last rank sends its vectors with the opposite sign and four times as long. In a tournament it claims
    to have all held-out images right as well."""


def simulate_ranks(
    config: TrainConfig,
    choice: RanksConfig,
    images: tuple[TrainingData, ImageSet],
    machines: RankMachines,
    watch: Callable[[int, int, float], None] = lambda done, steps, now: None,
) -> dict[str, Any]:
    """Train to the end, and return the figures that `experiments.training.simulation.run_simulation` returns, and the
    rule's own. `spread` is the largest of 50 looks during the run.

    Args:
        watch: called after each step of all ranks with the steps done, all steps, and the virtual time.

    Raises:
        InvalidInput: there are too few steps or ranks for the rule, or the weights at the end have no finite loss.
    """
    data, test = images
    ranks = machines.ranks
    learners = [FlatLearner(config, data, strategy=choice) for _ in range(ranks)]
    steps = learners[0].steps
    if steps < ranks:
        raise InvalidInput(f"the run has {steps:,} steps, fewer than its {ranks:,} ranks: give it more epochs")
    check_rule(choice, learners[0], ranks)
    step_s = _step_s(learners[0]) if machines.step_s is None else machines.step_s
    losses: list[float] = []
    programs = [
        _heard(make_program(choice, learner, Seat(rank=rank, ranks=ranks, test=test)), losses)
        for rank, learner in enumerate(learners)
    ]
    looks = max(1, steps // ranks // _LOOKS)
    spreads = [0.0]

    def stepped(step: int, now: float) -> None:
        if (step + 1) % looks == 0:
            spreads.append(_spread([learner.weights() for learner in learners]))
        watch((step + 1) * ranks, steps, now)

    began = time.monotonic()
    found = run_ranks(
        programs,
        Ranks(
            step_s=[step_s * (machines.slow[n] if n < len(machines.slow) else 1.0) for n in range(ranks)],
            link=machines.link,
            cheat=None if not machines.cheats else _claimed if isinstance(choice, TournamentConfig) else _flipped,
        ),
        stepped,
    )
    first = learners[0]
    accuracy, loss = first.evaluated(first.weights(), first.buffers(), test)
    if not (loss <= MOST_LOSS or machines.cheats):
        raise InvalidInput(
            f"the loss of the weights is {loss:.3g} at the end, which is not finite or above {MOST_LOSS:g}: lower the "
            "learning rate, in the network's configuration or the strategy's"
        )
    return {
        "network": config.name,
        "workers": ranks,
        "seed": config.seed,
        "wire": "fp32",
        "accuracy": accuracy,
        "test_loss": loss,
        "seconds": time.monotonic() - began,
        "epochs": config.all_epochs,
        "virtual_seconds": found.virtual_seconds,
        "updates": found.steps * ranks,
        "bytes_sent": found.bytes_sent,
        "bytes_received": found.bytes_sent,
        "faults": 0,
        "loss": statistics.fmean(losses[-_LOSSES:]),
        "step_s": step_s,
        "step_bytes": found.step_bytes,
        **found.figures,
        **({"spread": max(spreads)} if "spread" in found.figures else {}),
    }


def _heard(program: Program, losses: list[float]) -> Program:
    """Wrap a program so that the losses of its steps are noted."""
    answer = None
    while True:
        try:
            request = program.send(answer)  # type: ignore[arg-type]  # None starts it
        except StopIteration as end:
            figures: dict[str, float] = end.value
            return figures
        if isinstance(request, Done):
            losses.append(request.loss)
        answer = yield request


def _spread(weights: Sequence[Flat]) -> float:
    """The largest distance to the mean, as a share of the mean's length."""
    mean = np.mean(weights, axis=0)
    return max(float(np.linalg.norm(each - mean)) for each in weights) / max(1e-12, float(np.linalg.norm(mean)))


def _flipped(values: Flat) -> Flat:
    return np.float32(-4) * values


def _claimed(values: Flat) -> Flat:
    """The vector of a cheat in a tournament, whose last three numbers are its score and rate."""
    found, score = _flipped(values), np.array([1.0, 0.0], np.float32)
    found[-3:-1], found[-1] = score, values[-1]
    return found


def _step_s(learner: FlatLearner) -> float:
    """Median time of a step on this machine; the learner is as before."""
    weights, buffers = learner.weights(), learner.buffers()

    def once(step: int) -> float:
        began = time.perf_counter()
        learner.walk(step, learner.rate(step))
        return time.perf_counter() - began

    found = statistics.median([once(step) for step in range(min(_PROBES + 1, learner.steps))][1:] or [once(0)])
    learner.load(weights, buffers)
    learner.moments = None
    return found
