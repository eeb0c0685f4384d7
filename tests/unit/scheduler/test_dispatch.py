"""Which task goes to which end device."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from scheduler.core.assignments import RoundRobin
from scheduler.core.device import Device, Intent, natural_order
from scheduler.core.fleet import Ledger
from scheduler.core.policy import JobPolicy
from scheduler.core.work import Coarse, JobFacts, OpenJob, Phase, TaskFacts
from scheduler.dispatch.choice import Choice, Chooser, grade, tags, turn
from scheduler.placement.mapping import share_to_cloud
from tests.unit.scheduler.test_devices import TIMES, attempt_on, begun, registration
from tierkit.pacing import TokenBucket
from tierkit.types import Recovery, Scheme

DRAINED = Intent(drained=True)


class Fleet:
    """End devices that are alive, with the tasks that they hold, and the choice among them."""

    def __init__(self, *names: str, window: int = 1, sequential: bool = False) -> None:
        self.devices = Ledger(TIMES, window=window)
        self.chooser = Chooser(ledger=self.devices, placement=None, pilot=None, sequential=sequential)  # type: ignore[arg-type]
        for name in names:
            self.devices.register(registration(name), 0.0)

    def give(self, node_id: str, tasks: int = 1, *, planned: bool = False, owed: bool = True) -> None:
        for _ in range(tasks):
            attempt = begun(self.devices, attempt_on(node_id, now=0.0, planned=planned))
            if not owed:
                self.devices.release(attempt, 0.0, answered=True)
                attempt.phase = Phase.FINE

    def put_on_trial(self, *names: str) -> None:
        """Their last answer was wrong, and they have rested for it."""
        for name in names:
            self.devices.note(name, "first-one", -100.0, Device.answers_wrongly, "nonsense", -100.0)
            self.devices.note(name, "first-one", 0.0, Device.seen, 0.0)

    def choice(self, *jobs: OpenJob) -> Choice | None:
        return self.chooser.next(jobs, 0.0)

    def choose(self, *jobs: OpenJob) -> str | None:
        """The device of the next task, which stays there."""
        choice = self.choice(*jobs)
        if choice is None:
            return None
        choice.job.take(choice.task, 0.0)
        self.chooser.sent(choice)
        self.give(choice.device.node_id)
        return choice.device.node_id


def job(tasks: int = 10, *, name: str = "job", interactive: bool = False, **policy: Any) -> OpenJob:
    settled = JobPolicy(**{"scheme": Scheme.MAPPING, "deadline_s": 100, "task_deadline_s": 10, **policy})
    facts = JobFacts(job_id=name, policy=settled, deadline=100.0, interactive=interactive)
    return OpenJob(facts, [TaskFacts(index=k, first_image=k, images=1) for k in range(tasks)], TokenBucket(1.0, 1.0))


def with_tried(*names: str, tasks: int = 1, **rest: Any) -> OpenJob:
    made = job(tasks, **rest)
    made.ready[0].blame.tried.update(names)
    return made


@pytest.mark.parametrize(("window", "rounds"), [(1, 1), (2, 2)])
def test_tasks_go_over_the_device_list_in_sequential_order_until_all_windows_are_full(window, rounds):
    names = ["end-1", "end-2", "end-10"]
    fleet, batch = Fleet(*names, window=window), job()
    assert [fleet.choose(batch) for _ in range(10)] == (names * rounds + [None] * 10)[:10]


def test_a_full_device_is_passed_over_and_the_order_goes_on_after_the_last_one():
    fleet = Fleet("a", "b", "c", window=2)
    fleet.give("a", 2)
    assert [fleet.choose(job()) for _ in range(5)] == ["b", "c", "b", "c", None]


def test_in_sequential_order_a_full_device_is_waited_for():
    fleet = Fleet("a", "b", "c", window=2, sequential=True)
    fleet.give("b", 2)
    assert [fleet.choose(job()) for _ in range(3)] == ["a", None, None]
    # One that gets no tasks is no longer in the order.
    fleet.devices.intend("b", DRAINED, 0.0)
    assert [fleet.choose(job()) for _ in range(4)] == ["c", "a", "c", None]
    # A request may use one place more, like in the other order.
    assert fleet.choose(job(interactive=True)) == "a"


@given(st.integers(4, 12), st.integers(1, 6), st.integers(0, 2**32))
@settings(max_examples=20)
def test_in_sequential_order_the_cloud_gets_its_share_by_eq_5(ends: int, window: int, seed: int):
    """However fast each device is. All but the first four go to the cloud, as with four edge nodes and N_map 1 (the
    paper's evaluation)."""
    draw = Random(seed)
    names = [f"end-{number}" for number in range(1, ends + 1)]
    fleet, batch = Fleet(*names, window=window, sequential=True), job(200)
    assigned, of_cloud = fleet.devices.assigned, 0
    speeds = [draw.random() for _ in names]
    for _ in range(200):
        while (name := fleet.choose(batch)) is None:
            (at,) = draw.choices(range(ends), speeds)
            for attempt in list(assigned.at(names[at]))[:1]:
                fleet.devices.release(attempt, 0.0, answered=True)
                assigned.remove(attempt)
        of_cloud += names.index(name) >= 4
    assert of_cloud / 200 == pytest.approx(share_to_cloud(ends, 4, 1), abs=0.02)


def test_in_sequential_order_a_task_waits_for_a_device_that_has_not_failed_it():
    fleet = Fleet("a", "b", sequential=True)
    fleet.give("b")
    assert fleet.choice(with_tried("a")) is None
    assert Fleet("a", "b", sequential=True).choose(with_tried("a")) == "b"


def test_only_alive_devices_receive_tasks():
    fleet = Fleet("a", "b")
    fleet.devices.intend("a", DRAINED, 0.0)
    assert [fleet.choose(job()), fleet.choose(job())] == ["b", None]


def test_reassign_goes_round_over_the_devices_of_the_beginning_dead_or_alive():
    fleet, batch = Fleet("a", "b", window=3), job(recovery=Recovery.REASSIGN)
    assert fleet.choose(batch) == "a"
    fleet.devices.intend("a", DRAINED, 0.0)
    fleet.devices.register(registration("new"), 0.0)
    assert [fleet.choose(batch), fleet.choose(batch)] == ["b", "a"]


def test_a_task_prefers_devices_that_have_not_failed_it_but_takes_what_there_is():
    assert Fleet("a", "b").choose(with_tried("a")) == "b"
    assert Fleet("a", "b").choose(with_tried("a", "b")) == "a"


def test_a_task_waits_for_a_device_that_has_not_failed_it_rather_than_go_to_one_that_has():
    """A device that fails at once is always free."""
    fleet = Fleet("a", "b")
    fleet.give("b")
    assert fleet.choice(with_tried("a")) is None
    # What has not failed there goes meanwhile.
    choice = fleet.choice(with_tried("a", tasks=2))
    assert choice is not None
    assert (choice.device.node_id, choice.task.facts.index) == ("a", 1)
    fleet.devices.intend("b", DRAINED, 0.0)
    assert fleet.choose(with_tried("a")) == "a"


@pytest.mark.parametrize(
    ("tried", "has_coarse", "goes_to"),
    [
        # A first attempt may be a trial.
        ("", False, "bad-1"),
        # What has failed already is no trial while another device has a clean record, with or without room.
        ("bad-1", False, "end-2"),
        ("bad-1 end-2", False, None),
        ("bad-1 end-1 end-2", False, "bad-2"),
        ("bad-1 bad-2 end-1 end-2", False, "bad-1"),
        # The coarse answer is not entrusted to a device on trial either.
        ("", True, "end-2"),
        ("end-1 end-2", True, "bad-1"),
    ],
)
def test_what_has_failed_goes_to_devices_with_a_clean_record(tried, has_coarse, goes_to):
    fleet, batch = Fleet("bad-1", "bad-2", "end-1", "end-2"), with_tried(*tried.split())
    fleet.put_on_trial("bad-1", "bad-2")
    fleet.give("end-1", 9)
    batch.ready[0].coarse = Coarse(None, frozenset()) if has_coarse else None
    assert fleet.choose(batch) == goes_to


def test_grades():
    clean, on_trial, tried = (
        grade(tried=tried, on_trial=trial) for tried, trial in ((False, False), (False, True), (True, False))
    )
    assert clean < on_trial < tried


def test_jobs_take_turns():
    old, new, mid = (turn(2.0, finish_tag, interactive=False) for finish_tag in (7.0, 0.0, 3.0))
    assert new < mid < old
    assert new == turn(2.0, 2.0, interactive=False), "what comes late does not go before what has waited"


def test_an_interactive_request_goes_first_and_may_exceed_the_window_by_one():
    assert turn(0.0, 9.0, interactive=True) < turn(0.0, 0.0, interactive=False)
    for held, expected in ((0, "live"), (1, "live"), (2, "live"), (3, None)):
        fleet = Fleet("a", window=2)
        fleet.give("a", held)
        choice = fleet.choice(job(name="batch"), job(name="live", interactive=True))
        assert (None if choice is None else choice.job.facts.job_id) == expected


def test_a_job_that_cannot_go_does_not_hold_up_another():
    fleet, stuck = Fleet("gone"), job(name="stuck", recovery=Recovery.REASSIGN)
    assert fleet.choose(stuck) == "gone"
    fleet.devices.forget("gone")
    fleet.devices.register(registration("a"), 0.0)
    choice = fleet.choice(stuck, job(name="other"))
    assert choice is not None
    assert choice.job.facts.job_id == "other"


@pytest.mark.parametrize(("planned", "owed", "full"), [(True, True, True), (True, False, False), (False, False, True)])
def test_tasks_of_the_scheme_adaptive_count_against_the_window_while_their_coarse_answers_are_owed(planned, owed, full):
    fleet = Fleet("a", window=2)
    fleet.give("a", 2, planned=planned, owed=owed)
    assert (fleet.choice(job()) is None) == full


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


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40), st.integers(-1, 13), st.integers(1, 13))
def test_a_ring_goes_round_in_the_order_of_the_list(changes, last, most):
    ring = RoundRobin()
    members: set[int] = set()
    for number, member in changes:
        ring.set(f"end-{number}", natural_order(f"end-{number}"), member=member)
        (members.add if member else members.discard)(number)
    in_order = sorted(members, key=lambda number: (number <= last, number))
    found = ring.after(None if last < 0 else natural_order(f"end-{last}"), most)
    assert found == [f"end-{number}" for number in in_order[:most]]
    fits = {f"end-{number}" for number in members if number % 2}
    assert ring.after(None, 99, fits.__contains__) == [f"end-{number}" for number in sorted(members) if number % 2]
