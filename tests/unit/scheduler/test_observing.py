"""Decisions on observations: times, numbers that go back, amendments, gaps, labels."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from scheduler.core.observing import (
    HeldObservation,
    SourceBatch,
    SourceNumbers,
    check_batch,
    joined,
    sort_out,
    taken_at,
)
from tierkit.errors import InvalidInput
from tierkit.types import Tier
from tierkit.wire.observations import FinerAnswer, Gap, LocalAnswer, Observation, ObservationBatch

OWN, OTHER = "a" * 16, "b" * 16
NOW = 1.8e9
ANSWER = LocalAnswer(model="small", sha256="0" * 64, label=3, confidence=0.5)
BETTER = LocalAnswer(model="small", sha256="0" * 64, label=3, confidence=0.75)


def seen(sequence: int, **changes: Any) -> Observation:
    return Observation(**{"source": "gate", "sequence": sequence, "age_s": 10.0, "local": ANSWER, **changes})


def held(revision: int = 0, **changes: Any) -> HeldObservation:
    facts = {"local": ANSWER, "name": "", "taken_at": NOW - 500, "labelled": False, **changes}
    return HeldObservation(revision=revision, **facts)


def batch(*observations: Observation, spool: str = OWN, gaps: tuple[tuple[int, int], ...] = ()) -> SourceBatch:
    lost = [Gap(source="gate", first=first, last=last) for first, last in gaps]
    return SourceBatch(spool=spool, observations=list(observations), gaps=lost)


@pytest.mark.parametrize(
    ("age_s", "label", "expected"),
    [
        (10.0, None, NOW - 10),
        (10.0, NOW - 60, NOW - 60),
        (10.0, NOW + 60, NOW - 10),
        (10.0, NOW - 9, NOW - 10),
        (10.0, 0.0, NOW - 10),
        (10.0, 1_577_836_799.0, NOW - 10),
        (10.0, 1_577_836_800.0, 1_577_836_800.0),
        (1e10, None, NOW - 1e10),
    ],
)
def test_time_of_a_picture(age_s: float, label: float | None, expected: float) -> None:
    assert taken_at(age_s, label, NOW) == expected


@pytest.mark.parametrize(
    ("given", "numbers", "stored", "expected"),
    [
        (batch(seen(1), seen(2)), None, {}, (2, 0, 2, None)),
        (batch(seen(11)), SourceNumbers(OWN, 10), {}, (1, 0, 11, None)),
        (batch(seen(10)), SourceNumbers(OWN, 10), {10: held()}, (0, 1, 10, None)),
        (batch(seen(9, revision=1)), SourceNumbers(OWN, 10), {9: held()}, (1, 0, 10, None)),
        (batch(seen(9), seen(9, revision=1)), SourceNumbers(OWN, 10), {9: held(revision=1)}, (0, 2, 10, None)),
        (batch(seen(9), seen(9, revision=1)), None, {}, (1, 0, 9, None)),
        # One that was deleted here, or comes late.
        (batch(seen(4)), SourceNumbers(OWN, 10), {}, (1, 0, 10, None)),
        (batch(gaps=((11, 20),)), SourceNumbers(OWN, 10), {}, (0, 0, 20, None)),
        # Another spool.
        (batch(seen(11), spool=OTHER), SourceNumbers(OWN, 10), {}, (1, 0, 11, None)),
        (batch(seen(10), seen(11), spool=OTHER), SourceNumbers(OWN, 10), {10: held()}, (0, 0, 10, 10)),
        (batch(seen(10), spool=OTHER), SourceNumbers(OWN, 10), {}, (0, 0, 10, 10)),
        (batch(seen(11), gaps=((3, 4),), spool=OTHER), SourceNumbers(OWN, 10), {}, (0, 0, 10, 3)),
        # A copy of the same spool.
        (batch(seen(10, local=BETTER)), SourceNumbers(OWN, 10), {10: held()}, (0, 0, 10, 10)),
        (batch(seen(10, local=None)), SourceNumbers(OWN, 10), {10: held()}, (0, 0, 10, 10)),
        (batch(seen(10, name="a.jpg")), SourceNumbers(OWN, 10), {10: held()}, (0, 0, 10, 10)),
        (batch(seen(10, name="a.jpg", revision=1)), SourceNumbers(OWN, 10), {10: held()}, (0, 0, 10, 10)),
        (
            batch(seen(9), seen(10, local=BETTER), seen(11)),
            SourceNumbers(OWN, 10),
            {9: held(), 10: held()},
            (0, 1, 10, 10),
        ),
        (batch(seen(9), seen(11, name="b")), SourceNumbers(OWN, 11), {11: held()}, (1, 0, 11, 11)),
        (batch(seen(10, name="b"), gaps=((7, 8), (11, 12))), SourceNumbers(OWN, 10), {10: held()}, (0, 0, 10, 10)),
    ],
)
def test_new_known_and_contradicting_numbers(
    given: SourceBatch,
    numbers: SourceNumbers | None,
    stored: dict[int, HeldObservation],
    expected: tuple[int, int, int, int | None],
) -> None:
    found = sort_out(given, numbers=numbers, held=stored, wall=NOW)
    assert (len(found.new), found.known, found.highest, found.first_behind) == expected
    assert found.accepted >= len(found.new) + found.known
    assert all(found.first_behind is None or gap.last < found.first_behind for gap in found.gaps)


@pytest.mark.parametrize(
    ("before", "label", "expected"),
    [
        (held(), None, (NOW - 500, False)),
        (held(), NOW - 600, (NOW - 600, True)),
        (held(labelled=True), NOW - 600, (NOW - 500, True)),
        (held(labelled=True), None, (NOW - 500, True)),
    ],
)
def test_a_time_is_corrected_only_by_a_first_label(
    before: HeldObservation, label: float | None, expected: tuple[float, bool]
) -> None:
    amended = batch(seen(10, revision=1, taken_at=label))
    found = sort_out(amended, numbers=SourceNumbers(OWN, 10), held={10: before}, wall=NOW)
    (new,) = found.new
    assert (new.taken_at, new.labelled) == expected
    assert new.amends


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([(1, 4)], [(1, 4)]),
        ([(5, 9), (1, 4)], [(1, 9)]),
        ([(1, 4), (6, 9)], [(1, 4), (6, 9)]),
        ([(1, 9), (2, 3), (9, 12)], [(1, 12)]),
        ([(1, 9), (1, 2)], [(1, 9)]),
    ],
)
def test_gaps_become_one(gaps: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert joined(gaps) == expected


def test_the_first_wrong_label_is_named() -> None:
    finer = FinerAnswer(
        node_id="cloud-0",
        tier=Tier.CLOUD,
        model="large",
        sha256="2" * 64,
        label=99,
        confidence=1.0,
        coarse_label=19,
        coarse_confidence=1.0,
    )
    given = ObservationBatch(
        node_id="end-0", incarnation="1" * 8, spool=OWN, observations=(seen(1), seen(2, finer=finer))
    )
    check_batch(given, coarse=20, fine=100)
    for classes, part in (((3, 100), "local.label"), ((20, 99), "finer.label"), ((19, 100), "finer.coarse_label")):
        with pytest.raises(InvalidInput, match=part):
            check_batch(given, coarse=classes[0], fine=classes[1])


def test_a_number_stands_for_one_picture_in_a_batch() -> None:
    given = ObservationBatch(node_id="end-0", incarnation="1" * 8, spool=OWN, observations=(seen(1), seen(1)))
    check_batch(given, coarse=20, fine=100)
    for other in (seen(1, local=BETTER, revision=1), seen(1, name="a.jpg"), seen(1, local=None)):
        with pytest.raises(InvalidInput, match="another picture with this number"):
            check_batch(replace(given, observations=(seen(1), other)), coarse=20, fine=100)
