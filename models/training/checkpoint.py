"""Checkpoints of a training run: one file, replaced atomically, from which the run continues exactly."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from pydantic import ValidationError

from models.hierarchy import Hierarchy
from models.training.config import Config
from tierkit.atomic import write_atomically
from tierkit.documents import faults
from tierkit.errors import SetupError, WeightsError

__all__ = [
    "CHECKPOINT",
    "Checkpoint",
    "EpochRow",
    "load_checkpoint",
    "load_own",
    "not_trained",
    "read_checkpoint",
    "save_checkpoint",
]

CHECKPOINT = "checkpoint.pt"


class EpochRow(TypedDict):
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
    adversary_ssim: NotRequired[float]
    """Mean SSIM of the adversary's reconstructions during the epoch, in an encoder's run."""


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
    epochs: list[EpochRow]
    loss_sum: float
    """Sum of the losses of the present epoch's steps."""
    epoch_seconds: float
    """Wall time spent on the present epoch so far."""
    seconds: float
    """Wall time spent on the whole run so far."""

    def configured(self, kind: type[Config]) -> Config:
        """Its configuration.

        Raises:
            WeightsError: it is not one of this version.
        """
        try:
            return kind.model_validate(self.config)
        except ValidationError as error:
            raise WeightsError(
                f"the run {self.config.get('name')!r} has a configuration that this version does not take "
                f"({faults(error, kind)}): use the version that trained it, or train it afresh"
            ) from error

    @property
    def trained_for(self) -> Hierarchy:
        return Hierarchy.parse(self.hierarchy, source="the checkpoint")


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint of a run folder; the previous one stays whole until this one is on disk.

    Raises:
        SetupError: it could not be written.
    """
    state = {field: getattr(checkpoint, field) for field in Checkpoint.__slots__}
    try:
        write_atomically(folder / CHECKPOINT, lambda file: torch.save(state, file))
    except RuntimeError as error:  # torch hides the error of the file
        reason = error.__context__ or error
        raise SetupError(f"cannot write {folder / CHECKPOINT}: {reason}; the old file, if any, is whole") from error


def read_checkpoint(folder: Path, device: str = "cpu") -> Checkpoint | None:
    """The checkpoint of a run folder; None where there is none.

    Raises:
        WeightsError: the file is truncated or no checkpoint, or its run has diverged.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of files that it has not written
            checkpoint = Checkpoint(**torch.load(path, map_location=device, weights_only=True))
    except Exception as error:  # torch raises many unrelated classes for a damaged file
        raise WeightsError(f"{path} is truncated, or no checkpoint; remove it, and train this run afresh") from error
    values = (value for weights in (checkpoint.weights, checkpoint.averaged) for value in weights.values())
    if not all(torch.isfinite(value).all() for value in values if isinstance(value, torch.Tensor)):
        raise WeightsError(
            f"{path} has NaN or infinite weights: its run has diverged; remove it, and train "
            "afresh with a lower peak_rate"
        )
    return checkpoint


def not_trained(folder: Path) -> WeightsError:
    """Error for a run that another one needs and that is missing. It names the command to train it."""
    return WeightsError(
        f"{folder.name!r} has not been trained, there is no {folder / CHECKPOINT}: train it with "
        f"'terrace models train {folder.name}' ('terrace privacy train' for an encoder), or name another folder of runs"
    )


def load_checkpoint(folder: Path, hierarchy: Hierarchy, device: str = "cpu") -> Checkpoint:
    """The checkpoint of a run that was trained for the labels of a data set: names, counts and order.

    Raises:
        WeightsError: there is none, it is damaged, or it was trained for another hierarchy.
    """
    checkpoint = read_checkpoint(folder, device)
    if checkpoint is None:
        raise not_trained(folder)
    stored = checkpoint.trained_for
    if stored != hierarchy:
        ours, theirs = (
            f"{each.name!r} ({len(each.fine)} classes in {len(each.coarse)} superclasses)"
            for each in (stored, hierarchy)
        )
        raise WeightsError(
            f"the run {checkpoint.config['name']!r} was trained for hierarchy {ours}, the data set has {theirs}; "
            "names and order of the classes must agree"
        )
    return checkpoint


def load_own(folder: Path, hierarchy: Hierarchy) -> Checkpoint:
    """Load the checkpoint of a run that will ship under the name of its folder.

    Raises:
        WeightsError: there is no usable checkpoint, or the run has another name, so it would replace another network.
    """
    checkpoint = load_checkpoint(folder, hierarchy)
    name = checkpoint.config.get("name")
    if name != folder.name:
        raise WeightsError(f"{folder} holds a run of {name!r}; call the folder that, or name another run")
    return checkpoint
