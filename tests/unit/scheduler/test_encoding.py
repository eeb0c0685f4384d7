"""Where images are encoded with `encode_on=auto`: Eq. 7 and 8 of the paper over measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from scheduler.core.work import AttemptFacts
from scheduler.placement.adaptive.encoding import EncodingTimes, Recent, Way, choose_way
from tierkit.types import FeatureForm, Tier
from tierkit.wire.events import FineEvent, Sent, UpperTiming
from tierkit.wire.messages import Encoding, Relay, Stage, Upstream

IMAGES = 50
HEAD = "resnet-34.conv1"


def way(
    encodes: str, encode_s: float | None, comm_s: float | None, skipped: int | None = 0, skipped_s: float = 0
) -> Way:
    return Way(encodes=encodes, encode_s=encode_s, comm_s=comm_s, skipped=skipped, skipped_s=skipped_s)


@pytest.mark.parametrize(
    ("end", "edge", "chosen", "words"),
    [
        # Nothing is measured: the end device first, then the edge node while the answer of the first is to come.
        ((None, None, None), (None, None, None), "end-1", "not measured yet"),
        ((None, None), (None, None, None), "edge-1", "not measured yet"),
        ((None, None), (None, None), "end-1", "no way is measured yet"),
        ((None, 0.1), (0.1, None), "end-1", "no way is measured yet"),
        # One is measured.
        ((0.1, 0.1), (None, None, None), "edge-1", "not measured yet"),
        ((0.1, 0.1), (None, None, 49), "end-1", "encoded on end-1: 0.100 s and 0.100 s on the way"),
        ((0.1, 0.1), (None, None, 50), "edge-1", "not measured yet"),
        # Eq. 8: a slow device, or a slow link for the pixels.
        ((0.3, 0.1), (0.02, 0.2), "edge-1", "encoded on edge-1: 0.020 s and 0.200 s on the way, 0.300 s and 0.100 s"),
        ((0.3, 0.1), (0.02, 0.5), "end-1", "encoded on end-1: 0.300 s and 0.100 s on the way, 0.020 s and 0.500 s"),
        ((0.2, 0.1), (0.1, 0.2), "end-1", "encoded on end-1"),
        # The slower way is tried again when that costs at most 2 % of the time since.
        ((0.1, 0.1), (0.1, 0.2, 20, 4.9), "end-1", "encoded on end-1"),
        ((0.1, 0.1), (0.1, 0.2, 20, 5.1), "edge-1", "measured again, 0.100 s more are expected"),
        ((0.1, 0.1), (0.1, 0.2, 9, 5.1), "end-1", "encoded on end-1"),
    ],
)
def test_the_way_with_the_least_overhead(end: tuple[Any, ...], edge: tuple[Any, ...], chosen: str, words: str):
    ways = [way("end-1", *end), way("edge-1", *edge)]
    number, reason = choose_way(ways)
    assert ways[number].encodes == chosen
    assert words in reason


def test_pixels_for_an_edge_node_that_answers_need_no_encoding():
    number, reason = choose_way([way("end-1", 0.3, 0.1), way("", 0.0, 0.2)])
    assert (number, reason) == (
        1,
        "not encoded: 0.000 s and 0.200 s on the way, 0.300 s and 0.100 s on the way if encoded on end-1",
    )


SECONDS = st.floats(0, 100)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=4))
def test_nothing_is_quicker_than_the_chosen_way(costs: list[tuple[float, float]]):
    ways = [way(f"node-{number}", *cost) for number, cost in enumerate(costs)]
    number, _ = choose_way(ways)
    assert ways[number].total_s == min(each.total_s for each in ways if each.total_s is not None)


@given(
    st.lists(
        st.builds(
            way,
            st.sampled_from(["end-1", "edge-1", ""]),
            st.none() | SECONDS,
            st.none() | SECONDS,
            st.none() | st.integers(0, 100),
            SECONDS,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_trying_again_costs_little(ways: list[Way]):
    """A known way that is slower is taken only for a fiftieth of what the tasks since then took."""
    number, reason = choose_way(ways)
    chosen, known = ways[number].total_s, [each.total_s for each in ways if each.total_s is not None]
    if chosen is not None:
        assert chosen - min(known) <= 0.02 * ways[number].skipped_s
        assert (chosen == min(known)) or "measured again" in reason


def test_an_estimate_leaves_out_the_first_and_one_slow_answer():
    recent = Recent()
    estimates = []
    for seconds in (9.0, 1.0, 1.2, 5.0, 5.0, 1.0):
        recent = recent.add(seconds)
        estimates.append(recent.value)
    assert estimates == [None, 1.0, pytest.approx(1.1), 1.2, 5.0, 1.0]
    assert recent.samples == 6


# --- with answers -----------------------------------------------------------------------------------------------------


def entry(relay: str | None, node_id: str = "cloud-0", *, encoded: bool = True) -> Upstream:
    encoding = Encoding(name=HEAD, head="1" * 64, tail="2" * 64, form=FeatureForm.UINT8) if encoded else None
    return Upstream(
        node_id=node_id,
        url="http://127.0.0.1:1",
        tier=Tier(node_id.partition("-")[0]),
        model=HEAD if encoded else "resnet-34",
        sha256="2" * 64,
        encoding=encoding,
        relay=Relay(node_id=relay, url="http://127.0.0.1:2") if relay else None,
    )


ENTRIES = [entry(None), entry("edge-1")]


def attempt(upstreams: Sequence[Upstream], images: int = IMAGES, stages: tuple[Stage, ...] = ()) -> AttemptFacts:
    return AttemptFacts(
        id=1,
        job_id="job",
        task=0,
        images=images,
        number=1,
        node_id="end-1",
        incarnation="first",
        upstreams=tuple(upstreams),
        stages=stages,
        started=0.0,
        started_at=0.0,
        deadline=1.0,
    )


def answer(node_id: str, encode_s: float, comm_s: float, images: int = IMAGES, *, encoded: bool = True) -> FineEvent:
    zeros = (0,) * images
    return FineEvent(
        task_id="job-0",
        node_id=node_id,
        tier=Tier(node_id.partition("-")[0]),
        model=HEAD,
        labels=zeros,
        confidences=(1.0,) * images,
        coarse_labels=zeros,
        coarse_confidences=(1.0,) * images,
        round_trip_ms=1000 * (encode_s + comm_s) + 30,
        timing=UpperTiming(queue_ms=10, compute_ms=20, batch_images=images),
        sent=Sent(form="conv1" if encoded else "pixels", upload_bytes=1, encode_ms=1000 * encode_s),
    )


class Link:
    """Sends tasks one by one, and counts the ways that they take."""

    def __init__(self, end: tuple[float, float], edge: tuple[float, float]) -> None:
        self.times = EncodingTimes()
        self.costs = {None: end, "edge-1": edge}
        self.seconds = 0.0

    def send(self, tasks: int) -> str:
        """One letter for each task: d for the end device, e for the edge node."""
        taken = ""
        for _ in range(tasks):
            chosen, _ = self.times.choose("end-1", IMAGES, ENTRIES, stepwise=False)
            facts = attempt([chosen])
            self.times.sent(facts)
            relay = None if chosen.relay is None else chosen.relay.node_id
            cost = self.costs[relay]
            self.times.answered(facts, answer("cloud-0", *cost), most_s=100.0)
            self.seconds += sum(cost)
            taken += "d" if relay is None else "e"
        return taken


def test_both_ways_are_measured_and_then_the_quicker_one_is_taken():
    assert Link((0.3, 0.1), (0.02, 0.2)).send(10) == "dd" + "e" * 8
    assert Link((0.1, 0.1), (0.02, 0.8)).send(10) == "dd" + "ee" + "d" * 6


@given(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)))
def test_beside_the_better_fixed_choice_it_loses_a_fiftieth_after_the_first_four_tasks(
    end: tuple[float, float], edge: tuple[float, float]
):
    link = Link(end, edge)
    link.send(4)
    link.seconds = 0.0
    taken = link.send(200)
    best_s = 200 * min(sum(end), sum(edge))
    assert link.seconds <= 1.0201 * best_s
    assert {"d", "e"} <= set(taken) or abs(sum(end) - sum(edge)) > 0.02 * best_s / 2


def test_the_choice_follows_a_change():
    link = Link((0.3, 0.1), (0.1, 0.2))
    assert link.send(20) == "dd" + "e" * 18
    link.costs["edge-1"] = (0.1, 2.0)  # the way that is in use gets slow
    taken = link.send(12)
    assert (taken.count("e"), taken[-8:]) == (2, "d" * 8)
    link.costs["edge-1"] = (0.1, 0.1)  # the other one gets quick: known when it is tried again
    taken = link.send(600)
    assert set(taken[:300]) == {"d", "e"}
    assert set(taken[300:]) == {"e", "d"}
    assert taken[300:].count("e") > 270


def test_no_second_task_goes_an_unknown_way_before_the_first_has_come_back():
    times = EncodingTimes()
    taken = []
    for _ in range(8):
        chosen, _ = times.choose("end-1", IMAGES, ENTRIES, stepwise=False)
        times.sent(attempt([chosen]))
        taken.append(chosen.relay is None)
    assert taken == [True, False, True, True, True, True, True, True]


def test_a_way_that_fails_is_left_for_a_while():
    link = Link((0.3, 0.1), (0.1, 0.1))
    assert link.send(10).endswith("e")
    chosen, _ = link.times.choose("end-1", IMAGES, ENTRIES, stepwise=False)
    link.times.sent(attempt([chosen]))
    link.times.failed(attempt([chosen]))
    assert link.send(100) == "d" * 50 + "e" * 50


def test_an_answer_of_another_node_is_a_failure_of_the_first():
    link = Link((0.3, 0.1), (0.1, 0.1))
    link.send(10)
    facts = attempt([ENTRIES[1], entry(None, "cloud-1")])
    link.times.sent(facts)
    link.times.answered(facts, answer("cloud-1", 0.1, 0.1), most_s=100.0)
    assert link.send(10) == "d" * 10


def test_tasks_of_other_sizes_and_those_of_which_some_images_go_up_are_measured_apart():
    link = Link((0.3, 0.1), (0.1, 0.1))
    link.send(10)
    for images, stepwise, relayed in ((IMAGES, False, True), (1, False, False), (IMAGES, True, False)):
        chosen, _ = link.times.choose("end-1", images, ENTRIES, stepwise=stepwise)
        assert (chosen.relay is not None) is relayed


def test_pixels_to_an_edge_node_that_answers_are_a_way_as_well():
    times, entries = EncodingTimes(), [entry(None, "edge-1"), entry(None, "edge-1", encoded=False)]
    for _ in range(6):
        chosen, reason = times.choose("end-1", IMAGES, entries, stepwise=False)
        times.sent(attempt([chosen]))
        encoded = chosen.encoding is not None
        times.answered(attempt([chosen]), answer("edge-1", 0.3 * encoded, 0.1, encoded=encoded), most_s=100.0)
    assert chosen.encoding is None
    assert reason.startswith("not encoded: 0.000 s and 0.100 s on the way")


def test_the_heads_are_measured_without_a_job_that_asks_for_it():
    times = EncodingTimes()
    for encode_s in (5.0, 0.1, 0.1):
        for upstream in ENTRIES:
            times.answered(attempt([upstream]), answer("cloud-0", encode_s, 0.1), most_s=100.0)
    assert [(each.node_id, each.encoder, each.ms_per_image, each.samples) for each in times.estimates({"edge-1"})] == [
        ("edge-1", HEAD, 2.0, 2)
    ]
    assert [each.node_id for each in times.estimates({"end-1", "edge-1"})] == ["edge-1", "end-1"]
    times.forget("edge-1")
    assert times.estimates({"edge-1"}) == []


def test_a_node_cannot_say_that_it_took_longer_than_the_scheduler_waited():
    times = EncodingTimes()
    for _ in range(2):
        times.answered(attempt([ENTRIES[0]]), answer("cloud-0", 1000.0, 0.1), most_s=1.0)
    (estimate,) = times.estimates({"end-1"})
    assert estimate.ms_per_image == 20.0


def test_one_way_is_no_choice():
    chosen, reason = EncodingTimes().choose("end-1", IMAGES, ENTRIES[:1], stepwise=False)
    assert (chosen, reason) == (ENTRIES[0], "")
