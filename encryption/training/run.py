"""One training run of a learned encoder from configuration to record."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from encryption.training.config import BottleneckConfig
from encryption.training.learner import EncoderLearner
from encryption.training.record import EncoderRecord
from encryption.training.upper import load_shipped, teacher_answers
from models.data import ImageSet
from models.dataset import Dataset
from models.held_out import hold_out
from models.training.batches import statistics
from models.training.checkpoint import load_checkpoint
from models.training.config import NetworkConfig
from models.training.data import TrainingData
from models.training.learner import averaged_network, check_images
from models.training.networks import build_network
from models.training.run import RunOptions, drive
from tierkit.atomic import made_folder
from tierkit.errors import WeightsError

__all__ = ["train_encoder"]

_CALIBRATION_IMAGES = 1_000


def train_encoder(
    config: BottleneckConfig,
    dataset: Dataset,
    runs: Path,
    options: RunOptions,
    *,
    upper_runs: Path,
    weights: Path | None = None,
) -> EncoderRecord:
    """Train `config` in the folder `runs / config.name`, or continue the run in it.

    Leaves `checkpoint.pt`, `log.txt` and `record.json`, the log brought up to date after every epoch,
    the record with every checkpoint.

    Args:
        runs: folder of all runs of encoders; a teacher's answers are kept here too.
        upper_runs: folder of the runs of `terrace models train` that `start = "run"` and `encoder.body` read.
        weights: folder of the shipped networks; default: the bundled one.

    Raises:
        ProviderUnavailable: torch cannot use the device.
        DataError, WeightsError, SetupError: see `TrainingData` and `resume`; or a run to start from is
            missing.
    """
    options.prepare()
    folder = made_folder(runs / config.name)
    options.say("reading the training images")
    data, hierarchy, teacher = dataset.read("train"), dataset.hierarchy, None
    upper = _upper(config, data, dataset, upper_runs, weights)  # may be missing; a teacher's answers take minutes
    check_images(upper, data.images.shape[1:], config)
    body = None
    if (named := config.encoder.body) is not None:
        body = _trained(upper_runs / named.run, named.network, config, dataset)
    if config.teacher is not None:
        names = config.teacher.runs
        options.say(f"getting the answers of {', '.join(names)} to them")
        teacher = teacher_answers(names, data, runs / "answers" / f"{'+'.join(names)}.safetensors", weights)
    images = TrainingData(config, data, hierarchy, teacher=teacher, device=options.device)
    return drive(EncoderLearner(config, images, upper, body), folder, options, dataset, EncoderRecord)


def _trained(folder: Path, described: NetworkConfig, config: BottleneckConfig, dataset: Dataset) -> nn.Module:
    """The network of a training run.

    Raises:
        WeightsError: the run is missing, or trained another network than the configuration describes.
    """
    network, trained, _ = averaged_network(load_checkpoint(folder, dataset.hierarchy))
    if trained.network != described:
        raise WeightsError(f"{folder} holds another network than the configuration {config.name!r} describes")
    return network


def _upper(config: BottleneckConfig, data: ImageSet, dataset: Dataset, runs: Path, weights: Path | None) -> nn.Module:
    """The upper network with the weights that the configuration names."""
    if config.start == "run":
        return _trained(runs / config.upper, config.network, config, dataset)
    torch.manual_seed(config.seed)
    network = build_network(config.network.kind, len(dataset.hierarchy.fine), config.network.options)
    if config.start == "shipped":
        assert data.fine is not None
        train = hold_out(data.fine, config.held_out_per_class).train
        load_shipped(
            network, config.upper, statistics(data.images[train]), data.images[train[:_CALIBRATION_IMAGES]], weights
        )
    return network
