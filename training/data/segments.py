"""The training images of a run in segments: files that workers fetch, in chunks with a hash each.

N workers plus the host have N + 1 segments; worker J holds J and the next one (the volunteers' platform of 2018,
section 4.3). A segment is a safetensors file with four arrays: `index` (numbers of its images in the data set),
`images`, `fine` (labels) and `train` (0 for an image that is held out). Images are assigned to segments at random from
the seed, so that each segment has all classes, even of a sorted data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor

from models.data import ImageSet
from models.dataset import Dataset
from models.held_out import hold_out
from models.hierarchy import Hierarchy
from models.training.answers import digest_of
from models.training.batches import Statistics
from models.training.config import TrainConfig
from models.training.data import DataPart, TrainingData
from tierkit.atomic import write_atomically
from tierkit.copies.files import CHUNK_BYTES, sha256_of
from tierkit.documents import read_json
from tierkit.errors import DataError, InvalidInput, SetupError
from training.data.manifest import (
    MOST_CHUNK_BYTES,
    MOST_CHUNKS,
    MOST_SEGMENTS,
    Piece,
    SegmentEntry,
    SegmentManifest,
    decoded,
)

__all__ = ["answers_in", "assembled", "cut", "hierarchy_of", "of_segments", "opened", "suits", "whole_data"]

_MANIFEST = "segments.json"


def suits(config: TrainConfig) -> None:
    """True if a worker with some of the segments can train this.

    Raises:
        InvalidInput: wrong labels and the order of a stream are drawn over the whole data set.
    """
    if config.label_noise or config.stream:
        raise InvalidInput(
            f"{config.name!r} has label_noise or stream, drawn over the whole data set: no segments can be cut"
        )


def cut(
    dataset: Dataset,
    prepared: TrainingData,
    config: TrainConfig,
    parts: int,
    folder: Path,
) -> SegmentManifest:
    """Write the segments of a data set and their manifest into a folder.

    Args:
        prepared: the training images, and the teacher's answers if there is a teacher, on the CPU.
        parts: number of segments.

    Raises:
        InvalidInput: the configuration does not suit segments (see `suits`), there are fewer images than segments, or
            more segments than `MOST_SEGMENTS`.
        DataError: the images are missing.
        SetupError: the segments could not be written.
    """
    data = dataset.read("train")
    suits(config)
    if not 0 < parts <= min(MOST_SEGMENTS, len(data)):
        raise InvalidInput(f"{len(data):,} images cannot be cut into {parts:,} segments, of at most {MOST_SEGMENTS:,}")
    assert data.fine is not None  # TrainingData takes no others
    answers = None if prepared.labels.teacher is None else prepared.labels.teacher.numpy()
    train = np.zeros(len(data), np.uint8)
    train[hold_out(data.fine, config.held_out_per_class).train] = 1
    order = np.random.default_rng(config.seed).permutation(len(data))
    total = data.images.nbytes + 17 * len(data) + (0 if answers is None else answers.nbytes)
    chunk_bytes = CHUNK_BYTES
    while total / chunk_bytes > MOST_CHUNKS - parts and chunk_bytes < MOST_CHUNK_BYTES:
        chunk_bytes *= 2
    entries = []
    folder.mkdir(mode=0o700, exist_ok=True)
    for part in np.array_split(order, parts):
        index = np.sort(part).astype(np.int64)
        content = save(
            {
                "index": index,
                "images": np.ascontiguousarray(data.images[index]),
                "fine": np.ascontiguousarray(data.fine[index], np.int64),
                "train": train[index],
                **({} if answers is None else {"answers": np.ascontiguousarray(answers[index])}),
            }
        )
        starts = range(0, len(content), chunk_bytes)
        entry = SegmentEntry(
            sha256=sha256_of(content),
            bytes=len(content),
            images=len(index),
            chunks=tuple(sha256_of(content[start : start + chunk_bytes]) for start in starts),
        )
        write_atomically(folder / entry.sha256, content)
        entries.append(entry)
    height, width, colours = data.images.shape[1:]
    manifest = SegmentManifest(
        data_sha256=prepared.sha256,
        chunk_bytes=chunk_bytes,
        shape=(height, width, colours),
        hierarchy=dataset.hierarchy.content(),
        mean=prepared.batches.statistics.mean,
        std=prepared.batches.statistics.std,
        steps_per_epoch=prepared.batches.steps_per_epoch,
        answers_sha256=None if answers is None else digest_of(prepared.sha256, answers),
        segments=tuple(entries),
    )
    write_atomically(folder / _MANIFEST, manifest.model_dump_json().encode())
    return manifest


def opened(folder: Path, data_sha256: str, answers_sha256: str | None = None) -> SegmentManifest | None:
    """Return the manifest of the segments in a folder after checking all of them; None if there is no manifest.

    Raises:
        SetupError, DataError: they are damaged, or belong to another data set.
    """
    if not (folder / _MANIFEST).exists():
        return None
    manifest = read_json(folder / _MANIFEST, SegmentManifest, what="manifest of segments", error=SetupError)
    pieces = []
    for entry in manifest.segments:
        try:
            content = (folder / entry.sha256).read_bytes()
        except OSError as exc:
            raise SetupError(f"cannot read the segment {folder / entry.sha256}: {exc.strerror}") from exc
        if sha256_of(content) != entry.sha256:
            raise DataError(f"the segment {folder / entry.sha256} is damaged: remove {folder}, then it is cut again")
        pieces.append(decoded(content, manifest))
    if (manifest.data_sha256, manifest.answers_sha256) != (data_sha256, answers_sha256):
        raise DataError(
            f"the segments in {folder} are of another data set than the run's, or of another teacher: remove the folder"
        )
    assembled(pieces, manifest)
    return manifest


def assembled(pieces: Sequence[Piece], manifest: SegmentManifest) -> ImageSet:
    """The data set that all segments together are.

    Raises:
        DataError: their sum is another one.
    """
    index = np.concatenate([piece.index for piece in pieces])
    order = np.argsort(index)
    if not np.array_equal(index[order], np.arange(manifest.images)):
        raise DataError("the segments together lack images of the data set, or have some twice")
    data = _images(pieces, manifest)
    data = data.take(order)
    if data.digest() != manifest.data_sha256:
        raise DataError("the segments together are not the data set of this run: their digests differ")
    return data


def of_segments(
    config: TrainConfig, pieces: Iterable[Piece], manifest: SegmentManifest, *, device: str = "cpu"
) -> TrainingData:
    """Return the training data of a worker that holds only these segments. The same segments in the same order give the
    same batches, on any machine.

    Raises:
        DataError: they contain no training images.
        InvalidInput: the configuration does not suit segments. See `suits`.
    """
    suits(config)
    held = list(pieces)
    part = DataPart(
        train=np.concatenate([piece.train for piece in held]),
        statistics=Statistics(mean=manifest.mean, std=manifest.std),
        steps_per_epoch=manifest.steps_per_epoch,
        sha256=manifest.data_sha256,
    )
    return TrainingData(
        config, _images(held, manifest), hierarchy_of(manifest), teacher=answers_in(held), device=device, part=part
    )


def answers_in(pieces: Sequence[Piece]) -> Tensor | None:
    """Log probabilities of the teacher `[N, 2, F]` in the order of the pieces; None for a run without a teacher."""
    found = [piece.answers for piece in pieces if piece.answers is not None]
    return torch.from_numpy(np.concatenate(found)) if found else None


def whole_data(config: TrainConfig, pieces: Sequence[Piece], manifest: SegmentManifest, *, device: str) -> TrainingData:
    """Everything that a worker with all segments trains on.

    Raises:
        DataError: the segments together are another data set.
    """
    images, teacher = assembled(pieces, manifest), answers_in(pieces)
    if teacher is not None:
        teacher = teacher[torch.from_numpy(np.argsort(np.concatenate([piece.index for piece in pieces])))]
    return TrainingData(config, images, hierarchy_of(manifest), teacher=teacher, device=device)


def hierarchy_of(manifest: SegmentManifest) -> Hierarchy:
    """Return the label hierarchy of the data set.

    Raises:
        DataError: it contradicts itself.
    """
    return Hierarchy.parse(manifest.hierarchy, source="the manifest of the segments")


def _images(pieces: Sequence[Piece], manifest: SegmentManifest) -> ImageSet:
    fine = np.concatenate([piece.fine for piece in pieces])
    hierarchy = hierarchy_of(manifest)
    return ImageSet(
        images=np.concatenate([piece.images for piece in pieces]),
        fine=fine,
        coarse=hierarchy.coarse_labels(fine),
        names=tuple(str(index) for piece in pieces for index in piece.index),
        hierarchy_name=hierarchy.name,
    )
