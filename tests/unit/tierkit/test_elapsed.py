"""Elapsed time: effects of a wrong clock, of a restart of the service and of a restart of the machine."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from tierkit.elapsed import Elapsed, Kept, boot_id, continued, since_boot

KEPT = Kept(elapsed=5000.0, boot="first", since_boot=100.0)


@pytest.mark.parametrize(
    ("kept", "boot", "since_boot", "wall", "goes_on_at"),
    [
        (None, "first", 100.0, 1.7e9, 1.7e9),
        (KEPT, "first", 100.0, 1.7e9, 5000.0),
        (KEPT, "first", 160.0, 1.7e9, 5060.0),  # the scheduler was away for a minute
        (KEPT, "first", 160.0, 0.0, 5060.0),  # whatever the clock says
        (KEPT, "first", 90.0, 1.7e9, 5000.0),  # cannot be
        (KEPT, "second", 10.0, 1.7e9, 5000.0),  # the machine has started again: nobody knows how long that took
        (KEPT, "", 160.0, 1.7e9, 5000.0),
        (Kept(elapsed=5000.0, boot="", since_boot=100.0), "", 160.0, 1.7e9, 5000.0),
    ],
)
def test_where_elapsed_time_goes_on(kept, boot, since_boot, wall, goes_on_at):
    assert continued(kept, boot=boot, since_boot=since_boot, wall=wall) == goes_on_at


@pytest.mark.parametrize(
    ("boot", "since_boot", "continues_at"),
    [
        ("first", 160.0, 5060.0),
        ("second", 10.0, 5010.0),  # it was off for an unknown time, and has run for ten seconds since
        ("", 10.0, 5000.0),
    ],
)
def test_time_since_a_new_start_of_the_same_machine_counts(boot, since_boot, continues_at):
    assert continued(KEPT, boot=boot, since_boot=since_boot, wall=0.0, same_machine=True) == continues_at


def by_name(kept: Kept) -> dict[str, object]:
    return {"elapsed": kept.elapsed, "boot": kept.boot, "since_boot": kept.since_boot}


class Machine:
    """A machine with a clock that anybody may set, and one that counts since its start."""

    def __init__(self) -> None:
        self.wall, self.since_boot, self.boot = 1_700_000_000.0, 0.0, 0
        self.kept: Kept | None = None
        self.start()

    def start(self) -> None:
        """The scheduler begins."""
        at = continued(self.kept, boot=str(self.boot), since_boot=self.since_boot, wall=self.wall)
        self.elapsed = Elapsed(at, boot=str(self.boot), clock=lambda: self.since_boot)
        self.note()

    def note(self) -> None:
        self.kept = Kept(**json.loads(json.dumps(by_name(self.elapsed.kept()))))

    def let_pass(self, seconds: float) -> None:
        self.wall += seconds
        self.since_boot += seconds


STEPS = st.one_of(
    st.tuples(st.just("pass"), st.floats(0, 1e6)),
    st.tuples(st.just("set"), st.floats(-2e9, 2e9)),
    st.tuples(st.just("restart"), st.floats(0, 1e6)),
    st.tuples(st.just("reboot"), st.floats(0, 1e6)),
    st.tuples(st.just("note"), st.just(0.0)),
)


@given(st.lists(STEPS, max_size=30))
def test_elapsed_time_is_the_time_that_passed_while_the_machine_ran(steps):
    """Setting the clock changes nothing, and it never goes back; only a restart of the machine may hide time."""
    machine = Machine()
    began, passed, sure = machine.elapsed.now(), 0.0, 0.0
    for what, seconds in steps:
        before = machine.elapsed.now()
        match what:
            case "pass":
                machine.let_pass(seconds)
                passed += seconds
            case "set":
                machine.wall += seconds
            case "restart":
                machine.let_pass(seconds)
                passed += seconds
                machine.start()
            case "note":
                machine.note()
                sure = passed
            case "reboot":
                machine.boot += 1
                machine.since_boot = 0.0
                machine.wall += seconds
                assert machine.kept is not None
                passed = machine.kept.elapsed - began  # what was noted last
                machine.start()
                before = machine.elapsed.now()
        now = machine.elapsed.now()
        assert now >= before - 1e-6  # sums of floats near 1.7e9 are rounded
        assert now - began == pytest.approx(passed, abs=1e-3 + 1e-9 * passed)
        assert now - began >= sure - 1e-3 - 1e-9 * sure or what == "reboot"


def test_this_machine_has_a_clock_that_nobody_sets():
    assert boot_id() == boot_id()
    assert since_boot() <= since_boot()
