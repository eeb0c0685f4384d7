"""One improvement in this process, on virtual time: real gradients and the host's own rules, without its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.manifest import ModelEntry
from models.training.config import TrainConfig
from training.cheating import Cheat
from training.improve.base import own_learner, own_training_data, read_base
from training.own_data import OwnData
from training.strategies.build import build_strategy
from training.strategies.config import OuterConfig
from training.units import Flat
from training.virtual import Conditions, SimulatedWorker, simulate

__all__ = ["Course", "Improved", "base_of", "improve"]

_STEP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A course of learning."""

    own: OwnData
    config: TrainConfig
    strategy: OuterConfig
    cheats: Mapping[int, Cheat] = field(default_factory=dict)
    """Devices that change their updates, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """The result of an improvement."""

    weights: Flat
    updates: int
    bytes_sent: int
    quarantined: tuple[str, ...]


def base_of(entry: ModelEntry, content: bytes, hierarchy: Hierarchy, layers: int) -> OwnData:
    """The network of an entry, as a host describes it to workers."""
    return OwnData.of(entry, content, hierarchy, release=f"{entry.name}@1", layers=layers)


def improve(content: bytes, course: Course, devices: Sequence[ImageSet]) -> Improved:
    """Train the network of a file on the pictures of devices, which are labelled by the answers from above.

    Args:
        devices: the pictures of each.

    Raises:
        InvalidInput: the weights become such that nothing can be computed from them.
    """
    own, config = course.own, course.config
    data = [own_training_data(config, images, own.classes, sha256=own.sha256) for images in devices]
    learner = own_learner(read_base(content, own, config), config, data[0], strategy=course.strategy)
    start = learner.weights(), learner.buffers()
    lease_s = 10 * _STEP_S * course.strategy.period
    strategy = build_strategy(course.strategy, start, learner, workers=len(devices), lease_s=lease_s)
    crew = [
        SimulatedWorker(name=f"device-{number}", step_s=_STEP_S, data=each, cheat=course.cheats.get(number))
        for number, each in enumerate(data)
    ]
    found = simulate(strategy, learner, crew, Conditions(spread=0.1, seed=config.seed))
    return Improved(
        weights=np.array(strategy.weights, np.float32),
        updates=found.updates,
        bytes_sent=found.bytes_sent,
        quarantined=tuple(found.quarantined),
    )
