"""Gates between tiers: curves and thresholds, against cases computed by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from models.escalation import (
    TUNING_NAME,
    Gate,
    GateSide,
    Tuning,
    load_tuning,
    make_gate,
    margin,
    save_tuning,
    unsure,
)
from models.manifest import load_manifest
from tierkit.errors import InvalidInput, NotFound, WeightsError
from tierkit.types import Tier

EDGE = GateSide(tier=Tier.EDGE, name="low", sha256="a" * 64)
CLOUD = GateSide(tier=Tier.CLOUD, name="high", sha256="b" * 64)


def gate(margins: list[float], lower: list[int], upper: list[int]) -> Gate:
    return make_gate(
        EDGE,
        CLOUD,
        "fine",
        margins=np.array(margins, np.float32),
        lower_right=np.array(lower, bool),
        upper_right=np.array(upper, bool),
    )


# Sorted by margin the lower network is right on 0 0 1 1, the upper one on 1 1 1 0.
FOUR = gate([0.5, 0.125, 0.75, 0.25], [1, 0, 1, 0], [1, 1, 0, 1])


def tuning(*gates: Gate) -> Tuning:
    return Tuning(data="ten images", relative_accuracy=0.9, budget=0.5, gates=gates or (FOUR,))


def test_the_margin_is_between_the_two_largest():
    rows = np.array([[0.1, 0.7, 0.2], [0.4, 0.2, 0.4]], np.float32)
    assert margin(rows).tolist() == pytest.approx([0.5, 0.0])
    assert unsure(rows, 0.5001).tolist() == [True, True]
    assert unsure(rows, 0.3).tolist() == [False, True]
    assert unsure(rows, 0.0).tolist() == [False, False]


def test_the_only_class_there_is_is_sure():
    assert margin(np.ones((2, 1), np.float32)).tolist() == [1, 1]


def test_a_curve_computed_by_hand():
    assert FOUR.below == (0.0, 0.25, 0.5, 0.75, 2.0)
    assert FOUR.share == (0, 0.25, 0.5, 0.75, 1)
    assert FOUR.accuracy == (0.5, 0.75, 1, 1, 0.75)
    assert (FOUR.lower_accuracy, FOUR.upper_accuracy, FOUR.images) == (0.5, 0.75, 4)


def test_images_with_equal_margins_stay_or_go_together():
    equal = gate([0.5, 0.5, 0.5, 0.75], [0, 0, 0, 1], [1, 1, 1, 1])
    assert equal.share == (0, 0, 0.75, 1)
    assert equal.accuracy == (0.25, 0.25, 1, 1)


def test_a_threshold_does_on_the_images_what_its_point_says():
    draw = np.random.default_rng(1)
    margins = draw.random(3000).astype(np.float32)
    lower, upper = draw.random(3000) < 0.5 + margins / 2, draw.random(3000) < 0.9
    made = make_gate(EDGE, CLOUD, "fine", margins=margins, lower_right=lower, upper_right=upper)
    for index in (0, 17, 500, 999, len(made.below) - 1):
        point = made.point(index)
        up = margins.astype(np.float64) < point.below
        assert point.share == pytest.approx(up.mean(), abs=1e-6)
        assert point.accuracy == pytest.approx(np.where(up, upper, lower).mean(), abs=1e-6)


@pytest.mark.parametrize(("relative", "share"), [(0.5, 0.0), (0.9, 0.25), (1.0, 0.25)])
def test_the_fewest_images_for_an_accuracy(relative: float, share: float):
    assert FOUR.for_accuracy(relative).share == share


def test_touching_the_target_by_chance_is_not_reaching_it():
    # 0.8 at one image of five, 0.6 again at two, then 0.8 to the end.
    wavy = gate([0.1, 0.2, 0.3, 0.4, 0.5], [0, 1, 0, 1, 1], [1, 0, 1, 1, 1])
    assert wavy.accuracy == (0.6, 0.8, 0.6, 0.8, 0.8, 0.8)
    assert wavy.for_accuracy(1.0).share == pytest.approx(0.6)


def test_what_the_upper_network_itself_has_can_be_reached_whatever_its_digits():
    third = gate([0.0, 0.0, 0.0], [0, 0, 0], [1, 0, 0])
    assert third.for_accuracy(1.0).share == 1


def test_more_than_the_upper_network_has_cannot_be_reached():
    with pytest.raises(InvalidInput, match=r"1\.2 times .* of 'high' \(0\.9000\) cannot be reached.* it is 0\.7500"):
        FOUR.for_accuracy(1.2)


@pytest.mark.parametrize(
    ("budget", "images", "share"),
    [
        (0.5, 2500, 0.49),  # one standard error of a share of 0.5 of 2,500 images is 0.01
        (0.1, 900, 0.09),
        (1.0, 100, 1.0),
        (0.01, 25, 0.0),  # a standard error above the budget: nothing goes up
    ],
)
def test_a_budget_is_kept_with_one_standard_error_to_spare(budget: float, images: int, share: float):
    everything = gate(list(np.linspace(0, 0.99, images)), [0] * images, [1] * images)
    point = everything.for_budget(budget)
    assert point.share <= share + 1e-9
    assert point.share == pytest.approx(share, abs=0.002)


def test_what_is_stored_comes_back(tmp_path: Path):
    path = save_tuning(tuning(), tmp_path)
    assert load_tuning(tmp_path) == tuning()
    assert max(map(len, path.read_text().splitlines())) > 40, "a curve stands on one line"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 2}, "format"),
        ({"budget": 0}, "budget"),
        ({"gates": []}, "gates"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_file_that_is_no_tuning_says_what_is_wrong(tmp_path: Path, change: dict[str, object], complaint: str):
    content = tuning().model_dump(mode="json") | change
    (tmp_path / TUNING_NAME).write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=rf"{TUNING_NAME} is wrong: {complaint}"):
        load_tuning(tmp_path)


def test_a_curve_that_falls_or_ends_early_is_refused(tmp_path: Path):
    for change in ({"share": [0, 0.5, 0.25, 0.75, 1]}, {"share": [0, 0.25, 0.5, 0.75, 0.9]}, {"accuracy": [0.5]}):
        content = tuning().model_dump(mode="json")
        content["gates"][0] |= change
        (tmp_path / TUNING_NAME).write_text(json.dumps(content))
        with pytest.raises(WeightsError, match="must"):
            load_tuning(tmp_path)


def test_a_folder_without_thresholds_says_how_to_make_them(tmp_path: Path):
    with pytest.raises(
        NotFound, match=rf"'terrace models tune-escalation .*--out {tmp_path} --dataset PICTURES' makes it"
    ):
        load_tuning(tmp_path)


def test_a_gate_that_was_not_tuned_is_named():
    assert tuning().gate(Tier.EDGE, Tier.CLOUD) == FOUR
    with pytest.raises(NotFound, match="from end to cloud; there is: edge to cloud"):
        tuning().gate(Tier.END, Tier.CLOUD)


def test_the_shipped_thresholds_are_of_the_shipped_weights():
    shipped, manifest = load_tuning(), load_manifest()
    shipped.check(manifest)
    assert {(gate.lower.tier, gate.upper.tier) for gate in shipped.gates} == {
        (Tier.EDGE, Tier.CLOUD),
        (Tier.END, Tier.EDGE),
        (Tier.END, Tier.CLOUD),
    }


def test_thresholds_of_other_weights_are_refused():
    shipped, manifest = load_tuning(), load_manifest()
    other = manifest.models[1].model_copy(update={"sha256": "0" * 64})
    changed = manifest.model_copy(update={"models": (manifest.models[0], other, manifest.models[2])})
    with pytest.raises(WeightsError, match=f"other weights of '{other.name}'.*000000000000.*tune-escalation"):
        shipped.check(changed)
    gone = manifest.model_copy(update={"models": manifest.models[:2]})
    with pytest.raises(WeightsError, match="no such network"):
        shipped.check(gone)
