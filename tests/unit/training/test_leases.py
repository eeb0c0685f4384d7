"""Who computes which steps: each one is done once, whoever leaves, comes late or sends twice."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from training.strategies.leases import Leases
from training.units import Computed, UnitLease, Update

NOTHING = Computed(values=np.zeros(0, np.float32), buffers=np.zeros(0, np.float32), loss=0.0)


def update(lease: UnitLease, steps: range, worker: str | None = None) -> Update:
    return Update(lease=lease.number, worker=worker or lease.worker, steps=steps, computed=NOTHING)


def granted(leases: Leases, worker: str = "a", now: float = 0.0) -> UnitLease:
    lease = leases.grant(worker, 0, now)
    assert lease is not None
    return lease


def test_units_cover_the_run_and_the_last_one_is_shorter() -> None:
    leases = Leases(steps=10, period=4, lease_s=1.0)
    units = [granted(leases).unit for _ in range(3)]
    assert [(unit.first, unit.steps) for unit in units] == [(0, 4), (4, 4), (8, 2)]
    assert units[0].span == range(0, 4)
    assert leases.grant("a", 0, 0.0) is None
    assert (leases.left, leases.finished) == (10, False)


@pytest.mark.parametrize(
    ("steps", "worker", "now", "expected"),
    [
        (range(0, 4), "a", 0.5, "lease"),
        (range(0, 2), "a", 0.5, "refused"),
        (range(1, 5), "a", 0.5, "refused"),
        (range(0, 4), "b", 0.5, "refused"),
        (range(0, 4), "a", 1.5, "late"),
    ],
)
def test_an_update_is_claimed_for_the_steps_of_its_unit(steps: range, worker: str, now: float, expected: str) -> None:
    leases = Leases(steps=10, period=4, lease_s=1.0)
    lease = granted(leases)
    claimed = leases.claim(update(lease, steps, worker), now)
    assert claimed is lease if expected == "lease" else claimed == expected


def test_an_update_ends_its_lease_and_counts_once() -> None:
    leases = Leases(steps=4, period=4, lease_s=1.0)
    lease = granted(leases)
    assert leases.expired(0.9) == []
    assert leases.expired(1.0) == [lease]
    leases.fulfil(lease, 0.9)
    assert leases.finished
    assert leases.claim(update(lease, lease.unit.span), 1.8) == "duplicate"


def test_the_steps_of_a_lost_lease_are_granted_first() -> None:
    leases = Leases(steps=8, period=4, lease_s=1.0)
    lease = granted(leases)
    leases.give_back(lease)
    assert leases.claim(update(lease, range(0, 4)), 0.2) == "late"
    again = granted(leases, "b")
    assert (again.unit.first, again.unit.steps, again.worker) == (0, 4, "b")
    assert again.number != lease.number


@given(
    st.lists(st.tuples(st.sampled_from(["grant", "bring", "twice", "leave", "wait"]), st.integers(0, 5)), max_size=200)
)
def test_whatever_happens_each_step_is_brought_once(events: list[tuple[str, int]]) -> None:
    leases = Leases(steps=23, period=4, lease_s=1.0)
    out: list[UnitLease] = []
    brought: list[int] = []
    now = 0.0

    def bring(lease: UnitLease) -> None:
        if leases.claim(update(lease, lease.unit.span), now) is lease:
            leases.fulfil(lease, now)
            brought.extend(lease.unit.span)

    for kind, which in [*events, *[("finish", 0)] * 100]:
        if kind in ("grant", "finish"):
            for expired in leases.expired(now):
                leases.give_back(expired)
            if (lease := leases.grant("a", 0, now)) is not None:
                out.append(lease)
        if kind == "wait":
            now += 0.4
        if kind == "finish":
            now += 2.0 if lease is None else 0.0
        if out and kind in ("bring", "twice", "finish"):
            chosen = out[which % len(out)] if kind != "finish" else out[-1]
            for _ in range(1 + (kind == "twice")):
                bring(chosen)
        if out and kind == "leave":
            out.pop(which % len(out))
    assert sorted(brought) == list(range(23))
    assert leases.finished


@pytest.mark.parametrize(
    ("took", "worker", "now", "late"),
    [
        ({}, "a", 99.0, False),  # nobody knows how long an update takes
        ({"a": 4.0}, "a", 4.9, False),
        ({"a": 4.0}, "a", 5.0, True),
        ({"a": 4.0, "b": 8.0}, "b", 9.9, False),  # each by its own time
        ({"a": 4.0, "b": 8.0}, "b", 10.0, True),
        ({"a": 4.0, "b": 8.0, "c": 4.0}, "new", 4.9, False),  # or by the median
        ({"a": 4.0, "b": 8.0, "c": 4.0}, "new", 5.0, True),
        ({"a": 0.01}, "a", 0.9, False),  # but not within a second
        ({"a": 0.01}, "a", 1.0, True),
    ],
)
def test_an_update_is_overdue_by_what_its_worker_has_taken_before(
    took: dict[str, float], worker: str, now: float, late: bool
) -> None:
    leases = Leases(steps=100, period=4, lease_s=100.0)
    for name, seconds in took.items():
        leases.fulfil(granted(leases, name, -seconds), 0.0)
    lease = granted(leases, worker)
    assert (leases.overdue(now), leases.in_time(now)) == (([lease], 0) if late else ([], 1))
    again = Leases(steps=100, period=4, lease_s=100.0)
    again.restore(leases.state())
    assert again.overdue(now) == leases.overdue(now)


def test_there_is_a_change_when_a_lease_is_overdue_and_when_it_expires() -> None:
    leases = Leases(steps=100, period=4, lease_s=10.0)
    assert leases.next_change(0.0) is None
    leases.fulfil(granted(leases, "a", -4.0), 0.0)
    lease = granted(leases)
    assert [leases.next_change(now) for now in (0.0, 4.9, 5.0, 9.0)] == [5.0, 5.0, 10.0, 10.0]
    leases.give_back(lease, overdue_at=9.0)
    again = granted(leases, now=20.0)  # of the same worker, which is waited for longer now
    assert (again.unit.first, leases.next_change(20.0), leases.in_time(29.9), leases.next_change(29.9)) == (
        4,
        30.0,
        1,
        30.0,
    )


def test_leases_that_follow_others_have_steps_of_their_own_and_numbers_that_go_on() -> None:
    former, leases = Leases(steps=4, period=2, lease_s=1.0), Leases(steps=0, period=4, lease_s=1.0)
    old = granted(former)
    leases.follow(former, range(20, 26))
    first, second = granted(leases), granted(leases, "b")
    assert [(each.unit.first, each.unit.steps) for each in (first, second)] == [(20, 4), (24, 2)]
    assert old.number < first.number < second.number
    assert leases.claim(update(old, range(0, 2)), 0.1) == "late"
    assert (leases.left, leases.finished) == (6, False)
    leases.fulfil(first, 0.1)
    leases.fulfil(second, 0.1)
    assert (leases.done, leases.left, leases.finished) == (6, 0, True)
