"""Conversion of a release's network to a learner of its last layers, and back to a file."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.training.batches import Statistics
from models.training.config import TrainConfig
from models.training.data import DataPart, TrainingData
from models.training.onnx_network import OnnxNetwork, rewritten
from tierkit.atomic import write_atomically
from tierkit.errors import InvalidAnswer, MissingExtra, SetupError, WeightsError
from training.learner import FlatLearner, learner_of
from training.measuring import free_bytes
from training.messages import RunSpec
from training.own_data import OwnData
from training.strategies.config import StrategyConfig
from training.units import Flat

__all__ = [
    "AS_STORED",
    "IMPROVED",
    "WEIGHTS",
    "FileNetwork",
    "keep_weights",
    "own_learner",
    "own_training_data",
    "read_base",
    "read_weights",
    "worker_learner",
    "written",
]

IMPROVED = "network.onnx"
"""File in the folder of a finished run, with the improved network of the release."""
WEIGHTS = "weights.npy"
"""File in the same folder, with the trained weights in FP32 before they were rounded."""
AS_STORED = Statistics(mean=0, std=1.0)
"""The file itself normalises its pixels."""
_MOST_NUMBERS = 100_000_000
"""Most numbers that the steps of a network may give for one picture: 400 MB in fp32."""


class FileNetwork(nn.Module):
    """A stored network for images `[n, 3, h, w]`, float from 0 to 255.

    Args:
        layers: number of last layers with weights to train; 0 for all.

    Raises:
        WeightsError: it has no layer with weights.
    """

    def __init__(self, stored: OnnxNetwork, layers: int) -> None:
        super().__init__()
        self.stored = stored
        trained = stored.layers()[-layers:]
        if not trained:
            raise WeightsError("the network has no layer with weights, so nothing of it can be trained")
        for layer in trained:
            for each in layer.parameters:
                each.requires_grad_()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.stored(images.permute(0, 2, 3, 1))
        return logits


def read_base(content: bytes, own: OwnData, config: TrainConfig) -> FileNetwork:
    """The network of a file that another machine has sent.

    Args:
        config: configuration of the run.

    Raises:
        WeightsError: it is another file than `own` says, is damaged, has operators that cannot be differentiated, takes
            other pictures, has other classes, or a picture takes too much memory.
        DataError: the classes contradict themselves.
    """
    if hashlib.sha256(content).hexdigest() != own.sha256:
        raise WeightsError(f"the file is not the network of {own.release}: its sha256 is another one")
    try:
        stored = OnnxNetwork(content)
    except (WeightsError, MissingExtra):
        raise
    except Exception as error:  # the parser's own classes cannot be named without onnx
        raise WeightsError(f"the network of {own.release} cannot be read: {str(error)[:200]}") from error
    numbers, shape = stored.outline((1, own.height, own.width, 3))
    if shape != (wanted := (1, len(own.classes.labels(config.target)))):
        raise WeightsError(f"the network of {own.release} answers with {shape}, and its classes make that {wanted}")
    if numbers > _MOST_NUMBERS:
        raise WeightsError(f"the network of {own.release} computes {numbers:,} numbers for a picture: too many")
    free = free_bytes("cpu")
    needed = 4 * numbers * config.batch_size
    if free is not None and needed > free:
        raise WeightsError(
            f"a step of the network of {own.release} takes {needed / 1e9:.1f} GB, and this machine has "
            f"{free / 1e9:.1f} free"
        )
    return FileNetwork(stored, own.layers)


def own_training_data(
    config: TrainConfig, images: ImageSet, hierarchy: Hierarchy, *, sha256: str, device: str = "cpu"
) -> TrainingData:
    """Return training data with all of these images in their stored form. A run on kept pictures has no epochs, and the
    configuration gives its number of steps.

    Args:
        sha256: digest of the network's file, by which the workers of a run know that they train the same network.

    Raises:
        DataError: see `TrainingData`.
    """
    part = DataPart(train=np.ones(len(images), bool), statistics=AS_STORED, steps_per_epoch=1, sha256=sha256)
    return TrainingData(config, images, hierarchy, device=device, part=part)


def own_learner(
    network: FileNetwork, config: TrainConfig, data: TrainingData, *, strategy: StrategyConfig | None = None
) -> FlatLearner:
    """The learner of a network from a file, whose vectors have only what is trained.

    Raises:
        DataError: see `FlatLearner`.
    """
    return FlatLearner(config, data, strategy=strategy, network=network)


def worker_learner(spec: RunSpec, content: bytes, images: ImageSet, *, device: str = "cpu") -> FlatLearner:
    """The learner of a worker for a run that another machine describes.

    Args:
        content: the network's file, as the host has sent it.
        images: images that this worker trains on.

    Raises:
        InvalidAnswer: the file is not what the run says, or cannot be trained here.
        DataError: see `own_training_data`.
    """
    own = spec.own
    assert own is not None
    try:
        network = read_base(content, own, spec.network)
    except WeightsError as error:
        raise InvalidAnswer(f"the host's network is refused: {error}") from error
    data = own_training_data(spec.network, images, own.classes, sha256=spec.data_sha256, device=device)
    return learner_of(spec, data, network)


def written(content: bytes, layers: int, weights: Flat, share: float = 1.0) -> bytes:
    """The file with other weights in its last layers.

    Args:
        content: file of the network.
        layers: see `FileNetwork`.
        weights: weights of these layers, in the order of a learner's vector.
        share: of the way from the file's weights to these; 1 for these weights. Rounding to INT8 comes last, so that a
            small share of many small changes is not lost.

    Raises:
        WeightsError: the weights do not fit, or are not finite, or the file stores them in an unknown form.
    """
    if not np.isfinite(weights).all():
        raise WeightsError("the weights are not finite, so no network is made of them")
    network = FileNetwork(OnnxNetwork(content), layers)
    trained = [each for each in network.parameters() if each.requires_grad]
    if (values := sum(each.numel() for each in trained)) != len(weights):
        raise WeightsError(f"the last layers of the network have {values:,} weights, and these are {len(weights):,}")
    parts = torch.from_numpy(weights.astype(np.float32)).split([each.numel() for each in trained])
    with torch.no_grad():
        for parameter, part in zip(trained, parts, strict=True):
            parameter.lerp_(part.reshape(parameter.shape), share)
        return rewritten(content, network.stored)


def read_weights(path: Path) -> Flat:
    """The weights that `keep_weights` has written.

    Raises:
        SetupError: the file is missing or damaged.
    """
    try:
        return np.asarray(np.load(path, allow_pickle=False), np.float32).reshape(-1)
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read the trained weights in {path}: {error}") from error


def keep_weights(path: Path, weights: Flat) -> None:
    """Write weights that `read_weights` reads.

    Raises:
        SetupError: they cannot be written.
    """
    stored = io.BytesIO()
    np.save(stored, weights)
    write_atomically(path, stored.getvalue())
