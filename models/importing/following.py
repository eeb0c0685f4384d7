"""The first operators of a network, followed from its input.

Three numbers describe each channel: the channel of the input that it comes from, and the factor and the offset that
were applied to its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from models.importing.graph import taken_by
from tierkit.tensors import Array

__all__ = ["BYTES", "SUMS", "PixelTensor", "followed"]

BYTES = 30.0
"""A larger mean or limit is for values of 0 to 255."""
SUMS = {"Add", "Sub", "Mul", "Div"}
_SAME = {"Identity", "Cast", "Resize", "Upsample", "Pad", "Dropout", "DequantizeLinear"}
"""Operators that leave what values mean, and the order of the channels."""
_ASIDE = {"Shape", "Size"}
_WHOLE = {getattr(onnx.TensorProto, name) for name in ("UINT8", "INT8", "INT16", "UINT16", "INT32", "INT64")}
_MOST_CHANNELS = 64
_DEEPEST = 8
"""Operators of which a constant is made."""


@dataclass(frozen=True)
class PixelTensor:
    """A tensor made of the input's values, each axis but the channels' of length 1."""

    source: Array
    factor: Array
    offset: Array
    limit: float = np.nan
    """Largest value of the input that is not cut off."""
    by: str | None = None
    """The first operator that changed the values."""

    def formed(self, change: Callable[[Array], Array]) -> PixelTensor:
        return replace(self, source=change(self.source), factor=change(self.factor), offset=change(self.offset))


def followed(graph: onnx.GraphProto, taken: str) -> list[tuple[PixelTensor, str]]:
    """Follow the input to the first operators that do more than scale, shift and move channels. Return the tensor and
    the operator at each of these ends.
    """
    constants = _Constants(graph)
    found = {taken: _input(graph, taken)}
    ends: list[tuple[PixelTensor, str]] = []
    for node in graph.node:
        if node.op_type in _ASIDE or not (used := [name for name in taken_by(node) if name in found]):
            continue
        try:
            results = _after(node, found, constants)
        except Exception:  # whatever a damaged or unusual operator leads to
            results = None
        if results is None or max(each.source.size for each in results) > _MOST_CHANNELS:
            ends += [(found[name], _named(node)) for name in used]
        else:
            found.update(zip(node.output, results, strict=False))
    return ends


def _named(node: onnx.NodeProto) -> str:
    ours = node.domain in ("", "ai.onnx") or node.domain.startswith("com.m")  # of ONNX Runtime
    return str(node.op_type) if ours else f"an operator of {node.domain}"


def _input(graph: onnx.GraphProto, taken: str) -> PixelTensor:
    value = next(each for each in graph.input if each.name == taken)
    dims = [each.dim_value for each in value.type.tensor_type.shape.dim]
    axis = 3 if dims[3:] and dims[3] in (1, 3) and dims[1] not in (1, 3) else 1
    shape = [1] * max(4, len(dims))
    shape[axis] = 1 if dims[axis:] and dims[axis] == 1 else 3
    source = np.arange(shape[axis], dtype=float).reshape(shape)
    return PixelTensor(source, np.ones(shape), np.zeros(shape))


class _Constants:
    """Values that do not depend on the input, computed when they are asked for."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._made_by = {name: node for node in graph.node for name in node.output}

    def of(self, name: str, depth: int = 0) -> Array | None:
        """Return the value of a tensor; None if it is unknown."""
        if name in self._stored:
            return np.asarray(numpy_helper.to_array(self._stored[name]))
        node = self._made_by.get(name)
        if node is None or depth > _DEEPEST:
            return None
        if node.op_type == "Constant":
            value = onnx.helper.get_attribute_value(node.attribute[0])
            return np.asarray(numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value)
        inputs = [value for each in node.input if (value := self.of(each, depth + 1)) is not None]
        if not inputs or len(inputs) < len(node.input):
            return None
        first, *others = inputs
        match node.op_type, others:
            case "Identity" | "Cast", _:
                return first
            case "Reshape", [shape]:
                return np.reshape(first, shape.tolist())
            case "Unsqueeze" | "Squeeze" | "Transpose", _:
                return _form(node, lambda at, name: _argument(node, at, name, self), np.ndim(first))(first)
        return None

    def small(self, name: str) -> Array:
        """Return the values by channel; for a whole picture, the mean of each channel."""
        value = self.of(name)
        if value is None:
            raise ValueError(name)
        long = tuple(axis for axis, length in enumerate(value.shape) if length not in (1, 3))
        return np.asarray(np.asarray(value, np.float64).mean(axis=long, keepdims=True))


def _argument(node: onnx.NodeProto, at: int, name: str, constants: _Constants) -> Any:
    """An argument that is an input or, in older files, an attribute; None if it is neither."""
    attribute = next((each for each in node.attribute if each.name == name), None)
    if attribute is not None:
        return onnx.helper.get_attribute_value(attribute)
    if at >= len(node.input) or not node.input[at]:
        return None
    if (value := constants.of(node.input[at])) is None:
        raise ValueError(f"{name} is not known")
    return value


def _form(node: onnx.NodeProto, say: Callable[[int, str], Any], rank: int) -> Callable[[Array], Array]:
    """Return the change that an operator makes to the axes."""
    match node.op_type:
        case "Transpose":
            order = say(9, "perm")
            return lambda array: np.transpose(array, order)
        case "Unsqueeze" | "Squeeze":
            axes = say(1, "axes")
            axes = None if axes is None else tuple(np.ravel(axes).tolist())
            return lambda array: np.expand_dims(array, axes) if node.op_type == "Unsqueeze" else np.squeeze(array, axes)
        case "Gather":
            axis, indices = say(9, "axis") or 0, np.asarray(say(1, "indices"))
            return lambda array: np.take(array, indices if array.shape[axis] > 1 else indices * 0, axis=axis)
        case "Slice":
            starts = say(1, "starts")
            axes = say(3, "axes")
            axes = range(len(starts)) if axes is None else np.ravel(axes).tolist()
            return lambda array: _sliced(array, [axis % rank for axis in axes], starts, say)
    raise ValueError(node.op_type)


def _sliced(array: Array, axes: list[int], starts: Any, say: Callable[[int, str], Any]) -> Array:
    steps = say(4, "steps")
    parts = [slice(None)] * array.ndim
    for at, axis in enumerate(axes):
        if array.shape[axis] > 1:  # which part of a picture is taken does not matter
            parts[axis] = slice(int(starts[at]), int(say(2, "ends")[at]), 1 if steps is None else int(steps[at]))
    return array[tuple(parts)]


def _after(node: onnx.NodeProto, found: Mapping[str, PixelTensor], constants: _Constants) -> list[PixelTensor] | None:
    """Return the outputs of an operator; None if it does more than scale, shift and move channels.

    Raises:
        Exception: an argument is not known, or does not fit.
    """
    kind = str(node.op_type)
    if node.domain not in ("", "ai.onnx", "com.microsoft"):
        return None

    def say(at: int, name: str) -> Any:
        return _argument(node, at, name, constants)

    if kind == "Concat":
        all_of = [found[name] for name in node.input]
        axis = say(9999, "axis")
        source, factor, offset = (
            np.concatenate([getattr(each, name) for each in all_of], axis) for name in ("source", "factor", "offset")
        )
        by = next((each.by for each in all_of if each.by), None)
        return [replace(all_of[0], source=source, factor=factor, offset=offset, by=by)]
    if sum(name in found for name in node.input) != 1:
        return None
    if kind in SUMS:
        first = node.input[0] in found
        pixels = found[node.input[0 if first else 1]]
        return [_computed(kind, pixels, constants.small(node.input[1 if first else 0]), first)]
    if node.input[0] not in found:
        return None
    pixels = found[node.input[0]]
    by = pixels.by or kind
    match kind:
        case "Cast" if say(9, "to") in _WHOLE:
            return [replace(pixels, limit=_limit(pixels, 255.0), by=by)]
        case _ if kind in _SAME:
            return [pixels]
        case "Neg":
            return [replace(pixels, factor=-pixels.factor, offset=-pixels.offset, by=by)]
        case "Transpose" | "Unsqueeze" | "Squeeze" | "Gather" | "Slice":
            return [pixels.formed(_form(node, say, pixels.source.ndim))]
        case "Split":
            return _split(node, pixels, say)
        case "BatchNormalization":
            mean, variance = (constants.small(name).reshape(1, -1, 1, 1) for name in node.input[3:5])
            spread = np.sqrt(variance + 1e-5)
            return [_computed("Div", _computed("Sub", replace(pixels, by=by), mean), spread)]
        case "Clip":
            top = say(2, "max")
            return [replace(pixels, limit=np.nan if top is None else _limit(pixels, float(top)), by=by)]
        case "QuantizeLinear":
            scale, zero = constants.small(node.input[1]), say(2, "zero_point")
            most = 255 if zero is None else np.iinfo(np.asarray(zero).dtype).max
            limit = _limit(pixels, float(np.max((most - (0 if zero is None else int(np.max(zero)))) * scale)))
            return [replace(pixels, limit=limit, by=by) if limit > BYTES else pixels]
    return None


def _split(node: onnx.NodeProto, pixels: PixelTensor, say: Callable[[int, str], Any]) -> list[PixelTensor]:
    axis, count, sizes = say(9, "axis") or 0, len(node.output), say(1, "split")
    if pixels.source.shape[axis] == 1:
        return [pixels] * count
    at: Any = count if sizes is None else np.cumsum(sizes)[:-1]
    parts = [np.split(array, at, axis) for array in (pixels.source, pixels.factor, pixels.offset)]
    return [replace(pixels, source=s, factor=f, offset=o) for s, f, o in zip(*parts, strict=True)]


def _computed(kind: str, pixels: PixelTensor, value: Array, first: bool = True) -> PixelTensor:
    factor, offset = np.broadcast_arrays(pixels.factor, pixels.offset)
    with np.errstate(divide="ignore", invalid="ignore"):
        match kind, first:
            case "Add", _:
                offset = offset + value
            case "Sub", True:
                offset = offset - value
            case "Sub", False:
                factor, offset = -factor, value - offset
            case "Mul", _:
                factor, offset = factor * value, offset * value
            case "Div", True:
                factor, offset = factor / value, offset / value
            case _:
                raise ValueError("a constant divided by pixels")
    source, factor, offset = np.broadcast_arrays(pixels.source, factor, offset)
    return replace(pixels, source=source, factor=factor, offset=offset, by=pixels.by or kind)


def _limit(pixels: PixelTensor, top: float) -> float:
    """The largest value of the input that stays below a value."""
    return float(np.max((top - pixels.offset) / pixels.factor))
