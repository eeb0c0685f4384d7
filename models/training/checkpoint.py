"""Checkpoints of a training run: one file, replaced atomically, from which the run goes on exactly."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.atomic import write_atomically
from tierkit.errors import WeightsError

__all__ = ["Checkpoint", "EpochRow", "load_checkpoint", "save_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """One line of the log."""

    epoch: int
    loss: float
    """Mean training loss of the epoch."""
    held_out_coarse: float | None
    held_out_fine: float | None
    """Accuracies of the averaged weights on the held-out training images; None where the network has no such answer."""
    rate: float
    seconds: float
    """Wall time of the epoch's steps in this process; pauses of the process included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """State after `step` steps."""

    step: int
    config: dict[str, Any]
    hierarchy: dict[str, Any]
    """`Hierarchy.content` of what it is trained for."""
    data_sha256: str
    """`ImageSet.digest` of all training images, held-out ones included."""
    statistics: dict[str, Any]
    weights: dict[str, Any]
    averaged: dict[str, Any]
    optimizer: dict[str, Any]
    epochs: list[dict[str, Any]]
    loss_sum: float
    """Sum of the losses of the present epoch's steps."""
    epoch_seconds: float
    """Wall time spent on the present epoch so far."""
    seconds: float
    """Wall time spent on the whole run so far."""


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint`; the previous one stays whole until this one is on disk.

    Raises:
        SetupError: it could not be written.
    """
    buffer = io.BytesIO()
    torch.save({field: getattr(checkpoint, field) for field in Checkpoint.__slots__}, buffer)
    write_atomically(path, buffer.getvalue())


def load_checkpoint(path: Path, device: str = "cpu") -> Checkpoint | None:
    """Read a checkpoint; None where there is none.

    Raises:
        WeightsError: the file is truncated or no checkpoint.
    """
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        return Checkpoint(**content)
    except Exception as error:  # torch raises many unrelated classes for a damaged file
        raise WeightsError(
            f"{path} is truncated or no checkpoint ({type(error).__name__}); remove it to start this run afresh"
        ) from error
