"""What `terrace models train` does: find the configuration, train, draw."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from models.dataset import Dataset
from models.training.config import bundled_config, load_config
from models.training.curves import draw_curves
from models.training.loop import Progress
from models.training.record import TrainingRecord
from models.training.run import train_run
from tierkit.errors import ProviderUnavailable

__all__ = ["train_by_name"]


def train_by_name(
    name: str,
    *,
    config: Path | None,
    dataset: Dataset,
    runs: Path,
    device: str,
    threads: int | None,
    minutes: float | None,
    progress: Callable[[Progress], None],
) -> TrainingRecord:
    """Train the network `name` in `runs / name`, or go on with it; draws `curves.png` there.

    Args:
        config: configuration file; the bundled one called `name` unless given.
        minutes: stop after so long, at the end of a step.

    Raises:
        InvalidInput: the configuration is wrong.
        ProviderUnavailable: torch cannot use `device`.
        DataError, WeightsError, Conflict, SetupError: see `train_run`.
    """
    chosen = load_config(config or bundled_config(name)).model_copy(update={"name": name})
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ProviderUnavailable("torch finds no CUDA device on this machine; train with --device cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    end = None if minutes is None else time.monotonic() + minutes * 60
    record = train_run(
        chosen,
        dataset,
        runs,
        device=device,
        report=progress,
        stop=lambda: end is not None and time.monotonic() >= end,
    )
    if record.epochs:
        draw_curves(record, runs / name / "curves.png")
    return record
