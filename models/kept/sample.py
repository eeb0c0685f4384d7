"""Kept pictures, and the balance of the sample that they form. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from models.hierarchy import Hierarchy
from tierkit.errors import InvalidAnswer
from tierkit.types import Tier

__all__ = ["Cell", "Form", "KeptPicture", "Kind", "checked", "kind_of", "which_to_drop"]

Kind = Literal["differs", "unsure", "sure"]
"""The two answers name different coarse classes; or they agree, and the local answer was unsure; or it was sure."""
Form = Literal["pixels", "features"]

_SURE_SHARE = 2
"""At most half of the pictures are sure ones. They keep the network from forgetting what it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPicture:
    """A picture of a source, with both answers."""

    source: str
    sequence: int
    taken_at: float | None = None
    """Seconds since 1970; None if the device did not know the time."""
    sha256: str
    """sha256 of the file."""
    release: int
    local_sha256: str
    """sha256 of the network that gave the local answer."""
    local: int
    """Coarse class of the local answer."""
    local_confidence: float
    margin: float
    tier: Tier
    """Tier that gave the answer from above."""
    node_id: str
    upper_sha256: str
    label: int
    """Fine class of the answer from above."""
    confidence: float
    coarse_label: int
    coarse_confidence: float
    kind: Kind
    form: Form
    """Form in which the picture travelled for that answer."""
    classes: str
    """Digest of the hierarchy that the classes belong to."""
    person: int | None = None
    """Fine class that a person named."""
    person_name: str | None = None
    person_at: float | None = None

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def target(self) -> int:
        """The fine class to learn: of a person, or of the answer from above."""
        return self.label if self.person is None else self.person

    @property
    def cell(self) -> Cell:
        """Its place in the balance of the sample."""
        return Cell(self.target, self.kind, self.person is not None)

    def labelled(self, person: int | None, name: str, at: float) -> Self:
        """Return it with the class that a person names; None removes that class."""
        return dataclasses.replace(
            self,
            person=person,
            person_name=None if person is None else name,
            person_at=None if person is None else at,
        )

    def as_json(self) -> bytes:
        return _adapter.dump_json(self)

    @classmethod
    def parse(cls, content: bytes) -> KeptPicture:
        """Read what `as_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            return _adapter.validate_json(content)
        except ValidationError as error:
            raise ValueError(str(error.errors(include_url=False)[0]["msg"])) from error


_adapter: TypeAdapter[KeptPicture] = TypeAdapter(KeptPicture)


def kind_of(local: int, coarse_label: int, *, unsure: bool) -> Kind:
    """The kind of a picture with these coarse answers."""
    if local != coarse_label:
        return "differs"
    return "unsure" if unsure else "sure"


def checked(picture: KeptPicture, hierarchy: Hierarchy) -> KeptPicture:
    """The picture, if it can be learned from.

    Raises:
        InvalidAnswer: a confidence is not a number from 0 to 1, or a class does not exist.
    """
    numbers = {
        "local_confidence": picture.local_confidence,
        "margin": picture.margin,
        "confidence": picture.confidence,
        "coarse_confidence": picture.coarse_confidence,
    }
    for name, value in numbers.items():
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise InvalidAnswer(f"{name} is {value}, and not a number from 0 to 1")
    if picture.classes != hierarchy.digest:
        raise InvalidAnswer(f"the answers have other classes than {hierarchy.name!r}")
    for name, index, classes in (
        ("local", picture.local, hierarchy.coarse),
        ("coarse_label", picture.coarse_label, hierarchy.coarse),
        ("label", picture.label, hierarchy.fine),
    ):
        if not 0 <= index < len(classes):
            raise InvalidAnswer(f"{name} is class {index}, and there are {len(classes)}")
    return picture


class Cell(NamedTuple):
    """Pictures that count as equal when one of them has to go."""

    target: int
    kind: Kind
    labelled: bool


def which_to_drop(counts: Mapping[Cell, int]) -> Cell:
    """The cell whose oldest picture goes when the sample is full. There must be a picture.

    Labelled pictures go last. Sure ones go first while they are more than half. Otherwise the class with the
    most pictures loses one of its more frequent other kind. So no class and no kind displaces the rest.
    """
    present = {cell: count for cell, count in counts.items() if count > 0}
    free = {cell: count for cell, count in present.items() if not cell.labelled}
    if not free:
        return _largest(present)
    sure = {cell: count for cell, count in free.items() if cell.kind == "sure"}
    if sum(sure.values()) * _SURE_SHARE > sum(present.values()):
        return _largest(sure)
    hard = {cell: count for cell, count in free.items() if cell.kind != "sure"}
    if not hard:
        return _largest(sure)
    classes: Counter[int] = Counter()
    for cell, count in present.items():
        classes[cell.target] += count
    most = max({cell.target for cell in hard}, key=lambda target: (classes[target], -target))
    return _largest({cell: count for cell, count in hard.items() if cell.target == most})


def _largest(cells: Mapping[Cell, int]) -> Cell:
    order = get_args(Kind)
    return max(cells, key=lambda cell: (cells[cell], order.index(cell.kind), -cell.target))
