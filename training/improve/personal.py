"""Personal heads: a device trains the last layer of its release's network on its own kept pictures.

Cross-validation decides if the head is used: each kept picture is answered by a head that was trained without it.
Nothing leaves the device.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from models.calibration import fit_temperature
from models.data import ImageSet
from models.kept.sample import KeptPicture
from models.manifest import Manifest, ModelEntry
from models.personal import PersonalRecord, write_head
from models.training.config import TrainConfig
from tierkit.errors import DataError, InvalidInput, WeightsError
from tierkit.tensors import Array
from training.improve.base import own_learner, own_training_data, read_base, written
from training.improve.gate import FEWEST, Comparison, compared, judge
from training.improve.kept import images_of, label_of, read_kept
from training.improve.plan import training_of
from training.improve.successor import answers_of_file
from training.own_data import MOST_BASE_BYTES, OwnData

__all__ = [
    "BATCH",
    "FOLDS",
    "LAYERS",
    "MOST_PICTURES",
    "RATE",
    "STEPS",
    "HeadOutcome",
    "HeadPictures",
    "JudgedHead",
    "ServedNetwork",
    "fold_of",
    "head_config",
    "judged_head",
    "make_head",
    "trained_head",
]

log = logging.getLogger(__name__)

STEPS, BATCH, RATE = 60, 32, 0.01
"""Steps of plain SGD, pictures of a step, and learning rate."""
MOST_PICTURES = STEPS * BATCH
"""The newest kept pictures count: the steps see as many."""
LAYERS = 1
"""The last layers with weights, which are trained."""
FOLDS = 5
"""Parts of the pictures. For each, a head is trained on the other parts and judged on this one."""
_NAMED = "kept pictures"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedNetwork:
    """The network that a device serves, and its file."""

    manifest: Manifest
    entry: ModelEntry
    content: bytes
    release: int
    """Number of its release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutcome:
    """The result of a training."""

    record: PersonalRecord
    passes: bool
    """True if the head was written."""
    reason: str
    """The figures that decided."""


def head_config(entry: ModelEntry, *, seed: int = 0) -> TrainConfig:
    """The configuration by which a head is trained."""
    return training_of(entry, steps=STEPS, batch=BATCH, rate=RATE).model_copy(update={"seed": seed})


def trained_head(
    content: bytes,
    own: OwnData,
    config: TrainConfig,
    images: ImageSet,
    stand_back: Callable[[], None] = lambda: None,
) -> bytes:
    """The file of a network whose last layers were trained.

    Args:
        content: file of the network, which `own` describes.
        config: gives the number of steps.
        images: all are trained on.
        stand_back: called before each step; returns when it may be computed.

    Raises:
        WeightsError: see `read_base`; or the training diverges.
        DataError: see `own_training_data`.
    """

    learner = own_learner(
        read_base(content, own, config), config, own_training_data(config, images, own.classes, sha256=own.sha256)
    )
    stand_back()
    learner.compute(range(config.epochs), "change", watch=lambda _: stand_back())
    return written(content, own.layers, learner.weights())


def fold_of(sha256: str) -> int:
    """The part to which the picture of this digest belongs."""
    return int(sha256[:8], 16) % FOLDS


@dataclass(frozen=True, slots=True)
class HeadPictures:
    """The pictures of a head."""

    images: ImageSet
    labels: Array
    """The right answers, int64 `[n]`."""
    folds: Array
    """The part to which each picture belongs, int `[n]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedHead:
    """A head that was trained on all pictures, and what heads that were trained without a picture make of it."""

    content: bytes
    """File of the network with the head."""
    logits: Array
    """Answers to each picture by the head that was trained without its part, `[n, classes]`."""
    found: Comparison
    """The served network against these answers."""


def judged_head(
    content: bytes,
    pictures: HeadPictures,
    train: Callable[[ImageSet], bytes],
    answers: Callable[[bytes, Array], Array],
) -> JudgedHead:
    """Train a head on all pictures, and judge it by cross-validation (Stone 1974).

    Args:
        content: file of the served network.
        train: makes a head of pictures, see `trained_head`; its errors are passed on.
        answers: the logits `[n, classes]` of the network in a file for UINT8 pictures.
    """
    images, folds = pictures.images, pictures.folds
    old = answers(content, images.images)
    new = np.empty_like(old)
    for fold in np.unique(folds):
        rest, part = (np.flatnonzero(chosen) for chosen in (folds != fold, folds == fold))
        new[part] = answers(train(images.take(rest)), images.images[part])
    return JudgedHead(content=train(images), logits=new, found=compared(old, new, pictures.labels))


def make_head(served: ServedNetwork, kept: Path, stand_back: Callable[[], None] = lambda: None) -> HeadOutcome:
    """Train a head on the kept pictures of a folder, compare it with the served network, and write it there if it is
    better.

    Args:
        stand_back: see `trained_head`.

    Raises:
        DataError: there are too few kept pictures that can be trained on.
        InvalidInput: the network is too large.
        WeightsError: the network cannot be trained here, or the training diverges.
        SetupError: there is no kept sample, or the head cannot be written.
    """
    entry, own = served.entry, _own_data(served)
    pictures = _pictures(kept, own, entry.target)

    def train(images: ImageSet) -> bytes:
        return trained_head(served.content, own, head_config(entry), images, stand_back)

    def answers(content: bytes, images: Array) -> Array:
        return answers_of_file(served.manifest, entry, content, images)[0]

    head = judged_head(served.content, pictures, train, answers)
    sha256 = hashlib.sha256(head.content).hexdigest()
    if sha256 == own.sha256:
        raise WeightsError("the training has changed no weight, so there is no head to use")
    verdict = judge(None, head.found, named=_NAMED)
    record = PersonalRecord(
        base=own.sha256,
        sha256=sha256,
        size_bytes=len(head.content),
        release=served.release,
        # Few pictures without an error would make the head too sure, and its unsure pictures would not go up.
        temperature=max(entry.temperature, fit_temperature(head.logits, pictures.labels))
        if head.found.finite
        else entry.temperature,
        pictures=len(pictures.labels),
        figures=head.found.figures("held_out"),
        made_at=datetime.now(UTC),
    )
    if verdict.passes:
        write_head(kept, record, head.content)
    return HeadOutcome(record=record, passes=verdict.passes, reason=verdict.reason)


def _own_data(served: ServedNetwork) -> OwnData:
    entry = served.entry
    if len(served.content) > MOST_BASE_BYTES:
        raise InvalidInput(
            f"the network {entry.name!r} has {len(served.content):,} bytes, and a head is trained on networks of up to "
            f"{MOST_BASE_BYTES:,}"
        )
    release = f"release@{max(1, served.release)}"
    return OwnData.of(entry, served.content, served.manifest.hierarchy, release=release, layers=LAYERS)


def _pictures(kept: Path, own: OwnData, target: str) -> HeadPictures:
    """The newest pictures."""
    parts: dict[int, int] = {}
    hierarchy = own.classes
    usable = (
        key
        for key, picture, _ in read_kept(kept)
        if not isinstance(label_of(picture, hierarchy, target, own.least_confidence), str)
    )
    first = next(iter(deque(usable, maxlen=MOST_PICTURES)), 0)

    def newest() -> Iterator[tuple[int, KeptPicture, bytes]]:
        for key, picture, content in read_kept(kept):
            if key >= first:
                parts[key] = fold_of(picture.sha256)
                yield key, picture, content

    found = images_of(newest(), own, target)
    left_out = "".join(f"; left out: {count} ({reason})" for reason, count in found.left_out.items())
    log.info("%d kept pictures, %d of them labelled by people%s", len(found.images), found.by_people, left_out)
    if (count := len(found.images)) < FEWEST:
        raise DataError(
            f"{count:,} kept pictures have sure answers or labels, and a head needs {FEWEST}: let the device keep more"
        )
    folds = np.array([parts[key] for key in found.keys])
    if (folds == folds[0]).all():
        raise DataError("the kept pictures are too much alike to train a head on some and judge it on others")
    labels = found.images.fine if target == "fine" else found.images.coarse
    assert labels is not None
    return HeadPictures(found.images, labels, folds)
