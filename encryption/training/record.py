"""The record of an encoder's training run, kept next to the weights."""

from __future__ import annotations

from encryption.training.config import BottleneckConfig
from models.training.record import TrainingRecord

__all__ = ["EncoderRecord"]


class EncoderRecord(TrainingRecord):
    """One run of an encoder."""

    config: BottleneckConfig
