"""Multiply-adds and peak memory of a network, against counts by hand and by torch."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from models.costs import costs_of, graph_costs, with_costs
from models.graph import read_graph
from models.manifest import MANIFEST_NAME, Costs, load_manifest, weights_folder
from models.split import extract_part


def network(*nodes: object, weights: dict[str, Any], shape: tuple[int, ...] = (3, 8, 8)) -> bytes:
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", *shape])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return bytes(model.SerializeToString())


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_a_small_network_by_hand() -> None:
    content = network(
        helper.make_node("Conv", ["images", "kernel"], ["filtered"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["filtered", "deep"], ["single"], group=4, pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["single"], ["positive"]),
        helper.make_node("GlobalAveragePool", ["positive"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "last"], ["logits"], transB=1),
        weights={"kernel": floats(4, 3, 3, 3), "deep": floats(4, 1, 3, 3), "last": floats(5, 4)},
    )
    macs = 4 * 4 * 4 * 27 + 4 * 4 * 4 * 9 + 5 * 4
    weights = 4 * (4 * 27 + 4 * 9 + 5 * 4)
    # Most is alive while the first convolution runs: 3 x 8 x 8 values in, 4 x 4 x 4 out, of four bytes each.
    assert costs_of(content, "small") == Costs(macs=macs, peak_bytes=weights + 4 * (192 + 64))


def test_a_value_that_is_used_later_stays_in_memory() -> None:
    content = network(
        helper.make_node("Relu", ["images"], ["kept"]),
        helper.make_node("MatMul", ["kept", "square"], ["once"]),
        helper.make_node("MatMul", ["once", "square"], ["twice"]),
        helper.make_node("GlobalAveragePool", ["twice"], ["pooled"]),
        helper.make_node("Add", ["kept", "pooled"], ["logits"]),
        weights={"square": floats(8, 8)},
    )
    assert costs_of(content, "small") == Costs(macs=2 * 192 * 8, peak_bytes=4 * 64 + 3 * 4 * 192)


def test_quantised_values_count_in_their_quantised_size() -> None:
    content = network(
        helper.make_node("QuantizeLinear", ["images", "scale", "zero"], ["packed"]),
        helper.make_node("DequantizeLinear", ["packed", "scale", "zero"], ["taken"]),
        helper.make_node("DequantizeLinear", ["kernel", "scale"], ["weights"]),
        helper.make_node("Conv", ["taken", "weights"], ["filtered"]),
        helper.make_node("QuantizeLinear", ["filtered", "scale", "zero"], ["again"]),
        helper.make_node("DequantizeLinear", ["again", "scale", "zero"], ["logits"]),
        weights={
            "kernel": np.ones((2, 3, 1, 1), np.int8),
            "scale": np.array(0.1, np.float32),
            "zero": np.array(0, np.uint8),
        },
    )
    # The quantiser has the FP32 picture and its UINT8 form; later steps have less.
    assert costs_of(content, "small") == Costs(macs=2 * 64 * 3, peak_bytes=6 + 4 + 1 + 5 * 192)


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Einsum", ["images", "images"], ["logits"], equation="nchw,nchw->n")],
        [helper.make_node("Gelu", ["images"], ["x"], domain="com.microsoft"), helper.make_node("RNN", [], [])],
    ],
    ids=["einsum", "unreadable"],
)
def test_a_count_that_is_not_certain_is_unknown(nodes: list[object]) -> None:
    found = costs_of(network(*nodes, weights={}), "small")
    assert found is None or found.macs is None


def test_integer_operators_count_like_those_of_floats() -> None:
    nodes = (
        helper.make_node("Cast", ["images"], ["bytes"], to=TensorProto.UINT8),
        helper.make_node("ConvInteger", ["bytes", "kernel"], ["filtered"]),
        helper.make_node("Cast", ["filtered"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("QuantizeLinear", ["floats", "scale", "zero"], ["packed"]),
        helper.make_node(
            "QLinearConv", ["packed", "scale", "zero", "deep", "scale", "zero", "scale", "zero"], ["next"]
        ),
        helper.make_node("DequantizeLinear", ["next", "scale", "zero"], ["logits"]),
    )
    weights = {
        "kernel": np.ones((2, 3, 3, 3), np.uint8),
        "deep": np.ones((4, 2, 1, 1), np.uint8),
        "scale": np.array(0.1, np.float32),
        "zero": np.array(0, np.uint8),
    }
    found = costs_of(network(*nodes, weights=weights), "small")
    assert found is not None
    assert found.macs == 2 * 36 * 27 + 4 * 36 * 2


def test_the_manifest_has_the_costs_of_the_shipped_files() -> None:
    folder, manifest = weights_folder(), load_manifest()
    for entry in manifest.models:
        assert entry.costs == costs_of((folder / entry.file).read_bytes(), entry.name)
    for encoder in manifest.encoders:
        for part in (encoder.head, encoder.tail):
            content = extract_part((folder / part.file).read_bytes(), part.part)
            assert part.costs == graph_costs(read_graph(content, encoder.name))


def test_a_manifest_without_costs_is_read_as_it_is_and_completed_from_the_files(tmp_path: Path) -> None:
    shutil.copytree(weights_folder(), tmp_path / "set")
    path = tmp_path / "set" / MANIFEST_NAME
    content = json.loads(path.read_text())
    for part in (*content["models"], *(each[side] for each in content["encoders"] for side in ("head", "tail"))):
        del part["costs"]
    path.write_text(json.dumps(content))
    older = load_manifest(path.parent)
    # Nodes of an earlier version, which know no costs, can read what is sent on.
    assert older.content() == content
    assert with_costs(older, path.parent) == load_manifest()
    (path.parent / older.models[0].file).write_bytes(b"other")
    assert with_costs(older, path.parent).models[0].costs is None


@pytest.mark.train
@pytest.mark.parametrize("tier", ["end", "edge", "cloud"])
def test_multiply_adds_are_those_that_torch_runs(tier: str) -> None:
    entry = load_manifest().default_for(tier)
    torch = pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    from models.training.config import find_config
    from models.training.networks import build_network

    config = find_config(entry.name, None).network
    counted: list[int] = []

    built = build_network(config.kind, entry.classes, config.options).eval()
    for name, module in built.named_modules():
        # A normalisation before a rectifier is exported as a convolution: there is none to fold it into.
        alone = config.kind == "wide-resnet" and name.endswith("norm1")
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_hook(lambda it, _, output: counted.append(output.numel() * it.weight[0].numel()))
        elif alone:
            module.register_forward_hook(lambda _, __, output: counted.append(output.numel()))
    built(torch.zeros(1, 3, *entry.input_shape[:2]))
    assert entry.costs is not None
    assert sum(counted) == entry.costs.macs
