"""One training run from configuration to record: reads the data, asks the teachers, trains, logs, draws."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from models.dataset import Dataset
from models.evaluate import Evaluation, score
from models.training.checkpoint import EpochRow, load_checkpoint
from models.training.config import TrainConfig
from models.training.data import TrainingData
from models.training.learner import NetworkLearner, averaged_network, check_images, predict, served_weights
from models.training.networks import count_parameters
from models.training.record import TrainingRecord, make_record, save_record, unfinished
from models.training.teacher import teacher_probabilities
from models.training.trainer import Learner, Trainer, TrainerProgress, resume
from tierkit.atomic import alone_in, made_folder
from tierkit.errors import MissingExtra, ProviderUnavailable, SetupError, WeightsError

__all__ = ["RunOptions", "drive", "initial_weights", "measure_run", "train_run"]

Record = TypeVar("Record", bound=TrainingRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Device, limits and callbacks of a run."""

    device: str = "cpu"
    threads: int | None = None
    """Number of torch's CPU threads; torch chooses by default."""
    minutes: float | None = None
    """Stop after this many minutes, at the end of a step."""
    steps: int | None = None
    """Stop when the run has done this many steps, including the steps of earlier calls."""
    report: Callable[[TrainerProgress], None] = lambda _: None
    """Called after each step."""
    say: Callable[[str], None] = lambda _: None
    """Called with progress messages and each finished epoch."""

    def prepare(self) -> None:
        """Have torch use the device and threads.

        Raises:
            ProviderUnavailable: it cannot.
        """
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ProviderUnavailable("torch finds no CUDA device on this machine; train with --device cpu")
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def train_run(config: TrainConfig, dataset: Dataset, runs: Path, options: RunOptions) -> TrainingRecord:
    """Train `config` in the folder `runs / config.name`, or continue the run that is there.

    Leaves `checkpoint.pt`, `log.txt` and `record.json`, the log brought up to date after every epoch, the record with
    every checkpoint; and `curves.png` if matplotlib is installed.

    Args:
        runs: folder of all runs; the run to start from and a teacher's are looked for here, and a teacher's answers are
            kept here for its other students.

    Raises:
        ProviderUnavailable: torch cannot use the device.
        DataError, WeightsError, SetupError: see `TrainingData`, `resume` and `teacher_probabilities`.
    """
    options.prepare()
    draws = find_spec("matplotlib") is not None  # a worker of a fleet has none
    if not draws:
        options.say(str(MissingExtra("plots", "curves.png is left out: drawing it")))
    folder = made_folder(runs / config.name)
    options.say("reading the training images")
    data, hierarchy, teacher = dataset.read("train"), dataset.hierarchy, None
    for name in (*(config.teacher.runs if config.teacher else ()), *([config.initial] if config.initial else ())):
        if what := unfinished(runs / name):
            options.say(what)
    if config.teacher is not None:
        names = config.teacher.runs
        options.say(f"getting the answers of {', '.join(names)} to them")
        teacher = teacher_probabilities(
            [runs / name for name in names],
            data,
            hierarchy,
            cache=runs / "answers" / f"{'+'.join(names)}.safetensors",
            device=options.device,
        )
    initial = None if config.initial is None else initial_weights(config, runs / config.initial, dataset)
    images = TrainingData(config, data, hierarchy, teacher=teacher, device=options.device)
    record = drive(NetworkLearner(config, images, initial), folder, options, dataset, TrainingRecord)
    if record.epochs and draws:
        from models.training.curves import draw_curves

        draw_curves(record, folder / "curves.png")
    return record


def drive(learner: Learner, folder: Path, options: RunOptions, dataset: Dataset, kind: type[Record]) -> Record:
    """Run a learner and return the record at the end. It writes a line of `log.txt` after each epoch and a new
    `record.json` with each checkpoint.

    Raises:
        WeightsError: the run's checkpoint cannot be used. See `resume`.
        SetupError: another process trains this run, or a file could not be written.
    """
    busy = f"another process trains in {folder}: let it end, or name another folder of runs"
    with alone_in(folder, otherwise=busy):
        return _drive(resume(learner, folder), options, dataset, kind)


def _drive(trainer: Trainer, options: RunOptions, dataset: Dataset, kind: type[Record]) -> Record:
    config, folder = trainer.learner.config, trainer.folder

    def record() -> Record:
        made = make_record(
            kind,
            config,
            trainer.learner.data,
            data=dataset.name,
            steps=trainer.step,
            planned_steps=trainer.steps,
            seconds=trainer.seconds,
            epochs=trainer.rows,
        )
        save_record(made, folder)
        return made

    def after_step(progress: TrainerProgress) -> None:
        if progress.row is not None:
            line = _line(progress.row, progress.seconds_left, config.all_epochs)
            _log(folder / "log.txt", line)
            options.say(line)
        if progress.saved:  # a record tells no more than the checkpoint beside it holds
            record()
        options.report(progress)

    options.say(
        f"{config.name}: {config.network.kind} on {dataset.name}, {config.all_epochs} epoch"
        f"{'s' * (config.all_epochs > 1)} of {trainer.steps_per_epoch:,} steps with {config.batch_size} images each, "
        f"on {options.device}" + (f", going on after step {trainer.step:,}" if trainer.step else "")
    )
    end = None if options.minutes is None else time.monotonic() + options.minutes * 60
    trainer.run(after_step, last=options.steps, stop=lambda: end is not None and time.monotonic() >= end)
    return record()


def measure_run(folder: Path, dataset: Dataset, options: RunOptions) -> tuple[int, Evaluation]:
    """Number of trained values of a run's network, and what its averaged weights answer to the test images.

    Raises:
        WeightsError: the folder has no checkpoint, or one for another hierarchy than the data set's.
        DataError: the images are missing, or do not fit.
        ProviderUnavailable: torch cannot use the device.
    """
    options.prepare()
    device = torch.device(options.device)
    network, config, known = averaged_network(load_checkpoint(folder, dataset.hierarchy, options.device))
    test = dataset.read("test")
    check_images(network, test.images.shape[1:], config)
    network.to(device, memory_format=torch.channels_last)
    begun = time.perf_counter()
    logits = predict(network, test.images, known, config, device)
    ms = (time.perf_counter() - begun) * 1e3
    coarse, fine, ece = score(logits, test, dataset.hierarchy, target=config.target, temperature=1.0)
    return count_parameters(network), Evaluation(
        images=len(test), coarse_accuracy=coarse, fine_accuracy=fine, ece=ece, ms_per_image=ms / len(test)
    )


def initial_weights(config: TrainConfig, folder: Path, dataset: Dataset) -> dict[str, Tensor]:
    """Weights of a run that another one is to start from.

    Raises:
        WeightsError: there is no checkpoint, it is damaged, or its network is another one.
    """
    checkpoint = load_checkpoint(folder, dataset.hierarchy)
    before = checkpoint.configured(TrainConfig)
    if (before.network, before.target) != (config.network, config.target):
        raise WeightsError(
            f"{config.name!r} cannot start from the weights of {before.name!r}: network and target of the two differ"
        )
    return served_weights(checkpoint)


def _line(row: EpochRow, seconds_left: float, epochs: int) -> str:
    measured = {
        "held-out coarse": row["held_out_coarse"],
        "fine": row["held_out_fine"],
        "adversary SSIM": row.get("adversary_ssim"),
    }
    return "  ".join(
        [
            f"epoch {row['epoch']}/{epochs}",
            f"loss {row['loss']:.4f}",
            *(f"{name} {value:.4f}" for name, value in measured.items() if value is not None),
            f"{row['seconds']:.1f} s",
            f"{seconds_left / 60:.1f} min left",
        ]
    )


def _log(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}  {line}\n")
            log.flush()
            os.fsync(log.fileno())
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}") from error
