"""Class names of an imported network, and how they fit those of its set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.hierarchy import Hierarchy, few
from tierkit.errors import DataError, InvalidInput

__all__ = ["Place", "place_in", "read_labels"]

_MOST_BYTES = 4 * 1024**2
_LONGEST = 200


def read_labels(path: Path) -> tuple[str, ...]:
    """Class names, one in each line, in the order of the network's outputs.

    Raises:
        DataError: the file cannot be read, is no UTF-8, or a name is missing, too long or stands twice.
    """
    try:
        with path.open("rb") as handle:
            raw = handle.read(_MOST_BYTES + 1)
    except OSError as exc:
        raise DataError(f"cannot read the labels {path}: {exc.strerror}") from exc
    if len(raw) > _MOST_BYTES:
        raise DataError(f"the labels {path} have more than {_MOST_BYTES} bytes")
    try:
        lines = [line.strip() for line in raw.decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as exc:
        raise DataError(f"the labels {path} are no UTF-8 (byte {exc.start}): save the file as UTF-8") from exc
    while lines and not lines[-1]:
        del lines[-1]
    for number, line in enumerate(lines, 1):
        if not line:
            raise DataError(
                f"the labels {path} have no name in line {number}: one class in each line, in the order of the outputs"
            )
        if len(line) > _LONGEST or not line.isprintable():
            raise DataError(f"the labels {path}, line {number}: a name has at most {_LONGEST} printable characters")
    if len(lines) < 2:
        raise DataError(f"the labels {path} name {len(lines)} classes: a classifier has at least two")
    if twice := [name for name, count in Counter(lines).items() if count > 1]:
        raise DataError(f"the labels {path} name {', '.join(map(repr, twice[:5]))} twice")
    return tuple(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How a network's classes stand in its set."""

    target: Literal["coarse", "fine"]
    order: tuple[int, ...] | None
    """The network's output for each class of the set; None where the order is the same."""


def place_in(hierarchy: Hierarchy, labels: Sequence[str], tier: str, *, source: str = "the set") -> Place:
    """Which classes of the set the network answers.

    Args:
        source: where the hierarchy is from, for messages.

    Raises:
        InvalidInput: neither the classes nor the superclasses of the set, or superclasses above the end tier.
    """
    for target, names in (("coarse", hierarchy.coarse), ("fine", hierarchy.fine)):
        if set(labels) != set(names) or (target == "coarse" and tier != "end"):
            continue
        position = {name: index for index, name in enumerate(labels)}
        order = tuple(position[name] for name in names)
        return Place(target=target, order=None if order == tuple(range(len(order))) else order)  # type: ignore[arg-type]
    missing = [name for name in hierarchy.fine if name not in set(labels)]
    stray = [name for name in labels if name not in set(hierarchy.fine)]
    differ = "; ".join(
        f"{what} {few(names)}" for what, names in ((f"{source} lacks", stray), ("the labels lack", missing)) if names
    )
    raise InvalidInput(
        f"the network's classes are not those of {source} ({differ}): all networks of a set answer the same classes, "
        "and a hierarchy lists each of them in `fine` and in one superclass; on the end tier a network may answer the "
        "superclasses of a hierarchy, which --hierarchy gives"
    )
