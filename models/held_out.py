"""Which images training left out: their answers tell how a network does on images that it has not seen.

Torch-free, because serving's thresholds are chosen on them (`models.tuning`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.manifest import ModelEntry
from tierkit.errors import DataError, WeightsError

__all__ = ["Split", "held_out_per_class", "hold_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Indices of the images that are trained on, and of those held out."""

    train: np.ndarray
    held_out: np.ndarray


def hold_out(fine: np.ndarray, per_class: int) -> Split:
    """Hold out the last `per_class` images of each class, in data set order.

    Raises:
        DataError: a class has no image left to train on.
    """
    held: list[np.ndarray] = []
    for label in np.unique(fine):
        members = np.flatnonzero(fine == label)
        if len(members) <= per_class:
            raise DataError(f"class {int(label)} has {len(members)} training images; {per_class} are to be held out")
        held.append(members[-per_class:])
    held_out = np.sort(np.concatenate(held))
    return Split(train=np.setdiff1d(np.arange(len(fine)), held_out), held_out=held_out)


def held_out_per_class(entries: Iterable[ModelEntry], records: Path) -> int:
    """How many images of each class none of these networks was trained on, by their training records.

    The runs that a network started from and its teachers count as well: what a teacher has seen, its student knows.

    Args:
        records: folder of the training records.

    Raises:
        WeightsError: a record is missing or damaged, or a run held nothing out.
    """
    seen: dict[str, int] = {}
    waiting = [Path(entry.training.record).stem for entry in entries]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        config = _config(records / f"{name}.json")
        seen[name] = config["held_out_per_class"]
        if seen[name] < 1:
            raise WeightsError(f"{name!r} was trained on all images (held_out_per_class is 0): none is left to tune on")
        teacher = config.get("teacher") or {}
        waiting += [run for run in (config.get("initial"), *teacher.get("runs", ())) if run is not None]
    # The last images of each class are held out, so the smallest number is in all of them.
    return min(seen.values())


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())["config"]
        int(config["held_out_per_class"])
    except OSError as error:
        raise WeightsError(
            f"cannot read the training record {path} ({error.strerror}); without it nothing says which images the "
            "network has not seen. Name the folder of the records with --records"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"the training record {path} is damaged: {error!r}") from error
    return dict(config)
