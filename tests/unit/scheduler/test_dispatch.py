"""Which task goes to which end device."""

from __future__ import annotations

from scheduler.dispatch import Choice, Place, Want, choose


def place(node_id: str, outstanding: int = 0, *, alive: bool = True) -> Place:
    return Place(node_id=node_id, outstanding=outstanding, alive=alive)


def want(job_id: str = "job", *, interactive: bool = False, last_served: int = 0, **rest) -> Want:
    return Want(job_id=job_id, interactive=interactive, last_served=last_served, **rest)


def node_of(choice: Choice | None) -> str | None:
    return None if choice is None else choice.node_id


def run(count: int, *, window: int, wants: list[Want], names: list[str]) -> list[str]:
    """The devices of so many tasks when nothing comes back."""
    outstanding = dict.fromkeys(names, 0)
    last, sent = None, []
    for _ in range(count):
        choice = choose(wants, [place(name, outstanding[name]) for name in names], window=window, last_used=last)
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
    choice = choose([want()], [place("a", 2), place("b", 2), place("c", 1)], window=2, last_used=None)
    assert choice is not None
    assert (choice.node_id, choice.reason) == ("c", "next in order with room, 2 passed over")


def test_the_order_goes_on_after_the_last_used_device():
    places = [place("a"), place("b"), place("c")]
    assert node_of(choose([want()], places, window=1, last_used="b")) == "c"
    assert node_of(choose([want()], places, window=1, last_used="c")) == "a"
    assert node_of(choose([want()], places, window=1, last_used="gone")) == "a"


def test_only_alive_devices_receive_tasks():
    places = [place("a", alive=False), place("b")]
    assert node_of(choose([want()], places, window=1, last_used=None)) == "b"
    assert choose([want()], [place("a", alive=False)], window=1, last_used=None) is None


def test_reassign_goes_round_over_the_devices_of_the_beginning_dead_or_alive():
    places = [place("a", alive=False), place("b"), place("new")]
    job = want(regardless=frozenset({"a", "b"}))
    assert node_of(choose([job], places, window=1, last_used=None)) == "a"
    assert node_of(choose([job], places, window=1, last_used="b")) == "a"


def test_a_task_prefers_devices_that_have_not_failed_it_but_takes_what_there_is():
    places = [place("a"), place("b")]
    assert node_of(choose([want(tried=frozenset({"a"}))], places, window=1, last_used=None)) == "b"
    assert node_of(choose([want(tried=frozenset({"a", "b"}))], places, window=1, last_used=None)) == "a"


def test_jobs_take_turns():
    wants = [want("old", last_served=7), want("new", last_served=0), want("mid", last_served=3)]
    choice = choose(wants, [place("a")], window=1, last_used=None)
    assert choice is not None
    assert choice.job_id == "new"


def test_an_interactive_request_goes_first_and_may_exceed_the_window_by_one():
    wants = [want("batch"), want("live", interactive=True, last_served=9)]
    for outstanding, expected in ((0, "live"), (1, "live"), (2, "live"), (3, None)):
        choice = choose(wants, [place("a", outstanding)], window=2, last_used=None)
        assert (None if choice is None else choice.job_id) == expected


def test_a_job_that_cannot_go_does_not_hold_up_another():
    stuck = want("stuck", regardless=frozenset({"gone"}))
    choice = choose([stuck, want("other", last_served=5)], [place("a")], window=1, last_used=None)
    assert choice is not None
    assert choice.job_id == "other"
