"""What `terrace models train` does: train, draw."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from models.dataset import Dataset
from models.training.config import TrainConfig
from models.training.curves import draw_curves
from models.training.loop import Progress
from models.training.record import TrainingRecord
from models.training.run import train_run
from tierkit.errors import ProviderUnavailable

__all__ = ["train_and_draw"]


def train_and_draw(
    config: TrainConfig,
    *,
    dataset: Dataset,
    runs: Path,
    device: str,
    threads: int | None,
    minutes: float | None,
    steps: int | None,
    progress: Callable[[Progress], None],
    say: Callable[[str], None],
) -> TrainingRecord:
    """Train in the folder `runs / config.name`, or go on with what is there; draws `curves.png` there.

    Args:
        minutes: stop after so long, at the end of a step.
        steps: stop when the run has done so many steps.

    Raises:
        ProviderUnavailable: torch cannot use `device`.
        DataError, WeightsError, Conflict, SetupError: see `train_run`.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ProviderUnavailable("torch finds no CUDA device on this machine; train with --device cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    end = None if minutes is None else time.monotonic() + minutes * 60
    record = train_run(
        config,
        dataset,
        runs,
        device=device,
        last=steps,
        report=progress,
        stop=lambda: end is not None and time.monotonic() >= end,
        say=say,
    )
    if record.epochs:
        draw_curves(record, runs / config.name / "curves.png")
    return record
