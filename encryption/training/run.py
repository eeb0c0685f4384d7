"""One training run of a learned encoder from configuration to record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from encryption.training.config import BottleneckConfig
from encryption.training.loop import EncoderRow, EncoderTrainer, Progress
from encryption.training.record import EncoderRecord, make_record, save_record
from encryption.training.upper import load_shipped, teacher_answers
from models.data import ImageSet
from models.dataset import Dataset
from models.held_out import hold_out
from models.training.batches import statistics
from models.training.checkpoint import load_checkpoint
from models.training.loop import averaged_network, check_hierarchy
from models.training.networks import build_network
from models.training.run import read_training_images
from tierkit.errors import DataError, ProviderUnavailable, WeightsError

__all__ = ["train_encoder"]

_CALIBRATION_IMAGES = 1_000


def train_encoder(
    config: BottleneckConfig,
    dataset: Dataset,
    runs: Path,
    *,
    upper_runs: Path,
    weights: Path | None = None,
    device: str = "cpu",
    threads: int | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> EncoderRecord:
    """Train `config` in the folder `runs / config.name`, or go on with what is there.

    Leaves `checkpoint.pt`, `log.txt` and `record.json`, the last two brought up to date after every epoch.

    Args:
        runs: folder of all runs of encoders; the run to start from is looked for here, and a teacher's answers are kept
            here.
        upper_runs: folder of the runs of `terrace models train`, for `start = "run"`.
        weights: folder of the shipped networks; the bundled one unless given.
        threads: of torch on a CPU.
        minutes: stop after so long, at the end of a step.
        steps: stop when the run has done so many steps.
        say: told what is going on before the first step.

    Raises:
        ProviderUnavailable: torch cannot use `device`.
        DataError, WeightsError, Conflict, SetupError: see `EncoderTrainer`; or a run to start from is missing.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ProviderUnavailable("torch finds no CUDA device on this machine; train with --device cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    say("reading the training images")
    data = read_training_images(dataset)
    if data.fine is None:
        raise DataError("training needs labelled images")
    folder = runs / config.name
    folder.mkdir(parents=True, exist_ok=True)
    teacher = None
    if config.teacher is not None:
        names = config.teacher.runs
        say(f"getting the answers of {', '.join(names)} to them")
        teacher = teacher_answers(names, data, runs / "answers" / f"{'+'.join(names)}.pt", weights)
    trainer = EncoderTrainer(
        config,
        data,
        dataset.hierarchy,
        folder,
        upper=_upper(config, data, dataset, upper_runs, weights),
        initial=None if config.initial is None else _initial(runs / config.initial),
        teacher=teacher,
        device=device,
    )

    def record() -> EncoderRecord:
        return make_record(config, trainer, data=dataset.name, held_out=len(data) - trainer.train_images, device=device)

    def after_step(step: Progress) -> None:
        if step.row is not None:
            _log(folder / "log.txt", step.row, config.hint_epochs + config.epochs, step.seconds_left)
            save_record(record(), folder)
        progress(step)

    end = None if minutes is None else time.monotonic() + minutes * 60
    say(
        f"{config.name}: {config.hint_epochs + config.epochs} epochs of {trainer.steps_per_epoch:,} steps with "
        f"{config.batch_size} images each, on {device}" + (f", after step {trainer.step:,}" if trainer.step else "")
    )
    trainer.run(after_step, last=steps, stop=lambda: end is not None and time.monotonic() >= end)
    finished = record()
    save_record(finished, folder)
    return finished


def _upper(config: BottleneckConfig, data: ImageSet, dataset: Dataset, runs: Path, weights: Path | None) -> nn.Module:
    """The upper network with the weights that the configuration names."""
    if config.start == "run":
        path = runs / config.upper / "checkpoint.pt"
        checkpoint = load_checkpoint(path)
        if checkpoint is None:
            raise WeightsError(f"the upper network has not been trained: no {path}; 'terrace models train' does it")
        check_hierarchy(checkpoint, dataset.hierarchy)
        network, trained, _ = averaged_network(checkpoint, dataset.hierarchy)
        if trained.network != config.network:
            raise WeightsError(f"{path} holds another network than the configuration {config.name!r} describes")
        return network
    torch.manual_seed(config.seed)
    network = build_network(config.network.kind, len(dataset.hierarchy.fine), config.network.options)
    if config.start == "shipped":
        assert data.fine is not None
        train = hold_out(data.fine, config.held_out_per_class).train
        load_shipped(
            network, config.upper, statistics(data.images[train]), data.images[train[:_CALIBRATION_IMAGES]], weights
        )
    return network


def _initial(folder: Path) -> dict[str, Tensor]:
    checkpoint = load_checkpoint(folder / "checkpoint.pt")
    if checkpoint is None:
        raise WeightsError(f"the run to start from has not been trained: no {folder / 'checkpoint.pt'}")
    return checkpoint.averaged


def _log(path: Path, row: EncoderRow, epochs: int, seconds_left: float) -> None:
    fine = "hint" if row.held_out_fine is None else f"held-out fine {row.held_out_fine:.4f}"
    line = (
        f"{time.strftime('%Y-%m-%dT%H:%M:%S')}  epoch {row.epoch}/{epochs}  loss {row.loss:.4f}  "
        f"adversary SSIM {row.adversary_ssim:.3f}  {fine}  {row.seconds:.1f} s  {seconds_left / 60:.1f} min left\n"
    )
    with path.open("a", encoding="utf-8") as log:
        log.write(line)
        log.flush()
        os.fsync(log.fileno())
