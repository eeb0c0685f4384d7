"""The nodes, weights and intermediate tensors of a stored network, without any ONNX library.

Shapes come from ONNX Runtime, which runs one blank picture and gives every intermediate tensor: so operators that shape
inference does not know have shapes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from models import protobuf
from models.protobuf import encode, encode_number, fields, first, numbers
from models.session import open_session, plain
from tierkit.errors import WeightsError

__all__ = ["Graph", "Operator", "Shape", "TensorSize", "read_graph", "value_info"]

Shape = tuple[int, ...]

_ELEMENTS = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10,
    "float64": 11, "uint32": 12, "uint64": 13,
}  # fmt: skip
"""Numbers of the types in `onnx.proto`, by their names in numpy."""
_BYTES = {number: np.dtype(name).itemsize for name, number in _ELEMENTS.items()} | {16: 2}
_INPUTS = {"tensor(uint8)": np.uint8, "tensor(float)": np.float32, "tensor(float16)": np.float16}


class TensorSize(NamedTuple):
    """Shape of a tensor for one picture, and its size."""

    shape: Shape
    size_bytes: int
    element: int = 0
    """`TensorProto.DataType`."""


class Operator(NamedTuple):
    """One operator."""

    kind: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    numbers: Mapping[str, int]
    """Attributes that are one number."""
    has_graph: bool
    """True if it runs graphs inside."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A network with the tensors that one picture makes."""

    nodes: tuple[Operator, ...]
    """Each after those whose outputs it takes."""
    weights: Mapping[str, TensorSize]
    """Stored tensors by name."""
    tensors: Mapping[str, TensorSize]
    """Input and outputs of all nodes by name, as one picture makes them."""
    input: str
    output: str
    computed: frozenset[str]
    """Tensors that depend on the picture."""

    def shape(self, name: str) -> Shape:
        """Shape of a weight or of another tensor; KeyError if it is unknown."""
        return (self.weights.get(name) or self.tensors[name]).shape


def read_graph(model: bytes, source: str) -> Graph:
    """Read a network, and run it once.

    Args:
        model: An ONNX file.
        source: names the network in messages.

    Raises:
        WeightsError: `model` is not an ONNX file with one input and one output, or it does not run with all its tensors
            as outputs.
        MissingExtra: ONNX Runtime is not installed.
    """
    try:
        whole = [(number, value, field) for number, value, field in fields(memoryview(model))]
        graph = next(value for number, value, _ in whole if number == protobuf.MODEL_GRAPH)
        parts = list(fields(graph))
        nodes = tuple(_node(value) for number, value, _ in parts if number == protobuf.GRAPH_NODE)
        weights = dict(_weight(value) for number, value, _ in parts if number == protobuf.GRAPH_INITIALIZER)
        outputs = [_text(value, protobuf.VALUE_NAME) for number, value, _ in parts if number == protobuf.GRAPH_OUTPUT]
    except (IndexError, ValueError, StopIteration) as error:
        raise WeightsError(f"{source} is not an ONNX file: {error}") from error
    made = list(dict.fromkeys(name for node in nodes for name in node.outputs if name and name not in outputs))
    added = [encode(protobuf.GRAPH_OUTPUT, encode(protobuf.VALUE_NAME, name.encode())) for name in made]
    shown = b"".join(
        encode(number, value, *added) if number == protobuf.MODEL_GRAPH else field for number, value, field in whole
    )
    session = open_session(shown, source)
    given = session.get_inputs()
    if len(given) != 1 or len(outputs) != 1 or given[0].type not in _INPUTS:
        raise WeightsError(f"{source} is not a network for pictures with one input and one output")
    blank = np.zeros([size if isinstance(size, int) else 1 for size in given[0].shape], _INPUTS[given[0].type])
    try:
        values = session.run([*outputs, *made], {given[0].name: blank})
    except Exception as error:  # the runtime's own classes share no base but Exception
        raise WeightsError(f"{source} cannot be run: {plain(str(error))}") from error
    tensors = {name: _tensor(value) for name, value in zip([*outputs, *made], values, strict=True)}
    computed = {given[0].name}
    for node in nodes:
        if node.has_graph or not computed.isdisjoint(node.inputs):
            computed.update(name for name in node.outputs if name)
    return Graph(
        nodes=nodes,
        weights=weights,
        tensors={given[0].name: _tensor(blank)} | tensors,
        input=given[0].name,
        output=outputs[0],
        computed=frozenset(computed),
    )


def value_info(name: str, tensor: TensorSize) -> bytes:
    """Name, type and shape of a tensor for any number of pictures, an encoded `ValueInfoProto`."""
    axes = [encode(protobuf.AXIS_NAME, b"n"), *(encode_number(protobuf.AXIS_LENGTH, size) for size in tensor.shape[1:])]
    shape = encode(protobuf.TYPE_SHAPE, *(encode(protobuf.SHAPE_AXIS, axis) for axis in axes))
    kind = encode(protobuf.TYPE_TENSOR, encode_number(protobuf.TYPE_ELEMENT, tensor.element), shape)
    return encode(protobuf.VALUE_NAME, name.encode()) + encode(protobuf.VALUE_TYPE, kind)


def _node(node: memoryview) -> Operator:
    attributes = [value for number, value, _ in fields(node) if number == protobuf.NODE_ATTRIBUTE]
    counts: dict[str, int] = {}
    for attribute in attributes:
        found = [value for number, value, _ in fields(attribute) if number == protobuf.ATTRIBUTE_NUMBER]
        if found:
            counts[_text(attribute, protobuf.ATTRIBUTE_NAME)] = numbers(found[0])[0]
    graphs = (protobuf.ATTRIBUTE_GRAPH, protobuf.ATTRIBUTE_GRAPHS)
    return Operator(
        kind=_text(node, protobuf.NODE_KIND),
        domain=_text(node, protobuf.NODE_DOMAIN),
        inputs=_texts(node, protobuf.NODE_INPUT),
        outputs=_texts(node, protobuf.NODE_OUTPUT),
        numbers=counts,
        has_graph=any(number in graphs for attribute in attributes for number, _, _ in fields(attribute)),
    )


def _weight(tensor: memoryview) -> tuple[str, TensorSize]:
    shape: list[int] = []
    element = 0
    for number, value, _ in fields(tensor):
        if number == protobuf.TENSOR_DIMENSION:
            shape += numbers(value)
        elif number == protobuf.TENSOR_ELEMENT:
            (element,) = numbers(value)
    size = prod(shape) * _BYTES.get(element, 1)
    return _text(tensor, protobuf.TENSOR_NAME), TensorSize(tuple(shape), size, element)


def _tensor(value: object) -> TensorSize:
    if not isinstance(value, np.ndarray):  # a sequence or a map
        return TensorSize((), 0)
    return TensorSize(value.shape, value.nbytes, _ELEMENTS.get(value.dtype.name, 0))


def _text(message: memoryview, number: int) -> str:
    return first(message, number).decode()


def _texts(message: memoryview, wanted: int) -> tuple[str, ...]:
    return tuple(bytes(value).decode() for number, value, _ in fields(message) if number == wanted)
