"""One training run from configuration to record: reads the data, asks the teachers, trains, logs, draws."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from models.data import ImageSet
from models.dataset import CIFAR100, Dataset
from models.training.checkpoint import EpochRow, load_checkpoint
from models.training.config import TrainConfig
from models.training.curves import draw_curves
from models.training.driver import Driver, Progress, check_hierarchy
from models.training.loop import Trainer, served_weights
from models.training.record import RunRecord, TrainingRecord, make_record, save_record
from models.training.teacher import teacher_probabilities
from tierkit.errors import DataError, ProviderUnavailable, WeightsError

__all__ = ["Sitting", "drive", "read_training_images", "train_run"]

Row = TypeVar("Row", bound=EpochRow)
Record = TypeVar("Record", bound=RunRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    """On what a run goes on this time, for how long, and who is told."""

    device: str = "cpu"
    threads: int | None = None
    """Of torch on a CPU; its own choice unless given."""
    minutes: float | None = None
    """Stop after so long, at the end of a step."""
    steps: int | None = None
    """Stop when the run has done so many steps, those of earlier times included."""
    report: Callable[[Progress[Any]], None] = lambda _: None
    """Called after each step."""
    say: Callable[[str], None] = lambda _: None
    """Told what is going on before the first step."""

    def prepare(self) -> None:
        """Have torch use the device and threads.

        Raises:
            ProviderUnavailable: it cannot.
        """
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ProviderUnavailable("torch finds no CUDA device on this machine; train with --device cpu")
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def read_training_images(dataset: Dataset) -> ImageSet:
    """The training images; CIFAR-100 through torchvision, which checks the md5 of its files.

    Raises:
        DataError: they are missing or damaged.
    """
    if dataset.name != CIFAR100:
        return dataset.read("train")
    if dataset.folder is None:
        raise DataError("no data folder given: set TERRACE_DATA to the folder that holds cifar-100-python/")
    from torchvision.datasets import CIFAR100 as TorchvisionCIFAR100

    try:
        stored = TorchvisionCIFAR100(str(dataset.folder), train=True, download=False)
    except RuntimeError as error:
        raise DataError(
            f"{dataset.folder / 'cifar-100-python'} is missing or damaged: unpack cifar-100-python.tar.gz there"
        ) from error
    fine = np.asarray(stored.targets, dtype=np.int64)
    return ImageSet(
        images=np.asarray(stored.data),
        fine=fine,
        coarse=dataset.hierarchy.coarse_labels(fine),
        names=tuple(f"train/{index:05d}" for index in range(len(fine))),
        hierarchy_name=dataset.hierarchy.name,
    )


def train_run(config: TrainConfig, dataset: Dataset, runs: Path, sitting: Sitting) -> TrainingRecord:
    """Train `config` in the folder `runs / config.name`, or go on with what is there.

    Leaves `checkpoint.pt`, `log.txt`, `record.json` and `curves.png`, log and record brought up to date after every
    epoch.

    Args:
        runs: folder of all runs; the run to start from and a teacher's are looked for here, and a teacher's answers are
            kept here for its other students.

    Raises:
        ProviderUnavailable: torch cannot use the device.
        DataError, WeightsError, Conflict, SetupError: see `Trainer` and `teacher_probabilities`.
    """
    sitting.prepare()
    device, say = sitting.device, sitting.say
    say("reading the training images")
    data = read_training_images(dataset)
    folder = runs / config.name
    folder.mkdir(parents=True, exist_ok=True)
    teacher = None
    if config.teacher is not None:
        say(f"getting the answers of {', '.join(config.teacher.runs)} to them")
        teacher = teacher_probabilities(
            [runs / name for name in config.teacher.runs],
            data,
            dataset.hierarchy,
            cache=runs / "answers" / f"{'+'.join(config.teacher.runs)}.pt",
            device=device,
        )
    initial = None if config.initial is None else _initial_weights(config, runs / config.initial, dataset, device)
    trainer = Trainer(config, data, dataset.hierarchy, folder, initial=initial, teacher=teacher, device=device)
    record = drive(trainer, folder, sitting, dataset, make_record, _measured)
    if record.epochs:
        draw_curves(record, folder / "curves.png")
    return record


def drive(
    trainer: Driver[Any, Row],
    folder: Path,
    sitting: Sitting,
    dataset: Dataset,
    make_record: Callable[..., Record],
    measured: Callable[[Row], str],
) -> Record:
    """Let a trainer run, with a line of `log.txt` and a new `record.json` after each epoch; the record at the end.

    Args:
        make_record: of the run as it stands; called with the trainer, `data` and `device`.
        measured: what a line says of an epoch beside its number, loss and times.

    Raises:
        SetupError: a file could not be written.
    """

    def record() -> Record:
        return make_record(trainer, data=dataset.name, device=sitting.device)

    def after_step(progress: Progress[Row]) -> None:
        if (row := progress.row) is not None:
            _log(
                folder / "log.txt",
                f"epoch {row.epoch}/{trainer.epochs}  loss {row.loss:.4f}  {measured(row)}  {row.seconds:.1f} s  "
                f"{progress.seconds_left / 60:.1f} min left",
            )
            save_record(record(), folder)
        sitting.report(progress)

    config = trainer.config
    sitting.say(
        f"{config.name}: {config.network.kind} on {dataset.name}, {trainer.epochs} epochs of "
        f"{trainer.steps_per_epoch:,} steps with {config.batch_size} images each, on {sitting.device}"
        + (f", going on after step {trainer.step:,}" if trainer.step else "")
    )
    end = None if sitting.minutes is None else time.monotonic() + sitting.minutes * 60
    trainer.run(after_step, last=sitting.steps, stop=lambda: end is not None and time.monotonic() >= end)
    finished = record()
    save_record(finished, folder)
    return finished


def _initial_weights(config: TrainConfig, folder: Path, dataset: Dataset, device: str) -> dict[str, Tensor]:
    checkpoint = load_checkpoint(folder / "checkpoint.pt", device=device)
    if checkpoint is None:
        raise WeightsError(f"the run to start from has not been trained: no {folder / 'checkpoint.pt'}")
    check_hierarchy(checkpoint, dataset.hierarchy)
    before = TrainConfig.model_validate(checkpoint.config)
    if (before.network, before.target) != (config.network, config.target):
        raise WeightsError(
            f"{config.name!r} cannot start from the weights of {before.name!r}: network and target of the two differ"
        )
    return served_weights(checkpoint)


def _measured(row: EpochRow) -> str:
    fine = "" if row.held_out_fine is None else f"  fine {row.held_out_fine:.4f}"
    return f"held-out coarse {row.held_out_coarse:.4f}{fine}"


def _log(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}  {line}\n")
        log.flush()
        os.fsync(log.fileno())
