"""Accuracy of an imported network on labelled pictures, and signs of mistakes in its preprocessing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from models.folders import Pictures, all_pictures, find_pictures
from models.hierarchy import Hierarchy
from models.importing.preprocess import Preprocess
from tierkit.errors import DataError
from tierkit.tensors import Array

__all__ = [
    "Mistake",
    "batches",
    "evenly",
    "evenly_by_class",
    "labelled_in",
    "left_out",
    "likely_mistake",
    "pictures_in",
]

_BATCH = 25
_MOST_NAMED = 20
_MOST_TRIED = 200
"""Pictures on which other preprocessing is tried."""
_WORTH = 0.05
"""Share of the pictures by which another preprocessing must be better to be called a likely mistake."""
_DEVIATIONS = 3.0
"""Standard deviations of a sign test by which other preprocessing must also be better, because several are tried, at
times on few pictures.
"""

_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_NONE = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
_HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@dataclass(frozen=True, slots=True)
class Mistake:
    """Preprocessing that fits the network better."""

    change: str
    """The changed setting, as a line of `preprocess.toml`."""
    accuracy: float
    given_accuracy: float
    images: int


def pictures_in(folder: Path, preprocess: Preprocess) -> Pictures:
    """Return all pictures of a folder in the form that the network takes.

    Raises:
        DataError: no such folder, or no pictures.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    return _as_taken(all_pictures(folder), preprocess)


def labelled_in(
    folder: Path, hierarchy: Hierarchy, target: Literal["coarse", "fine"], preprocess: Preprocess
) -> tuple[Pictures, Array]:
    """Return the pictures in folders named after the network's classes, and their labels, int64 `[n]`. For a network
    that answers superclasses, folders may be named after the classes as well.

    Raises:
        DataError: the pictures are missing or misplaced. See `find_pictures`.
    """
    labels = {name: label for label, name in enumerate(hierarchy.labels(target))}
    if target == "coarse":
        labels = dict(zip(hierarchy.fine, hierarchy.parent, strict=True)) | labels
    found = find_pictures(folder, labels)
    return _as_taken([path for path, _ in found], preprocess), np.array([label for _, label in found], np.int64)


def _as_taken(paths: Sequence[Path], preprocess: Preprocess) -> Pictures:
    return Pictures(paths=tuple(paths), fit=preprocess.fit)


def batches(pictures: Pictures) -> Iterator[tuple[Array, list[int], list[str]]]:
    """Yield the results of `Pictures.readable`, a few pictures at a time."""
    return (pictures.readable(slice(start, start + _BATCH)) for start in range(0, len(pictures), _BATCH))


def left_out(damage: Sequence[str], left: int, purpose: str) -> str | None:
    """A warning that names the pictures which cannot be read; None where there are none.

    Raises:
        DataError: none can be read.
    """
    if not damage:
        return None
    named = "; ".join(damage[:_MOST_NAMED]) + (f"; and {more} more" if (more := len(damage) - _MOST_NAMED) > 0 else "")
    if not left:
        raise DataError(f"none of the {len(damage)} pictures {purpose} can be read: {named}")
    return f"left out {len(damage)} of the {len(damage) + left} pictures {purpose}, which cannot be read: {named}"


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, spread evenly."""
    return sorted({int(at) for at in np.linspace(0, count - 1, min(count, most)).round()})


def evenly_by_class(labels: Array, most: int) -> list[int]:
    """Return the numbers of at most `most` pictures, evenly by class. They are drawn with a fixed seed.

    Args:
        labels: labels of the pictures, int64 `[n]`.
    """
    turn: dict[int, int] = {}
    order: list[tuple[int, int, int]] = []
    for place, number in enumerate(np.random.default_rng(0).permutation(len(labels))):
        label = int(labels[number])
        turn[label] = turn.get(label, 0) + 1
        order.append((turn[label], place, int(number)))
    return sorted(number for _, _, number in sorted(order)[:most])


def likely_mistake(
    run: Callable[[Array, Preprocess], Array], chosen: Pictures, labels: Array, given: Preprocess
) -> Mistake | None:
    """Other preprocessing under which the network does clearly better; None for none.

    Args:
        run: logits FP32 `[n, classes]` of UINT8 pictures under some preprocessing.
        labels: labels of the pictures, int64 `[n]`.
    """
    some = evenly_by_class(labels, _MOST_TRIED)
    pictures, labels = chosen.take(some)[:], labels[some]

    def right(preprocess: Preprocess) -> Array:
        parts = [run(pictures[start : start + _BATCH], preprocess) for start in range(0, len(pictures), _BATCH)]
        found: Array = np.concatenate(parts).argmax(axis=1) == labels
        return found

    now = right(given)
    best: Mistake | None = None
    for change, other in _alternatives(given):
        then = right(other)
        share = float(then.mean())
        if clearly_more(then, now) and (best is None or share > best.accuracy):
            best = Mistake(change, share, float(now.mean()), len(labels))
    return best


def clearly_more(then: Array, now: Array) -> bool:
    """True if more is right than before, bool `[n]` both, and by more than chance (sign test on what has changed)."""
    gained, lost = int((then & ~now).sum()), int((now & ~then).sum())
    return gained - lost > max(_WORTH * len(now), _DEVIATIONS * math.sqrt(gained + lost))


def _alternatives(given: Preprocess) -> Iterator[tuple[str, Preprocess]]:
    """Yield the common mistakes, one change at a time."""
    if given.colour != "grey":
        swapped = "rgb" if given.colour == "bgr" else "bgr"
        yield f'colour = "{swapped}"', given.model_copy(update={"colour": swapped})
    for scale in (255.0, 1.0):
        for values in (_NONE, _HALF) if given.colour == "grey" else (_NONE, _IMAGENET, _HALF):
            if scale == 1.0 and values is not _NONE:
                continue
            other = given.model_copy(update={"scale": scale, **values})
            if other != given:
                mean, std = (list(values[name]) for name in ("mean", "std"))
                yield f"scale = {scale:g}, mean = {mean}, std = {std}", other
