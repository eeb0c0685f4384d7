"""A search among stored observations, and the position at which a page of it ends. Pure."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from models.hierarchy import Hierarchy
from tierkit.errors import InvalidInput, NotFound
from tierkit.types import JobState

__all__ = ["Position", "SoughtClass", "SoughtJobs", "SoughtObservations", "classes_called", "cursor_of", "position_of"]

_MOST_CURSOR = 400


class SoughtClass(Struct, frozen=True, kw_only=True):
    """A class or a superclass, by its number in one hierarchy."""

    hierarchy: str
    """Digest."""
    coarse: int | None = None
    fine: int | None = None


class SoughtObservations(Struct, frozen=True, kw_only=True):
    """A search among observations. None in a field means all."""

    node_id: str | None = None
    source: str | None = None
    site: str | None = None
    """The site of the node when the observation was stored."""
    classes: tuple[SoughtClass, ...] | None = None
    """One of these is the answer in force, or the superclass of it."""
    since: float | None = None
    """Taken then or later, seconds since 1970."""
    below: float | None = None
    """The answer in force is less sure than this, 0 to 1."""
    amended: bool = False
    """True: only those that were amended."""
    reader: str | None = None
    """Only sources that this user may see; None: all."""

    @property
    def by_content(self) -> bool:
        """True if an observation is judged by more than its source and its number."""
        return self.classes is not None or self.since is not None or self.below is not None or self.amended


class SoughtJobs(Struct, frozen=True, kw_only=True):
    """A search among jobs. None in a field means all."""

    state: JobState | None = None
    owner: str | None = None
    site: str | None = None
    """Only jobs that name it."""


class Position(Struct, frozen=True, array_like=True):
    """The place of an observation in the order by time, the newest first."""

    taken_at: float
    sequence: Annotated[int, Meta(ge=0, le=2**53)]
    node_id: Annotated[str, Meta(max_length=63)]
    source: Annotated[str, Meta(max_length=63)]


_decode = msgspec.json.Decoder(Position).decode


def cursor_of(position: Position) -> str:
    """The position as a text for users, who give it back unchanged."""
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def position_of(cursor: str) -> Position:
    """Raises InvalidInput for a cursor that no page has given."""
    try:
        if len(cursor) > _MOST_CURSOR:
            raise ValueError("too long")
        position = _decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if not math.isfinite(position.taken_at):
            raise ValueError("no time")
    except (ValueError, binascii.Error, msgspec.DecodeError, RecursionError) as exc:
        raise InvalidInput(f"cursor is the next_cursor of the page before, not {cursor[:32]!r}") from exc
    return position


def classes_called(label: str, hierarchies: Mapping[str, Hierarchy]) -> tuple[SoughtClass, ...]:
    """The classes and superclasses with this name. If a superclass has it, its classes belong to it.

    Args:
        hierarchies: by digest.

    Raises:
        NotFound: there is none.
    """
    found = []
    for digest, hierarchy in hierarchies.items():
        if label in hierarchy.coarse:
            found.append(SoughtClass(hierarchy=digest, coarse=hierarchy.coarse.index(label)))
        elif label in hierarchy.fine:
            found.append(SoughtClass(hierarchy=digest, fine=hierarchy.fine.index(label)))
    if not found:
        raise NotFound(f"no class or superclass is called {label[:64]!r}{_like(label, hierarchies.values())}")
    return tuple(found)


def _like(label: str, hierarchies: Iterable[Hierarchy]) -> str:
    names = {name for hierarchy in hierarchies for name in (*hierarchy.coarse, *hierarchy.fine)}
    near = get_close_matches(label[:64], sorted(names), n=3)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
