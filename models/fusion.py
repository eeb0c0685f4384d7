"""Average pooling in a form that ONNX Runtime computes on integers.

Exporters write the pooling at the end of a network as a mean over height and width, and ONNX Runtime has no mean of
quantised values: it dequantises them, averages in FP32 and quantises the result. `GlobalAveragePool` is the same for a
tensor `[n, channels, h, w]`, and that it computes on the quantised values where they lie, if a dequantisation stands
before and a quantisation after each node. So this

    DequantizeLinear, ReduceMean, QuantizeLinear, DequantizeLinear, Gemm

becomes, with `ReduceMean` alone replaced and the scale and zero point of the mean used twice,

    DequantizeLinear, GlobalAveragePool, QuantizeLinear, DequantizeLinear, Flatten,
    QuantizeLinear, DequantizeLinear, Gemm

The file stays as it is; what is changed is what ONNX Runtime is given.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable
from itertools import count, permutations

from models import wire
from models.wire import encode, fields, first

__all__ = ["fuse_pooling"]

_FLOAT, _UINT8, _INT8, _INT64 = b"\x01", b"\x02", b"\x03", b"\x07"
"""Types of tensors, as they are encoded."""
_ZERO, _TWO = b"\x00", b"\x02"
_HEIGHT_AND_WIDTH = {struct.pack("<2q", *axes) for pair in ((2, 3), (-2, -1)) for axes in permutations(pair)}
"""As axes of `[n, channels, h, w]`."""


def fuse_pooling(model: bytes) -> bytes:
    """The ONNX file with the mean over height and width as `GlobalAveragePool`, where a quantised network has one.

    Both average the same numbers and round once, to the same 8 bits; only an average that lies within the error of FP32
    of the middle between two steps could come out one step apart. `model` itself comes back if it has no such mean, if
    anything about it is unusual, or if it cannot be read: what is wrong then is for ONNX Runtime to say.
    """
    try:
        parts = list(fields(memoryview(model)))
        (graph,) = [_Graph(value) for number, value, _ in parts if number == wire.MODEL_GRAPH]
        quantizers = graph.quantizers_of_means()
    except (IndexError, ValueError):
        return model
    if not quantizers:
        return model
    # It stands nowhere in the file, so no name begins with it.
    prefix = next(name for number in count() if (name := b"pooled_%d_" % number) not in model)
    pooled = encode(wire.MODEL_GRAPH, *graph.with_pools(quantizers, prefix))
    return b"".join(pooled if number == wire.MODEL_GRAPH else whole for number, _, whole in parts)


class _Node:
    def __init__(self, message: memoryview) -> None:
        values = _values(message)
        self.operator = b"".join(values[wire.NODE_OPERATOR])
        self.inputs = list(map(bytes, values[wire.NODE_INPUT]))
        self.outputs = list(map(bytes, values[wire.NODE_OUTPUT]))
        attributes = map(_values, values[wire.NODE_ATTRIBUTE])
        self.attributes = {b"".join(attribute[wire.ATTRIBUTE_NAME]): attribute for attribute in attributes}
        self.is_standard = b"".join(values[wire.NODE_DOMAIN]) in (b"", b"ai.onnx")

    def is_a(self, operator: bytes) -> bool:
        return self.is_standard and self.operator == operator

    @property
    def has_subgraph(self) -> bool:
        """Whether it is a branch or a loop, which may use tensors of the graph without having them as inputs."""
        subgraphs = (wire.ATTRIBUTE_GRAPH, wire.ATTRIBUTE_GRAPHS)
        return any(attribute[kind] for attribute in self.attributes.values() for kind in subgraphs)


class _Graph:
    def __init__(self, message: memoryview) -> None:
        self._parts = list(fields(message))
        self._nodes = {at: _Node(value) for at, (kind, value, _) in enumerate(self._parts) if kind == wire.GRAPH_NODE}
        self._producers = {name: node for node in self._nodes.values() for name in node.outputs}
        self._outputs = {first(value, wire.VALUE_NAME) for kind, value, _ in self._parts if kind == wire.GRAPH_OUTPUT}
        self._constants = {
            first(value, wire.TENSOR_NAME): value for kind, value, _ in self._parts if kind == wire.GRAPH_INITIALIZER
        }
        for kind, value, _ in self._parts:
            if kind == wire.GRAPH_INPUT:  # of the same name: a value that the caller may replace
                self._constants.pop(first(value, wire.VALUE_NAME), None)

    def quantizers_of_means(self) -> dict[int, _Node]:
        """The node behind each mean that can be replaced, by the mean's place in the graph."""
        if any(node.has_subgraph for node in self._nodes.values()):
            return {}
        found = ((at, self._quantizer_of(node)) for at, node in self._nodes.items())
        return {at: quantizer for at, quantizer in found if quantizer is not None}

    def with_pools(self, quantizers: dict[int, _Node], prefix: bytes) -> list[bytes | memoryview]:
        """The fields of the graph with the means at these places replaced; what is new has names with `prefix`."""
        pools = {at: _pool(self._nodes[at], quantizer, prefix) for at, quantizer in quantizers.items()}
        used = {name for at, node in self._nodes.items() if at not in pools for name in node.inputs}
        # ONNX Runtime warns about an initializer that no node uses.
        unused = {self._nodes[at].inputs[1] for at in pools} - used - self._outputs
        return [
            pools.get(at, whole)
            for at, (kind, value, whole) in enumerate(self._parts)
            if kind != wire.GRAPH_INITIALIZER or first(value, wire.TENSOR_NAME) not in unused
        ]

    def _quantizer_of(self, mean: _Node) -> _Node | None:
        if not (mean.is_a(b"ReduceMean") and self._leaves_out_height_and_width(mean)):
            return None
        before, after = self._producers.get(mean.inputs[0]), self._users(mean.outputs[0])
        if before is None or not self._is_step(before, b"DequantizeLinear"):
            return None
        if mean.outputs[0] in self._outputs or len(after) != 1 or not self._is_step(after[0], b"QuantizeLinear"):
            return None
        return after[0] if self._feeds_gemm(after[0]) else None

    def _leaves_out_height_and_width(self, mean: _Node) -> bool:
        if len(mean.inputs) != 2 or not mean.attributes.keys() <= {b"keepdims", b"noop_with_empty_axes"}:
            return False
        keeps = mean.attributes[b"keepdims"][wire.ATTRIBUTE_INTEGER] if b"keepdims" in mean.attributes else []
        axes = self._constant(mean.inputs[1])
        return (
            keeps == [_ZERO]
            and axes[wire.TENSOR_TYPE] == [_INT64]
            and axes[wire.TENSOR_DIMENSION] == [_TWO]
            and b"".join(axes[wire.TENSOR_BYTES]) in _HEIGHT_AND_WIDTH
        )

    def _is_step(self, node: _Node, operator: bytes) -> bool:
        """Whether it maps FP32 to 8 bits or back, with one scale and one zero point for the whole tensor."""
        if not node.is_a(operator) or len(node.inputs) != 3 or node.attributes:
            return False
        scale, zero_point = map(self._constant, node.inputs[1:])
        return (
            not (scale[wire.TENSOR_DIMENSION] or zero_point[wire.TENSOR_DIMENSION])
            and scale[wire.TENSOR_TYPE] == [_FLOAT]
            and zero_point[wire.TENSOR_TYPE] in ([_UINT8], [_INT8])
        )

    def _feeds_gemm(self, quantizer: _Node) -> bool:
        """Whether what is quantised goes into a `Gemm`. That takes matrices alone: a mean over two axes, which makes a
        matrix, was one of four axes."""
        return any(
            user.is_a(b"Gemm") and user.inputs[0] == back.outputs[0]
            for back in self._users(quantizer.outputs[0])
            if self._is_step(back, b"DequantizeLinear") and back.inputs[1:] == quantizer.inputs[1:]
            for user in self._users(back.outputs[0])
        )

    def _users(self, name: bytes) -> list[_Node]:
        return [node for node in self._nodes.values() if name in node.inputs]

    def _constant(self, name: bytes) -> dict[int, list[memoryview]]:
        return _values(self._constants.get(name, memoryview(b"")))


def _pool(mean: _Node, quantizer: _Node, prefix: bytes) -> bytes:
    step = quantizer.inputs[1:]
    encoded, source = b"", mean.inputs[0]
    for operator in (b"GlobalAveragePool", b"QuantizeLinear", b"DequantizeLinear", b"Flatten"):
        name = prefix + operator + b"_" + mean.outputs[0]
        target = mean.outputs[0] if operator == b"Flatten" else name
        inputs = [source, *step] if operator.endswith(b"Linear") else [source]
        encoded += encode(wire.GRAPH_NODE, *_node(operator, inputs, target, name))
        source = target
    return encoded


def _node(operator: bytes, inputs: Iterable[bytes], output: bytes, name: bytes) -> list[bytes]:
    return [
        *(encode(wire.NODE_INPUT, source) for source in inputs),
        encode(wire.NODE_OUTPUT, output),
        encode(wire.NODE_NAME, name),
        encode(wire.NODE_OPERATOR, operator),
    ]


def _values(message: memoryview) -> dict[int, list[memoryview]]:
    """The values of each field, by its number; none for a field that is not there."""
    values = defaultdict(list)
    for number, value, _ in fields(message):
        values[number].append(value)
    return values
