"""A two-level label hierarchy: classes, superclasses, and which class belongs to which superclass.

The hierarchy is data. It is read from a small TOML or JSON file of this form. Fine labels are numbered in the order of
`fine`, coarse labels in the order of the superclasses:

    name = "shapes"
    fine = ["circle", "ellipse", "square"]

    [superclasses]
    round = ["circle", "ellipse"]
    angular = ["square"]
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tierkit.errors import DataError
from tierkit.tensors import Array

__all__ = ["Hierarchy", "bundled_hierarchy", "few"]

_MOST_NAMED = 5

_FOLDER = Path(__file__).parent / "hierarchies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Class names by label and the superclass of each class."""

    name: str
    fine: tuple[str, ...]
    """Class names; the index is the fine label."""
    coarse: tuple[str, ...]
    """Superclass names; the index is the coarse label."""
    parent: tuple[int, ...]
    """Coarse label of each fine class."""

    @property
    def classes(self) -> tuple[object, ...]:
        """Everything except the name. Answers mean the same under two hierarchies with equal classes."""
        return (self.fine, self.coarse, self.parent)

    @classmethod
    def load(cls, path: Path) -> Hierarchy:
        """Read a hierarchy from a `.toml` or `.json` file.

        Raises:
            DataError: the file cannot be read, or a class is missing, unknown or named twice.
        """
        try:
            raw = path.read_bytes()
            content = json.loads(raw) if path.suffix == ".json" else tomllib.loads(raw.decode())
        except OSError as error:
            raise DataError(f"cannot read the hierarchy {path}: {error.strerror}") from error
        except ValueError as error:  # also JSONDecodeError, TOMLDecodeError and UnicodeDecodeError
            raise DataError(f"the hierarchy {path} is not valid {path.suffix or 'TOML'}: {error}") from error
        return cls.parse(content, source=str(path))

    @classmethod
    def parse(cls, content: Any, *, source: str) -> Hierarchy:
        """Check the decoded content of a hierarchy file; `source` names it in messages.

        Raises:
            DataError: the content is wrong; the message names the fault and the name.
        """
        if not isinstance(content, Mapping):
            raise DataError(f"{source}: a hierarchy is a table with `name`, `fine` and `superclasses`")
        unknown = set(content) - {"name", "fine", "superclasses"}
        if unknown:
            raise DataError(f"{source}: unknown field {few(unknown)} in the hierarchy")
        name: Any = content.get("name")
        fine: Any = content.get("fine")
        groups: Any = content.get("superclasses")
        if not isinstance(name, str) or not name:
            raise DataError(f"{source}: the hierarchy needs a `name`")
        if not _is_names(fine):
            raise DataError(f"{source}: `fine` must be a list of at least one class name")
        if not isinstance(groups, Mapping) or not groups or not all(map(_is_names, groups.values())):
            raise DataError(f"{source}: `superclasses` must map each superclass to a list of its classes")
        if twice := [label for label, count in Counter(fine).items() if count > 1]:
            raise DataError(f"{source}: `fine` names {few(twice)} twice")
        members = Counter(label for labels in groups.values() for label in labels)
        if twice := [label for label, count in members.items() if count > 1]:
            raise DataError(f"{source}: {few(twice)} {_stand(twice)} in more than one superclass")
        if stray := [label for label in members if label not in set(fine)]:
            raise DataError(f"{source}: {few(stray)} {_stand(stray)} in a superclass but not in `fine`")
        if missing := [label for label in fine if label not in members]:
            raise DataError(f"{source}: {few(missing)} {_stand(missing)} in no superclass")
        superclass = {label: index for index, labels in enumerate(groups.values()) for label in labels}
        return cls(
            name=name,
            fine=tuple(fine),
            coarse=tuple(groups),
            parent=tuple(superclass[label] for label in fine),
        )

    def labels(self, target: str) -> tuple[str, ...]:
        """Names of the classes ("fine") or of the superclasses ("coarse")."""
        return self.fine if target == "fine" else self.coarse

    @classmethod
    def flat(cls, name: str, labels: Sequence[str]) -> Hierarchy:
        """Classes without superclasses: each is its own, so that all tiers answer the same."""
        return cls(name=name, fine=tuple(labels), coarse=tuple(labels), parent=tuple(range(len(labels))))

    @property
    def is_flat(self) -> bool:
        """True if coarse and fine answers name the same classes."""
        return self.fine == self.coarse

    @property
    def digest(self) -> str:
        """sha256 of names and order."""
        return hashlib.sha256(json.dumps(self.content()).encode()).hexdigest()

    def content(self) -> dict[str, Any]:
        """The decoded form of the hierarchy file: `parse` of it gives this hierarchy again."""
        groups: dict[str, list[str]] = {label: [] for label in self.coarse}
        for label, parent in zip(self.fine, self.parent, strict=True):
            groups[self.coarse[parent]].append(label)
        return {"name": self.name, "fine": list(self.fine), "superclasses": groups}

    def coarse_labels(self, fine: Array) -> Array:
        """Fine labels, int64 `[n]`, to the labels of their superclasses, int64 `[n]`."""
        return np.asarray(self.parent, dtype=np.int64)[fine]

    def coarse_probabilities(self, fine: Array) -> Array:
        """Sum class probabilities per superclass.

        Args:
            fine: `[n, F]`, one row of class probabilities per image.

        Returns:
            `[n, C]` of the same dtype; rows keep their sum.

        Raises:
            DataError: `fine` has another number of classes than this hierarchy.
        """
        if fine.ndim != 2 or fine.shape[1] != len(self.fine):
            raise DataError(f"hierarchy {self.name!r} has {len(self.fine)} classes, the model gave shape {fine.shape}")
        if self.is_flat:
            return fine
        return np.asarray(fine @ _membership(self.parent, len(self.coarse), fine.dtype))


@lru_cache(maxsize=16)
def _membership(parent: tuple[int, ...], superclasses: int, dtype: np.dtype[Any]) -> Array:
    """`[F, C]`: 1 where a class is in a superclass, else 0. Needed for each answer, and always the same."""
    found = np.zeros((len(parent), superclasses), dtype)
    found[np.arange(len(parent)), parent] = 1
    return found


@cache
def bundled_hierarchy(name: str = "cifar-100") -> Hierarchy:
    """A hierarchy that ships with Terrace.

    Raises:
        DataError: there is none of this name.
    """
    path = _FOLDER / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in _FOLDER.glob("*.toml")))
        raise DataError(f"no bundled hierarchy {name!r}; there is: {known}")
    return Hierarchy.load(path)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)


def _stand(names: Collection[str]) -> str:
    return "stands" if len(names) == 1 else "stand"


def few(names: Collection[str]) -> str:
    """Return some of the names, quoted, and the number of the others."""
    more = len(names) - _MOST_NAMED
    return ", ".join(map(repr, sorted(names)[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
