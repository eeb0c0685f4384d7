"""Rows of the table `predicted`: a network that learns a share of its weights (Denil et al. 2013). Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.training.cases import LINK_BYTES_PER_S, LINK_DELAY_S, Case
from experiments.training.ranks import RankMachines, simulate_ranks
from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.training.config import NetworkConfig, find_config
from models.training.data import TrainingData
from models.training.networks import build_network, count_parameters
from training.learner import FlatLearner
from training.strategies.config import ExchangeConfig
from training.virtual import Link

__all__ = ["predicted"]

_NETWORK = "mnist-100"
_HELD_OUT = 120
"""Reciprocal of the share of images that is held out."""


def predicted(
    case: Case,
    images: tuple[ImageSet, ImageSet, Hierarchy],
    seed: int,
    watch: Callable[[], None],
    step_s: Callable[[FlatLearner], float],
) -> dict[str, Any]:
    """Run one line, by one process.

    Args:
        images: training images, test images, and their classes.
        watch: called now and then; what it raises ends the run.
        step_s: returns the processor seconds of a step.
    """
    assert isinstance(case.strategy, ExchangeConfig)
    train, test, hierarchy = images
    plain = find_config(_NETWORK, None)
    options = {**plain.network.options, **case.network}
    changes = {
        "seed": seed,
        "epochs": case.epochs,
        "held_out_per_class": max(1, len(train) // _HELD_OUT // len(hierarchy.fine)),
        "network": NetworkConfig(kind=plain.network.kind, options=options),
    }
    config = plain.model_copy(update=changes)
    data = TrainingData(config, train, hierarchy)
    link = Link(delay_s=LINK_DELAY_S, bytes_per_s=LINK_BYTES_PER_S)
    alone = RankMachines(ranks=1, step_s=step_s(FlatLearner(config, data)), link=link)
    found = simulate_ranks(config, case.strategy, (data, test), alone, lambda done, steps, now: watch())
    return {
        **found,
        "cheat": None,
        "parameters": count_parameters(build_network(plain.network.kind, len(hierarchy.fine), options)),
        "epoch_seconds": found["virtual_seconds"] / case.epochs,
    }
