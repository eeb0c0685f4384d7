"""Which task goes to which end device."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import assume, given, strategies as st

from scheduler.dispatch.choice import Choice, FreePlaces, Place, Want, choose, eligible, in_order, tags, turn
from scheduler.placement.mapping import natural_order


def place(node_id: str, outstanding: int = 0, *, alive: bool = True, on_trial: bool = False) -> Place:
    return Place(node_id=node_id, outstanding=outstanding, alive=alive, on_trial=on_trial)


def want(job_id: str = "job", *, interactive: bool = False, **rest) -> Want:
    return Want(job_id=job_id, interactive=interactive, **rest)


def pick(wants: list[Want], places: list[Place], *, window: int, last_used: str | None) -> Choice | None:
    """The choice among jobs of the paper's schemes."""

    def plan(want: Want) -> Choice | None:
        raise AssertionError("the planner was asked")

    return choose(wants, in_order=partial(in_order, places=places, window=window, last_used=last_used), plan=plan)


def node_of(choice: Choice | None) -> str | None:
    return None if choice is None else choice.node_id


def run(count: int, *, window: int, wants: list[Want], names: list[str]) -> list[str]:
    """The devices of so many tasks when nothing comes back."""
    outstanding = dict.fromkeys(names, 0)
    last, sent = None, []
    for _ in range(count):
        choice = pick(wants, [place(name, outstanding[name]) for name in names], window=window, last_used=last)
        if choice is None:
            break
        last = choice.node_id
        outstanding[last] += 1
        sent.append(last)
    return sent


def test_tasks_go_over_the_device_list_in_sequential_order_until_all_windows_are_full():
    names = ["end-1", "end-2", "end-3"]
    assert run(10, window=2, wants=[want()], names=names) == names * 2
    assert run(10, window=1, wants=[want()], names=names) == names


def test_a_full_device_is_passed_over():
    choice = pick([want()], [place("a", 2), place("b", 2), place("c", 1)], window=2, last_used=None)
    assert choice is not None
    assert (choice.node_id, choice.reason) == ("c", "next in order with room, 2 passed over")


def test_the_order_goes_on_after_the_last_used_device():
    places = [place("a"), place("b"), place("c")]
    assert node_of(pick([want()], places, window=1, last_used="b")) == "c"
    assert node_of(pick([want()], places, window=1, last_used="c")) == "a"
    assert node_of(pick([want()], places, window=1, last_used="gone")) == "a"


def test_only_alive_devices_receive_tasks():
    places = [place("a", alive=False), place("b")]
    assert node_of(pick([want()], places, window=1, last_used=None)) == "b"
    assert pick([want()], [place("a", alive=False)], window=1, last_used=None) is None


def test_reassign_goes_round_over_the_devices_of_the_beginning_dead_or_alive():
    places = [place("a", alive=False), place("b"), place("new")]
    job = want(regardless=frozenset({"a", "b"}))
    assert node_of(pick([job], places, window=1, last_used=None)) == "a"
    assert node_of(pick([job], places, window=1, last_used="b")) == "a"


def test_a_task_prefers_devices_that_have_not_failed_it_but_takes_what_there_is():
    places = [place("a"), place("b")]
    assert node_of(pick([want(tried=frozenset({"a"}))], places, window=1, last_used=None)) == "b"
    assert node_of(pick([want(tried=frozenset({"a", "b"}))], places, window=1, last_used=None)) == "a"


def test_a_task_waits_for_a_device_that_has_not_failed_it_rather_than_go_to_one_that_has():
    """A device that fails at once is always free."""
    job = want(tried=frozenset({"a"}))
    assert pick([job], [place("a"), place("b", 1)], window=1, last_used=None) is None
    assert node_of(pick([job], [place("a"), place("b", 1, alive=False)], window=1, last_used=None)) == "a"
    # What has not failed there goes meanwhile.
    choice = pick([job, want(task=5)], [place("a"), place("b", 1)], window=1, last_used=None)
    assert choice is not None
    assert (choice.node_id, choice.task) == ("a", 5)


FLEET = [
    place("bad-1", on_trial=True),
    place("bad-2", on_trial=True),
    place("end-1", 9),
    place("end-2"),
    place("gone", alive=False),
]


@pytest.mark.parametrize(
    ("task", "may_go_to"),
    [
        # A first attempt may be a trial.
        ({}, "bad-1 bad-2 end-1 end-2"),
        # What has failed already is no trial while another device has a clean record, with or without room.
        ({"tried": {"bad-1"}}, "end-1 end-2"),
        ({"tried": {"bad-1", "end-2"}}, "end-1"),
        ({"tried": {"bad-1", "end-1", "end-2"}}, "bad-2"),
        ({"tried": {"bad-1", "bad-2", "end-1", "end-2"}}, "bad-1 bad-2 end-1 end-2"),
        # The coarse answer is not entrusted to a device on trial either.
        ({"fine_only": True}, "end-1 end-2"),
        ({"fine_only": True, "tried": {"end-1", "end-2"}}, "bad-1 bad-2"),
        ({"tried": {"bad-1"}, "regardless": frozenset({"bad-1", "gone"})}, "bad-1 gone"),
    ],
)
def test_what_has_failed_goes_to_devices_with_a_clean_record(task, may_go_to):
    assert [place.node_id for place in eligible(want(**task), FLEET)] == may_go_to.split()


def test_where_all_devices_are_on_trial_they_get_what_has_failed_as_well():
    bad = [place("bad-1", on_trial=True), place("bad-2", on_trial=True)]
    assert [place.node_id for place in eligible(want(tried=frozenset({"bad-1"})), bad)] == ["bad-2"]


def test_jobs_take_turns():
    old, new, mid = (turn(2.0, finish_tag, interactive=False) for finish_tag in (7.0, 0.0, 3.0))
    assert new < mid < old
    assert new == turn(2.0, 2.0, interactive=False), "what comes late does not go before what has waited"


def test_an_interactive_request_goes_first_and_may_exceed_the_window_by_one():
    assert turn(0.0, 9.0, interactive=True) < turn(0.0, 0.0, interactive=False)
    wants = [want("live", interactive=True), want("batch")]
    for outstanding, expected in ((0, "live"), (1, "live"), (2, "live"), (3, None)):
        choice = pick(wants, [place("a", outstanding)], window=2, last_used=None)
        assert (None if choice is None else choice.job_id) == expected


def test_a_job_that_cannot_go_does_not_hold_up_another():
    stuck = want("stuck", regardless=frozenset({"gone"}))
    choice = pick([stuck, want("other")], [place("a")], window=1, last_used=None)
    assert choice is not None
    assert choice.job_id == "other"


def test_the_planner_says_where_the_tasks_of_adaptive_jobs_go():
    def plan(want: Want) -> Choice | None:
        return None if want.job_id == "held" else Choice(job_id=want.job_id, node_id="b", reason="planned")

    wants = [want("held", adaptive=True), want("sent", adaptive=True), want("fixed")]
    by_order = partial(in_order, places=[place("a")], window=1, last_used=None)
    choice = choose(wants, in_order=by_order, plan=plan)
    assert choice == Choice(job_id="sent", node_id="b", reason="planned")
    # What is held back holds up nobody.
    choice = choose([wants[0], wants[2]], in_order=by_order, plan=plan)
    assert choice is not None
    assert choice.job_id == "fixed"


def test_a_device_that_owes_a_window_of_coarse_answers_is_full_whatever_scheme_they_are_of():
    full = Place(node_id="a", outstanding=0, owed=2, alive=True)
    assert pick([want()], [full], window=2, last_used=None) is None


def shares(weights: dict[str, float], tasks: int, *, late: str | None = None) -> dict[str, int]:
    """Images of each job after so many tasks of 50; `late` comes when half of them are sent."""
    virtual, finish = 0.0, dict.fromkeys(weights, 0.0)
    sent = dict.fromkeys(weights, 0)
    for number in range(tasks):
        names = [name for name in weights if name != late or number >= tasks / 2]
        first = min(names, key=lambda name: turn(virtual, finish[name], interactive=False))
        virtual, finish[first] = tags(virtual, finish[first], 50, weights[first])
        sent[first] += 50
    return sent


def test_jobs_share_by_their_weights():
    assert shares({"a": 1.0, "b": 1.0}, 100) == {"a": 2500, "b": 2500}
    sent = shares({"a": 1.0, "b": 3.0}, 100)
    assert abs(sent["b"] - 3 * sent["a"]) <= 200
    sent = shares({"heavy": 100.0, "light": 0.1}, 2003)
    assert sent["light"] >= 100, "the light one starves"


def test_a_job_that_comes_late_begins_beside_the_others_and_not_before_them():
    sent = shares({"early": 1.0, "late": 1.0}, 100, late="late")
    assert sent["late"] == 1250


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=12),
    st.integers(-1, 12),
    st.booleans(),
)
def test_the_book_of_free_places_chooses_as_a_look_at_all_places_does(devices, last, again):
    """Where there is a device with a clean record; without one, all places are looked at."""
    places = [
        place(f"end-{n}", held, alive=alive, on_trial=on_trial) for n, (held, alive, on_trial, _) in enumerate(devices)
    ]
    tried = frozenset(f"end-{n}" for n, (_, _, _, failed) in enumerate(devices) if failed and again)
    last_used = f"end-{last}" if 0 <= last < len(places) else None
    free = FreePlaces()
    for one in reversed(places):
        free.set(one.node_id, natural_order(one.node_id), free=True)
    for one in places:
        free.set(one.node_id, natural_order(one.node_id), free=one.alive and one.outstanding < 2)
    clean = {one.node_id for one in places if one.node_id not in tried and not one.on_trial}
    assume(not again or any(one.alive and one.node_id in clean for one in places))
    expected = in_order(want(fine_only=again, tried=tried), places, window=2, last_used=last_used)
    found = free.after(None if last_used is None else natural_order(last_used), clean.__contains__ if again else None)
    assert found == node_of(expected)
