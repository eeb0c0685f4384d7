"""ONNX files without any ONNX library: the protobuf wire format, and the fields that are looked at.

The format is described at https://protobuf.dev/programming-guides/encoding/, and the numbers of fields are in
`onnx.proto` (IR version 3 and later).
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Field", "encode", "encode_number", "fields", "first", "numbers"]

MODEL_GRAPH, MODEL_METADATA = 7, 14
ENTRY_KEY, ENTRY_VALUE = 1, 2
GRAPH_NODE, GRAPH_INITIALIZER, GRAPH_INPUT, GRAPH_OUTPUT, GRAPH_VALUE = 1, 5, 11, 12, 13
NODE_INPUT, NODE_OUTPUT, NODE_KIND, NODE_ATTRIBUTE, NODE_DOMAIN = 1, 2, 4, 5, 7
ATTRIBUTE_NAME, ATTRIBUTE_NUMBER, ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS = 1, 3, 6, 11
TENSOR_DIMENSION, TENSOR_ELEMENT, TENSOR_NAME = 1, 2, 8
VALUE_NAME, VALUE_TYPE = 1, 2
TYPE_TENSOR = 1
TYPE_ELEMENT, TYPE_SHAPE = 1, 2
SHAPE_AXIS = 1
AXIS_LENGTH, AXIS_NAME = 1, 2

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Field = tuple[int, memoryview, memoryview]
"""Field number, the encoding of the field's value, and the whole encoding of the field."""


def fields(message: memoryview) -> Iterator[Field]:
    """The fields of a message in the order of the file, without a copy.

    Raises:
        IndexError, ValueError: `message` is not a protobuf message.
    """
    at = 0
    while at < len(message):
        start = at
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        value = at
        if kind == _VARINT:
            _, at = _varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
        elif kind == _BYTES:
            length, value = _varint(message, at)
            at = value + length
        else:
            raise ValueError(f"protobuf wire type {kind} at byte {start}")
        if at > len(message):
            raise ValueError("the file ends in the middle of a field")
        yield number, message[value:at], message[start:at]


def first(message: memoryview, number: int) -> bytes:
    """The value of the first field with this number; empty if there is none.

    Raises:
        IndexError, ValueError: the message is damaged. See `fields`.
    """
    return next((bytes(value) for found, value, _ in fields(message) if found == number), b"")


def numbers(value: memoryview) -> list[int]:
    """The numbers in a field's value: one, or several that are packed.

    Raises:
        IndexError, ValueError: see `fields`.
    """
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found


def encode_number(number: int, value: int) -> bytes:
    """A field that holds a number, 0 or more."""
    return _encode_varint(number << 3 | _VARINT) + _encode_varint(value)


def encode(number: int, *pieces: bytes | memoryview) -> bytes:
    """A field that holds text, bytes or a message, which is given in any number of pieces."""
    length = sum(map(len, pieces))
    return b"".join([_encode_varint(number << 3 | _BYTES), _encode_varint(length), *pieces])


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


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
