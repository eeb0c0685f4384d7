"""Personal heads: a device trains the last layer of its release's network on its own kept pictures.

The head is used only if it is better on kept pictures that it was not trained on. Nothing leaves the device.
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
from training.improve.base import own_learner, own_training_data, read_base, written
from training.improve.gate import FEWEST, compared, judge
from training.improve.kept import images_of, label_of, read_kept
from training.improve.plan import training_of
from training.improve.successor import answers_of_file
from training.own_data import MOST_BASE_BYTES, OwnData

__all__ = [
    "BATCH",
    "HELD_OUT",
    "LAYERS",
    "MOST_PICTURES",
    "RATE",
    "STEPS",
    "HeadOutcome",
    "ServedNetwork",
    "head_config",
    "is_held_out",
    "make_head",
    "trained_head",
]

log = logging.getLogger(__name__)

STEPS, BATCH, RATE = 60, 32, 0.01
"""Steps of plain SGD, pictures of a step, and learning rate."""
MOST_PICTURES = STEPS * BATCH * 5 // 4
"""The newest kept pictures count: the steps see as many, and the others are held out."""
LAYERS = 1
"""The last layers with weights, which are trained."""
HELD_OUT = 0.2
"""Share of the pictures that judge the head."""
_NAMED = "held-out kept pictures"


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


def is_held_out(sha256: str) -> bool:
    """True if a head is judged on the picture of this digest, and not trained on it: for a fifth of the pictures."""
    return int(sha256[:8], 16) < HELD_OUT * 2**32


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
    train, judged = _divided(kept, own, entry.target)
    content = trained_head(served.content, own, head_config(entry), train, stand_back)
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 == own.sha256:
        raise WeightsError("the training has changed no weight, so there is no head to use")
    labels = judged.fine if entry.target == "fine" else judged.coarse
    assert labels is not None
    old, new = (answers_of_file(served.manifest, entry, each, judged.images)[0] for each in (served.content, content))
    found = compared(old, new, labels)
    verdict = judge(None, found, named=_NAMED)
    record = PersonalRecord(
        base=own.sha256,
        sha256=sha256,
        size_bytes=len(content),
        release=served.release,
        # Few pictures without an error would make the head too sure, and its unsure pictures would not go up.
        temperature=max(entry.temperature, fit_temperature(new, labels)) if found.finite else entry.temperature,
        pictures=len(train),
        held_out=len(judged),
        figures=found.figures("held_out"),
        made_at=datetime.now(UTC),
    )
    if verdict.passes:
        write_head(kept, record, content)
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


def _divided(kept: Path, own: OwnData, target: str) -> tuple[ImageSet, ImageSet]:
    """Pictures to train on, and pictures to judge by: the newest."""
    held_out: set[int] = set()
    hierarchy = own.classes
    usable = (
        key
        for key, picture, _ in read_kept(kept)
        if not isinstance(label_of(picture, hierarchy, target, own.least_confidence), str)
    )
    first = next(iter(deque(usable, maxlen=MOST_PICTURES)), 0)

    def newest() -> Iterator[tuple[int, KeptPicture, bytes]]:
        for key, picture, content in read_kept(kept):
            if key < first:
                continue
            if is_held_out(picture.sha256):
                held_out.add(key)
            yield key, picture, content

    found = images_of(newest(), own, target)
    left_out = "".join(f"; left out: {count} ({reason})" for reason, count in found.left_out.items())
    log.info("%d kept pictures, %d of them labelled by people%s", len(found.images), found.by_people, left_out)
    judged = np.array([key in held_out for key in found.keys])
    if (count := int(judged.sum())) < FEWEST:
        raise DataError(
            f"{count:,} of {len(judged):,} kept pictures are held out to judge the head, and {FEWEST} are needed: a "
            f"device needs about {FEWEST / HELD_OUT:.0f} kept pictures with sure answers or labels"
        )
    return found.images.take(np.flatnonzero(~judged)), found.images.take(np.flatnonzero(judged))
