"""Where an imported network can be cut into head and tail, and where it cannot."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models.importing.cut import with_cut
from models.importing.run import Wish, import_network
from models.manifest import load_manifest
from models.session import load_model
from tests.model_sets import COLOURS, colour_network, colour_pictures, colour_set, coloured
from tierkit.types import Tier

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)


def network(nodes: Sequence[onnx.NodeProto], *, half: bool = False) -> onnx.ModelProto:
    """From `images` to `logits`; `planes` are the images `[n, 3, h, w]`, `filter` a convolution's weights."""
    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    rng = np.random.default_rng(1)
    stored = {
        name: (scale * rng.normal(size=shape)).astype(np.float16 if half else np.float32)
        for name, shape, scale in (
            ("filter", (4, 3, 3, 3), 1e-3),
            ("bias", (4,), 1),
            ("last", (4, 5), 1),
            ("of three", (3, 5), 1e-3),
        )
    }
    begin = [
        helper.make_node("Cast", ["images"], ["values"], to=kind),
        helper.make_node("Transpose", ["values"], ["planes"], perm=[0, 3, 1, 2]),
    ]
    end = [helper.make_node("Cast", ["scores"], ["logits"], to=TensorProto.FLOAT)]
    graph = helper.make_graph(
        [*begin, *nodes, *end],
        "net",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["n", 8, 8, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(values, name) for name, values in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


CONVOLUTION = helper.make_node("Conv", ["planes", "filter", "bias"], ["filtered"], strides=[2, 2])
POOLED = [
    helper.make_node("GlobalAveragePool", ["rectified"], ["pooled"]),
    helper.make_node("Flatten", ["pooled"], ["flat"]),
]
RECTIFIER = helper.make_node("Relu", ["filtered"], ["rectified"])
LAST = helper.make_node("MatMul", ["flat", "last"], ["scores"])


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_it_is_cut_after_the_first_convolution(half: bool) -> None:
    changed, cut = with_cut(network([CONVOLUTION, RECTIFIER, *POOLED, LAST], half=half), IMAGES)
    assert cut is not None
    assert cut.shape == (4, 3, 3)
    assert cut.head_parameters == 4 * 3 * 3 * 3 + 4
    onnx.checker.check_model(changed)


@pytest.mark.parametrize(
    "nodes",
    [
        [
            helper.make_node("GlobalAveragePool", ["planes"], ["pooled"]),
            helper.make_node("Flatten", ["pooled"], ["flat"]),
            helper.make_node("MatMul", ["flat", "of three"], ["scores"]),
        ],
        [
            CONVOLUTION,
            RECTIFIER,
            *POOLED,
            helper.make_node("MatMul", ["flat", "last"], ["one way"]),
            helper.make_node("GlobalAveragePool", ["planes"], ["around"]),
            helper.make_node("Flatten", ["around"], ["flat around"]),
            helper.make_node("MatMul", ["flat around", "of three"], ["other way"]),
            helper.make_node("Add", ["one way", "other way"], ["scores"]),
        ],
        [
            CONVOLUTION,
            RECTIFIER,
            *POOLED,
            helper.make_node("MatMul", ["flat", "last"], ["one way"]),
            helper.make_node("Conv", ["planes", "filter", "bias"], ["second"], strides=[2, 2]),
            helper.make_node("GlobalAveragePool", ["second"], ["second pooled"]),
            helper.make_node("Flatten", ["second pooled"], ["second flat"]),
            helper.make_node("MatMul", ["second flat", "last"], ["other way"]),
            helper.make_node("Add", ["one way", "other way"], ["scores"]),
        ],
    ],
    ids=["no convolution", "a way around it", "a second convolution of the images"],
)
def test_it_is_not_cut_where_more_than_features_would_have_to_go_up(nodes: list[onnx.NodeProto]) -> None:
    model = network(nodes)
    assert with_cut(model, IMAGES) == (model, None)


@pytest.mark.parametrize("single", [False, True], ids=["any batch", "one at a time"])
def test_an_imported_network_has_head_and_tail(tmp_path: Path, single: bool) -> None:
    models = colour_set(tmp_path / "set", {"cloud": colour_network(tmp_path / "net.onnx", single=single)})
    (entry,) = load_manifest(models).models
    assert (entry.feature_shape, entry.head_parameters) == ((3, 32, 32), 84)
    images = np.stack([coloured(colour) for colour in COLOURS])
    head, tail, whole = (load_model(entry, models, part=part) for part in ("head", "tail", "whole"))
    features = head.run({"images": images}, ["features"])
    assert features["features"].shape == (3, 3, 32, 32)
    expected = whole.run({"images": images}, ["logits"])["logits"]
    assert tail.run(features, ["logits"])["logits"] == pytest.approx(expected, rel=1e-5)


def test_so_has_one_in_int8(tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(COLOURS))
    file, pictures = colour_network(tmp_path / "net.onnx"), colour_pictures(tmp_path / "pictures")
    wish = Wish(file=file, models=tmp_path / "set", tier=Tier.CLOUD, labels=labels, calibrate=pictures)
    entry = import_network(wish).entry
    assert (entry.precision, entry.feature_shape, entry.head_parameters) == ("int8", (3, 32, 32), 84)


def test_a_constant_of_both_sides_is_no_bar(tmp_path: Path) -> None:
    model = onnx.load(colour_network(tmp_path / "net.onnx"))
    one = helper.make_node("Constant", [], ["one"], value=numpy_helper.from_array(np.float32(1), "one"))
    before = helper.make_node("Mul", ["input", "one"], ["scaled"])
    after = helper.make_node("Mul", ["doubled", "one"], ["scores"])
    convolution, *middle, last = model.graph.node
    convolution.input[0], last.output[0] = "scaled", "doubled"
    nodes = [one, before, convolution, *middle, last, after]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    models = colour_set(tmp_path / "set", {"cloud": tmp_path / "net.onnx"})
    assert load_manifest(models).models[0].feature_shape == (3, 32, 32)
