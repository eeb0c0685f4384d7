"""True classes of images, given by name or number."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierkit.errors import InvalidInput, TooLarge

__all__ = ["labels_from_array", "labels_from_json", "labels_from_list"]

Labels = NDArray[np.int32]

_LABEL_BYTES = 128
_NO_LIST = "labels: must be a JSON list with one name, number or null per image"


def _most_bytes(images: int) -> int:
    """Most bytes of the JSON list of the labels of this many images: names may be written with escapes."""
    return 1024 + _LABEL_BYTES * images


def labels_from_json(text: str, fine: Sequence[str], *, images: int) -> Labels:
    """Labels of this number of images from a JSON list.

    Raises:
        TooLarge: more text than that takes.
        InvalidInput: anything else that is wrong with it.
    """
    # Before it is parsed: that holds up the whole process, and takes many times the memory of the text.
    if len(text) > _most_bytes(images):
        raise TooLarge(f"labels: {len(text)} characters of JSON for {images} images")
    if text.count("[") > 1 or "{" in text:
        raise InvalidInput(_NO_LIST)
    try:
        values = json.loads(text)
    except ValueError as exc:
        raise InvalidInput(f"labels: not a JSON list ({exc})") from exc
    if not isinstance(values, list):
        raise InvalidInput(_NO_LIST)
    return labels_from_list(values, fine)


def labels_from_list(values: Sequence[object], fine: Sequence[str]) -> Labels:
    """Class numbers from fine class names, numbers, or None for unknown; unknown becomes -1. Raises InvalidInput."""
    numbers = {name: number for number, name in enumerate(fine)}
    found = np.empty(len(values), np.int32)
    for image, value in enumerate(values):
        if value is None:
            found[image] = -1
        elif isinstance(value, str) and value in numbers:
            found[image] = numbers[value]
        elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(fine):
            found[image] = value
        else:
            close = difflib.get_close_matches(value[:64], fine, n=1) if isinstance(value, str) else []
            hint = f"; did you mean {close[0]!r}?" if close else f"; numbers go from 0 to {len(fine) - 1}"
            raise InvalidInput(f"labels: {str(value)[:64]!r} of image {image} is not a fine class{hint}")
    return found


def labels_from_array(values: NDArray[np.generic], fine: Sequence[str], count: int) -> Labels:
    """Class numbers from a 1-d array of `count` integers (-1 for unknown) or names. Raises InvalidInput."""
    if values.ndim != 1:
        raise InvalidInput(f"labels: one number or name per image, not an array of shape {list(values.shape)}")
    if len(values) != count:
        raise InvalidInput(f"{len(values)} labels for {count} images")
    if values.dtype.kind == "U":
        return labels_from_list(values.tolist(), fine)
    if values.dtype.kind not in "iu":
        raise InvalidInput(f"labels: integers or names, not {values.dtype}")
    wrong = np.flatnonzero((values.astype(np.int64) < -1) | (values.astype(np.int64) >= len(fine)))
    if wrong.size:
        image = int(wrong[0])
        raise InvalidInput(
            f"labels: {values[image]} of image {image} is not a fine class; they go from 0 to {len(fine) - 1}"
        )
    return values.astype(np.int32)
