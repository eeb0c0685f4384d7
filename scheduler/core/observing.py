"""Decisions on the observations of sources: what is new, what time it is labelled with, what contradicts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from tierkit.errors import InvalidInput
from tierkit.types import Tier
from tierkit.wire.observations import FinerAnswer, Gap, LocalAnswer, Observation, ObservationBatch, Receipt

__all__ = [
    "HeldObservation",
    "KnownSource",
    "Label",
    "NewObservation",
    "SourceBatch",
    "SourceNumbers",
    "SourceUpdate",
    "StoredBatch",
    "StoredObservation",
    "check_batch",
    "joined",
    "sort_out",
    "taken_at",
]

_EARLIEST = 1_577_836_800.0
"""2020-01-01 UTC. A clock that shows less was never set."""


class SourceNumbers(Struct, frozen=True):
    """The numbering of a source so far."""

    spool: str
    highest: int


class SourceBatch(Struct, frozen=True, kw_only=True):
    """The part of a batch that is about one source; not empty."""

    spool: str
    observations: list[Observation] = []
    gaps: list[Gap] = []


class HeldObservation(Struct, frozen=True, kw_only=True):
    """The facts of a stored observation by which one with the same number is judged."""

    revision: int
    local: LocalAnswer | None
    name: str
    taken_at: float
    labelled: bool
    finer: FinerAnswer | None = None


class NewObservation(Struct, frozen=True, kw_only=True):
    """An observation to store: a new one, or a higher revision."""

    observation: Observation
    amends: bool
    differs: bool = True
    """True if it is new, or its answer is another one than before."""
    taken_at: float
    labelled: bool


class Label(Struct, frozen=True, kw_only=True):
    """The class that a person sees in a picture."""

    label: int
    """Number of the class."""
    hierarchy: str
    """Digest of the classes that it numbers."""
    by: str | None
    """Name of a token; None if no token was asked for."""
    at: float
    """Seconds since 1970."""


class StoredObservation(Struct, frozen=True, kw_only=True):
    """An observation as it is stored."""

    node_id: str
    received: int
    """Rises with each observation that is stored or amended."""
    taken_at: float
    hierarchy: str
    """Digest of the classes that its labels number."""
    has_picture: bool
    content: Observation
    site: str | None = None
    """Site of the node when it was stored; None: no site."""
    person: Label | None = None


class KnownSource(Struct, frozen=True, kw_only=True):
    """A source as the database has it."""

    node_id: str
    source: str
    stored_elapsed: float
    """Time at which its latest batch was stored."""
    last: StoredObservation | None
    """The observation with the highest number; None if that number was lost or is deleted."""
    last_picture: int | None


class StoredBatch(Struct, frozen=True, kw_only=True):
    """A batch that is stored."""

    receipt: Receipt
    updates: Mapping[str, SourceUpdate]
    """Updates by source."""
    newest: Mapping[str, StoredObservation]
    """The observation with the highest number among the new ones, by source; a higher number may be stored already."""


class SourceUpdate(Struct, frozen=True, kw_only=True):
    """A batch's consequences for one source."""

    new: Sequence[NewObservation]
    known: int
    """Observations that were stored before."""
    accepted: int
    """Observations that are new or known."""
    gaps: Sequence[Gap]
    highest: int
    first_behind: int | None = None
    """The number from which on nothing is accepted, because the numbers go back; None if they do not."""


def taken_at(age_s: float, label: float | None, wall: float) -> float:
    """The time at which a picture was taken, seconds since 1970.

    Args:
        label: by the device's clock. It counts if it is possible.
        wall: now, by the scheduler's clock.
    """
    by_age = wall - age_s
    return by_age if label is None or label < _EARLIEST else min(label, by_age)


def sort_out(
    batch: SourceBatch, *, numbers: SourceNumbers | None, held: Mapping[int, HeldObservation], wall: float
) -> SourceUpdate:
    """Compare a batch of one source with what is stored.

    Its numbers go back if another spool begins at a number that is taken, or from the first number on that is stored
    for another picture.

    Args:
        numbers: None for a new source.
        held: the stored observations that have a number of the batch.
    """
    behind = [each.sequence for each in batch.observations if _differs(each, held.get(each.sequence))]
    first = min([each.sequence for each in batch.observations] + [gap.first for gap in batch.gaps])
    if numbers is not None and numbers.spool != batch.spool and first <= numbers.highest:
        behind.append(first)
    first_behind = min(behind, default=None)
    accepted = [each for each in batch.observations if first_behind is None or each.sequence < first_behind]
    gaps = [gap for gap in batch.gaps if first_behind is None or gap.last < first_behind]
    new: dict[int, NewObservation] = {}
    stored, known = dict(held), 0
    for each in accepted:
        before = stored.get(each.sequence)
        if before is not None and before.revision >= each.revision:
            known += 1
            continue
        labelled, at = each.taken_at is not None, taken_at(each.age_s, each.taken_at, wall)
        if before is not None and (before.labelled or not labelled):
            labelled, at = before.labelled, before.taken_at
        amends = each.sequence in held
        differs = not amends or _answer(held[each.sequence].finer) != _answer(each.finer)
        new[each.sequence] = NewObservation(
            observation=each, amends=amends, differs=differs, taken_at=at, labelled=labelled
        )
        stored[each.sequence] = HeldObservation(
            revision=each.revision, local=each.local, name=each.name, taken_at=at, labelled=labelled, finer=each.finer
        )
    last = max([each.sequence for each in accepted] + [gap.last for gap in gaps], default=0)
    highest = last if numbers is None else max(last, numbers.highest)
    return SourceUpdate(
        new=list(new.values()),
        known=known,
        accepted=len(accepted),
        gaps=gaps,
        highest=highest,
        first_behind=first_behind,
    )


def _answer(finer: FinerAnswer | None) -> tuple[int, int, float] | None:
    return None if finer is None else (finer.label, finer.coarse_label, finer.confidence)


def _differs(each: Observation, before: HeldObservation | None) -> bool:
    """True if another picture is stored under this number."""
    return before is not None and (before.local, before.name) != (each.local, each.name)


def joined(gaps: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same numbers as ranges that neither overlap nor touch, rising."""
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(gaps):
        if ranges and first <= ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], max(last, ranges[-1][1])
        else:
            ranges.append((first, last))
    return ranges


def check_batch(batch: ObservationBatch, *, coarse: int, fine: int) -> None:
    """Raise InvalidInput for the first part of a batch that cannot be.

    Args:
        coarse, fine: numbers of superclasses and classes.
    """
    pictures: dict[tuple[str, int], tuple[LocalAnswer | None, str]] = {}
    for place, each in enumerate(batch.observations):
        where = f"observations[{place}] ({each.source} {each.sequence})"
        if each.local is not None and each.local.label >= coarse:
            raise InvalidInput(f"{where}: local.label is {each.local.label}, and there are {coarse} superclasses")
        if pictures.setdefault((each.source, each.sequence), (each.local, each.name)) != (each.local, each.name):
            raise InvalidInput(f"{where}: the batch has another picture with this number")
        finer = each.finer
        if finer is None:
            continue
        if finer.label >= fine:
            raise InvalidInput(f"{where}: finer.label is {finer.label}, and there are {fine} classes")
        if finer.coarse_label >= coarse:
            raise InvalidInput(f"{where}: finer.coarse_label is {finer.coarse_label} of {coarse} superclasses")
        if finer.tier is Tier.END:
            raise InvalidInput(f"{where}: finer.tier must be edge or cloud")
    for place, gap in enumerate(batch.gaps):
        if gap.last < gap.first:
            raise InvalidInput(f"gaps[{place}] ({gap.source}): last is {gap.last}, and first {gap.first}")
