"""A release's network as a learner of its last layers, and a file again."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

import onnx
from onnx import TensorProto, helper, numpy_helper

from models.data import ImageSet
from models.training.config import TrainConfig
from tests.shapes import SHAPES, shape_images
from tierkit.errors import InvalidAnswer, WeightsError
from training.improve.base import own_learner, own_training_data, read_base, worker_learner, written
from training.messages import RunSpec
from training.own_data import OwnData
from training.strategies.config import OuterConfig

pytestmark = pytest.mark.train

SIDE = 8
CONFIG = TrainConfig.model_validate(
    {
        "name": "shapes",
        "tier": "end",
        "target": "fine",
        "network": {"kind": "file"},
        "epochs": 40,
        "batch_size": 8,
        "peak_rate": 0.05,
        "schedule": "constant",
        "momentum": 0.0,
        "weight_decay": 0.0,
        "label_smoothing": 0.0,
        "crop_padding": 0,
        "precision": "fp32",
    }
)


def network(*extra: onnx.NodeProto, classes: int = 3, **stored: np.ndarray) -> bytes:
    """UINT8 images, a convolution, a rectifier, a mean and a linear layer, all with random weights."""
    draw = np.random.default_rng(0)
    held = {
        "scale": np.array(1 / 255, np.float32),
        "kernel": draw.normal(0, 0.3, (6, 3, 3, 3)).astype(np.float32),
        "bias": np.zeros(6, np.float32),
        "form": np.array([0, -1], np.int64),
        "last": draw.normal(0, 0.3, (6, classes)).astype(np.float32),
        "shift": np.zeros(classes, np.float32),
        **stored,
    }
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "scale"], ["small"]),
        *extra,
        helper.make_node("Transpose", ["small"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["planes", "kernel", "bias"], ["filtered"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["filtered"], ["rectified"]),
        helper.make_node("GlobalAveragePool", ["rectified"], ["pooled"]),
        helper.make_node("Reshape", ["pooled", "form"], ["means"]),
        helper.make_node("Gemm", ["means", "last", "shift"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "shapes",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["n", SIDE, SIDE, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", classes])],
        [numpy_helper.from_array(values, name) for name, values in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()


def own(content: bytes, layers: int = 1, side: int = SIDE) -> OwnData:
    return OwnData(
        release="shapes@1",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        layers=layers,
        hierarchy=SHAPES.content(),
        height=side,
        width=side,
    )


def spec(content: bytes, **changes: int) -> RunSpec:
    given = {"values": 21, "buffers": 0, **changes}
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
    new = onnx.load_from_string(written(content, learner, learner.weights()))
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
        written(content, learner, replace_first(learner.weights(), np.nan))


def replace_first(values: np.ndarray, value: float) -> np.ndarray:
    found = values.copy()
    found[0] = value
    return found


def test_images_are_trained_on_as_they_are_stored(images: ImageSet):
    data = own_training_data(CONFIG, replace(images, names=images.names), SHAPES, sha256="1" * 64)
    batch = data.batches.batch(0)
    assert float(batch.images.max()) > 100
    assert data.sha256 == "1" * 64
