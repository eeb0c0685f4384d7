"""The figures of a trial: which observations count."""

from typing import Any

import pytest

from scheduler.core.guards import Trial
from scheduler.core.release import ReleaseChange
from scheduler.releases.figures import TrialRecord
from tierkit.types import Tier
from tierkit.wire.observations import FinerAnswer, LocalAnswer, Observation
from tierkit.wire.releases import RolloutState

CHANGE = ReleaseChange(
    id=1,
    release=2,
    previous=1,
    kind="canary",
    state=RolloutState.CANARY,
    share=0.5,
    begun=0.0,
    ready=0.0,
    stepped=0.0,
    started_at=0.0,
)


def seen(release: int) -> Observation:
    local = LocalAnswer(model="end", sha256="a" * 64, label=0, confidence=0.9, ms=3.0)
    finer = FinerAnswer(
        node_id="edge-1",
        tier=Tier.EDGE,
        model="edge",
        sha256="b" * 64,
        label=1,
        confidence=0.9,
        coarse_label=1,
        coarse_confidence=0.9,
    )
    return Observation(source="gate", sequence=1, age_s=0.0, local=local, release=release, finer=finer)


def figures(release: int) -> dict[str, Any]:
    record = TrialRecord()
    record.begin(CHANGE, {})
    record.observed("end-1", [(seen(release), False)])
    found: dict[str, Any] = record.notes()["trial"]
    return found


@pytest.mark.parametrize("release", [1, 2])
def test_an_observation_counts_for_its_release(release: int) -> None:
    counted = [name for name, group in figures(release).items() if group["agreement"] == [0, 1]]
    assert len(counted) == 1
    assert (counted == ["new"]) == (release == 2)


@pytest.mark.parametrize("release", [0, 3])
def test_answers_of_personal_heads_and_of_other_releases_count_for_none(release: int) -> None:
    assert figures(release) == Trial().as_json()
