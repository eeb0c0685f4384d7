"""One training run from configuration to record: reads the data, asks the teachers, trains, logs, draws."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from models.data import ImageSet
from models.dataset import CIFAR100, Dataset
from models.training.checkpoint import EpochRow, load_checkpoint
from models.training.config import TrainConfig
from models.training.loop import Progress, Trainer, check_hierarchy, served_weights
from models.training.record import TrainingRecord, make_record, save_record
from models.training.teacher import teacher_probabilities
from tierkit.errors import DataError, WeightsError

__all__ = ["read_training_images", "train_run"]


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


def train_run(
    config: TrainConfig,
    dataset: Dataset,
    runs: Path,
    *,
    device: str = "cpu",
    last: int | None = None,
    report: Callable[[Progress], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda _: None,
) -> TrainingRecord:
    """Train `config` in the folder `runs / config.name`, or go on with what is there.

    Leaves `checkpoint.pt`, `log.txt` and `record.json`, the last two brought up to date after every epoch.

    Args:
        runs: folder of all runs; the run to start from and a teacher's are looked for here, and a teacher's answers are
            kept here for its other students.
        last: stop after this many steps of the run, those of earlier calls included.
        stop: asked after each step whether to stop there.
        say: told what is going on before the first step.

    Raises:
        DataError, WeightsError, Conflict, SetupError: see `Trainer` and `teacher_probabilities`.
    """
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

    def record() -> TrainingRecord:
        return make_record(
            config,
            trainer.rows,
            data=dataset.name,
            train_images=trainer.train_images,
            held_out_images=len(data) - trainer.train_images,
            steps=trainer.step,
            planned_steps=trainer.steps,
            seconds=trainer.seconds,
            device=device,
        )

    def after_step(progress: Progress) -> None:
        if progress.row is not None:
            _log(folder / "log.txt", progress.row, config.epochs, progress.seconds_left)
            save_record(record(), folder)
        report(progress)

    say(
        f"{config.name}: {config.network.kind} on {dataset.name}, {config.epochs} epochs of "
        f"{trainer.steps // config.epochs:,} steps with {config.batch_size} images each, on {device}"
        + (f", going on after step {trainer.step:,}" if trainer.step else "")
    )
    trainer.run(after_step, last=last, stop=stop)
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


def _log(path: Path, row: EpochRow, epochs: int, seconds_left: float) -> None:
    fine = "" if row.held_out_fine is None else f"fine {row.held_out_fine:.4f}  "
    line = (
        f"{time.strftime('%Y-%m-%dT%H:%M:%S')}  epoch {row.epoch}/{epochs}  loss {row.loss:.4f}  "
        f"held-out coarse {row.held_out_coarse:.4f}  {fine}{row.seconds:.1f} s  {seconds_left / 60:.1f} min left\n"
    )
    with path.open("a", encoding="utf-8") as log:
        log.write(line)
        log.flush()
        os.fsync(log.fileno())
