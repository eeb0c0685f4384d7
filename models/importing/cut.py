"""The place in an imported network where head and tail can be cut: after its first convolution (`models.split`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from models.importing.graph import IMAGES, LOGITS
from models.manifest import Cut
from models.session import open_session, run_session
from models.split import FEATURES, HEAD_NODES_KEY, extract_part
from tierkit.errors import WeightsError
from tierkit.tensors import Array

__all__ = ["with_cut"]

_TOLERANCE = 0.1
"""Largest difference between the logits of head plus tail and of the whole network, as a fraction of the largest logit.
In INT8 the features are rounded differently.
"""


@dataclass(frozen=True, slots=True)
class _Sides:
    """Nodes on both sides of the cut, in their order."""

    head: list[onnx.NodeProto]
    tail: list[onnx.NodeProto]
    convolution: onnx.NodeProto


def with_cut(model: onnx.ModelProto, images: Array) -> tuple[onnx.ModelProto, Cut | None]:
    """Prepare a network to be cut after its first convolution, and describe the cut. Return the network unchanged and
    None if the rest of it needs anything but the convolution's output.

    Args:
        model: `images` to `logits`.
        images: UINT8 `[n, h, w, 3]`, to try the parts with.
    """
    sides = _sides(model.graph)
    if sides is None:
        return model, None
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    # As the exporter writes it: the head's nodes come first, and a tensor of FP32 called `features` lies between.
    given = sides.convolution.output[0]
    kind = _element_type(model, given, images)
    if kind is None:
        return model, None
    head, tail = list(sides.head), list(sides.tail)
    if kind == TensorProto.FLOAT:
        head, tail = ([_renamed(node, given, FEATURES) for node in nodes] for nodes in (head, tail))
    else:
        back = f"{FEATURES}/back"
        head.append(helper.make_node("Cast", [given], [FEATURES], name=f"{FEATURES}/out", to=TensorProto.FLOAT))
        again = helper.make_node("Cast", [FEATURES], [back], name=back, to=kind)
        tail = [again, *(_renamed(node, given, back) for node in tail)]
    del graph.node[:]
    graph.node.extend([*head, *tail])
    first = _first_axis(model)
    graph.value_info.append(helper.make_tensor_value_info(FEATURES, TensorProto.FLOAT, [first, "c", "h", "w"]))
    changed.metadata_props.add(key=HEAD_NODES_KEY, value=str(len(head)))
    try:
        return _checked(changed, sides.convolution, images)
    except WeightsError:
        return model, None


def _checked(model: onnx.ModelProto, convolution: onnx.NodeProto, images: Array) -> tuple[onnx.ModelProto, Cut]:
    """Add the shape of the features.

    Raises:
        WeightsError: the parts answer differently from the whole.
    """
    features = _run(extract_part(model.SerializeToString(), "head"), {IMAGES: images}, FEATURES)
    if features.ndim != 4 or len(features) != len(images):
        raise WeightsError(f"the features have the shape {features.shape}")
    channels, height, width = (int(size) for size in features.shape[1:])
    first = _first_axis(model)
    noted = helper.make_tensor_value_info(FEATURES, TensorProto.FLOAT, [first, channels, height, width])
    (stale,) = (value for value in model.graph.value_info if value.name == FEATURES)
    stale.CopyFrom(noted)
    content = model.SerializeToString()
    whole = _run(content, {IMAGES: images}, LOGITS)
    joined = _run(extract_part(content, "tail"), {FEATURES: features}, LOGITS)
    if np.abs(whole - joined).max() > _TOLERANCE * max(1.0, float(np.abs(whole).max())):
        raise WeightsError("head and tail together differ from the whole")
    return model, Cut((channels, height, width), _parameters(convolution, model.graph))


def _first_axis(model: onnx.ModelProto) -> int | str:
    """Images that the network takes at once: "n", or 1."""
    axis = model.graph.output[0].type.tensor_type.shape.dim[0]
    return int(axis.dim_value) or "n"


def _run(network: bytes, inputs: dict[str, Array], output: str) -> Array:
    try:
        return run_session(open_session(network, "a part of the network"), output, inputs)
    except WeightsError:
        raise
    except Exception as exc:  # the runtime's own classes
        raise WeightsError(str(exc)) from exc


def _sides(graph: onnx.GraphProto) -> _Sides | None:
    """Find the two sides of the cut; None if there is no convolution, or if more than its output leads from the images
    to the rest.
    """
    made_by = {name: node for node in graph.node for name in node.output}
    seen = {IMAGES}
    """Tensors that depend on the images."""
    convolution = None
    for node in graph.node:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            return None  # what inner graphs use from outside cannot be seen here
        if seen.intersection(node.input):
            seen.update(node.output)
            if node.op_type == "Conv" and convolution is None:
                convolution = node
    if convolution is None:
        return None
    needed: set[str] = set()
    waiting = [convolution.output[0]]
    while waiting:
        name = waiting.pop()
        if name in made_by and name not in needed:
            node = made_by[name]
            needed.update(node.output)
            waiting += node.input
    head = [node for node in graph.node if needed.intersection(node.output)]
    tail = [node for node in graph.node if not needed.intersection(node.output)]
    crossing = {name for node in tail for name in node.input} & (needed | {IMAGES})
    if crossing != {convolution.output[0]} or any(value.name in needed for value in graph.output):
        return None
    return _Sides(head, tail, convolution)


def _element_type(model: onnx.ModelProto, name: str, images: Array) -> int | None:
    """Return the `onnx.TensorProto` type of a tensor; None if it is neither FP32 nor FP16, or the network does not run
    with it as its output.
    """
    asked = onnx.ModelProto()
    asked.CopyFrom(model)
    for kind, dtype in ((TensorProto.FLOAT, np.float32), (TensorProto.FLOAT16, np.float16)):
        del asked.graph.output[:]
        asked.graph.output.append(helper.make_tensor_value_info(name, kind, None))
        try:
            if _run(asked.SerializeToString(), {IMAGES: images[:1]}, name).dtype == dtype:
                return int(kind)
        except WeightsError:
            continue
    return None


def _renamed(node: onnx.NodeProto, old: str, new: str) -> onnx.NodeProto:
    """Rename one of the node's tensors."""
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    changed.input[:] = [new if name == old else name for name in node.input]
    changed.output[:] = [new if name == old else name for name in node.output]
    return changed


def _parameters(convolution: onnx.NodeProto, graph: onnx.GraphProto) -> int:
    """Number of weights and biases of a convolution, including values stored as integers."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    made_by = {name: node for node in graph.node for name in node.output}
    count = 0
    for name in convolution.input[1:]:
        while name not in stored and name in made_by:
            name = made_by[name].input[0]  # DequantizeLinear, Cast
        count += int(np.prod(stored[name].dims)) if name in stored else 0
    return max(1, count)
