"""A release's network as a learner of its last layers, and a file again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

import onnx
import torch
from onnx import helper, numpy_helper

from models.data import ImageSet
from models.hierarchy import bundled_hierarchy
from models.manifest import load_manifest
from tests.own_networks import CONFIG, SIDE, network, own
from tests.shapes import SHAPES, shape_images
from tierkit.errors import InvalidAnswer, InvalidInput, SetupError, WeightsError
from training.improve.base import (
    keep_weights,
    own_learner,
    own_training_data,
    read_base,
    read_weights,
    worker_learner,
    written,
)
from training.messages import RunSpec
from training.own_data import MOST_BASE_BYTES, OwnData
from training.strategies.config import OuterConfig

pytestmark = pytest.mark.train


def spec(content: bytes, **changes: int) -> RunSpec:
    given: dict[str, Any] = {"values": 21, "buffers": 0, **changes}
    return RunSpec(
        id="a" * 32,
        network=CONFIG,
        choice="improve",
        strategy=OuterConfig(),
        workers=3,
        wire="fp32",
        data_sha256=own(content).sha256,
        lease_s=30.0,
        own=own(content),
        **given,
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps as small as these cost more to share than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return shape_images(SIDE)


@pytest.mark.parametrize(("layers", "values"), [(1, 21), (2, 6 * 27 + 6 + 21), (0, 6 * 27 + 6 + 21)])
def test_only_the_last_layers_travel_and_learn(layers: int, values: int, images: ImageSet):
    content = network()
    base = read_base(content, own(content, layers), CONFIG)
    learner = own_learner(base, CONFIG, own_training_data(CONFIG, images, SHAPES, sha256="0" * 64))
    assert learner.lengths == (values, 0)
    assert learner.steps == 40
    before = learner.logits(images).argmax(1)
    for _ in range(8):
        learner.compute(range(40), "change", 0.5)
    assert np.mean(learner.logits(images).argmax(1) == images.fine) > max(0.9, np.mean(before == images.fine))
    held = {item.name: numpy_helper.to_array(item) for item in onnx.load_from_string(content).graph.initializer}
    new = onnx.load_from_string(written(content, layers, learner.weights()))
    changed = {item.name for item in new.graph.initializer if (numpy_helper.to_array(item) != held[item.name]).any()}
    assert changed == {"last", "shift"} | ({"kernel", "bias"} if layers != 1 else set())


def test_the_learner_begins_with_the_answers_of_the_file(images: ImageSet):
    content = network()
    base = read_base(content, own(content), CONFIG)
    learner = own_learner(base, CONFIG, own_training_data(CONFIG, images, SHAPES, sha256="0" * 64))
    onnxruntime = pytest.importorskip("onnxruntime")
    [found] = onnxruntime.InferenceSession(content).run(["logits"], {"images": images.images})
    np.testing.assert_allclose(learner.logits(images), found, atol=1e-4)


def test_a_worker_computes_what_the_run_says(images: ImageSet):
    content = network()
    assert worker_learner(spec(content), content, images).lengths == (21, 0)
    with pytest.raises(InvalidAnswer):
        worker_learner(spec(content, values=22), content, images)


def refused(kind: str) -> tuple[bytes, OwnData]:
    """A file that no worker trains on, and what its host says of it."""
    content = network()
    match kind:
        case "another file":
            return content, own(network(classes=2))
        case "no network":
            content = b"\x08\x07" + bytes(100)
        case "cut short":
            content = content[: len(content) // 2]
        case "another operator":
            content = network(helper.make_node("Exp", ["small"], ["unused"]))
        case "other classes":
            content = network(classes=2)
        case "other pictures":
            return content, own(network(), side=SIDE).model_copy(update={"height": 0})
        case "too much memory":
            wide = helper.make_node("Mul", ["small", "wide"], ["unused"])
            content = network(wide, wide=np.ones((1_000_000, 1, 1, 1), np.float32))
        case "no weights":
            content = network(last=np.zeros((2, 2), np.float32))
    return content, own(content)


@pytest.mark.parametrize(
    "kind",
    [
        "another file",
        "no network",
        "cut short",
        "another operator",
        "other classes",
        "other pictures",
        "too much memory",
        "no weights",
    ],
)
def test_a_file_that_cannot_be_trained_is_refused_before_it_costs_much(kind: str):
    content, said = refused(kind)
    with pytest.raises(WeightsError):
        read_base(content, said, CONFIG)


def test_weights_that_are_not_finite_make_no_network(images: ImageSet):
    content = network()
    base = read_base(content, own(content), CONFIG)
    learner = own_learner(base, CONFIG, own_training_data(CONFIG, images, SHAPES, sha256="0" * 64))
    with pytest.raises(WeightsError, match="finite"):
        written(content, 1, replace_first(learner.weights(), np.nan))


def test_weights_lie_at_a_share_of_the_way_and_return_from_a_file(images: ImageSet, tmp_path: Path):
    content = network()
    learner = own_learner(
        read_base(content, own(content), CONFIG), CONFIG, own_training_data(CONFIG, images, SHAPES, sha256="0" * 64)
    )
    before = learner.weights()
    keep_weights(tmp_path / "weights.npy", before + 1)
    trained = read_weights(tmp_path / "weights.npy")
    half = written(content, 1, trained, 0.5)
    found = own_learner(
        read_base(half, own(half), CONFIG), CONFIG, own_training_data(CONFIG, images, SHAPES, sha256="0" * 64)
    )
    assert np.allclose(found.weights(), before + 0.5)
    assert written(content, 1, trained) == written(content, 1, before + 1, 1.0)
    with pytest.raises(WeightsError, match="weights"):
        written(content, 2, trained)
    (tmp_path / "weights.npy").write_bytes(b"damaged")
    with pytest.raises(SetupError, match=r"weights\.npy"):
        read_weights(tmp_path / "weights.npy")


def replace_first(values: np.ndarray, value: float) -> np.ndarray:
    found = values.copy()
    found[0] = value
    return found


def test_images_are_trained_on_as_they_are_stored(images: ImageSet):
    data = own_training_data(CONFIG, replace(images, names=images.names), SHAPES, sha256="1" * 64)
    batch = data.batches.batch(0)
    assert float(batch.images.max()) > 100
    assert data.sha256 == "1" * 64


def test_a_network_that_is_too_large_is_refused_in_words() -> None:
    entry, content = load_manifest().default_for("end"), bytes(MOST_BASE_BYTES + 1)
    with pytest.raises(InvalidInput, match="cannot be trained on a fleet: size_bytes"):
        OwnData.of(entry, content, bundled_hierarchy(), release="bundled@1")
