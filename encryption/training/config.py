"""Configuration of a learned encoder's training: a TOML file, checked and frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from models.training.config import NetworkConfig, TrainConfig, read_config
from tierkit.documents import Frozen

__all__ = ["CONFIGS", "AdversaryConfig", "BodyConfig", "BottleneckConfig", "EncoderConfig", "find_encoder_config"]

CONFIGS = Path(__file__).parent.parent / "configs"
"""Folder of the configurations that ship with Terrace."""


class BodyConfig(Frozen):
    """A network whose first layers the encoder begins with."""

    run: str
    """The training run whose averaged weights they start with."""
    network: NetworkConfig


class EncoderConfig(Frozen):
    """The part that runs on the device, and its features.

    It consists either of new convolutions (`widths`, `strides`), or of the first convolution and some blocks (`keep`)
    of the upper network or of `body`, which start with that network's weights. A last convolution makes the features.
    """

    widths: tuple[PositiveInt, ...] = ()
    """Output channels of its 3x3 convolutions."""
    strides: tuple[Literal[1, 2], ...] = ()
    """Their strides."""
    keep: tuple[NonNegativeInt, ...] = ()
    """Numbers of the blocks that it takes from that network."""
    body: BodyConfig | None = None
    inner: float = Field(1.0, ge=1, le=1, exclude=True)
    """Only in records of earlier versions."""
    channels: PositiveInt
    """Channels of the features."""
    levels: Literal[2, 4, 8, 16, 32, 64, 128, 256]
    """Number of values that a feature can take: 0, 1/(levels - 1), ..., 1."""
    noise: NonNegativeFloat
    """Standard deviation of the Gaussian noise that is added before rounding to a level."""
    cut: NonNegativeInt
    """Blocks of the upper network that the encoder takes the place of; the tail has the others."""

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> EncoderConfig:
        if bool(self.widths) == bool(self.keep):
            raise ValueError("an encoder has either new convolutions (widths) or blocks of the network (keep)")
        if len(self.widths) != len(self.strides):
            raise ValueError(f"{len(self.widths)} widths need as many strides, not {len(self.strides)}")
        if self.body is not None and not self.keep:
            raise ValueError("name the blocks (keep) that the encoder takes from the body")
        if self.body is None and any(block >= self.cut for block in self.keep):
            raise ValueError(f"blocks from {self.cut} on belong to the tail, and cannot be kept below")
        return self


class AdversaryConfig(Frozen):
    """The decoder that learns alongside to reconstruct the images, and its weight in the encoder's loss."""

    weight: NonNegativeFloat
    """Weight of the decoder's SSIM in the encoder's loss; 0 for an encoder that ignores the decoder."""
    ramp_epochs: NonNegativeFloat = 1.0
    """Epochs in which the weight rises from zero."""
    width: PositiveInt = 96
    """Channels of the decoder."""
    rate: PositiveFloat = 1e-3
    """Its learning rate (AdamW)."""
    steps: PositiveInt = 1
    """Its steps for each step of the encoder."""


class BottleneckConfig(TrainConfig):
    """Everything that determines the training of a learned encoder, together with the data and the code.

    `network` is the upper network, `teacher.runs` are networks of the manifest.
    """

    upper: str
    """The upper network's name in the manifest."""
    start: Literal["shipped", "run", "random"] = "shipped"
    """Source of the first weights: the manifest's file (only ResNet), the checkpoint of the network's own training run,
    or none."""
    initial: None = None
    hint_epochs: NonNegativeInt = 0
    """Epochs before the first in which only the head learns, to give the output of the replaced blocks (FitNets,
    arXiv:1412.6550)."""
    encoder: EncoderConfig
    adversary: AdversaryConfig
    clip_norm: PositiveFloat = 5.0
    """Longest gradient of head and tail together."""

    @property
    def all_epochs(self) -> int:
        return self.hint_epochs + self.epochs


def find_encoder_config(name: str, path: Path | None) -> BottleneckConfig:
    """The configuration of an encoder; see `read_config`."""
    return read_config(name, path, BottleneckConfig, CONFIGS)
