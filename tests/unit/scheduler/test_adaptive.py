"""Estimates, backlogs and the planner's choices, case by case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from scheduler.core.device import Node
from scheduler.core.fleet import Ledger
from scheduler.core.work import Attempt, Phase
from scheduler.placement.adaptive.backlog import forecast
from scheduler.placement.adaptive.estimates import CHANGE, CHANGE_WEIGHT, HALF_LIFE_S, WEIGHT, Estimate
from scheduler.placement.adaptive.pilot import Pilot
from scheduler.placement.adaptive.planner import Ask, EndState, Hold, Send, UpstreamState, outlook, plan
from tests.unit.scheduler.test_devices import TIMES, attempt_on, begun
from tierkit.types import Tier
from tierkit.wire.oip import Timing

NOW = 100.0


def end(node_id: str = "end-1", *, busy_s: float = 0.0, seconds: float = 0.4, **rest: Any) -> EndState:
    fields: dict[str, Any] = {"has_room": True, "hop_s": 0.0, **rest}
    return EndState(node_id=node_id, free_at=NOW + busy_s, seconds=seconds, **fields)


def node(node_id: str, ms: float = 6.0) -> Node:
    return Node(
        node_id=node_id,
        tier=Tier(node_id.partition("-")[0]),
        url=f"http://{node_id}",
        model=f"{node_id.partition('-')[0]}-net",
        ms_per_image=ms,
    )


def upper(
    node_id: str, *, busy_s: float = 0.0, seconds: float = 0.3, slack_s: float = 0.5, **rest: Any
) -> UpstreamState:
    return UpstreamState(node=node(node_id), free_at=NOW + busy_s, seconds=seconds, slack_s=slack_s, **rest)


def link(end_id: str, upper_id: str) -> float:
    return 1.0 if upper_id.startswith("cloud") else 0.5


def choose(ends: Sequence[EndState], uppers: Sequence[UpstreamState], **ask: Any) -> Send | Hold | None:
    return plan(Ask(**{"remaining": 1, **ask}), ends, uppers, link=link, now=NOW)


def route(choice: Send | Hold | None) -> tuple[str, list[str]]:
    assert isinstance(choice, Send), choice
    return choice.end, [node.node_id for node in choice.upper]


ONLY_CLOUD = ("http://cloud-0",)


def test_a_task_goes_to_an_end_device_that_may_ask_an_upper_node():
    pinned = end("end-0", allowed_upstreams=ONLY_CLOUD)
    assert route(choose([pinned], [upper("edge-0"), upper("cloud-0")])) == ("end-0", ["cloud-0"])
    assert route(choose([pinned, end("end-1", busy_s=0.2)], [upper("edge-0")])) == ("end-1", ["edge-0"])
    # The others are busy: better later than without a fine answer.
    assert choose([pinned, end("end-1", has_room=False)], [upper("edge-0")]) is None


def test_where_no_end_device_may_ask_an_upper_node_the_coarse_answer_is_all_that_is_asked_for():
    choice = choose([end("end-0", allowed_upstreams=ONLY_CLOUD)], [upper("edge-0")], remaining=10, deadline=NOW + 9)
    assert route(choice) == ("end-0", [])
    assert isinstance(choice, Send)
    assert not choice.too_late


# --- estimates ---


def test_an_estimate_moves_towards_what_is_observed_and_back_when_nothing_is():
    estimate = Estimate(prior=1.0)
    assert estimate.value(NOW) == 1.0
    estimate = estimate.observe(2.0, NOW)
    assert estimate.value(NOW) == pytest.approx(1.0 + WEIGHT)
    assert estimate.value(NOW + HALF_LIFE_S) == pytest.approx(1.0 + WEIGHT / 2)
    for _ in range(7):
        estimate = estimate.observe(2.0, NOW)
    assert estimate.value(NOW) == pytest.approx(2.0, abs=0.1)
    assert estimate.samples == 8


def test_a_guess_is_replaced_by_the_first_observation():
    estimate = Estimate(prior=0.0).observe(0.5, NOW, trust_first=True)
    assert estimate.value(NOW + 1000) == 0.5
    assert estimate.observe(1.0, NOW, trust_first=True).value(NOW) == pytest.approx(0.5 + 0.5 * WEIGHT)


@pytest.mark.parametrize(
    ("observation", "weight"),
    [(1.01 * CHANGE, CHANGE_WEIGHT), (0.99 * CHANGE, WEIGHT), (1.01 / CHANGE, WEIGHT), (0.99 / CHANGE, CHANGE_WEIGHT)],
)
def test_an_observation_that_is_far_off_is_a_change(observation, weight):
    estimate = Estimate(prior=1.0).observe(observation, NOW, may_change=True)
    assert estimate.value(NOW) == pytest.approx(1.0 + weight * (observation - 1.0))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.001, 100), st.floats(0, 1000)), min_size=1), st.floats(0.001, 100), st.booleans())
def test_an_estimate_stays_between_what_it_has_seen(observations, prior, may_change):
    estimate, now = Estimate(prior=prior), 0.0
    for observation, after_s in observations:
        now += after_s
        estimate = estimate.observe(observation, now, may_change=may_change)
    seen = [prior, *(observation for observation, _ in observations)]
    assert min(seen) * (1 - 1e-9) <= estimate.value(now) <= max(seen) * (1 + 1e-9)


# --- backlog ---


@pytest.mark.parametrize(
    ("queue", "idle_since", "known", "expected"),
    [
        ([(10.0, 1.0), (10.0, 1.0)], 0.0, 10.0, [11.0, 12.0]),
        ([(10.0, 1.0), (15.0, 1.0)], 0.0, 10.5, [11.0, 16.0]),
        ([(10.0, 1.0)], 12.0, 12.5, [13.0]),
        # Two seconds on a task of one: twice as slow, for all that it has, and one more second for this one.
        ([(10.0, 1.0), (10.0, 1.0)], 0.0, 12.0, [13.0, 15.0]),
        ([], 0.0, 10.0, []),
    ],
)
def test_when_a_queue_is_done(queue, idle_since, known, expected):
    _, done = forecast(queue, idle_since=idle_since, known=known)
    assert done == pytest.approx(expected)


@pytest.mark.parametrize(
    ("known", "factor", "expected"),
    [
        # Two that wait are one batch; the third comes when that has begun.
        (11.5, 1.0, [12.0, 12.0, 13.0]),
        # Overdue is only the batch as a whole: twice as slow, and two more seconds for this one.
        (14.0, 2.0, [16.0, 16.0, 18.0]),
    ],
)
def test_what_a_node_computes_together_is_done_together(known, factor, expected):
    queue = [(9.0, 1.0), (10.0, 1.0), (10.5, 1.0)]
    assert forecast(queue, idle_since=10.0, known=known, joins=2) == (factor, expected)


def test_a_task_that_seems_to_have_come_just_after_a_batch_began_may_be_in_it():
    """Arrivals are estimates, and a batch of two that is taken for one of one looks twice as slow."""
    queue = [(10.0, 1.0), (10.05, 1.0), (10.5, 1.0)]
    assert forecast(queue, idle_since=0.0, known=11.9, joins=2) == (1.0, [12.0, 12.0, 13.0])
    assert forecast(queue, idle_since=0.0, known=11.9, joins=1)[0] == pytest.approx(1.9)


def test_a_task_whose_neighbour_was_given_up_may_still_be_in_a_batch_of_two():
    queue = [(10.0, 1.0)]
    assert forecast(queue, idle_since=0.0, known=10.9, joins=2) == (1.0, [11.0])
    assert forecast(queue, idle_since=0.0, known=11.5, joins=2) == (1.0, [12.0])
    assert forecast(queue, idle_since=0.0, known=14.0, joins=2) == (2.0, [16.0])


# --- the planner ---


def test_a_lone_task_goes_where_it_is_finished_first():
    assert route(choose([end()], [upper("edge-1"), upper("cloud-1")])) == ("end-1", ["edge-1", "cloud-1"])
    # The way to the cloud is half a second longer; the queue at the edge node is longer still.
    assert route(choose([end()], [upper("edge-1", busy_s=2.0), upper("cloud-1")]))[1][0] == "cloud-1"
    assert route(choose([end(busy_s=1.0), end("end-2")], [upper("edge-1")]))[0] == "end-2"


def test_a_slow_device_does_not_get_the_last_tasks():
    slow, full = end("end-1", seconds=4.0), end("end-2", busy_s=0.8, has_room=False)
    choice = choose([slow, full], [upper("edge-1")], remaining=1)
    assert isinstance(choice, Hold)
    assert "busy now" in choice.reason
    assert route(choose([slow, full], [upper("edge-1")], remaining=50))[0] == "end-1"


def test_among_what_delays_nothing_the_more_accurate_network_is_asked():
    uppers = [upper("edge-1", accuracy=0.6), upper("cloud-1", accuracy=0.7)]
    choice = choose([end()], uppers, remaining=20)
    assert isinstance(choice, Send)
    assert route(choice)[1] == ["cloud-1", "edge-1"]
    assert choice.reason.startswith("more accurate, and no later than the job's other 19 tasks, end-1 and cloud-1")
    # The last one would be later that way.
    assert route(choose([end()], uppers, remaining=1))[1] == ["edge-1", "cloud-1"]
    # Somebody waits for this one.
    assert route(choose([end()], uppers, remaining=20, interactive=True))[1] == ["edge-1", "cloud-1"]


def test_a_more_accurate_answer_that_might_come_too_late_is_not_waited_for():
    """With 3 tasks all can be done in 3 * 0.4 + 0.5 + 0.3 = 2.0 s; the cloud would answer 0.1 or 0.2 s before that."""
    edge = upper("edge-1", accuracy=0.6)
    for cloud_s, first in [(0.5, "edge-1"), (0.4, "cloud-1")]:
        choice = choose([end()], [edge, upper("cloud-1", seconds=cloud_s, accuracy=0.7)], remaining=3)
        assert route(choice)[1][0] == first


def test_where_the_upper_nodes_are_the_narrow_place_the_one_that_runs_out_of_work_first_gets_the_task():
    quick = [end(f"end-{number}", seconds=0.1) for number in range(1, 5)]
    uppers = [
        upper("edge-1", busy_s=0.7, accuracy=0.6),
        upper("edge-2", busy_s=0.5, accuracy=0.6),
        upper("cloud-1", busy_s=1.0, accuracy=0.7),
    ]
    # A task comes to an edge node after 0.35 s and to the cloud after 0.6 s: 0.35, 0.15 and 0.4 s before its turn.
    choice = choose(quick, uppers, remaining=50)
    assert isinstance(choice, Send)
    assert choice.upper[0].node_id == "edge-2"
    uppers[0] = upper("edge-1", accuracy=0.6)
    choice = choose(quick, [uppers[0], uppers[2]], remaining=50)
    assert isinstance(choice, Send)
    assert choice.reason.startswith("earliest finish, ")
    # All three are idle: whoever is reached last has waited longest by then.
    idle = [upper("edge-1", accuracy=0.6), upper("cloud-1", accuracy=0.5)]
    choice = choose(quick, idle, remaining=50)
    assert isinstance(choice, Send)
    assert choice.reason.startswith("it runs out of work first, end-1 and cloud-1")


def test_a_task_is_held_back_while_the_upper_nodes_have_enough():
    choice = choose([end()], [upper("edge-1", busy_s=2.0)], remaining=20)
    assert isinstance(choice, Hold)
    # It would arrive after 0.65 s and wait 1.35 s, of which 0.5 s are allowed.
    assert choice.until == pytest.approx(NOW + 0.85)
    assert route(choose([end()], [upper("edge-1", busy_s=2.0)], remaining=20, interactive=True))[1] == ["edge-1"]


def test_an_idle_device_is_not_kept_waiting_for_a_busy_one():
    """By way of the busy one the task would wait less at the upstream node; it would be no earlier."""
    choice = choose([end("end-1", busy_s=1.1), end("end-2")], [upper("edge-1", busy_s=1.0)], remaining=20)
    assert route(choice)[0] == "end-2"


@pytest.mark.parametrize(
    ("left_s", "expected"),
    [(5.0, ["edge-1", "cloud-1"]), (1.5, ["edge-1"]), (1.0, [])],
)
def test_with_a_deadline_only_what_arrives_in_time_is_asked(left_s, expected):
    deadline = NOW + left_s
    choice = choose([end()], [upper("edge-1"), upper("cloud-1")], deadline=deadline, job_deadline=deadline)
    assert isinstance(choice, Send)
    assert route(choice)[1] == expected
    assert choice.too_late == (not expected)


def test_nothing_is_held_back_when_the_devices_need_all_the_time_that_is_left():
    uppers = [upper("edge-1", busy_s=2.0)]
    assert isinstance(choose([end()], uppers, remaining=10, deadline=NOW + 60, job_deadline=NOW + 60), Hold)
    choice = choose([end()], uppers, remaining=10, deadline=NOW + 4.2, job_deadline=NOW + 4.2)
    assert isinstance(choice, Send)
    assert route(choice)[1] == ["edge-1"]
    assert "no time to wait" in choice.reason


def test_without_upper_nodes_the_coarse_answer_is_asked_for():
    choice = choose([end(busy_s=1.0), end("end-2")], [])
    assert isinstance(choice, Send)
    assert route(choice) == ("end-2", [])
    assert not choice.too_late


def test_without_room_on_an_end_device_nothing_goes():
    assert choose([end(has_room=False)], [upper("edge-1")]) is None


def test_the_forecast_is_the_time_of_the_best_order():
    # 7 tasks on servers that take 2 and 3 s: 2 3 4 6 6 8 9
    ends = [end(seconds=0.0)]
    uppers = [upper("edge-1", seconds=2.0), upper("edge-2", seconds=3.0)]
    for tasks, seconds in [(1, 2), (2, 3), (3, 4), (5, 6), (6, 8), (7, 9)]:
        assert outlook(tasks, ends, uppers, link=lambda end, upper: 0.0, now=NOW).last == pytest.approx(NOW + seconds)
    ends = [end(seconds=2.0), end("end-2", seconds=3.0)]
    uppers = [upper("edge-1", seconds=0.0)]
    assert outlook(7, ends, uppers, link=lambda end, upper: 0.0, now=NOW).last == pytest.approx(NOW + 9)


seconds = st.floats(0.0, 5.0)
ends = st.lists(
    st.builds(
        lambda busy_s, seconds, hop_s, room: (busy_s, seconds, hop_s, room),
        seconds,
        seconds,
        st.floats(0.0, 0.5),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
uppers = st.lists(st.tuples(seconds, seconds, st.floats(0.0, 1.0), st.booleans(), st.floats(0.0, 1.0)), max_size=6)


@settings(deadline=None)
@given(
    ends=ends,
    uppers=uppers,
    remaining=st.integers(1, 300),
    interactive=st.booleans(),
    left_s=st.one_of(st.just(math.inf), st.floats(0.0, 20.0)),
)
def test_whatever_the_fleet_a_choice_is_possible_in_time_and_has_a_reason(ends, uppers, remaining, interactive, left_s):
    end_states = [
        end(f"end-{k}", busy_s=busy_s, seconds=seconds, hop_s=hop_s, has_room=room)
        for k, (busy_s, seconds, hop_s, room) in enumerate(ends)
    ]
    upper_states = [
        upper(f"edge-{k}", busy_s=busy_s, seconds=seconds, slack_s=slack_s, has_room=room, accuracy=accuracy)
        for k, (busy_s, seconds, slack_s, room, accuracy) in enumerate(uppers)
    ]
    deadline = NOW + left_s
    choice = choose(
        end_states, upper_states, remaining=remaining, interactive=interactive, deadline=deadline, job_deadline=deadline
    )
    rooms = {state.node_id for state in end_states if state.has_room}
    if choice is None:
        assert not rooms
        return
    assert choice.reason
    if isinstance(choice, Hold):
        busy = [state for state in end_states if not state.has_room or state.free_at > NOW]
        busy_above = [state for state in upper_states if not state.has_room or state.free_at > NOW]
        assert busy or busy_above, "held back though every node is idle: nothing would ever change that"
        return
    assert choice.end in rooms
    with_room = {state.node.node_id for state in upper_states if state.has_room}
    assert {node.node_id for node in choice.upper} <= with_room
    if choice.upper:
        assert choice.finish <= deadline
    if interactive and with_room and left_s == math.inf:
        assert choice.upper


# --- the pilot ---


class Flying(Pilot):
    """A pilot with its ledger, in which attempts begin and end as the state machine lets them."""

    def __init__(self, *, edge_s: float = 0.0) -> None:
        self.ledger = Ledger(TIMES)
        super().__init__(self.ledger, link_s={Tier.EDGE: edge_s, Tier.CLOUD: 0.0}, hop_s=0.0, accuracy={})

    def sent(self, *, end: Node, upper: Node | None, now: float) -> Attempt:
        uppers = [] if upper is None else [upper.node_id]
        due_at = self.due_at(end, upper, 50, now)
        return begun(self.ledger, attempt_on(end.node_id, *uppers, now=now, due_at=due_at, planned=True))

    def coarse_came(self, attempt: Attempt, timing: Timing, now: float) -> None:
        attempt.phase, attempt.coarse_at = Phase.FINE, now
        self.coarse(attempt.facts, timing, now)

    def fine_came(self, attempt: Attempt, timing: Timing, round_trip_s: float, now: float) -> None:
        attempt.phase = Phase.ANSWERED
        self.fine(attempt.facts, "edge-1", timing, round_trip_s, now)


def timing(compute_s: float, queue_s: float = 0.0, batch: int = 50) -> Timing:
    return Timing(queue_s=queue_s, compute_s=compute_s, batch_images=batch)


def test_the_pilot_begins_with_what_nodes_say_and_goes_on_with_what_they_do():
    flying, edge, device = Flying(), node("edge-1"), node("end-1", 8.0)
    (first, second), links = flying.estimates([device], [edge], 0.0)
    assert (first.ms_per_image, first.samples, second.ms_per_image, links) == (8.0, 0, 6.0, [])
    attempt = flying.sent(end=device, upper=edge, now=0.0)
    flying.coarse_came(attempt, timing(0.8), 0.81)
    flying.fine_came(attempt, timing(0.6, queue_s=0.1), round_trip_s=1.2, now=2.02)
    (first, second), (pair,) = flying.estimates([device], [edge], 2.02)
    assert first.ms_per_image == pytest.approx(8 + CHANGE_WEIGHT * 8, rel=0.05)
    assert second.ms_per_image == pytest.approx(6 + CHANGE_WEIGHT * 6)
    assert (first.samples, second.samples) == (1, 1)
    assert (pair.end, pair.upper, pair.samples) == ("end-1", "edge-1", 1)
    assert pair.seconds == pytest.approx(0.5)


def test_tasks_on_their_way_are_the_backlog_of_both_nodes():
    flying, edge, device = Flying(edge_s=0.5), node("edge-1"), node("end-1", 8.0)
    _, second_sent, third_sent = (flying.sent(end=device, upper=edge, now=0.0) for _ in range(3))
    (first, second), _ = flying.estimates([device], [edge], 0.0)
    # 3 * 0.4 s; the last one arrives at 1.45 and takes 0.3 s.
    assert first.tasks == second.tasks == 3
    assert first.backlog_s == pytest.approx(1.2)
    assert second.backlog_s == pytest.approx(1.75)
    flying.ledger.assigned.remove(second_sent)
    flying.ledger.assigned.remove(third_sent)
    assert flying.estimates([device], [edge], 0.0)[0][1].backlog_s == pytest.approx(0.95)


def test_a_task_whose_coarse_answer_is_known_takes_a_device_no_time():
    flying = Flying(edge_s=0.5)
    way = flying.plan(Ask(remaining=1), 50, [node("end-1", 8.0)], [node("edge-1")], 0.0, fine_only=True)
    assert isinstance(way, Send)
    assert way.finish == pytest.approx(0.8)


def test_an_upper_node_that_does_not_answer_looks_slower_with_every_moment():
    flying, edge, other = Flying(edge_s=0.5), node("edge-1"), node("edge-2")
    flying.coarse_came(flying.sent(end=node("end-1", 8.0), upper=edge, now=0.0), timing(0.4), 0.4)
    # Its answer is due at 1.2.
    for now, first in [(1.2, "edge-1"), (1.3, "edge-2"), (3.0, "edge-2")]:
        way = flying.plan(Ask(remaining=1), 50, [node("end-1", 8.0)], [edge, other], now)
        assert isinstance(way, Send)
        assert way.upper[0].node_id == first


def test_the_size_of_a_batch_that_no_node_has_does_not_make_it_wait_for_ever():
    flying, edge, device = Flying(edge_s=0.5), node("edge-1"), node("end-1", 8.0)
    for now in (0.0, 2.0):
        attempt = flying.sent(end=device, upper=edge, now=now)
        flying.coarse_came(attempt, timing(0.4), now + 0.4)
        if now == 0.0:
            flying.fine_came(attempt, timing(0.3, batch=2**31 - 1), round_trip_s=0.8, now=1.2)
    # The second answer is late: it may be in a batch with others, though not with millions.
    assert 0 < flying.estimates([device], [edge], 4.0)[0][1].backlog_s < 10


def test_a_node_that_has_started_again_is_taken_at_its_word():
    flying, device = Flying(), node("end-1", 8.0)
    flying.coarse_came(flying.sent(end=device, upper=None, now=0.0), timing(4.0), 4.0)
    assert flying.estimates([device], [], 4.0)[0][0].ms_per_image > 20
    assert flying.estimates([node("end-1", 7.5)], [], 4.0)[0][0].ms_per_image == 7.5


def test_answers_of_nodes_that_nobody_knows_are_no_observations():
    flying, facts = Flying(), attempt_on("end-1", "edge-1", now=0.0)
    flying.coarse(facts, timing(1.0), 1.0)
    flying.fine(facts, "edge-1", timing(1.0), 1.0, 1.0)
    assert flying.estimates([node("end-1", 8.0)], [node("edge-1")], 1.0)[0][0].samples == 0
