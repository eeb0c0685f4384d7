"""Metrics of releases, guards and roll-outs."""

from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY

from scheduler.metrics import count_rollout, set_standby, show_guards, show_releases
from tierkit.wire.releases import GuardNow, ReleaseState, RolloutState


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    show_releases({}, 0)
    show_guards([])


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"terrace_scheduler_{name}", labels)


def test_releases_that_answer() -> None:
    show_releases({("a@1", ReleaseState.IN_FORCE): 5, ("a@2", ReleaseState.CANARY): 2}, 1)
    assert value("release_info", release="a@1", state="in force") == 1
    assert value("release_nodes", release="a@2") == 2
    assert value("release_lagging_nodes") == 1
    show_releases({("a@2", ReleaseState.IN_FORCE): 6}, 0)
    assert value("release_info", release="a@2", state="in force") == 1
    for gone in ({"release": "a@1", "state": "in force"}, {"release": "a@2", "state": "canary"}):
        assert value("release_info", **gone) is None
    assert value("release_nodes", release="a@1") is None


def test_guards_of_the_trial() -> None:
    show_guards([GuardNow(name="agreement", limit=0.97, value=0.9), GuardNow(name="errors", limit=0.005)])
    assert (value("guard", guard="agreement"), value("guard_limit", guard="agreement")) == (0.9, 0.97)
    assert (value("guard", guard="errors"), value("guard_limit", guard="errors")) == (None, 0.005)
    show_guards([])
    assert value("guard_limit", guard="errors") is None


@pytest.mark.parametrize(
    ("state", "outcome"),
    [(RolloutState.DONE, "done"), (RolloutState.ROLLED_BACK, "rolled_back"), (RolloutState.STOPPED, "stopped")],
)
def test_changes_that_ended(state: RolloutState, outcome: str) -> None:
    before = value("rollouts_total", outcome=outcome)
    assert before is not None
    count_rollout(state)
    assert value("rollouts_total", outcome=outcome) == before + 1


def test_a_standby_shows_no_releases() -> None:
    show_releases({("a@1", ReleaseState.IN_FORCE): 5}, 3)
    show_guards([GuardNow(name="p99", limit=1.3, value=2.0)])
    set_standby()
    assert value("release_nodes", release="a@1") is None
    assert value("guard", guard="p99") is None
    assert value("release_lagging_nodes") == 0
