"""Small ONNX files as strangers bring them: a classifier that says which colour a picture has most of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

COLOURS = ("red", "green", "blue")
Make = Callable[..., Path]


Tail = tuple[list[Any], list[Any], list[Any]]
"""Nodes, outputs and stored tensors."""


def _tail(*nodes: Any, kind: int | None = None, shape: Any = None, stored: dict[str, Any] | None = None) -> Any:
    """Nodes from `scores` to `output`.

    Args:
        kind: Type of the output; the input's by default.
        shape: Of the output; `[n, classes]` by default.
    """

    def make(element: int, batch: Any, classes: int) -> Tail:
        made = helper.make_tensor_value_info("output", kind or element, shape or [batch, classes])
        tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in (stored or {}).items()]
        return [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes], [made], tensors

    return make


def _zipmap(names: Any) -> Any:
    def make(element: int, batch: Any, classes: int) -> Tail:
        of = TensorProto.STRING if isinstance(names[0], str) else TensorProto.INT64
        key = "classlabels_strings" if isinstance(names[0], str) else "classlabels_int64s"
        kind = helper.make_map_type_proto(of, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
        nodes = [
            helper.make_node("Softmax", ["scores"], ["prob"]),
            helper.make_node("ZipMap", ["prob"], ["loss"], domain="ai.onnx.ml", **{key: names}),
            helper.make_node("ArgMax", ["prob"], ["label"], axis=1, keepdims=0),
        ]
        label = helper.make_tensor_value_info("label", TensorProto.INT64, [batch])
        return nodes, [label, helper.make_value_info("loss", helper.make_sequence_type_proto(kind))], []

    return make


_node = helper.make_node
_SOFTMAX = _node("Softmax", ["scores"], ["prob"], axis=-1)
_EIGHTH = {"scale": np.float32(1 / 256), "zero": np.uint8(0)}
_ROUND = _node("QuantizeLinear", ["prob", "scale", "zero"], ["rounded"])
_BACK = _node("DequantizeLinear", ["rounded", "scale", "zero"], ["output"])
_ONE = {"one": np.array([[1], [0], [-1]], np.float32)}

TAILS = {
    "softmax": _tail(_node("Softmax", ["scores"], ["output"], axis=-1)),
    "log softmax": _tail(_node("LogSoftmax", ["scores"], ["output"], axis=-1)),
    "softmax in 8 bits": _tail(_SOFTMAX, _ROUND, _BACK, stored=_EIGHTH),
    "softmax as bytes": _tail(
        _SOFTMAX, _node("QuantizeLinear", ["prob", "scale", "zero"], ["output"]), kind=TensorProto.UINT8, stored=_EIGHTH
    ),
    "quantised softmax": _tail(
        _node("QuantizeLinear", ["scores", "wide", "middle"], ["q"]),
        _node(
            "QLinearSoftmax", ["q", "wide", "middle", "scale", "zero"], ["rounded"], domain="com.microsoft", opset=13
        ),
        _BACK,
        stored=_EIGHTH | {"wide": np.float32(0.1), "middle": np.uint8(100)},
    ),
    "softmax in half": _tail(
        _node("Cast", ["scores"], ["half"], to=TensorProto.FLOAT16),
        _node("Softmax", ["half"], ["output"]),
        kind=TensorProto.FLOAT16,
    ),
    "softmax by hand": _tail(
        _node("Exp", ["scores"], ["powers"]),
        _node("ReduceSum", ["powers", "axis"], ["sum"], keepdims=1),
        _node("Div", ["powers", "sum"], ["output"]),
        stored={"axis": np.array([1])},
    ),
    "softmax in another shape": _tail(
        _SOFTMAX,
        _node("Reshape", ["prob", "form"], ["output"]),
        shape=["n", 3, 1, 1],
        stored={"form": np.array([-1, 3, 1, 1])},
    ),
    "softmax of all pictures in one row": _tail(
        _node("Reshape", ["scores", "row"], ["rows"]),
        _node("Softmax", ["rows"], ["prob"], axis=-1),
        _node("Reshape", ["prob", "form"], ["output"]),
        stored={"row": np.array([1, -1, 3]), "form": np.array([-1, 3])},
    ),
    "softmax over pictures": _tail(_node("Softmax", ["scores"], ["output"], axis=0)),
    "softmax in percent": _tail(
        _SOFTMAX, _node("Mul", ["prob", "hundred"], ["output"]), stored={"hundred": np.float32(100)}
    ),
    "cut softmax": _tail(
        _SOFTMAX, _node("Mul", ["prob", "some"], ["output"]), stored={"some": np.array([1, 0.5, 1], np.float32)}
    ),
    "negative logarithms": _tail(_node("LogSoftmax", ["scores"], ["log"]), _node("Neg", ["log"], ["output"])),
    "sigmoid": _tail(_node("Sigmoid", ["scores"], ["output"])),
    "sigmoid in 8 bits": _tail(_node("Sigmoid", ["scores"], ["prob"]), _ROUND, _BACK, stored=_EIGHTH),
    "clipped sigmoid": _tail(
        _node("Sigmoid", ["scores"], ["prob"]),
        _node("Clip", ["prob", "low", "high"], ["output"]),
        stored={"low": np.float32(1e-7), "high": np.float32(1 - 1e-7)},
    ),
    "logarithm of a sigmoid": _tail(_node("Sigmoid", ["scores"], ["prob"]), _node("Log", ["prob"], ["output"])),
    "decision": _tail(
        _node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
        _node("OneHot", ["best", "three", "ends"], ["output"]),
        stored={"three": np.array(3), "ends": np.array([0, 1], np.float32)},
    ),
    "sorted": _tail(_SOFTMAX, _node("TopK", ["prob", "three"], ["output", "places"]), stored={"three": np.array([3])}),
    "distance": _tail(
        _node("Sub", ["scores", "five"], ["apart"]),
        _node("Mul", ["apart", "apart"], ["squares"]),
        _node("Sqrt", ["squares"], ["output"]),
        stored={"five": np.float32(5)},
    ),
    "chance": _tail(_node("RandomNormalLike", ["scores"], ["noise"]), _node("Add", ["scores", "noise"], ["output"])),
    "range of the batch": _tail(
        _node("DynamicQuantizeLinear", ["scores"], ["q", "wide", "middle"]),
        _node("DequantizeLinear", ["q", "wide", "middle"], ["output"]),
    ),
    "tanh": _tail(_node("Tanh", ["scores"], ["output"])),
    "one sigmoid": _tail(
        _node("MatMul", ["scores", "one"], ["score"]),
        _node("Sigmoid", ["score"], ["output"]),
        shape=["n", 1],
        stored=_ONE,
    ),
    "one clipped sigmoid": _tail(
        _node("MatMul", ["scores", "one"], ["score"]),
        _node("Sigmoid", ["score"], ["prob"]),
        _node("Clip", ["prob", "low", "high"], ["output"]),
        shape=["n", 1],
        stored=_ONE | {"low": np.float32(1e-7), "high": np.float32(1 - 1e-7)},
    ),
    "one score": _tail(_node("MatMul", ["scores", "one"], ["output"]), shape=["n", 1], stored=_ONE),
    "one tanh": _tail(
        _node("MatMul", ["scores", "one"], ["score"]), _node("Tanh", ["score"], ["output"]), shape=["n", 1], stored=_ONE
    ),
    "fixed": _tail(
        _node("Reshape", ["scores", "form"], ["flat"]),
        _node("Softmax", ["flat"], ["output"]),
        stored={"form": np.array([1, 3])},
    ),
    "mean of the batch": _tail(
        _node("ReduceMean", ["scores", "first"], ["mean"]),
        _node("Sub", ["scores", "mean"], ["output"]),
        stored={"first": np.array([0])},
    ),
    "half the mean of the batch": _tail(
        _node("ReduceMean", ["scores", "first"], ["mean"]),
        _node("Mul", ["mean", "half"], ["less"]),
        _node("Sub", ["scores", "less"], ["output"]),
        stored={"first": np.array([0]), "half": np.float32(0.5)},
    ),
    "zipmap": _zipmap(["red", "green", "blue"]),
    "numbered zipmap": _zipmap([0, 1, 2]),
    "shuffled zipmap": _zipmap([2, 0, 1]),
}


def write_colours(
    path: Path,
    *,
    layout: str = "nchw",
    size: tuple[Any, Any] = ("h", "w"),
    batch: Any = "n",
    channels: int = 3,
    tail: str = "",
    softmax: bool = False,
    element: int = TensorProto.FLOAT,
    factor: float = 10.0,
    classes: int = 3,
    metadata: dict[str, str] | None = None,
) -> Path:
    """A network whose scores are ten times the means of its input planes; returns its path.

    Args:
        tail: What follows the scores: a key of `TAILS`.
    """
    shape = [batch, channels, *size] if layout == "nchw" else [batch, *size, channels]
    kind = np.float16 if element == TensorProto.FLOAT16 else np.float32
    weights = np.zeros((channels, classes), kind)
    weights[:3, :3] = np.eye(3)[:channels, :classes] * factor
    axes = numpy_helper.from_array(np.array([2, 3] if layout == "nchw" else [1, 2]), "axes")
    nodes = [helper.make_node("ReduceMean", ["input", "axes"], ["means"], keepdims=0)]
    nodes.append(helper.make_node("MatMul", ["means", "weights"], ["scores"]))
    outputs = [helper.make_tensor_value_info("scores", element, [batch, classes])]
    stored = [axes, numpy_helper.from_array(weights, "weights")]
    opsets = [helper.make_opsetid("", 18)]
    if tail := tail or ("softmax" if softmax else ""):
        more, outputs, tensors = TAILS[tail](element, batch, classes)
        nodes += more
        stored += tensors
        opsets += [helper.make_opsetid(domain, 1) for domain in sorted({node.domain for node in more if node.domain})]
    graph = helper.make_graph(
        nodes,
        "colours",
        [helper.make_tensor_value_info("input", element, shape)],
        outputs,
        stored,
    )
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    for key, value in (metadata or {}).items():
        model.metadata_props.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a network of `write_colours` under a name."""
    return lambda name="net.onnx", **given: write_colours(tmp_path / name, **given)


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.txt"
    path.write_text("\n".join(COLOURS) + "\n")
    return path


def picture(colour: str, height: int = 6, width: int = 8) -> np.ndarray[Any, Any]:
    """UINT8 `[h, w, 3]`, mostly of that colour."""
    pixels = np.full((height, width, 3), 40, np.uint8)
    pixels[..., COLOURS.index(colour)] = 200
    return pixels
