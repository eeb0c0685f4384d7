"""Answers of teachers to the training images, in one file: computed once, used by every student and every worker.

The file is safetensors (no pickle). A complete one has `log_probabilities`; one with the K likeliest classes has
`classes` and `likeliest`, and the rest of the probability is spread evenly over the other classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.manifest import Digest, PlainName
from models.session import softmax
from tierkit.atomic import write_atomically
from tierkit.documents import Frozen
from tierkit.errors import DataError, InvalidInput
from tierkit.tensors import Array

__all__ = [
    "LEAST",
    "AnswerFacts",
    "Teacher",
    "TeacherAnswers",
    "ask",
    "check_log_probabilities",
    "digest_of",
    "read_answers",
    "write_answers",
]

Teacher = Callable[[Array], Array]
"""Logits, FP32 `[n, F]`, of UINT8 images `[n, h, w, c]`."""
LEAST = float(np.log(1e-7))
"""Smallest log probability that is kept."""
_KEY, _FORMAT = "terrace", 1
_MOST_HEADER_BYTES = 65_536


class AnswerFacts(Frozen):
    """Origin of the answers: the header of the file."""

    format: Annotated[int, Field(ge=_FORMAT, le=_FORMAT)] = _FORMAT
    data_sha256: Digest
    """`ImageSet.digest` of the training images, held-out ones included."""
    hierarchy: Annotated[str, Field(max_length=200)]
    """Name of the hierarchy."""
    teachers: Annotated[tuple[PlainName, ...], Field(min_length=1, max_length=64)]
    teachers_sha256: Digest
    """Digest of the files of the teachers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherAnswers:
    """Log of the mean probabilities of one or more teachers."""

    facts: AnswerFacts
    log_probabilities: NDArray[np.float16]
    """Log-probabilities `[N, 2, F]` of each image and its mirror image."""

    @property
    def digest(self) -> str:
        """See `digest_of`: two files with the same digest teach the same."""
        return digest_of(self.facts.data_sha256, self.log_probabilities)


def digest_of(data_sha256: str, log_probabilities: Array) -> str:
    """Return the sha256 of the digest of the images and of the answers to them."""
    digest = hashlib.sha256(data_sha256.encode())
    digest.update(np.ascontiguousarray(log_probabilities).data)
    return digest.hexdigest()


def ask(teachers: Iterable[Teacher], data: ImageSet, hierarchy: Hierarchy | None = None) -> NDArray[np.float16]:
    """Compute the log of the teachers' mean probabilities `[N, 2, F]` for each image and its mirror image.

    Raises:
        DataError: a teacher gives another number of answers than the hierarchy has fine classes, or numbers that are
            not finite.
    """
    views = data.images, np.ascontiguousarray(data.images[:, :, ::-1])
    total: Array | None = None
    count = 0
    for teacher in teachers:
        found = np.stack([softmax(teacher(view)) for view in views], axis=1)
        if hierarchy is not None and found.shape[2] != len(hierarchy.fine):
            raise DataError(
                f"a teacher gives {found.shape[2]:,} answers, and a student needs the {len(hierarchy.fine):,} fine "
                f"classes of {hierarchy.name!r}: name a network with fine answers"
            )
        total, count = found if total is None else total + found, count + 1
    assert total is not None
    if not np.isfinite(total).all():
        raise DataError(
            "a teacher gives answers that are not finite: train it again with a lower rate, or name another"
        )
    log: NDArray[np.float16] = np.log(np.maximum(total / count, 1e-7)).astype(np.float16)
    return log


def write_answers(path: Path, answers: TeacherAnswers, *, top: int | None = None) -> None:
    """Write a file of answers.

    Args:
        top: number of likeliest classes to keep. Default: all.

    Raises:
        InvalidInput: `top` is not below the number of classes.
        SetupError: the file could not be written.
    """
    numbers = answers.log_probabilities
    if top is None:
        tensors = {"log_probabilities": np.ascontiguousarray(numbers)}
    else:
        if not 1 <= top < numbers.shape[2]:
            raise InvalidInput(f"--top must be from 1 to {numbers.shape[2] - 1:,}, fewer than there are classes")
        classes = np.argsort(-numbers.astype(np.float32), axis=2, kind="stable")[:, :, :top]
        tensors = {
            "classes": np.ascontiguousarray(classes, np.uint16),
            "likeliest": np.ascontiguousarray(np.take_along_axis(numbers, classes, axis=2)),
        }
    write_atomically(path, save(tensors, metadata={_KEY: answers.facts.model_dump_json()}))


def read_answers(path: Path, data_sha256: str, hierarchy: Hierarchy) -> TeacherAnswers:
    """Read answers to these images. No more is read than a file for this number of classes can hold.

    Raises:
        DataError: the file is missing or damaged, its numbers are not log probabilities, or it belongs to other images
            or to another hierarchy.
    """
    try:
        content = path.read_bytes()
        if len(content) < 8 or (size := int.from_bytes(content[:8], "little")) > min(
            _MOST_HEADER_BYTES, len(content) - 8
        ):
            raise ValueError("it has no header")
        facts = AnswerFacts.model_validate_json(json.loads(content[8 : 8 + size])["__metadata__"][_KEY])
        tensors = load(content)
    except OSError as error:
        raise DataError(f"cannot read the answers {path}: {error.strerror}") from error
    except (SafetensorError, ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged or not a file of 'terrace models answers': make it again with that command"
        ) from error
    if facts.hierarchy != hierarchy.name:
        raise DataError(f"the answers {path} belong to the hierarchy {facts.hierarchy!r}, not {hierarchy.name!r}")
    if facts.data_sha256 != data_sha256:
        raise DataError(f"the answers {path} belong to other training images: make them with this data set")
    numbers = _complete(tensors, len(hierarchy.fine), path)
    check_log_probabilities(numbers, len(hierarchy.fine), f"the answers {path}")
    return TeacherAnswers(facts=facts, log_probabilities=numbers)


def check_log_probabilities(numbers: Array, classes: int, what: str) -> None:
    """Raise DataError unless these are float16 `[n, 2, classes]` whose exponentials sum to one (within 2 %)."""
    if numbers.dtype != np.float16 or numbers.ndim != 3 or numbers.shape[1:] != (2, classes):
        raise DataError(f"{what} are not for the {classes:,} fine classes of each image and its mirror image")
    for start in range(0, len(numbers), 4096):  # the sum in fp32 of some, not of all
        sums = np.exp(numbers[start : start + 4096].astype(np.float32)).sum(axis=2)
        if not (np.abs(sums - 1) < 0.02).all():  # false for NaN
            raise DataError(f"{what} have probabilities that are not finite or do not sum to one")


def _complete(tensors: dict[str, Array], classes: int, path: Path) -> NDArray[np.float16]:
    """All classes `[N, 2, F]`."""
    if set(tensors) == {"log_probabilities"}:
        return tensors["log_probabilities"]
    if set(tensors) != {"classes", "likeliest"}:
        raise DataError(f"the answers {path} have other arrays than a file of 'terrace models answers'")
    picked, likeliest = tensors["classes"], tensors["likeliest"]
    top = picked.shape[-1] if picked.ndim == 3 else 0
    shapes_fit = picked.shape == likeliest.shape and picked.dtype == np.uint16 and likeliest.dtype == np.float16
    if not shapes_fit or not 0 < top < classes or picked.shape[1] != 2 or int(picked.max(initial=0)) >= classes:
        raise DataError(f"the answers {path} name classes that the data set does not have")
    known = np.exp(likeliest.astype(np.float32)).sum(axis=2, keepdims=True)
    rest = np.log(np.maximum((1 - known) / (classes - top), 1e-7)).astype(np.float16)
    numbers = np.repeat(rest, classes, axis=2)
    np.put_along_axis(numbers, picked.astype(np.int64), likeliest, axis=2)
    return numbers
