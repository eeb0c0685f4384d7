"""Events for other systems: which sink wants them, what they say, and what follows a failed delivery."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from scheduler.core.job import JobRow
from scheduler.core.outbox import (
    EVENT_TYPES,
    LANES,
    EventFilter,
    SinkEvent,
    after_failure,
    is_online,
    job_event,
    lane_of,
    matches,
    node_event,
    release_event,
    unknown_types,
)
from scheduler.core.policy import JobPolicy
from scheduler.core.release import ReleaseChange
from tierkit.types import Health, JobState, Scheme, Tier
from tierkit.wire.messages import ModelOffer, Registration
from tierkit.wire.releases import RolloutState

JOB = SinkEvent(type="job.completed", key="job/1", data={"id": "1", "state": "completed"})
CAT = SinkEvent(
    type="observation.added",
    key="source/shop/door",
    data={"node": "shop", "source": "door", "label": "cat", "confidence": 0.8, "fine": {"coarse_label": "pets"}},
)
UNREADABLE = SinkEvent(
    type="observation.added",
    key="source/shop/door",
    data={"node": "shop", "source": "door", "label": None, "confidence": None, "fine": None},
)


@pytest.mark.parametrize(
    ("conditions", "wanted"),
    [
        ({}, {"job", "cat", "unreadable"}),
        ({"events": ("job.*",)}, {"job"}),
        ({"events": ("job.failed", "observation.added")}, {"cat", "unreadable"}),
        ({"sources": ("do*",)}, {"cat", "unreadable"}),
        ({"sources": ("shop/door",)}, {"cat", "unreadable"}),
        ({"sources": ("shop",)}, set()),
        ({"sources": ("*/door",)}, {"cat", "unreadable"}),
        ({"labels": ("cat",)}, {"cat"}),
        ({"labels": ("pets", "dog")}, {"cat"}),
        ({"labels": ("ca*",)}, set()),
        ({"confidence": 0.8}, {"cat"}),
        ({"confidence": 0.81}, set()),
        ({"events": ("job.*",), "labels": ("cat",)}, set()),
    ],
)
def test_a_filter_lets_through_what_meets_all_conditions(conditions: dict[str, Any], wanted: set[str]) -> None:
    events = {"job": JOB, "cat": CAT, "unreadable": UNREADABLE}
    assert {name for name, event in events.items() if matches(EventFilter(**conditions), event)} == wanted


_patterns = st.lists(st.sampled_from(["job.*", "*", "observation.added", "door", "cat", "pets"]), max_size=3)


@given(
    st.builds(
        EventFilter,
        events=_patterns.map(tuple),
        sources=_patterns.map(tuple),
        labels=_patterns.map(tuple),
        confidence=st.none() | st.floats(0, 1),
    ),
    st.sampled_from(["events", "sources", "labels", "confidence"]),
    st.sampled_from([JOB, CAT, UNREADABLE]),
)
def test_a_filter_with_one_condition_less_lets_through_no_less(
    conditions: EventFilter, condition: str, event: SinkEvent
) -> None:
    fields = {name: getattr(conditions, name) for name in ("events", "sources", "labels", "confidence")}
    fields[condition] = None if condition == "confidence" else ()
    assert matches(EventFilter(**fields), event) or not matches(conditions, event)


def test_patterns_are_compiled_once_for_each_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more patterns than the cache of fnmatch has room for."""
    filters = [EventFilter(sources=(f"{sink}-*", *(f"*/{sink}-{each}*" for each in range(80)))) for sink in range(500)]
    wanting = filters[7], EventFilter(sources=(*(f"x{each}*" for each in range(300)), "sho?/do*"))
    event = SinkEvent(type="observation.added", key="", data={"node": "shop", "source": "7-door"})
    door = SinkEvent(type="observation.added", key="", data={"node": "shop", "source": "door"})
    assert [each for each in filters if matches(each, event)] == [wanting[0]]
    assert matches(wanting[1], door)
    monkeypatch.setattr(re, "compile", None)
    assert [each for each in filters if matches(each, event)] == [wanting[0]]
    assert matches(wanting[1], door)


def test_patterns_that_no_event_can_meet_are_found() -> None:
    assert unknown_types(EventFilter(events=("job.*", "jobs.*", "*", "node.dead", "Job.failed"))) == [
        "jobs.*",
        "Job.failed",
    ]


@pytest.mark.parametrize(
    ("attempts", "age_s", "least_s", "most_s"),
    [(1, 0.0, 0.5, 1.0), (3, 10.0, 2.0, 4.0), (30, 86_399.0, 30.0, 60.0), (2, 1e9, 1.0, 2.0)],
)
def test_tries_come_at_growing_distances(attempts: int, age_s: float, least_s: float, most_s: float) -> None:
    for chance, expected in ((0.0, least_s), (1.0, most_s)):
        assert after_failure(attempts, age_s=age_s, retry_s=86_400.0, chance=chance) == expected


@pytest.mark.parametrize(("attempts", "age_s"), [(5, 86_400.0), (2000, 86_401.0)])
def test_an_old_event_is_given_up_after_some_tries(attempts: int, age_s: float) -> None:
    assert after_failure(attempts, age_s=age_s, retry_s=86_400.0, chance=0.5) is None


@given(st.text())
def test_a_key_has_one_lane(key: str) -> None:
    assert 0 <= lane_of(key) == lane_of(key) < LANES


@pytest.mark.parametrize(
    ("state", "health", "online"),
    [
        ("running", Health.ALIVE, True),
        ("running", Health.SUSPECT, True),
        ("running", Health.DEAD, False),
        ("running", Health.REMOVED, False),
        ("running", None, False),
        ("starting", Health.ALIVE, None),
        ("starting", Health.DEAD, False),
        ("paused", Health.ALIVE, False),
        ("waiting", Health.ALIVE, False),
        ("finished", Health.ALIVE, False),
    ],
)
def test_a_source_is_online_while_it_runs_on_a_living_node(
    state: str, health: Health | None, online: bool | None
) -> None:
    assert is_online(state, health) is online


@pytest.mark.parametrize("state", JobState)
def test_each_state_of_a_job_has_an_event(state: JobState) -> None:
    job = JobRow(
        id="1",
        policy=JobPolicy(scheme=Scheme.END, deadline_s=10, task_deadline_s=5, name="a job"),
        images=3,
        input_sha256="0" * 64,
        resized_images=0,
        fingerprint="f",
        created_at=0.0,
        deadline_elapsed=10.0,
    )
    event = job_event(job, state, reason="why", summary={"answered_coarse": 2, "by_node": {}})
    assert event.type in EVENT_TYPES
    assert (event.key, event.data["name"], event.data["answered_coarse"]) == ("job/1", "a job", 2)
    assert "by_node" not in event.data


@pytest.mark.parametrize(
    ("health", "known", "kind"),
    [
        (None, False, "node.joined"),
        (None, True, "node.alive"),
        (Health.ALIVE, False, "node.alive"),
        (Health.SUSPECT, False, "node.suspect"),
        (Health.SUSPECT, True, "node.suspect"),
        (Health.DRAINING, False, "node.draining"),
        (Health.DEAD, False, "node.dead"),
        (Health.DEAD, True, "node.left"),
        (Health.REMOVED, True, "node.left"),
        (Health.REMOVED, False, "node.left"),
    ],
)
def test_each_change_of_a_node_has_an_event(health: Health | None, known: bool, kind: str) -> None:
    offer = ModelOffer(name="middle", sha256="1" * 64, ms_per_image=1.0)
    node = Registration(
        node_id="edge-0", incarnation="12345678", tier=Tier.EDGE, url="http://edge:1", models=(offer,), version="0"
    )
    event = node_event(node, health, "", known=known)
    assert (event.type, event.key) == (kind, "node/edge-0")


def change(state: RolloutState) -> ReleaseChange:
    return ReleaseChange(
        id=1, release=2, previous=1, kind="canary", state=state, share=0.1, begun=0.0, stepped=0.0, started_at=0.0
    )


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (None, RolloutState.CANARY, "release.started"),
        (None, RolloutState.ROLLING, "release.started"),
        (None, RolloutState.DONE, "release.promoted"),
        (RolloutState.CANARY, RolloutState.CANARY, None),
        (RolloutState.CANARY, RolloutState.ROLLING, "release.rolling_out"),
        (RolloutState.ROLLING, RolloutState.ROLLING, None),
        (RolloutState.ROLLING, RolloutState.DONE, "release.promoted"),
        (RolloutState.CANARY, RolloutState.ROLLED_BACK, "release.rolled_back"),
        (RolloutState.CANARY, RolloutState.STOPPED, "release.stopped"),
    ],
)
def test_a_release_is_told_of_when_its_state_changes(
    before: RolloutState | None, after: RolloutState, kind: str | None
) -> None:
    was = None if before is None else change(before)
    event = release_event(change(after), was, new="b@2", old="a@1")
    assert (event and event.type) == kind
