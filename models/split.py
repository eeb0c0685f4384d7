"""Cutting a stored network after its first convolution, without any ONNX library.

The exporter (`models.export`) puts the head's nodes first in the graph, calls the tensor at the cut `features`, and
notes in the model's metadata how many nodes the head has. So head and tail are the stored file with one run of nodes
left out, and every network's weights are stored once. Only the protobuf wire format is needed for that
(https://protobuf.dev/programming-guides/encoding/); field numbers are those of `onnx.proto` (IR version 3 and later).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from tierkit.errors import WeightsError

__all__ = ["FEATURES", "HEAD_NODES_KEY", "Part", "extract_part"]

Part = Literal["whole", "head", "tail"]

FEATURES = "features"
HEAD_NODES_KEY = "terrace.head_nodes"

_MODEL_GRAPH, _MODEL_METADATA = 7, 14
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT, _GRAPH_VALUE = 1, 5, 11, 12, 13
_NODE_INPUT = 1
_TENSOR_NAME = 8
_VALUE_NAME = 1

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_Field = tuple[int, memoryview, memoryview]
"""Field number, payload of a length-delimited field (else empty), and the field's whole encoding."""


def extract_part(model: bytes, part: Part) -> bytes:
    """The ONNX file of the whole network, of its head (`images` to `features`) or of its tail (`features` to
    `logits`).

    Raises:
        WeightsError: `model` is no ONNX file that the exporter wrote.
    """
    if part == "whole":
        return model
    try:
        fields = list(_fields(memoryview(model)))
        head_nodes = _head_nodes(fields)
        return b"".join(
            _encode(number, _cut_graph(payload, part, head_nodes)) if number == _MODEL_GRAPH else whole
            for number, payload, whole in fields
        )
    except (IndexError, ValueError, UnicodeDecodeError) as error:
        raise WeightsError(f"cannot cut the network into head and tail: {error}") from error


def _head_nodes(fields: Iterable[_Field]) -> int:
    for number, payload, _ in fields:
        if number == _MODEL_METADATA:
            pair = {key: bytes(value).decode() for key, value, _ in _fields(payload)}
            if pair.get(_ENTRY_KEY) == HEAD_NODES_KEY:
                return int(pair[_ENTRY_VALUE])
    raise ValueError(f"the file has no {HEAD_NODES_KEY!r} in its metadata")


def _cut_graph(graph: memoryview, part: Part, head_nodes: int) -> bytes:
    fields = list(_fields(graph))
    nodes = [(payload, whole) for number, payload, whole in fields if number == _GRAPH_NODE]
    kept = nodes[:head_nodes] if part == "head" else nodes[head_nodes:]
    used = {bytes(name) for payload, _ in kept for key, name, _ in _fields(payload) if key == _NODE_INPUT}
    cut = [payload for number, payload, _ in fields if number == _GRAPH_VALUE and _name(payload) == FEATURES]
    if not cut or not kept:
        raise ValueError(f"the graph has no tensor {FEATURES!r} between two groups of nodes")
    replaced = _GRAPH_OUTPUT if part == "head" else _GRAPH_INPUT
    out = [bytes(whole) for _, whole in kept]
    for number, payload, whole in fields:
        if number in (_GRAPH_NODE, _GRAPH_VALUE, replaced):
            continue
        # ONNX Runtime warns about weights that no node uses, and would keep them in memory.
        if number == _GRAPH_INITIALIZER and _name(payload, _TENSOR_NAME).encode() not in used:
            continue
        out.append(bytes(whole))
    out.append(_encode(replaced, bytes(cut[0])))
    return b"".join(out)


def _name(message: memoryview, field: int = _VALUE_NAME) -> str:
    return next((bytes(payload).decode() for number, payload, _ in _fields(message) if number == field), "")


def _fields(message: memoryview) -> Iterator[_Field]:
    at = 0
    while at < len(message):
        start = at
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        payload = message[0:0]
        if kind == _VARINT:
            _, at = _varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
        elif kind == _BYTES:
            length, at = _varint(message, at)
            payload = message[at : at + length]
            at += length
        else:
            raise ValueError(f"protobuf wire type {kind} at byte {start}")
        if at > len(message):
            raise ValueError("the file ends in the middle of a field")
        yield number, payload, message[start:at]


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("an overlong number")


def _encode(number: int, payload: bytes) -> bytes:
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(payload)) + payload


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
