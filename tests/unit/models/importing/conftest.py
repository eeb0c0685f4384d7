"""Small ONNX files as strangers bring them: a classifier that says which colour a picture has most of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

COLOURS = ("red", "green", "blue")
Make = Callable[..., Path]


def write_colours(
    path: Path,
    *,
    layout: str = "nchw",
    size: tuple[Any, Any] = ("h", "w"),
    batch: Any = "n",
    softmax: bool = False,
    element: int = TensorProto.FLOAT,
    factor: float = 10.0,
    classes: int = 3,
    metadata: dict[str, str] | None = None,
) -> Path:
    """A network whose scores are ten times the means of its three input planes; returns its path."""
    shape = [batch, 3, *size] if layout == "nchw" else [batch, *size, 3]
    kind = np.float16 if element == TensorProto.FLOAT16 else np.float32
    weights = np.zeros((3, classes), kind)
    weights[:3, :3] = np.eye(3)[:, :classes] * factor
    axes = numpy_helper.from_array(np.array([2, 3] if layout == "nchw" else [1, 2]), "axes")
    nodes = [helper.make_node("ReduceMean", ["input", "axes"], ["means"], keepdims=0)]
    nodes.append(helper.make_node("MatMul", ["means", "weights"], ["scores"]))
    if softmax:
        nodes.append(helper.make_node("Softmax", ["scores"], ["output"], axis=-1))
    graph = helper.make_graph(
        nodes,
        "colours",
        [helper.make_tensor_value_info("input", element, shape)],
        [helper.make_tensor_value_info("output" if softmax else "scores", element, [batch, classes])],
        [axes, numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
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
