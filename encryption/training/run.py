"""One training run of a learned encoder from configuration to record."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from encryption.training.config import BottleneckConfig
from encryption.training.loop import EncoderRow, EncoderTrainer
from encryption.training.record import EncoderRecord, make_record
from encryption.training.upper import load_shipped, teacher_answers
from models.data import ImageSet
from models.dataset import Dataset
from models.held_out import hold_out
from models.training.batches import statistics
from models.training.checkpoint import load_checkpoint
from models.training.driver import check_hierarchy
from models.training.loop import averaged_network
from models.training.networks import build_network
from models.training.run import Sitting, drive, read_training_images
from tierkit.errors import DataError, WeightsError

__all__ = ["train_encoder"]

_CALIBRATION_IMAGES = 1_000


def train_encoder(
    config: BottleneckConfig,
    dataset: Dataset,
    runs: Path,
    sitting: Sitting,
    *,
    upper_runs: Path,
    weights: Path | None = None,
) -> EncoderRecord:
    """Train `config` in the folder `runs / config.name`, or go on with what is there.

    Leaves `checkpoint.pt`, `log.txt` and `record.json`, the last two brought up to date after every epoch.

    Args:
        runs: folder of all runs of encoders; the run to start from is looked for here, and a teacher's answers are kept
            here.
        upper_runs: folder of the runs of `terrace models train`, for `start = "run"`.
        weights: folder of the shipped networks; the bundled one unless given.

    Raises:
        ProviderUnavailable: torch cannot use the device.
        DataError, WeightsError, Conflict, SetupError: see `EncoderTrainer`; or a run to start from is missing.
    """
    sitting.prepare()
    device, say = sitting.device, sitting.say
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
    return drive(trainer, folder, sitting, dataset, make_record, _measured)


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


def _measured(row: EncoderRow) -> str:
    fine = "hint" if row.held_out_fine is None else f"held-out fine {row.held_out_fine:.4f}"
    return f"adversary SSIM {row.adversary_ssim:.3f}  {fine}"
