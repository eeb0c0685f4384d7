"""The loop of learning in one process: small networks, small pictures, real gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from experiments.improve.drift import drifted, standardised
from experiments.improve.experiment import missed
from experiments.improve.leak import Attacker, LeakCase, leak_line
from experiments.improve.learning import Course, base_of, improve
from experiments.improve.tables import KINDS, Lie, Recipe, drift_line, personal_line, poison_line, teacher_line
from experiments.improve.world import AnsweredPictures, DeviceGroup, LearningWorld, device_pictures, escalated, owners
from models.manifest import load_manifest
from models.session import softmax
from models.training.onnx_network import OnnxNetwork
from tests.own_networks import network
from tests.shapes import SHAPES
from tierkit.tensors import Array
from training.improve.base import written
from training.improve.plan import IMPROVE
from training.masking import Masking

pytestmark = pytest.mark.train

SIDE = 8
RECIPE = Recipe(steps=40, rate=0.2)
KEEPING = DeviceGroup(devices=10, skew=5.0, audit_share=0.5)


def coloured(labels: Array, seed: int) -> Array:
    """Pictures whose colour tells the class."""
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 60, (len(labels), SIDE, SIDE, 3), dtype=np.uint8)
    images[np.arange(len(labels)), :, :, labels] += 150
    return images


@pytest.fixture(scope="module")
def world() -> LearningWorld:
    """A network that knows nothing yet, and a tier above that knows everything."""
    content = network()
    entry = (
        load_manifest()
        .default_for("end")
        .model_copy(update={"input_shape": (SIDE, SIDE, 3), "classes": 3, "target": "fine", "temperature": 1.0})
    )

    def answers(count: int, seed: int) -> AnsweredPictures:
        truth = np.random.default_rng(seed).integers(0, 3, count)
        return AnsweredPictures(coloured(truth, seed), truth, np.eye(3, dtype=np.float32)[truth])

    stream = answers(600, 1)
    return LearningWorld(
        entry=entry,
        content=content,
        hierarchy=SHAPES,
        stream=stream,
        own=answers(400, 2),
        clean=answers(400, 3),
        local=softmax(OnnxNetwork(content).run(stream.images)),
        below=0.2,
    )


def test_drift_takes_contrast_and_the_cloud_gives_it_back():
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    faded = drifted(images, 0, 0.5)
    assert np.isclose(faded.std() / images.std(), 0.5, atol=0.02)
    assert np.array_equal(standardised(images), images)
    assert standardised(faded).std() > 1.2 * faded.std()
    assert standardised(np.full((1, 4, 4, 3), 7, np.uint8)).max() == 7


@pytest.mark.parametrize(("at_least", "share"), [(0.5, 0.0), (0.75, 0.25), (1.0, 0.5), (1.1, 1.0)])
def test_the_least_sure_go_up(at_least: float, share: float):
    # The two least sure pictures are wrong, and the tier above knows them.
    local = np.array([[0.9, 0.1], [0.8, 0.2], [0.45, 0.55], [0.49, 0.51]])
    truth = np.array([0, 0, 0, 0])
    answers = AnsweredPictures(np.zeros((4, 1, 1, 3), np.uint8), truth, np.eye(2)[truth])
    assert escalated(local, answers, at_least) == share


def test_devices_keep_what_went_up_and_few_sure_pictures(world: LearningWorld):
    kept = device_pictures(world, KEEPING, 0)
    unsure = np.sort(np.partition(world.local, -2, axis=1)[:, -2:], axis=1)
    hard = int(np.sum(unsure[:, 1] - unsure[:, 0] < world.below))
    assert sum(len(each) for each in kept) >= hard
    assert len(kept) == KEEPING.devices
    assert np.array_equal(owners(world, KEEPING, 0), owners(world, KEEPING, 0))
    assert not np.array_equal(owners(world, KEEPING, 0), owners(world, KEEPING, 1))


def test_an_improvement_brings_back_accuracy_and_spares_the_uplink(world: LearningWorld):
    line = drift_line(world, RECIPE, KEEPING, 0)
    assert line["passes"]
    assert line["new_own"] > line["old_own"] + 0.3
    assert line["new_up"] <= line["old_up"]
    assert line["updates"] == 5


@pytest.mark.parametrize("lie", KINDS)
def test_liars_do_not_bring_a_worse_release_in(world: LearningWorld, lie: Lie):
    line = poison_line(world, RECIPE, KEEPING, lie, 0)
    assert not line["worse_released"]
    assert line["reason"]


def test_labelled_pictures_stop_a_teacher_that_is_wrong_for_a_class(world: LearningWorld):
    own = base_of(world.entry, world.content, world.hierarchy, 0)
    course = Course(own=own, config=RECIPE.config(world, 0), strategy=IMPROVE)
    improved = improve(world.content, course, device_pictures(world, KEEPING, 0))
    content = written(world.content, 0, improved.weights)
    local = softmax(OnnxNetwork(content).run(world.stream.images))
    taught = replace(world, content=content, local=local, below=1.0)
    long = replace(RECIPE, steps=160)
    known, unknown = (teacher_line(taught, long, KEEPING, 1, validation=each) for each in (True, False))
    assert not known["passes"]
    assert unknown["passes"]
    assert unknown["wrong_class"] == 1
    assert unknown["change_class"] < -0.5


def test_an_own_head_fits_the_own_classes(world: LearningWorld, monkeypatch: pytest.MonkeyPatch):
    group = DeviceGroup(devices=4, skew=0.3, audit_share=0.5)
    monkeypatch.setattr("experiments.improve.tables.FEWEST", 1_000)
    unused = personal_line(world, group, 0)
    assert (unused["devices"], unused["used"]) == (4, 0)  # too few pictures to judge by
    assert unused["new_own"] == unused["old_own"]
    monkeypatch.setattr("experiments.improve.tables.FEWEST", 1)
    monkeypatch.setattr("training.improve.gate.FEWEST", 1)
    monkeypatch.setattr("training.improve.personal.RATE", 0.1)
    line = personal_line(world, group, 0)
    assert line["used"] > 0
    assert line["new_own"] > line["old_own"]


DRIFT = {
    "line": "answers from above",
    "recovered": 0.6,
    "old_up": 0.4,
    "new_up": 0.3,
    "old_clean": 0.8,
    "new_clean": 0.795,
}


@pytest.mark.parametrize(
    ("table", "point", "count"),
    [
        ("drift", DRIFT, 0),
        ("drift", DRIFT | {"recovered": 0.4}, 1),
        ("drift", DRIFT | {"new_up": 0.33, "new_clean": 0.78}, 2),
        ("drift", DRIFT | {"line": "true labels", "recovered": 0.0}, 0),
        ("poison", {"line": "alie", "worse_released": False}, 0),
        ("poison", {"line": "alie", "worse_released": True}, 1),
        ("personal", {"line": "x", "old_own": 0.7, "new_own": 0.74, "old_general": 0.8, "new_general": 0.76}, 1),
        ("teacher", {"line": "x", "passes": True}, 0),
    ],
)
def test_targets(table: str, point: dict[str, Any], count: int):
    assert len(missed(table, [point])) == count


def test_an_attacker_reads_a_picture_from_an_update_and_noise_hides_it(world: LearningWorld):
    def judge(images: Array) -> Array:
        return np.asarray(images.mean(axis=(1, 2)).argmax(axis=1))

    # SSIM needs 11 pixels.
    pictures = replace(world.own, images=world.own.images.repeat(2, axis=1).repeat(2, axis=2))
    entry = world.entry.model_copy(update={"input_shape": (2 * SIDE, 2 * SIDE, 3)})
    large = replace(world, own=pictures, entry=entry)
    read, hidden = (
        leak_line(large, RECIPE.config(large, 0), case, Attacker(steps=60, judge=judge), 0)
        for case in (
            LeakCase(pictures=1, steps=1, layers=0, plain=True),
            LeakCase(pictures=1, steps=1, layers=0, plain=True, masking=Masking(clip=1.0, noise=1.0)),
        )
    )
    assert read["recognised_originals"] == read["recognised"] == 1.0
    assert read["ssim"] > hidden["ssim"]
