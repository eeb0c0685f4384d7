"""A stored network as a torch module: it can be differentiated, trained, and written back into its file.

Quantised steps compute what ONNX Runtime computes; their gradient is the identity's within the range of the
levels (straight-through estimator, arXiv:1308.3432), since rounding itself has none. So an INT8 network is trained with
the rounding of its activations, and its scales stay as they were calibrated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tierkit.errors import WeightsError
from tierkit.extras import training_extra
from tierkit.tensors import Array

if TYPE_CHECKING:
    import onnx

__all__ = ["Layer", "OnnxNetwork", "rewritten", "round_through"]

_BATCH = 250
_PRODUCTS = ("Conv", "Gemm", "MatMul")


def round_through(values: Tensor) -> Tensor:
    """`values` rounded to whole numbers, half to even; the gradient passes unchanged."""
    return values + (torch.round(values) - values).detach()


@dataclass(frozen=True, slots=True)
class Layer:
    """The parameters of a convolution or a matrix product."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


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
        onnx = _onnx()
        graph = onnx.load_from_string(content).graph
        stored = {item.name: torch.from_numpy(onnx.numpy_helper.to_array(item).copy()) for item in graph.initializer}
        self._input, self._output = graph.input[0].name, graph.output[0].name
        self._steps: list[_Step] = []
        for node in graph.node:
            if node.op_type not in _OPERATORS:
                raise WeightsError(f"the ONNX operator {node.op_type!r} cannot be differentiated")
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

    def outline(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Numbers in all that the steps give for an input of this shape, and the shape of the output; computes nothing.

        Raises:
            WeightsError: the steps do not fit together.
        """
        known = {name: torch.empty_like(self.values[key], device="meta") for name, key in self._keys.items()}
        known |= self._axes | {self._input: torch.empty(shape, device="meta")}
        numbers = 0
        try:
            for step in self._steps:
                known[step.output] = step(known)
                numbers += known[step.output].numel()
            return numbers, tuple(known[self._output].shape)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
            raise WeightsError(f"the network takes no input of shape {shape}: {str(error)[:200]}") from error

    def layers(self) -> list[Layer]:
        """Convolutions and matrix products by stored weights, in the order of the graph."""
        products = [step for step in self._steps if step.operator in _PRODUCTS and step.inputs[1] in self._keys]
        return [
            Layer(
                self.values[self._keys[step.inputs[1]]],
                self.values[self._keys[step.inputs[2]]] if len(step.inputs) > 2 else None,
            )
            for step in products
        ]

    def parameter(self, name: str) -> nn.Parameter | None:
        """The parameter of a tensor of the file; None if it has none."""
        key = self._keys.get(name)
        return None if key is None else self.values[key]


def rewritten(content: bytes, network: OnnxNetwork) -> bytes:
    """A file with the weights and biases that `network` has now.

    INT8 weights get new scales by output channel, and their biases the scales that follow; all else stays.

    Args:
        content: the file that `network` was made of.

    Raises:
        WeightsError: a weight that has changed is stored in a form that this function does not write.
    """
    onnx = _onnx()
    model = onnx.load_from_string(content)
    file = _File(model.graph)
    for node in model.graph.node:
        if node.op_type in _PRODUCTS:
            file.write(node, network)
    onnx.checker.check_model(model)
    done: bytes = model.SerializeToString()
    return done


class _File:
    """The stored tensors of a graph, while layers are written into it."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._onnx = _onnx()
        self._stored = {item.name: item for item in graph.initializer}
        self._makers = {node.output[0]: node for node in graph.node}
        self._uses = Counter(name for node in graph.node for name in node.input)

    def write(self, node: onnx.NodeProto, network: OnnxNetwork) -> None:
        """Write weight and bias of a product if one of them has changed."""
        names = [name for name in node.input[1:3] if name]
        found = [(name, network.parameter(name)) for name in names]
        new = {name: each.detach().cpu().numpy() for name, each in found if each is not None}
        if not any(not np.array_equal(values, self._floats(name)) for name, values in new.items()):
            return
        weight, *bias = names
        scale = self._write_weight(weight, new[weight]) if weight in new else None
        for name in bias:
            if name in new:
                self._write_bias(name, new[name], node.input[0], scale)

    def _write_weight(self, name: str, values: Array) -> Array | None:
        """Write a weight; returns the scales of its output channels, None for a weight in FP32."""
        if name in self._stored:
            self._put(name, values.astype(np.float32))
            return None
        levels, scales, zero = self._quantised(name)
        axis = next((item.i for item in self._makers[name].attribute if item.name == "axis"), 1)
        if self._array(levels).dtype != np.int8 or self._array(zero).any():
            raise WeightsError(f"the weights {name!r} are quantised in another form than INT8 around zero")
        others = tuple(each for each in range(values.ndim) if each != axis % values.ndim)
        largest = np.abs(values).max(axis=others, keepdims=True)
        if self._array(scales).size == 1:
            largest = np.full_like(largest, largest.max())
        scale = np.maximum(largest / 127, np.finfo(np.float32).tiny).astype(np.float32)
        self._put(levels, np.clip(np.round(values / scale), -127, 127).astype(np.int8))
        flat = scale.reshape(-1)
        self._put(scales, flat if self._array(scales).size > 1 else flat[0].reshape(self._array(scales).shape))
        return flat

    def _write_bias(self, name: str, values: Array, given: str, weight_scale: Array | None) -> None:
        if name in self._stored:
            self._put(name, values.astype(np.float32))
            return
        levels, scales, _ = self._quantised(name)
        maker = self._makers.get(given)
        if weight_scale is None or maker is None or maker.op_type != "DequantizeLinear":
            raise WeightsError(f"the bias {name!r} is quantised, and the scales that it follows are not known")
        scale = (self._array(maker.input[1]) * weight_scale).astype(np.float32)
        steps = np.round(values.astype(np.float64) / scale)
        held = np.iinfo(np.int32)
        self._put(levels, np.clip(steps, held.min, held.max).astype(np.int32))
        self._put(scales, scale.reshape(self._array(scales).shape) if scale.size == self._array(scales).size else scale)

    def _quantised(self, name: str) -> tuple[str, str, str]:
        """Names of the levels, scales and zero points of a quantised tensor, which belong to it only."""
        maker = self._makers.get(name)
        if maker is None or maker.op_type != "DequantizeLinear" or len(maker.input) != 3:
            raise WeightsError(f"the values {name!r} are stored in a form that cannot be written")
        if any(self._uses[each] > 1 for each in maker.input[:2]):
            raise WeightsError(f"the values {name!r} share their scale with others, so they cannot be written")
        levels, scales, zero = maker.input
        return levels, scales, zero

    def _floats(self, name: str) -> Array:
        """The values of a tensor."""
        if name in self._stored:
            return self._array(name)
        maker = self._makers[name]
        known = {each: torch.from_numpy(self._array(each).copy()) for each in maker.input}
        attributes = {item.name: self._onnx.helper.get_attribute_value(item) for item in maker.attribute}
        read: Array = _Step(maker.op_type, attributes, tuple(maker.input), name)(known).float().numpy()
        return read

    def _array(self, name: str) -> Array:
        values: Array = self._onnx.numpy_helper.to_array(self._stored[name])
        return values

    def _put(self, name: str, values: Array) -> None:
        if values.shape != self._array(name).shape:
            raise WeightsError(f"{name!r} has the shape {self._array(name).shape}, and {values.shape} came")
        self._stored[name].CopyFrom(self._onnx.numpy_helper.from_array(np.ascontiguousarray(values), name))


def _onnx() -> Any:
    """The package, which workers of other runs do without.

    Raises:
        MissingExtra: it is not installed.
    """
    with training_extra("training the network of a file", "learn"):
        import onnx
        import onnx.numpy_helper
    return onnx


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
        raise WeightsError("only convolutions over two dimensions with explicit padding can be differentiated")
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


def _reshape(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Tensor:
    values, wanted = inputs
    kept = attributes.get("allowzero", 0)
    sizes = [values.shape[at] if not size and not kept else size for at, size in enumerate(wanted.tolist())]
    return values.reshape(sizes)


_OPERATORS: dict[str, Callable[[Sequence[Any], Mapping[str, Any]], Tensor]] = {
    "Add": lambda inputs, _: inputs[0] + inputs[1],
    "Cast": lambda inputs, _: inputs[0],  # from UINT8 images to floats, which they are here
    "Clip": lambda inputs, _: torch.clamp(*inputs),
    "Conv": _convolve,
    "DequantizeLinear": _dequantize,
    "Div": lambda inputs, _: inputs[0] / inputs[1],
    "Flatten": lambda inputs, attributes: torch.flatten(inputs[0], attributes.get("axis", 1)),
    "Gemm": _multiply,
    "GlobalAveragePool": lambda inputs, _: torch.mean(inputs[0], dim=(2, 3), keepdim=True),
    "Identity": lambda inputs, _: inputs[0],
    "MatMul": _multiply,
    "Mul": lambda inputs, _: inputs[0] * inputs[1],
    "QuantizeLinear": _quantize,
    "ReduceMean": _mean,
    "Relu": lambda inputs, _: torch.relu(inputs[0]),
    "Reshape": _reshape,
    "Sub": lambda inputs, _: inputs[0] - inputs[1],
    "Tanh": lambda inputs, _: torch.tanh(inputs[0]),
    "Transpose": lambda inputs, attributes: inputs[0].permute(*attributes["perm"]),
}
