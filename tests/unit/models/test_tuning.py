"""What thresholds come to on a set of images, counted by hand."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from models.escalation import Tuning, load_tuning
from models.manifest import load_manifest
from models.tuning import Side, TuningTarget, caution, curve_rows, measure_choice, tune
from tierkit.errors import InvalidInput
from tierkit.types import Tier

RECORDS = Path(__file__).parents[3] / "models" / "records"


def side(tier: Tier, margins: list[float], coarse: list[int], fine: list[int] | None) -> Side:
    """A network of two classes on each level, with these margins on both."""
    top = (1 + np.array(margins)) / 2
    probabilities = np.stack([top, 1 - top], axis=1)
    levels = {"coarse": coarse} | ({} if fine is None else {"fine": fine})
    return Side(
        entry=load_manifest().default_for(tier),
        probabilities=dict.fromkeys(levels, probabilities),  # type: ignore[arg-type]
        right={level: np.array(values, bool) for level, values in levels.items()},  # type: ignore[misc]
    )


@cache
def answers() -> dict[Tier, Side]:
    return {
        Tier.END: side(Tier.END, [0.125, 0.25, 0.75, 0.875], [0, 1, 1, 1], None),
        Tier.EDGE: side(Tier.EDGE, [0.125, 0.875, 0.25, 0.75], [0, 1, 1, 1], [0, 1, 0, 1]),
        Tier.CLOUD: side(Tier.CLOUD, [0.5, 0.5, 0.5, 0.5], [1, 1, 1, 1], [1, 1, 1, 0]),
    }


@cache
def tuning() -> Tuning:
    return tune(answers(), TuningTarget(accuracy=1.0, budget=1.0), data="four images")


def test_one_gate_for_each_pair_of_tiers():
    assert [(gate.lower.tier, gate.upper.tier, gate.answers) for gate in tuning().gates] == [
        (Tier.EDGE, Tier.CLOUD, "fine"),
        (Tier.END, Tier.EDGE, "coarse"),
        (Tier.END, Tier.CLOUD, "coarse"),
    ]


def test_every_image_gets_a_fine_answer_from_the_edge_on():
    found = measure_choice(answers(), tuning(), escalate="threshold", lowest=Tier.EDGE)
    # 1.0 times the cloud's 0.75 is kept from one image on, the least sure one.
    assert found.went_to == {"edge": 1.0, "cloud": 0.25}
    assert found.stayed_at == {"end": 0.0, "edge": 0.75, "cloud": 0.25}
    assert (found.fine_accuracy, found.coarse_accuracy, found.relative_accuracy) == (0.75, 1.0, 1.0)
    assert list(found.thresholds) == ["edge-cloud"]


def test_a_sure_coarse_answer_stays_on_the_end_device():
    found = measure_choice(answers(), tuning(), escalate="threshold", lowest=Tier.END)
    # The edge is no better than the end here (0.75 both): nothing need go up.
    assert found.stayed_at == {"end": 1.0, "edge": 0.0, "cloud": 0.0}
    assert (found.fine_accuracy, found.coarse_accuracy) == (None, 0.75)


def test_a_budget_of_all_images_is_the_upper_network():
    found = measure_choice(answers(), tuning(), escalate="budget", lowest=Tier.END)
    assert found.stayed_at == {"end": 0.0, "edge": 0.0, "cloud": 1.0}
    assert (found.fine_accuracy, found.coarse_accuracy, found.relative_accuracy) == (0.75, 1.0, 1.0)


@given(
    st.lists(st.tuples(*[st.floats(0, 0.99)] * 2, *[st.booleans()] * 5), min_size=2, max_size=60),
    st.floats(0.1, 1.0),
    st.floats(0.01, 1.0),
    st.sampled_from(["threshold", "budget"]),
    st.sampled_from([Tier.END, Tier.EDGE]),
)
def test_every_image_has_one_answer(rows, relative: float, budget: float, escalate: str, lowest: Tier):
    end_margin, edge_margin, *right = (list(column) for column in zip(*rows, strict=True))
    right[3] = [True, *right[3][1:]]  # a network that is always wrong has no share of its accuracy
    right[4] = [True, *right[4][1:]]
    answers = {
        Tier.END: side(Tier.END, end_margin, right[0], None),
        Tier.EDGE: side(Tier.EDGE, edge_margin, right[1], right[2]),
        Tier.CLOUD: side(Tier.CLOUD, [0.5] * len(rows), right[3], right[4]),
    }
    tuned = tune(answers, TuningTarget(accuracy=relative, budget=budget), data="drawn")
    found = measure_choice(answers, tuned, escalate=escalate, lowest=lowest)
    assert sum(found.stayed_at.values()) == pytest.approx(1)
    assert found.went_to["cloud"] == pytest.approx(found.stayed_at["cloud"])
    assert found.went_to["edge"] == pytest.approx(found.stayed_at["edge"] + found.stayed_at["cloud"])
    if escalate == "budget":
        assert (
            max(share for tier, share in found.went_to.items() if (tier, lowest) != ("edge", "edge")) <= budget + 1e-9
        )
    elif lowest is Tier.EDGE:
        assert found.relative_accuracy >= relative - 1e-5


def test_no_rule_beats_the_oracle_nor_is_the_curve_beside_its_ends():
    rows = [row for row in curve_rows(answers(), tuning(), answers()) if row["gate"] == "edge-cloud"]
    # Only the cloud is right on two images, only the edge on one.
    assert [row["oracle"] for row in rows] == [0.5, 0.75, 1.0, 1.0, 0.75]
    assert [row["random"] for row in rows] == [0.5, 0.5625, 0.625, 0.6875, 0.75]
    assert all(row["accuracy"] <= row["oracle"] for row in rows)
    assert [row["test_accuracy"] for row in rows] == [row["accuracy"] for row in rows]
    assert "test_share" not in curve_rows(answers(), tuning(), None)[0]


def test_a_fine_accuracy_in_itself():
    assert tune(answers(), TuningTarget(accuracy=0.6, relative=False), data="").relative_accuracy == pytest.approx(0.8)
    with pytest.raises(InvalidInput, match=r"fine accuracy 0\.8 cannot be reached: .* 0\.7500"):
        tune(answers(), TuningTarget(accuracy=0.8, relative=False), data="")
    with pytest.raises(InvalidInput, match=r"1\.01 times .* cannot be reached"):
        tune(answers(), TuningTarget(accuracy=1.01), data="")


def test_one_tier_alone_has_nothing_to_escalate():
    with pytest.raises(InvalidInput, match="no two tiers"):
        tune({Tier.EDGE: answers()[Tier.EDGE]}, TuningTarget(accuracy=0.9), data="")


def test_the_record_is_of_the_shipped_thresholds_and_keeps_the_promise():
    shipped = load_tuning()
    content = json.loads((RECORDS / "escalation.json").read_bytes())
    test = {(row["escalate"], row["escalate_from"]): row for row in content["test"]}
    budget = test["budget", "edge"]
    assert budget["images"] == 10_000
    assert budget["thresholds"] == {"edge-cloud": shipped.gate(Tier.EDGE, Tier.CLOUD).for_budget(0.5).below}
    assert budget["relative_accuracy"] >= 0.99
    assert budget["went_to"]["cloud"] <= 0.5


@pytest.mark.parametrize(("images", "warns"), [(1, True), (199, True), (200, False)])
def test_few_pictures_are_warned_of(images: int, warns: bool):
    shipped = load_tuning()
    few = shipped.gates[0].model_copy(update={"images": images})
    warning = caution(shipped.model_copy(update={"gates": (few, *shipped.gates[1:])}))
    assert (warning is not None) == warns
    assert warning is None or f" {images} " in warning
