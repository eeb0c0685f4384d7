"""The steps up of a job, what an end device is told of them, and what it may answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from end_node.escalation import Below, going_up
from models.escalation import GateSide, Tuning, make_gate
from scheduler.core.device import Node
from scheduler.core.escalation import (
    JobGate,
    asks,
    check_routed,
    choose_gates,
    final_answers,
    stages_of,
    upstreams_of,
    without,
)
from scheduler.core.policy import PolicyRequest, settle
from tierkit.errors import InvalidInput, NotFound, TerraceError, WeightsError
from tierkit.types import Escalate, Privacy, Scheme, Tier
from tierkit.wire.events import RoutedEvent, StageAnswer, StageLoss
from tierkit.wire.messages import Stage

B = 0.351562  # 45/128: one standard error below half of 100 images
A = 0.382812  # 49/128: with 49 images going up 75 are right
SHA = {Tier.END: "1" * 64, Tier.EDGE: "2" * 64, Tier.CLOUD: "3" * 64}


def network(tier: Tier) -> GateSide:
    return GateSide(tier=tier, name=str(tier), sha256=SHA[tier])


def tuned(*pairs: tuple[Tier, Tier]) -> Tuning:
    """Of 100 images with margins 0/128 to 99/128 the lower network knows every second, the upper one all."""
    gates = [
        make_gate(
            network(lower),
            network(upper),
            "fine" if lower is Tier.EDGE else "coarse",
            margins=np.arange(100, dtype=np.float32) / 128,
            lower_right=np.arange(100) % 2 == 1,
            upper_right=np.ones(100, bool),
        )
        for lower, upper in pairs
    ]
    return Tuning(data="a hundred images", relative_accuracy=0.75, budget=0.5, gates=tuple(gates))


ALL = tuned((Tier.EDGE, Tier.CLOUD), (Tier.END, Tier.EDGE), (Tier.END, Tier.CLOUD))


def gates(
    escalate: Escalate = Escalate.BUDGET,
    scheme: Scheme = Scheme.MAPPING,
    tuning: Tuning | TerraceError = ALL,
    *,
    lowest="edge",
    accuracy: float | None = None,
    budget: float | None = None,
) -> tuple[JobGate, ...]:
    return choose_gates(escalate, scheme, tuning, lowest=lowest, accuracy=accuracy, budget=budget)


@pytest.mark.parametrize(
    ("scheme", "lowest", "expected"),
    [
        (Scheme.MAPPING, "edge", [("end", "edge", None), ("edge", "cloud", B)]),
        (Scheme.ADAPTIVE, "edge", [("end", "edge", None), ("edge", "cloud", B)]),
        (Scheme.MAPPING, "end", [("end", "edge", B), ("edge", "cloud", B)]),
        (Scheme.END_EDGE, "end", [("end", "edge", B)]),
        (Scheme.END_CLOUD, "end", [("end", "cloud", B)]),
    ],
)
def test_the_steps_up_of_a_scheme(scheme: Scheme, lowest: str, expected: list[tuple[str, str, float | None]]):
    assert [(gate.lower, gate.upper, gate.below) for gate in gates(scheme=scheme, lowest=lowest)] == expected


def test_the_aim_of_the_job_goes_before_the_tuned_one():
    assert gates(budget=1.0)[1].below == 2.0
    assert gates(Escalate.THRESHOLD)[1].below == A
    chosen = gates(Escalate.THRESHOLD, accuracy=0.6)[1]
    assert (chosen.below, chosen.share, chosen.accuracy) == (0.148438, 0.2, 0.6)
    assert (chosen.lower_sha256, chosen.upper_sha256) == (SHA[Tier.EDGE], SHA[Tier.CLOUD])
    assert gates(Escalate.ALWAYS) == ()
    assert gates(Escalate.ALWAYS, Scheme.END, NotFound("none")) == ()


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"scheme": Scheme.END}, "scheme end sends nothing up"),
        (
            {"scheme": Scheme.END_EDGE},
            "scheme end-edge no image goes .*choose scheme mapping or adaptive, or escalate_from",
        ),
        ({"scheme": Scheme.END_CLOUD}, "scheme end-cloud no image goes"),
        ({"tuning": NotFound("there is no file")}, r"has none \(there is no file\); submit with escalate=always"),
        ({"tuning": WeightsError("of other weights")}, r"has none \(of other weights\)"),
        ({"tuning": tuned((Tier.END, Tier.EDGE))}, "no tuned threshold from edge to cloud; there is: end to edge"),
        ({"accuracy": 0.9}, "escalate_accuracy goes with escalate=threshold, not with escalate=budget"),
        ({"escalate": Escalate.THRESHOLD, "budget": 0.5}, "escalate_budget goes with escalate=budget"),
        ({"escalate": Escalate.ALWAYS, "budget": 0.5}, "escalate_budget goes with escalate=budget"),
        ({"escalate": Escalate.ALWAYS, "lowest": "end"}, "escalate_from goes with"),
        ({"escalate": Escalate.THRESHOLD, "accuracy": 1.5}, r"cannot be reached: .* 1\.0000 on the held-out images"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, object], complaint: str):
    with pytest.raises(InvalidInput, match=complaint):
        gates(**asked)  # type: ignore[arg-type]


def test_a_device_is_told_the_thresholds_of_its_own_weights():
    both = gates(Escalate.THRESHOLD, lowest="end")
    assert stages_of(both, Escalate.THRESHOLD, SHA[Tier.END]) == (
        Stage(tier=Tier.EDGE, below=A),
        Stage(tier=Tier.CLOUD, below=A),
    )
    # Of other weights nobody knows how sure they are: all of its images go up.
    assert stages_of(both, Escalate.THRESHOLD, "f" * 64)[0] == Stage(tier=Tier.EDGE, below=None)
    # A budget is not broken because the edge has failed.
    assert [stage.spare for stage in stages_of(gates(), Escalate.BUDGET, SHA[Tier.END])] == [False, False]


def node(node_id: str, sha256: str | None = None) -> Node:
    tier = Tier(node_id.split("-")[0])
    return Node(node_id=node_id, tier=tier, url="http://h", model="m", ms_per_image=1.0, sha256=sha256 or SHA[tier])


@pytest.mark.parametrize(
    ("route", "turn", "expected"),
    [
        (["edge-1", "edge-0", "cloud-0"], 0, ["edge-1", "edge-0", "cloud-0"]),
        (["edge-1", "edge-0", "cloud-0"], 1, ["edge-1", "edge-0", "cloud-0"]),  # its own edge node comes first
        (["cloud-0", "edge-0", "edge-1"], 0, ["edge-0", "edge-1", "cloud-0"]),
        (["cloud-0", "edge-0", "edge-1"], 1, ["edge-1", "edge-0", "cloud-0"]),
        (["cloud-0"], 5, ["cloud-0"]),
    ],
)
def test_nodes_stand_in_the_order_of_the_tiers(route: list[str], turn: int, expected: list[str]):
    found = upstreams_of(gates(), [node(name) for name in route], turn)
    assert [one.node_id for one in found] == expected


def test_nodes_with_other_weights_are_left_out():
    route = [node("edge-0", "f" * 64), node("edge-1"), node("cloud-0", "f" * 64)]
    assert [one.node_id for one in upstreams_of(gates(), route, 0)] == ["edge-1"]


# --- what comes back ------------------------------------------------------------------------------------------------

OPEN = (Stage(tier=Tier.EDGE), Stage(tier=Tier.CLOUD, below=0.5))
GATED = (Stage(tier=Tier.EDGE, below=0.5), Stage(tier=Tier.CLOUD, below=0.5))
STRICT = (Stage(tier=Tier.EDGE), Stage(tier=Tier.CLOUD, below=0.5, spare=False))
KNOWN = (Stage(tier=Tier.EDGE, only=(1, 2)), Stage(tier=Tier.CLOUD, below=0.5))


def answer(tier: Tier, *indices: int, labels: tuple[int, ...] | None = None) -> StageAnswer:
    many = len(indices)
    return StageAnswer(
        tier=tier,
        node_id=f"{tier}-0",
        model="m",
        indices=indices,
        labels=labels or (0,) * many,
        confidences=(0.5,) * many,
        coarse_labels=(0,) * many,
        coarse_confidences=(0.5,) * many,
        round_trip_ms=1.0,
    )


def loss(tier: Tier, *indices: int, tried: tuple[str, ...] = ("x-0",)) -> StageLoss:
    return StageLoss(tier=tier, indices=indices, reason="upstream_error", detail="no", tried=tried)


def event(*entries: StageAnswer | StageLoss) -> RoutedEvent:
    return RoutedEvent(
        task_id="t",
        answers=tuple(entry for entry in entries if isinstance(entry, StageAnswer)),
        losses=tuple(entry for entry in entries if isinstance(entry, StageLoss)),
    )


@pytest.mark.parametrize(
    ("stages", "entries", "right"),
    [
        (OPEN, [answer(Tier.EDGE, 0, 1, 2)], True),
        (OPEN, [answer(Tier.EDGE, 0, 1, 2), answer(Tier.CLOUD, 1)], True),
        (OPEN, [answer(Tier.EDGE, 0, 1, 2), loss(Tier.CLOUD, 1)], True),
        (OPEN, [loss(Tier.EDGE, 0, 1, 2), answer(Tier.CLOUD, 0, 1, 2)], True),
        (OPEN, [loss(Tier.EDGE, 0, 1, 2), loss(Tier.CLOUD, 0, 1, 2)], True),
        (STRICT, [loss(Tier.EDGE, 0, 1, 2)], True),
        (GATED, [], True),
        (GATED, [answer(Tier.EDGE, 1, 2), answer(Tier.CLOUD, 2)], True),
        (GATED, [loss(Tier.EDGE, 1, 2), answer(Tier.CLOUD, 1, 2)], True),
        (KNOWN, [answer(Tier.EDGE, 1, 2), answer(Tier.CLOUD, 2)], True),
        (KNOWN, [answer(Tier.EDGE, 1)], False),
        (KNOWN, [answer(Tier.EDGE, 0, 1, 2)], False),
        (OPEN, [], False),  # images without a fine answer
        (OPEN, [answer(Tier.EDGE, 0, 1)], False),
        (OPEN, [loss(Tier.EDGE, 0, 1, 2)], False),  # the cloud should have got what the edge lost
        (OPEN, [loss(Tier.EDGE, 0, 1, 2), answer(Tier.CLOUD, 0, 1)], False),
        (STRICT, [loss(Tier.EDGE, 0, 1, 2), answer(Tier.CLOUD, 0)], False),
        (OPEN, [answer(Tier.EDGE, 0, 1, 2, 3)], False),  # there is no image 3
        (OPEN, [answer(Tier.EDGE, 0, 2, 1)], False),
        (OPEN, [answer(Tier.EDGE, 0, 1, 1, 2)], False),
        (OPEN, [answer(Tier.EDGE, 0, 1, 2), answer(Tier.EDGE, 0, 1, 2)], False),
        (OPEN, [answer(Tier.CLOUD, 1), answer(Tier.EDGE, 0, 1, 2)], False),
        (OPEN, [answer(Tier.EDGE, 0, 1, 2), loss(Tier.EDGE, 0)], False),
        (OPEN, [answer(Tier.END, 0, 1, 2)], False),
        (GATED, [answer(Tier.CLOUD, 2)], False),  # it skipped the edge
        (GATED, [answer(Tier.EDGE, 1), answer(Tier.CLOUD, 2)], False),
    ],
)
def test_which_images_may_be_where(stages: tuple[Stage, ...], entries: list[StageAnswer | StageLoss], right: bool):
    assert (check_routed(event(*entries), stages, 3) is None) == right


@pytest.mark.parametrize(
    ("entries", "unsure", "right"),
    [
        ([answer(Tier.EDGE, 1, 2), answer(Tier.CLOUD, 2)], (1, 2), True),
        ([loss(Tier.EDGE, 1, 2), answer(Tier.CLOUD, 1, 2)], (1, 2), True),
        ([], (), True),
        ([], (1,), False),
        ([answer(Tier.EDGE, 1)], (1, 2), False),
        ([answer(Tier.EDGE, 0, 1, 2)], (1, 2), False),
        ([loss(Tier.EDGE, 0)], (), False),
    ],
)
def test_the_images_that_go_up_are_those_that_the_coarse_answer_called_unsure(entries, unsure, right):
    assert (check_routed(event(*entries), GATED, 3, unsure) is None) == right


def test_the_highest_answer_stands_and_a_loss_counts_only_where_nothing_higher_came():
    both = event(answer(Tier.EDGE, 0, 1, 2, labels=(5, 6, 7)), answer(Tier.CLOUD, 0, 2, labels=(8, 9)))
    assert [(one.tier, at.tolist(), places.tolist()) for one, at, places in final_answers(both)] == [
        (Tier.CLOUD, [0, 2], [0, 1]),
        (Tier.EDGE, [1], [1]),
    ]
    assert (asks(both), without(both)) == ({Tier.EDGE: 3, Tier.CLOUD: 2}, {})
    half = event(answer(Tier.EDGE, 0, 1), loss(Tier.CLOUD, 1))
    assert (asks(half), list(without(half))) == ({Tier.EDGE: 2, Tier.CLOUD: 1}, [1])
    spared = event(loss(Tier.EDGE, 0, 1), answer(Tier.CLOUD, 0, 1))
    assert without(spared) == {}
    nobody = event(loss(Tier.EDGE, 0, 1, tried=()), loss(Tier.CLOUD, 0, 1))
    assert (asks(nobody), set(without(nobody))) == ({Tier.CLOUD: 2}, {0, 1})


@given(
    margins=st.lists(st.tuples(st.floats(0, 1, width=32), st.floats(0, 1, width=32)), min_size=1, max_size=20),
    below=st.tuples(st.none() | st.floats(0, 2), st.none() | st.floats(0, 2)),
    spare=st.booleans(),
    works=st.tuples(st.booleans(), st.booleans()),
)
def test_what_an_end_device_does_passes_the_check_and_leaves_no_image_out(margins, below, spare, works):
    """The routing of the end device (`end_node.escalation`), against what the scheduler makes of its answer."""
    stages = (Stage(tier=Tier.EDGE, below=below[0], spare=spare), Stage(tier=Tier.CLOUD, below=below[1], spare=spare))

    def probabilities(level: int, at) -> np.ndarray:
        top = (1 + np.array([margins[index][level] for index in at], np.float32)) / 2
        return np.stack([1 - top, top], axis=1).reshape(-1, 2)

    here = Below.of_all(len(margins), probabilities(0, range(len(margins))))
    entries: list[StageAnswer | StageLoss] = []
    for stage, ok in zip(stages, works, strict=True):
        going = going_up(stage, here)
        if not len(going):
            break
        entries.append((answer if ok else loss)(stage.tier, *going.tolist()))
        gone = going if not ok else going[:0]
        here = Below(
            answered=going if ok else going[:0], probabilities=probabilities(1, going) if ok else None, lost=gone
        )
    routed = event(*entries)
    assert check_routed(routed, stages, len(margins)) is None
    finer = [index for _, at, _ in final_answers(routed) for index in at.tolist()]
    assert len(finer) == len(set(finer))
    assert set(finer) == {index for entry in routed.answers for index in entry.indices}
    if all(works):
        assert without(routed) == {}


def test_no_thresholds_hold_behind_a_learned_encoder():
    def settled(privacy: Privacy):
        request = PolicyRequest(escalate=Escalate.BUDGET, privacy=privacy)
        return settle(request, scheme=Scheme.MAPPING, deadline_s=1.0, task_deadline_s=1.0, tuning=ALL)

    with pytest.raises(InvalidInput, match="behind the bottleneck encoder is another"):
        settled(Privacy.BOTTLENECK)
    assert settled(Privacy.CONV1).gates
