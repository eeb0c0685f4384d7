"""What the doctor finds out about releases, and what it advises."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from models.manifest import Manifest, load_manifest
from terrace.findings import Check, CheckVerdict
from terrace.release_checks import FleetNetworks, check_networks_of, check_releases, check_set
from tests.model_sets import colour_network, colour_set
from tests.release_stub import a_release, a_rollout
from tierkit.client import Device, ReleaseList, ReleaseNow, Rollout
from tierkit.types import Health, Tier
from tierkit.wire.releases import ReleaseNetwork, ReleaseState, RolloutState, TroubleNow

OLD = {"small": "1" * 64}


def listed(*releases: ReleaseNow, **changes: Any) -> FleetNetworks:
    """The networks of a fleet in which flowers@1 is in force."""
    first = a_release("flowers", 1, ReleaseState.IN_FORCE, origin="/srv/flowers", nodes=3)
    found = ReleaseList(in_force="flowers@1", releases=(*releases, first), **changes)
    return FleetNetworks(offered=OLD, releases=found)


def found_in(networks: FleetNetworks) -> dict[str, Check]:
    return {check.name: check for check in check_releases(networks)}


def test_a_fleet_at_rest() -> None:
    assert found_in(listed()) == {
        "release": Check("fleet", "release", CheckVerdict.OK, "flowers@1 in force, held by 3 nodes")
    }
    assert list(check_releases(FleetNetworks(offered=OLD, releases=None))) == []


@pytest.mark.parametrize(
    ("state", "origin", "told"),
    [
        (ReleaseState.READY, "/srv/flowers", True),
        (ReleaseState.READY, "", False),
        (ReleaseState.STOPPED, "/srv/flowers", False),
        (ReleaseState.ROLLED_BACK, "/srv/flowers", False),
    ],
)
def test_a_release_of_the_scheduler_s_folder_that_waits(state: ReleaseState, origin: str, told: bool) -> None:
    found = found_in(listed(a_release("flowers", 2, state, origin=origin)))
    assert ("flowers@2" in found) is told
    if told:
        check = found["flowers@2"]
        assert (check.verdict, "/srv/flowers" in check.detail) == (CheckVerdict.NOTE, True)
        assert "terrace models release promote flowers@2" in check.advice


def change(state: RolloutState = RolloutState.CANARY, *, minutes: float = 1, **changes: Any) -> Rollout:
    begun = datetime.now(UTC) - timedelta(minutes=minutes)
    return a_rollout("flowers@2", state, started_at=begun, wanted=4, **changes)


@pytest.mark.parametrize(
    ("state", "ready", "minutes", "verdict", "words"),
    [
        (RolloutState.CANARY, 1, 1, CheckVerdict.OK, "canary, 1 of 4 nodes hold it: waits"),
        (RolloutState.CANARY, 4, 100, CheckVerdict.OK, "canary, 4 of 4 nodes hold it"),
        (RolloutState.CANARY, 1, 100, CheckVerdict.NOTE, "1 of 4 nodes hold it: waits (since 1 h 40 min)"),
        (RolloutState.ROLLING, 3, 16, CheckVerdict.NOTE, "rolling out, 3 of 4"),
    ],
)
def test_a_change_under_way_and_one_that_hangs(
    state: RolloutState, ready: int, minutes: float, verdict: CheckVerdict, words: str
) -> None:
    rollout = change(state, ready=ready, minutes=minutes, reason="waits")
    check = found_in(listed(a_release("flowers", 2, ReleaseState.CANARY), rollout=rollout))["flowers@2"]
    assert (check.verdict, words in check.detail) == (verdict, True), check
    assert bool(check.advice) == (verdict is not CheckVerdict.OK)


@pytest.mark.parametrize(
    ("state", "hours", "told"),
    [
        (RolloutState.ROLLED_BACK, 2, True),
        (RolloutState.ROLLED_BACK, 25, False),
        (RolloutState.STOPPED, 2, False),
        (RolloutState.DONE, 2, False),
    ],
)
def test_a_release_that_was_rolled_back_lately(state: RolloutState, hours: int, told: bool) -> None:
    ended = datetime.now(UTC) - timedelta(hours=hours, minutes=1)
    found = found_in(listed(history=(change(state, ended_at=ended, reason="p99 is 5.1x"),)))
    assert ("flowers@2" in found) is told
    if told:
        assert found["flowers@2"].detail == "rolled back 2 h 1 min ago: p99 is 5.1x"
        assert found["flowers@2"].verdict is CheckVerdict.NOTE


@pytest.mark.parametrize("kind", ["room", "unusable", "unreachable", "differs", "a later kind"])
def test_a_node_that_cannot_hold_a_release(kind: str) -> None:
    trouble = TroubleNow(node_id="end-7", kind=kind, detail="2 MB free")
    new = a_release("flowers", 2, ReleaseState.CANARY, troubles=(trouble,))
    check = found_in(listed(new, rollout=change(ready=4)))["end-7, flowers@2"]
    assert (check.verdict, check.detail) == (CheckVerdict.NOTE, f"{kind}: 2 MB free")
    assert check.advice
    assert "end-7, flowers@2" not in found_in(listed(new)), "nothing is wanted of that release"


def node(**networks: str) -> Device:
    models = tuple({"name": name, "sha256": digit * 64} for name, digit in networks.items())
    return Device(node_id="end-1", tier=Tier.END, url="http://e:1", health=Health.ALIVE, models=models)


def test_which_networks_a_node_holds() -> None:
    networks = listed(a_release("flowers", 2, ReleaseState.CANARY))
    assert check_networks_of(node(small="1"), networks) is None
    assert check_networks_of(node(small="2", other="1"), networks) is not None
    assert check_networks_of(node(), networks) is None
    behind = check_networks_of(node(small="2"), networks)
    assert behind is not None
    assert (behind.verdict, "does not hold flowers@1" in behind.detail) == (CheckVerdict.NOTE, True)
    foreign = check_networks_of(node(small="9"), networks)
    assert foreign is not None
    assert (foreign.verdict, "without --models" in foreign.advice) == (CheckVerdict.FAIL, True)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model set, and the same after an import."""
    folder = tmp_path_factory.mktemp("sets")
    old = colour_network(folder / "old.onnx", factor=5)
    new = colour_network(folder / "new.onnx", factor=20)
    return colour_set(folder / "before", {"end": old}), colour_set(folder / "after it", {"end": new})


def release_of(models: Path, number: int, state: ReleaseState) -> ReleaseNow:
    networks = tuple(
        ReleaseNetwork.model_validate(entry.model_dump(include={"name", "tier", "sha256", "target", "size_bytes"}))
        for entry in load_manifest(models).models
    )
    return a_release("flowers", number, state, networks=networks)


def offered_by(manifest: Manifest) -> dict[str, str]:
    return {entry.name: entry.sha256 for entry in manifest.models}


@pytest.mark.parametrize(
    ("state", "verdict", "advice"),
    [
        (None, CheckVerdict.FAIL, "terrace models release create flowers --models "),
        (ReleaseState.READY, CheckVerdict.FAIL, "terrace models release promote flowers@2"),
        (ReleaseState.ROLLED_BACK, CheckVerdict.FAIL, "terrace models release promote flowers@2"),
        (ReleaseState.CANARY, CheckVerdict.NOTE, "terrace models release show flowers@2"),
    ],
)
def test_a_set_that_does_not_answer(
    sets: tuple[Path, Path], state: ReleaseState | None, verdict: CheckVerdict, advice: str
) -> None:
    before, after = sets
    releases = [release_of(before, 1, ReleaseState.IN_FORCE)]
    if state is not None:
        releases.insert(0, release_of(after, 2, state))
    found = ReleaseList(in_force="flowers@1", releases=tuple(releases))
    networks = FleetNetworks(offered=offered_by(load_manifest(before)), releases=found)
    (same,) = check_set(networks, before)
    assert (same.verdict, "flowers@1" in same.detail) == (CheckVerdict.OK, True)
    (other,) = check_set(networks, after)
    assert (other.verdict, advice in other.advice) == (verdict, True), other
    assert "of-end: sha256 " in other.detail
    if state is None:
        assert f"'{after}'" in other.advice, "the name of the folder has a blank"
    assert list(check_set(networks, before / "nowhere")) == []
