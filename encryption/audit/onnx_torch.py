"""A stored network as a torch module, so that an attacker who holds the weights can differentiate through it.

Quantised steps compute what ONNX Runtime computes; their gradient is that of the identity within the range of the
levels (straight-through estimator, arXiv:1308.3432), since rounding itself has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from tierkit.errors import WeightsError
from tierkit.tensors import Array

__all__ = ["OnnxNetwork", "round_through"]

_BATCH = 250


def round_through(values: Tensor) -> Tensor:
    """`values` rounded to whole numbers, half to even; the gradient passes unchanged."""
    return values + (torch.round(values) - values).detach()


class OnnxNetwork(nn.Module):
    """An ONNX file with one input, read as floats, and one output. UINT8 images become floats of 0 to 255.

    Stored values are parameters without a gradient until one is asked for.

    Args:
        content: the file.

    Raises:
        WeightsError: it has an operator, or one in a form, that this class does not know.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__()
        graph = onnx.load_from_string(content).graph
        stored = {item.name: torch.from_numpy(numpy_helper.to_array(item).copy()) for item in graph.initializer}
        self._input, self._output = graph.input[0].name, graph.output[0].name
        self._steps: list[_Step] = []
        for node in graph.node:
            if node.op_type not in _OPERATORS:
                raise WeightsError(f"the audit cannot differentiate through the ONNX operator {node.op_type!r}")
            attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
            if node.op_type == "QuantizeLinear":
                attributes["levels"] = torch.iinfo(stored[node.input[2]].dtype)
            step = _Step(node.op_type, attributes, tuple(node.input), node.output[0])
            if node.op_type == "DequantizeLinear" and node.input[0] in stored:
                stored[step.output] = step(stored).float()
            else:
                self._steps.append(step)
        used = {name for step in self._steps for name in step.inputs}
        # Lists of axes and shapes stay whole numbers; zero points are numbers like any other.
        self._axes = {name: value for name, value in stored.items() if value.dtype == torch.int64}
        kept = [name for name, value in stored.items() if name in used and value.dtype != torch.int64]
        self._keys = {name: name.replace(".", "/") for name in kept}
        self.values = nn.ParameterDict(
            {self._keys[name]: nn.Parameter(stored[name].float(), requires_grad=False) for name in kept}
        )

    def forward(self, values: Tensor) -> Tensor:
        known = {name: self.values[key] for name, key in self._keys.items()} | self._axes
        known[self._input] = values
        for step in self._steps:
            known[step.output] = step(known)
        return known[self._output]

    def run(self, values: Array) -> Array:
        """The output FP32 for an array of inputs, of which no gradient is wanted."""
        with torch.inference_mode():
            parts = [self(torch.from_numpy(np.ascontiguousarray(part)).float()) for part in _batches(values)]
        return np.concatenate([part.numpy() for part in parts])

    def weights(self) -> list[tuple[nn.Parameter, nn.Parameter | None]]:
        """Weight and bias of each convolution and matrix product, in the order of the graph."""
        products = [step for step in self._steps if step.operator in ("Conv", "Gemm", "MatMul")]
        return [
            (
                self.values[self._keys[step.inputs[1]]],
                self.values[self._keys[step.inputs[2]]] if len(step.inputs) > 2 else None,
            )
            for step in products
        ]


def _batches(values: Array) -> list[Array]:
    return [values[start : start + _BATCH] for start in range(0, len(values), _BATCH)]


class _Step:
    """One node of the graph."""

    def __init__(self, operator: str, attributes: Mapping[str, Any], inputs: tuple[str, ...], output: str) -> None:
        self.operator = operator
        self.inputs = inputs
        self.output = output
        self._attributes = attributes
        self._compute = _OPERATORS[operator]

    def __call__(self, known: Mapping[str, Tensor]) -> Tensor:
        return self._compute([known[name] if name else None for name in self.inputs], self._attributes)


def _along(values: Tensor, like: Tensor, attributes: Mapping[str, Any]) -> Tensor:
    """One number per channel of `like`, or one for all."""
    if values.numel() == 1:
        return values.reshape(())
    shape = [1] * like.dim()
    shape[attributes.get("axis", 1)] = -1
    return values.reshape(shape)


def _quantize(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Tensor:
    values, scale, zero = inputs
    levels = attributes["levels"]
    steps = round_through(values / _along(scale, values, attributes)) + _along(zero, values, attributes)
    return torch.clamp(steps, levels.min, levels.max)


def _dequantize(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Tensor:
    levels, scale, zero = inputs
    scale = _along(scale, levels, attributes)
    return (levels.to(scale.dtype) - _along(zero, levels, attributes)) * scale


def _convolve(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Tensor:
    values, weight, *bias = inputs
    top, left, bottom, right = attributes.get("pads", (0, 0, 0, 0))
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET" or weight.dim() != 4:
        raise WeightsError("the audit knows convolutions over two dimensions with explicit padding only")
    padding: tuple[int, int] = (top, left)
    if (top, left) != (bottom, right):
        values, padding = F.pad(values, (left, right, top, bottom)), (0, 0)
    return F.conv2d(
        values,
        weight,
        bias[0] if bias else None,
        stride=tuple(attributes.get("strides", (1, 1))),
        padding=padding,
        dilation=tuple(attributes.get("dilations", (1, 1))),
        groups=attributes.get("group", 1),
    )


def _multiply(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Tensor:
    values, weight, *bias = inputs
    values = values.T if attributes.get("transA") else values
    weight = weight.T if attributes.get("transB") else weight
    product: Tensor = attributes.get("alpha", 1.0) * (values @ weight)
    return product + attributes.get("beta", 1.0) * bias[0] if bias else product


def _mean(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Tensor:
    axes = inputs[1].tolist() if len(inputs) > 1 else list(attributes["axes"])
    return torch.mean(inputs[0], dim=axes, keepdim=bool(attributes.get("keepdims", 1)))


_OPERATORS: dict[str, Callable[[Sequence[Any], Mapping[str, Any]], Tensor]] = {
    "Add": lambda inputs, _: inputs[0] + inputs[1],
    "Cast": lambda inputs, _: inputs[0],  # from UINT8 images to floats, which they are here
    "Clip": lambda inputs, _: torch.clamp(*inputs),
    "Conv": _convolve,
    "DequantizeLinear": _dequantize,
    "Flatten": lambda inputs, attributes: torch.flatten(inputs[0], attributes.get("axis", 1)),
    "Gemm": _multiply,
    "GlobalAveragePool": lambda inputs, _: torch.mean(inputs[0], dim=(2, 3), keepdim=True),
    "Identity": lambda inputs, _: inputs[0],
    "MatMul": _multiply,
    "Mul": lambda inputs, _: inputs[0] * inputs[1],
    "QuantizeLinear": _quantize,
    "ReduceMean": _mean,
    "Relu": lambda inputs, _: torch.relu(inputs[0]),
    "Sub": lambda inputs, _: inputs[0] - inputs[1],
    "Transpose": lambda inputs, attributes: inputs[0].permute(*attributes["perm"]),
}
