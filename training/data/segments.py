"""The training images of a run in segments: files that workers fetch, in chunks with a hash each.

N workers beside the host have N + 1 segments; worker J holds J and the one after it (the volunteers' platform of 2018,
section 4.3). A segment is a safetensors file with four arrays: `index` (where its images stand in the data set),
`images`, `fine` (labels) and `train` (0 for an image that is held out). Which images it has is drawn from the seed, so
that classes are spread over all segments, however the data set is sorted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load, save

from models.atomic import write_atomically
from models.data import ImageSet
from models.dataset import Dataset
from models.held_out import hold_out
from models.hierarchy import Hierarchy
from models.training.batches import Statistics
from models.training.config import TrainConfig
from models.training.data import Part, TrainingData
from tierkit.documents import Frozen, read_json
from tierkit.errors import DataError, InvalidInput, SetupError

__all__ = [
    "MOST_SEGMENTS",
    "Manifest",
    "Piece",
    "SegmentEntry",
    "assembled",
    "cut",
    "decoded",
    "hierarchy_of",
    "of_segments",
    "opened",
    "sha256_of",
    "suits",
]

MOST_SEGMENTS = 1_024
_MANIFEST = "segments.json"
_CHUNK_BYTES = 256 * 1024
_MOST_CHUNKS = 16_384
"""Of all segments; chunks are larger where there would be more."""
_MOST_CHUNK_BYTES = 64 << 20
_MOST_HEADER_BYTES = 4096

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SegmentEntry(Frozen):
    """One segment, as the manifest has it."""

    sha256: Sha256
    bytes: PositiveInt
    images: PositiveInt
    chunks: Annotated[tuple[Sha256, ...], Field(min_length=1, max_length=_MOST_CHUNKS)]
    """Hash of each chunk; the last one may be shorter than the others."""


class Manifest(Frozen):
    """What a run's data consists of, and all that a worker must know of the images that it does not hold."""

    version: Literal[1] = 1
    data_sha256: Annotated[str, Field(max_length=128)]
    """Of all images and labels in the order of the data set: the run's."""
    chunk_bytes: Annotated[int, Field(gt=0, le=_MOST_CHUNK_BYTES)]
    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    """Height, width and colours of an image."""
    hierarchy: Annotated[dict[str, Any], Field(max_length=16)]
    mean: Annotated[int, Field(ge=0, le=255)]
    std: Annotated[float, Field(gt=0, le=255, allow_inf_nan=False)]
    """Centre and spread of the pixels of all images that are trained on."""
    steps_per_epoch: PositiveInt
    """Of the run."""
    segments: Annotated[tuple[SegmentEntry, ...], Field(min_length=1, max_length=MOST_SEGMENTS)]

    @model_validator(mode="after")
    def _fits(self) -> Manifest:
        image = int(np.prod(self.shape, dtype=object))
        for number, entry in enumerate(self.segments):
            if len(entry.chunks) != -(-entry.bytes // self.chunk_bytes):
                raise ValueError(f"segment {number} of {entry.bytes:,} bytes has {len(entry.chunks):,} chunks")
            if not 0 < entry.bytes - entry.images * (image + 17) <= _MOST_HEADER_BYTES:
                raise ValueError(f"segment {number} of {entry.images:,} images has {entry.bytes:,} bytes")
        if len({entry.sha256 for entry in self.segments}) < len(self.segments):
            raise ValueError("two segments are the same")
        return self

    @property
    def images(self) -> int:
        """Of the data set."""
        return sum(entry.images for entry in self.segments)

    def chunk(self, segment: int, number: int) -> range:
        """The bytes of a chunk."""
        start = number * self.chunk_bytes
        return range(start, min(start + self.chunk_bytes, self.segments[segment].bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The content of a segment."""

    index: NDArray[np.int64]
    images: NDArray[np.uint8]
    fine: NDArray[np.int64]
    train: NDArray[np.bool_]


def sha256_of(content: bytes | memoryview) -> str:
    """In hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def suits(config: TrainConfig) -> None:
    """Whether a worker with some of the segments can train this.

    Raises:
        InvalidInput: wrong labels and the order of a stream are drawn over the whole data set.
    """
    if config.label_noise or config.stream:
        raise InvalidInput(
            f"{config.name!r} has label_noise or stream, drawn over the whole data set: no segments can be cut"
        )


def cut(dataset: Dataset, prepared: TrainingData, config: TrainConfig, parts: int, folder: Path) -> Manifest:
    """Write the segments of a data set and their manifest into a folder.

    Args:
        prepared: the training images, as the host trains on them.
        parts: how many segments.

    Raises:
        InvalidInput: as `suits`, or there are fewer images than segments, or more segments than `MOST_SEGMENTS`.
        DataError: the images are missing.
        SetupError: the segments could not be written.
    """
    data = dataset.read("train")
    suits(config)
    if not 0 < parts <= min(MOST_SEGMENTS, len(data)):
        raise InvalidInput(f"{len(data):,} images cannot be cut into {parts:,} segments, of at most {MOST_SEGMENTS:,}")
    assert data.fine is not None  # TrainingData takes no others
    train = np.zeros(len(data), np.uint8)
    train[hold_out(data.fine, config.held_out_per_class).train] = 1
    order = np.random.default_rng(config.seed).permutation(len(data))
    total = data.images.nbytes + 17 * len(data)
    chunk_bytes = _CHUNK_BYTES
    while total / chunk_bytes > _MOST_CHUNKS - parts and chunk_bytes < _MOST_CHUNK_BYTES:
        chunk_bytes *= 2
    entries = []
    for part in np.array_split(order, parts):
        index = np.sort(part).astype(np.int64)
        content = save(
            {
                "index": index,
                "images": np.ascontiguousarray(data.images[index]),
                "fine": np.ascontiguousarray(data.fine[index], np.int64),
                "train": train[index],
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
    manifest = Manifest(
        data_sha256=prepared.sha256,
        chunk_bytes=chunk_bytes,
        shape=(height, width, colours),
        hierarchy=dataset.hierarchy.content(),
        mean=prepared.batches.statistics.mean,
        std=prepared.batches.statistics.std,
        steps_per_epoch=prepared.batches.steps_per_epoch,
        segments=tuple(entries),
    )
    write_atomically(folder / _MANIFEST, manifest.model_dump_json().encode())
    return manifest


def opened(folder: Path, data_sha256: str) -> Manifest | None:
    """The segments that a folder holds, all of them checked; None where there is no manifest.

    Raises:
        SetupError, DataError: they are damaged, or are not those of this data set.
    """
    if not (folder / _MANIFEST).exists():
        return None
    manifest = read_json(folder / _MANIFEST, Manifest, what="manifest of segments", error=SetupError)
    pieces = []
    for entry in manifest.segments:
        try:
            content = (folder / entry.sha256).read_bytes()
        except OSError as exc:
            raise SetupError(f"cannot read the segment {folder / entry.sha256}: {exc.strerror}") from exc
        if sha256_of(content) != entry.sha256:
            raise DataError(f"the segment {folder / entry.sha256} is damaged: remove {folder}, and it is cut anew")
        pieces.append(decoded(content, manifest))
    if manifest.data_sha256 != data_sha256:
        raise DataError(f"the segments in {folder} are of another data set than the run's: remove the folder")
    assembled(pieces, manifest)
    return manifest


def decoded(content: bytes, manifest: Manifest) -> Piece:
    """A segment from its file.

    Raises:
        DataError: it is none of this data set.
    """
    if len(content) < 8 or int.from_bytes(content[:8], "little") > _MOST_HEADER_BYTES:
        raise DataError("a segment has no header of a segment")
    try:
        found = load(content)
    except (SafetensorError, ValueError, KeyError) as exc:
        raise DataError(f"a segment is no safetensors file: {str(exc)[:200]}") from exc
    count = len(found["index"]) if "index" in found and found["index"].ndim == 1 else 0
    wanted = {
        "index": (np.dtype(np.int64), (count,)),
        "images": (np.dtype(np.uint8), (count, *manifest.shape)),
        "fine": (np.dtype(np.int64), (count,)),
        "train": (np.dtype(np.uint8), (count,)),
    }
    if not count or {name: (each.dtype, each.shape) for name, each in found.items()} != wanted:
        raise DataError(f"a segment holds other arrays than {', '.join(wanted)} of its images")
    index, fine, train = found["index"], found["fine"], found["train"]
    classes = len(manifest.hierarchy.get("fine", ()))
    if index[0] < 0 or index[-1] >= manifest.images or (np.diff(index) <= 0).any():
        raise DataError("the images of a segment are not in the order of the data set")
    if fine.min() < 0 or fine.max() >= classes or train.max() > 1:
        raise DataError("a segment has labels of no class")
    return Piece(index=index, images=found["images"], fine=fine, train=train.astype(bool))


def assembled(pieces: Sequence[Piece], manifest: Manifest) -> ImageSet:
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
    config: TrainConfig, pieces: Iterable[Piece], manifest: Manifest, *, device: str = "cpu"
) -> TrainingData:
    """What is trained on by a worker that holds these segments alone. The same segments in the same order give the same
    batches, on any machine.

    Raises:
        DataError: nothing in them is to be trained on.
        InvalidInput: as `suits`.
    """
    suits(config)
    held = list(pieces)
    part = Part(
        train=np.concatenate([piece.train for piece in held]),
        statistics=Statistics(mean=manifest.mean, std=manifest.std),
        steps_per_epoch=manifest.steps_per_epoch,
        sha256=manifest.data_sha256,
    )
    return TrainingData(config, _images(held, manifest), hierarchy_of(manifest), device=device, part=part)


def hierarchy_of(manifest: Manifest) -> Hierarchy:
    """Of the data set.

    Raises:
        DataError: it contradicts itself.
    """
    return Hierarchy.parse(manifest.hierarchy, source="the manifest of the segments")


def _images(pieces: Sequence[Piece], manifest: Manifest) -> ImageSet:
    fine = np.concatenate([piece.fine for piece in pieces])
    hierarchy = hierarchy_of(manifest)
    return ImageSet(
        images=np.concatenate([piece.images for piece in pieces]),
        fine=fine,
        coarse=hierarchy.coarse_labels(fine),
        names=tuple(str(index) for piece in pieces for index in piece.index),
        hierarchy_name=hierarchy.name,
    )
