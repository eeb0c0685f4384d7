"""Which pictures are worth a label, when tiers agree, and the bounds of what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core import learning
from scheduler.core.learning import Agreement, Audits, agrees, usefulness
from tierkit.types import Tier
from tierkit.wire.observations import FinerAnswer, LocalAnswer, Observation


def seen(local: int | None, confidence: float = 0.5, above: int | None = None, **changes: Any) -> Observation:
    own = None if local is None else LocalAnswer(model="m", sha256="0" * 64, label=local, confidence=confidence)
    finer = None
    if above is not None:
        finer = FinerAnswer(
            node_id="cloud-0",
            tier=Tier.CLOUD,
            model="l",
            sha256="1" * 64,
            label=7,
            confidence=0.7,
            coarse_label=above,
            coarse_confidence=0.8,
        )
    return Observation(source="gate", sequence=1, age_s=0.0, local=own, finer=finer, **changes)


@pytest.mark.parametrize(
    "picture",
    [seen(3), seen(3, unsure=True), seen(None), seen(None, above=3), seen(3, above=3)],
    ids=["no answer from above", "it waits", "no answer", "damaged", "all agree"],
)
def test_a_picture_without_a_question_needs_no_label(picture: Observation) -> None:
    assert usefulness(picture) is None


def test_two_sure_answers_that_differ_are_the_most_useful() -> None:
    order = [
        seen(4, 0.9, above=3),
        seen(4, 0.2, above=3, unsure=True),
        seen(3, 0.2, above=3, unsure=True),
        seen(3, 0.6, above=3, unsure=True),
    ]
    found = [usefulness(each) or 0.0 for each in order]
    assert found == sorted(found, reverse=True)
    assert min(found[:2]) > 1 > max(found[2:]) > 0


def test_only_audited_pictures_with_both_answers_are_counted() -> None:
    assert agrees(seen(3, above=3, audit=True)) is True
    assert agrees(seen(4, above=3, audit=True)) is False
    for other in (seen(3, above=3), seen(3, audit=True), seen(None, above=3, audit=True)):
        assert agrees(other) is None


def test_the_latest_pictures_of_the_latest_sources_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "MOST_AUDITED", 3)
    monkeypatch.setattr(learning, "MOST_SOURCES", 2)
    audits = Audits()
    for number in (4, 2, 3, 1, 5):
        audits.note("a", "gate", number, number > 3)
    assert audits.by_source() == {("a", "gate"): Agreement(3, 2)}, "3, 4 and 5"
    audits.note("a", "gate", 5, False)
    assert audits.by_source()["a", "gate"] == Agreement(3, 1), "the last word on a picture counts"
    audits.note("b", "gate", 1, True)
    audits.note("a", "gate", 6, True)
    audits.note("c", "gate", 1, True)
    assert set(audits.by_source()) == {("a", "gate"), ("c", "gate")}, "b was heard of least lately"
    assert (Agreement().share, Agreement(4, 3).plus(Agreement(4, 1)).share) == (None, 0.5)
