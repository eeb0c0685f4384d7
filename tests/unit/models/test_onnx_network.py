"""A stored network in torch: the same answers, and a file again after it was trained."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

import torch

from models.data import ImageSet, read_sample
from models.export.dequantize import dequantize_onnx
from models.manifest import load_manifest, weights_folder
from models.session import load_model
from models.training.onnx_network import OnnxNetwork, rewritten
from tierkit.errors import WeightsError

pytestmark = pytest.mark.train

NAME = "mobilenet-v1-0.5"


@pytest.fixture(scope="module")
def sample() -> ImageSet:
    return read_sample()


@pytest.fixture(scope="module")
def int8() -> bytes:
    return (weights_folder() / load_manifest().entry(NAME).file).read_bytes()


def served(content: bytes, precision: Literal["int8", "fp32"], tmp_path, images) -> np.ndarray:
    path = tmp_path / "network.onnx"
    path.write_bytes(content)
    entry = load_manifest().entry(NAME).with_file(path, precision=precision)
    return load_model(entry, tmp_path).run({"images": images}, ["logits"])["logits"]


def trained(content: bytes, layers: int) -> OnnxNetwork:
    network = OnnxNetwork(content)
    with torch.no_grad():
        for layer in network.layers()[-layers:]:
            for number, each in enumerate(layer.parameters):
                each.mul_(1.05 + 0.02 * number)
    return network


def test_an_unchanged_network_is_the_same_file(int8: bytes):
    assert rewritten(int8, OnnxNetwork(int8)) == onnx.load_from_string(int8).SerializeToString()


@pytest.mark.parametrize("layers", [1, 5, 100])
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_a_trained_network_answers_from_its_file_as_in_torch(
    precision: str, layers: int, int8: bytes, tmp_path, sample: ImageSet
):
    content = int8 if precision == "int8" else dequantize_onnx(int8)
    network, images = trained(content, layers), sample.images[:100]
    logits = network.run(images)
    assert not np.allclose(logits, OnnxNetwork(content).run(images), atol=0.05)
    found = served(rewritten(content, network), precision, tmp_path, images)
    if precision == "fp32":
        np.testing.assert_allclose(found, logits, atol=1e-3 * np.abs(logits).max())
    else:
        assert np.mean(found.argmax(1) == logits.argmax(1)) >= 0.95
        np.testing.assert_allclose(found, logits, atol=0.15 * np.abs(logits).max())


def test_only_layers_that_have_changed_are_written(int8: bytes):
    before = {item.name: item for item in onnx.load_from_string(int8).graph.initializer}
    after = onnx.load_from_string(rewritten(int8, trained(int8, 1))).graph.initializer
    changed = {item.name for item in after if item != before[item.name]}
    assert changed
    assert all("classifier" in name for name in changed)


def test_a_layer_learns_through_rounded_activations(int8: bytes, sample: ImageSet):
    network = OnnxNetwork(int8)
    layer = network.layers()[0]
    layer.weight.requires_grad_()
    network(torch.from_numpy(sample.images[:8]).float()).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().max() > 0


def graph(nodes, stored) -> bytes:
    images = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])
    logits = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])
    held = [numpy_helper.from_array(values, name) for name, values in stored.items()]
    made = helper.make_graph(nodes, "g", [images], [logits], held)
    return bytes(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def test_weights_in_a_form_that_cannot_be_written_are_refused():
    levels, scale = np.array([[1, 2], [3, 4]], np.uint8), np.array(0.5, np.float32)
    content = graph(
        [
            helper.make_node("DequantizeLinear", ["w8", "s", "z"], ["w"]),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
        ],
        {"w8": levels, "s": scale, "z": np.array(2, np.uint8)},
    )
    network = OnnxNetwork(content)
    assert rewritten(content, network)
    with torch.no_grad():
        network.layers()[0].weight.add_(1)
    with pytest.raises(WeightsError):
        rewritten(content, network)


def test_an_unknown_operator_is_refused():
    with pytest.raises(WeightsError, match="Softmax"):
        OnnxNetwork(graph([helper.make_node("Softmax", ["x"], ["y"])], {}))
