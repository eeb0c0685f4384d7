"""The plan of a run on kept pictures: a document and the network's file in one folder, which the host reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from models.manifest import ModelEntry
from models.training.config import NetworkConfig, TrainConfig
from tierkit.atomic import write_atomically
from tierkit.documents import Frozen, read_json
from tierkit.errors import InvalidInput, SetupError
from training.own_data import OwnData
from training.strategies.config import BatchConfig, HostedConfig, OuterConfig, TournamentConfig
from training.trust.config import FEWEST, MOST, TrustConfig

__all__ = [
    "BASE_FILE",
    "IMPROVE",
    "STRATEGY_NAME",
    "Plan",
    "check_strategy",
    "fitted_to",
    "read_plan",
    "training_of",
    "write_plan",
]

BASE_FILE = "base.onnx"
"""File in the folder of a plan, with the network that the run starts from."""
_PLAN = "plan.json"
_FROM_FILE = NetworkConfig(kind="file")

_CONTRAST = 1.8
"""Largest factor on the contrast of a picture."""

STRATEGY_NAME = "improve"
IMPROVE = OuterConfig(
    period=8,
    quorum=0.6,
    once=True,
    trust=TrustConfig(centre="trimmed-mean", cheaters=0.3, deviation=8.0, quarantine=0.05),
)
"""Unless another strategy is given: few steps from the same weights without momentum, and a trimmed mean of the
changes. Up to 30 % of the devices may cheat."""


class Plan(Frozen):
    """A run on kept pictures."""

    own: OwnData
    network: TrainConfig
    choice: Annotated[str, Field(max_length=255)] = STRATEGY_NAME
    """Name of the strategy, or of its file."""
    strategy: Annotated[HostedConfig, Field(discriminator="family")] = IMPROVE


def training_of(
    entry: ModelEntry, *, steps: int, batch: int = 32, rate: float = 0.01, mirror: bool = True
) -> TrainConfig:
    """The configuration of training for the network of an entry: plain SGD in FP32. Pictures are shifted, and their
    contrast changes, so that few pictures of one camera stand for others as well.

    Args:
        steps: steps of all workers together.
        batch: number of pictures of a step.
        rate: learning rate of the first step; it falls to zero.
        mirror: True if mirror images are learned as well.
    """
    height, width, _ = entry.input_shape
    return TrainConfig(
        name=entry.name,
        tier=entry.tier,
        target=entry.target,
        network=_FROM_FILE,
        epochs=steps,
        batch_size=batch,
        peak_rate=rate,
        schedule="cosine",
        momentum=0.0,
        weight_decay=0.0,
        label_smoothing=0.0,
        crop_padding=min(height, width) // 8,
        mirror=mirror,
        contrast=_CONTRAST,
        ema_decay=0.0,
        precision="fp32",
    )


def check_strategy(strategy: HostedConfig) -> None:
    """True if a run on kept pictures can have this strategy.

    Raises:
        InvalidInput: the strategy needs images that the host has as well.
    """
    if isinstance(strategy, BatchConfig | TournamentConfig):
        name = "lbfgs" if isinstance(strategy, BatchConfig) else "tournament"
        raise InvalidInput(f"{name} needs the training images on the host, and here they stay on the devices")
    if strategy.trust is not None and strategy.trust.recheck > 0:
        raise InvalidInput("the host has no kept pictures, so it can compute no update again: set trust.recheck to 0")


def fitted_to(strategy: HostedConfig, devices: int) -> tuple[HostedConfig, int]:
    """Return the strategy for this number of devices, and the number of devices in a round.

    Raises:
        InvalidInput: there are too few to outvote a wrong one; or see `check_strategy`.
    """
    check_strategy(strategy)
    if strategy.trust is not None and devices < FEWEST:
        raise InvalidInput(
            f"the strategy judges the updates of {FEWEST} devices or more, and this run has {devices}: give --strategy "
            "fedavg for so few"
        )
    if not isinstance(strategy, OuterConfig):
        return strategy, devices
    together = strategy.workers or (devices if strategy.trust is None else min(devices, MOST))
    return strategy.model_copy(update={"workers": together}), together


def write_plan(folder: Path, plan: Plan, content: bytes) -> None:
    """Write plan and network into a folder; the plan comes last.

    Raises:
        SetupError: they cannot be written.
    """
    write_atomically(folder / BASE_FILE, content)
    write_atomically(folder / _PLAN, plan.model_dump_json(indent=1).encode())


def read_plan(folder: Path) -> tuple[Plan, bytes]:
    """Plan and network of a folder.

    Raises:
        SetupError: they are missing, or the plan is damaged.
    """
    plan = read_json(folder / _PLAN, Plan, what="plan of an improvement", error=SetupError)
    try:
        return plan, (folder / BASE_FILE).read_bytes()
    except OSError as error:
        raise SetupError(f"cannot read {folder / BASE_FILE}: {error.strerror}") from error
