"""The manifest of a run's segments, and what is in their files. Needs no torch, so neither do those that only copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, PositiveInt, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load

from models.hierarchy import Hierarchy
from models.training.answers import check_log_probabilities
from tierkit.copies.files import FileParts, Sha256
from tierkit.copies.store import Store
from tierkit.documents import Frozen
from tierkit.errors import DataError

__all__ = ["MOST_SEGMENTS", "SEGMENT", "Piece", "SegmentEntry", "SegmentManifest", "decoded", "pieces_in"]

MOST_SEGMENTS = 1_024
SEGMENT = "a segment of the training images"
"""Name of a file in a store of segments. Messages use it."""
MOST_CHUNKS = 16_384
"""Most chunks of all segments together; chunks are made larger to stay below."""
MOST_CHUNK_BYTES = 64 << 20
MOST_CLASSES = 4_096
"""A table of classes and superclasses is kept in memory."""
_MOST_HEADER_BYTES = 4096


def _checked_hierarchy(content: dict[str, Any]) -> dict[str, Any]:
    try:
        classes = len(Hierarchy.parse(content, source="the hierarchy").fine)
    except DataError as exc:
        raise ValueError(str(exc)) from exc
    if classes > MOST_CLASSES:
        raise ValueError(f"has {classes:,} classes, at most {MOST_CLASSES:,} are possible")
    return content


class SegmentEntry(Frozen):
    """One segment, as the manifest has it."""

    sha256: Sha256
    bytes: PositiveInt
    images: PositiveInt
    chunks: Annotated[tuple[Sha256, ...], Field(min_length=1, max_length=MOST_CHUNKS)]
    """Hash of each chunk; the last one may be shorter than the others."""


class SegmentManifest(Frozen):
    """Manifest of a run's data: its segments, and everything that a worker must know of the images that it does not
    hold.
    """

    version: Literal[1] = 1
    data_sha256: Annotated[str, Field(max_length=128)]
    """Digest of all images and labels of the run, in the order of the data set."""
    chunk_bytes: Annotated[int, Field(gt=0, le=MOST_CHUNK_BYTES)]
    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    """Height, width and colours of an image."""
    hierarchy: Annotated[dict[str, Any], AfterValidator(_checked_hierarchy)]
    mean: Annotated[int, Field(ge=0, le=255)]
    std: Annotated[float, Field(gt=0, le=255, allow_inf_nan=False)]
    """Centre and spread of the pixels of all images that are trained on."""
    steps_per_epoch: Annotated[int, Field(ge=1, le=10**9)]
    """Steps per epoch of the run."""
    answers_sha256: Sha256 | None = None
    """Digest of the teacher's answers, which the segments then carry; the run's."""
    segments: Annotated[tuple[SegmentEntry, ...], Field(min_length=1, max_length=MOST_SEGMENTS)]

    @model_validator(mode="after")
    def _fits(self) -> SegmentManifest:
        image = int(np.prod(self.shape, dtype=object)) + 17
        if self.answers_sha256 is not None:
            image += 4 * len(self.hierarchy["fine"])
        for number, entry in enumerate(self.segments):
            if len(entry.chunks) != -(-entry.bytes // self.chunk_bytes):
                raise ValueError(f"segment {number} of {entry.bytes:,} bytes has {len(entry.chunks):,} chunks")
            if not 0 < entry.bytes - entry.images * image <= _MOST_HEADER_BYTES:
                raise ValueError(f"segment {number} of {entry.images:,} images has {entry.bytes:,} bytes")
        if len({entry.sha256 for entry in self.segments}) < len(self.segments):
            raise ValueError("two segments are the same")
        return self

    @property
    def images(self) -> int:
        """Number of images of the data set."""
        return sum(entry.images for entry in self.segments)

    @property
    def files(self) -> tuple[FileParts, ...]:
        """The segments as files, by their numbers."""
        return tuple(
            FileParts(sha256=each.sha256, bytes=each.bytes, chunk_bytes=self.chunk_bytes, chunks=each.chunks)
            for each in self.segments
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The content of a segment."""

    index: NDArray[np.int64]
    images: NDArray[np.uint8]
    fine: NDArray[np.int64]
    train: NDArray[np.bool_]
    answers: NDArray[np.float16] | None = None
    """Log probabilities of the teacher `[n, 2, F]`, if the run has one."""


def decoded(content: bytes, manifest: SegmentManifest) -> Piece:
    """Decode a segment's file.

    Raises:
        DataError: it does not belong to this data set.
    """
    if len(content) < 8 or int.from_bytes(content[:8], "little") > _MOST_HEADER_BYTES:
        raise DataError("a segment has no header of a segment")
    try:
        found = load(content)
    except (SafetensorError, ValueError, KeyError) as exc:
        raise DataError(f"a segment is not a safetensors file: {str(exc)[:200]}") from exc
    count = len(found["index"]) if "index" in found and found["index"].ndim == 1 else 0
    wanted = {
        "index": (np.dtype(np.int64), (count,)),
        "images": (np.dtype(np.uint8), (count, *manifest.shape)),
        "fine": (np.dtype(np.int64), (count,)),
        "train": (np.dtype(np.uint8), (count,)),
    }
    classes = len(manifest.hierarchy["fine"])
    if manifest.answers_sha256 is not None:
        wanted["answers"] = (np.dtype(np.float16), (count, 2, classes))
    if not count or {name: (each.dtype, each.shape) for name, each in found.items()} != wanted:
        raise DataError(f"a segment holds other arrays than {', '.join(wanted)} of its images")
    index, fine, train = found["index"], found["fine"], found["train"]
    if index[0] < 0 or index[-1] >= manifest.images or (np.diff(index) <= 0).any():
        raise DataError("the images of a segment are not in the order of the data set")
    if fine.min() < 0 or fine.max() >= classes or train.max() > 1:
        raise DataError("a segment has labels of no class")
    answers = found.get("answers")
    if answers is not None:
        check_log_probabilities(answers, classes, "the teacher's answers in a segment")
    return Piece(index=index, images=found["images"], fine=fine, train=train.astype(bool), answers=answers)


def pieces_in(store: Store, segments: Iterable[int], manifest: SegmentManifest) -> list[Piece]:
    """The content of whole segments in a store, in this order.

    Raises:
        NotFound: one of them is not here.
        DataError: it is damaged.
        SetupError: it cannot be read.
    """
    return [decoded(store.content(number), manifest) for number in segments]
