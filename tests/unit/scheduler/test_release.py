"""Releases and the change from one to another: who holds which release, and what follows from what happens."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from scheduler.core.release import (
    MOST_LIVE,
    FleetProgress,
    LiveReleases,
    ReleaseChange,
    advance,
    chosen,
    differs,
    number_of,
    rank,
    state_of,
    wanted,
    with_both_sides,
)
from tierkit.errors import NotFound
from tierkit.types import Tier
from tierkit.wire.releases import ReleaseState, RolloutState

OLD, NEW = 7, 8
ALL = FleetProgress(wanted=4, ready=4, ends_ready=3)


def change(state: RolloutState = RolloutState.CANARY, **facts: object) -> ReleaseChange:
    made = ReleaseChange(
        id=3,
        release=NEW,
        previous=OLD,
        kind="canary",
        state=state,
        share=0.1,
        canary=0.1,
        for_s=100.0,
        begun=0.0,
        stepped=0.0,
        started_at=1e9,
    )
    return replace(made, **facts)


def holds(node_id: str, tier: Tier, under_way: ReleaseChange | None, **more: object) -> tuple[int, ...]:
    live = LiveReleases(in_force=OLD, change=under_way)
    return wanted(replace(live, **more), node_id, tier)


IN, OUT = (
    next(name for name in (f"end-{n}" for n in range(99)) if chosen(change(), name) is wish) for wish in (True, False)
)


def test_a_canary_uses_the_new_release_first_and_others_do_not_have_it() -> None:
    assert holds(IN, Tier.END, change()) == (NEW, OLD)
    assert holds(OUT, Tier.END, change()) == (OLD,)
    assert holds("edge-1", Tier.EDGE, change()) == (OLD, NEW)
    assert holds(OUT, Tier.END, change(share=1.0)) == (NEW, OLD)
    assert holds(OUT, Tier.END, change(seeds=(OUT,))) == (NEW, OLD)


def test_jobs_of_a_trial_give_its_release_to_no_other_device() -> None:
    assert holds(OUT, Tier.END, change(), busy=frozenset({NEW, OLD})) == (OLD,)
    assert holds(IN, Tier.END, change(), busy=frozenset({NEW})) == (NEW, OLD)
    failed = change(RolloutState.ROLLED_BACK)
    assert holds(OUT, Tier.END, None, busy=frozenset({NEW}), tried={NEW: failed}) == (OLD,)
    assert holds(IN, Tier.END, None, busy=frozenset({NEW}), tried={NEW: failed}) == (OLD, NEW)
    assert holds("edge-1", Tier.EDGE, None, busy=frozenset({NEW}), tried={NEW: failed}) == (OLD, NEW)


def test_a_retired_release_is_held_until_its_jobs_have_ended() -> None:
    assert holds("end-1", Tier.END, None, in_force=NEW, busy=frozenset({OLD})) == (NEW, OLD)
    assert holds("end-1", Tier.END, None, in_force=NEW) == (NEW,)


@given(st.sets(st.integers(1, 50)), st.text("abc", min_size=1), st.sampled_from(Tier))
def test_the_release_in_force_is_always_held_and_the_number_is_bounded(busy: set[int], name: str, tier: Tier) -> None:
    for under_way in (None, change(), change(RolloutState.ROLLING, share=1.0)):
        numbers = holds(name, tier, under_way, busy=frozenset(busy))
        assert OLD in numbers[:2]
        assert len(numbers) == len(set(numbers)) <= MOST_LIVE


@given(st.integers(1, 100), st.floats(0.01, 0.5))
def test_a_larger_share_has_all_devices_of_a_smaller_one(release: int, share: float) -> None:
    small, large = change(release=release, share=share), change(release=release, share=2 * share)
    names = [f"end-{number}" for number in range(200)]
    assert {name for name in names if chosen(small, name)} <= {name for name in names if chosen(large, name)}
    assert all(0 <= rank(release, name) < 1 for name in names)


NAMES = st.sets(st.integers(1, 400).map(lambda number: f"end-{number}"), min_size=1, max_size=40)


@given(NAMES, NAMES, st.integers(1, 50), st.floats(0.001, 0.999))
def test_a_fleet_of_two_or_more_has_both_releases_in_it_until_the_share_is_1(
    ends: set[str], later: set[str], release: int, share: float
) -> None:
    trial = with_both_sides(change(release=release, share=share), ends)
    assert trial == with_both_sides(change(release=release, share=share), sorted(ends))
    part = {name for name in ends if chosen(trial, name)}
    assert part
    assert len(ends) == 1 or part != ends
    assert all(chosen(replace(trial, share=1.0), name) for name in ends)
    assert all(chosen(replace(trial, share=min(1.0, 2 * share)), name) for name in part)
    for name in later - ends:
        assert chosen(trial, name) is (rank(release, name) < share)


def test_about_the_share_is_chosen_and_another_part_for_each_release() -> None:
    names = [f"camera-{number}" for number in range(5000)]
    one, two = ({name for name in names if chosen(change(release=n), name)} for n in (1, 2))
    assert 400 < len(one) < 600
    assert 400 < len(two) < 600
    assert len(one & two) < 100


def test_a_trial_begins_when_a_device_holds_the_release_and_goes_to_everyone_in_steps() -> None:
    waiting = advance(change(), FleetProgress(wanted=4, ready=1, ends_ready=0), now=5.0)
    assert waiting == change()
    begun = advance(waiting, FleetProgress(wanted=4, ready=2, ends_ready=1), now=6.0)
    assert (begun.ready, begun.trial_s(10.0)) == (6.0, 4.0)
    extended = advance(begun, ALL, now=106.0, conclusion="extend", reason="too little")
    assert (extended.state, extended.extended) == (RolloutState.CANARY, True)
    now, shares = 200.0, []
    rolling = advance(extended, ALL, now=now, conclusion="promote", reason="good")
    while rolling.state is RolloutState.ROLLING:
        shares.append(round(rolling.share, 2))
        assert advance(rolling, ALL, now=now + 9.9) == rolling
        now += 10.0
        rolling = advance(rolling, ALL, now=now)
    assert shares == [0.2, 0.4, 0.8, 1.0]
    assert (rolling.state, rolling.reason) == (RolloutState.DONE, "good")


def test_a_step_does_not_wait_for_ever_for_a_device_that_is_away() -> None:
    lagging = FleetProgress(wanted=4, ready=3, ends_ready=2)
    rolling = change(RolloutState.ROLLING, share=1.0)
    assert advance(rolling, lagging, now=39.9) == rolling
    assert advance(rolling, lagging, now=40.1).state is RolloutState.DONE


@pytest.mark.parametrize("state", [RolloutState.CANARY, RolloutState.ROLLING])
def test_guards_that_fail_end_it_at_any_time(state: RolloutState) -> None:
    over = advance(change(state, ready=1.0), ALL, now=2.0, conclusion="roll back", reason="agreement: 0.1")
    assert (over.state, over.reason) == (RolloutState.ROLLED_BACK, "agreement: 0.1")


def test_a_release_that_a_node_cannot_use_is_rolled_back() -> None:
    broken = replace(ALL, unusable="end-1 cannot use it: damaged")
    assert advance(change(), broken, now=1.0).state is RolloutState.ROLLED_BACK
    promoted = change(RolloutState.ROLLING, kind="promote", share=1.0, for_s=0.0)
    assert advance(promoted, replace(broken, ends_ready=0), now=1.0).state is RolloutState.ROLLED_BACK
    # Others can: one bad device does not keep it from all.
    assert advance(promoted, broken, now=1.0).state is RolloutState.DONE


def test_a_release_that_no_device_ever_holds_is_rolled_back_but_a_roll_back_goes_on() -> None:
    nowhere = FleetProgress(wanted=4, ready=1, ends_ready=0)
    assert advance(change(), nowhere, now=601.0).state is RolloutState.ROLLED_BACK
    promoted = change(RolloutState.ROLLING, kind="promote", share=1.0, for_s=0.0)
    assert advance(promoted, nowhere, now=31.0).state is RolloutState.ROLLED_BACK
    back = replace(promoted, kind="rollback")
    assert advance(back, nowhere, now=31.0).state is RolloutState.ROLLING


@given(st.sampled_from(RolloutState), st.sampled_from(["go on", "extend", "promote", "roll back"]), st.floats(0, 1e4))
def test_what_is_over_stays_as_it_is(state: RolloutState, conclusion: str, now: float) -> None:
    before = change(state)
    after = advance(before, ALL, now=now, conclusion=conclusion, reason="")  # type: ignore[arg-type]
    assert (after == before) or not state.final


def ended(number: int, state: RolloutState, kind: str = "canary", previous: int = OLD) -> ReleaseChange:
    return change(state, release=number, kind=kind, previous=previous)


@pytest.mark.parametrize(
    ("history", "in_force", "under_way", "expected"),
    [
        ([], OLD, None, ReleaseState.READY),
        ([], OLD, change(), ReleaseState.CANARY),
        ([], OLD, change(RolloutState.ROLLING), ReleaseState.ROLLING),
        ([ended(NEW, RolloutState.DONE)], NEW, None, ReleaseState.IN_FORCE),
        ([ended(NEW, RolloutState.ROLLED_BACK)], OLD, None, ReleaseState.ROLLED_BACK),
        ([ended(NEW, RolloutState.STOPPED)], OLD, None, ReleaseState.STOPPED),
        ([ended(9, RolloutState.DONE, previous=NEW), ended(NEW, RolloutState.DONE)], 9, None, ReleaseState.RETIRED),
        (
            [ended(OLD, RolloutState.DONE, kind="rollback", previous=NEW), ended(NEW, RolloutState.DONE)],
            OLD,
            None,
            ReleaseState.ROLLED_BACK,
        ),
    ],
)
def test_the_state_of_a_release(
    history: list[ReleaseChange], in_force: int, under_way: ReleaseChange | None, expected: ReleaseState
) -> None:
    assert state_of(NEW, in_force=in_force, change=under_way, ended=history) is expected


@pytest.mark.parametrize(("ref", "found"), [("flowers@8", (8, "flowers")), ("8", (8, None))])
def test_names_of_releases(ref: str, found: tuple[int, str | None]) -> None:
    assert number_of(ref) == found


@pytest.mark.parametrize("ref", ["", "flowers", "flowers@", "@8", "flowers@0", "Flowers@8", "flowers@8x", "8" * 20])
def test_no_names_of_releases(ref: str) -> None:
    with pytest.raises(NotFound):
        number_of(ref)


def test_answers_of_another_network_are_told_from_rounding() -> None:
    known = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
    assert not differs(known, known)
    assert not differs(known + [[0.05, -0.05, 0.0]] * 2, known)
    assert "away" in differs(known[::-1], known)
    assert "away" in differs(np.full_like(known, np.nan), known)
    assert "form" in differs(known[:1], known)
