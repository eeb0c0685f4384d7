"""What the first operators of a network show of the pixels that it takes: one that divides by 255 or subtracts a mean
must not be given pixels on which this is done already."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from models.importing.preprocess import PreprocessFacts
from tierkit.inference.model import Array

__all__ = ["facts_of"]

_SAME = {"Identity", "Cast", "Transpose"}
_MOST = 8
"""Operators that are looked at; exporters write a scale and a mean as two to four."""
_BYTES_FACTOR, _BYTES_OFFSET = 1 / 30, 30.0
"""A smaller factor, or a larger offset without one, is for values of 0 to 255."""


def facts_of(graph: onnx.GraphProto, taken: str) -> PreprocessFacts:
    """What the first operators say about the network's input; nothing if they do not scale or shift it, or by
    something that is not clear."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            stored[node.output[0]] = node.attribute[0].t
    factor, offset, steps = np.ones(1), np.zeros(1), 0
    name = taken
    for _ in range(_MOST):
        users = [node for node in graph.node if name in node.input]
        if len(users) != 1:
            break
        (node,) = users
        if node.op_type not in _SAME:
            value = _constant(node, name, stored)
            if value is None:
                break
            factor, offset = _after(node, factor, offset, value)
            steps += 1
        name = node.output[0]
    if not steps or not (np.isfinite(factor).all() and np.isfinite(offset).all() and (factor > 0).all()):
        return PreprocessFacts()
    if (factor <= _BYTES_FACTOR).all() or ((factor == 1).all() and (offset < -_BYTES_OFFSET).all()):
        return PreprocessFacts(scale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    if (factor >= 1).all() and (offset <= 0).all() and (-offset / factor <= 1).all() and offset.any():
        return PreprocessFacts(scale=255.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    return PreprocessFacts()


def _constant(node: onnx.NodeProto, name: str, stored: dict[str, onnx.TensorProto]) -> Array | None:
    """What is added to a tensor or multiplied with it: one number, or one by channel. None for other operators."""
    if node.op_type not in ("Add", "Sub", "Mul", "Div") or len(node.input) != 2:
        return None
    other = stored.get(node.input[1] if node.input[0] == name else node.input[0])
    if other is None or int(np.prod(other.dims)) not in (1, 3):
        return None
    if node.input[1] == name and node.op_type in ("Sub", "Div"):
        return None
    return np.asarray(numpy_helper.to_array(other), np.float64).reshape(-1)


def _after(node: onnx.NodeProto, factor: Array, offset: Array, value: Array) -> tuple[Array, Array]:
    match node.op_type:
        case "Add":
            return factor, offset + value
        case "Sub":
            return factor, offset - value
        case "Mul":
            return factor * value, offset * value
        case _:
            with np.errstate(divide="ignore", invalid="ignore"):
                return factor / value, offset / value
