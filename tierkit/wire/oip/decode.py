"""Decodes messages from bytes. Nothing that a peer writes is believed before it is compared with the received bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from tierkit.errors import MalformedMessage, TooLarge
from tierkit.tensors import Array, TensorSpec
from tierkit.wire.oip.datatypes import BYTES, dtype_of
from tierkit.wire.oip.encode import BINARY_HEADER
from tierkit.wire.oip.messages import InferRequest, InferResponse, Parameters, RequestedOutput, Tensor

__all__ = ["Limits", "decode_request", "decode_response", "parse_header_length"]

_MAX_LISTS = 2**15
"""Lists and objects in a JSON part: reading one of them takes as long as reading several numbers."""
_MAX_NUMBERS = 200_000
"""Numbers in a JSON part, 65 images of 32 x 32 pixels: short ones take longer for their length."""
_MAX_STRINGS = 2**16
"""Elements of a BYTES tensor, each of which becomes a Python object; class names are the only strings here."""

_UNSUPPORTED = {"sequence_": "sequences", "shared_memory_": "tensors in shared memory"}
"""Features that are not supported, by the beginning of a parameter's name. Ignoring such a parameter would give a wrong
answer."""

_NESTED = re.compile(rb"\s*\[\s*\[")

_MAX_REMEMBERED = 256
"""JSON parts that are remembered: a fleet sends few different ones, again and again."""
_MAX_REMEMBERED_BYTES = 1024
"""Longest JSON part that is remembered."""

T = TypeVar("T")
Plain = dict[str, str | int | float | bool]
Body = bytes | bytearray | memoryview
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0)]
Dimension = Annotated[int, Meta(gt=0, le=2**63 - 1)]


class _OutputHead(Struct):
    name: Name
    parameters: Plain | None = None


class _TensorHead(Struct):
    name: Name
    shape: Annotated[tuple[Dimension, ...], Meta(min_length=1, max_length=16)]
    datatype: str
    parameters: Plain | None = None
    data: Raw | UnsetType = UNSET


class _RequestHead(Struct):
    """The JSON part of a request."""

    inputs: Annotated[list[_TensorHead], Meta(min_length=1)]
    outputs: list[_OutputHead] = []
    id: str = ""
    parameters: Plain | None = None


class _ResponseHead(Struct):
    """The JSON part of a response."""

    outputs: Annotated[list[_TensorHead], Meta(min_length=1)]
    model_name: str = ""
    model_version: str = ""
    id: str = ""
    parameters: Plain | None = None


class _Part(NamedTuple):
    """The description of a tensor in the JSON part."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    parameters: Parameters
    size: int | None
    """Its bytes after the JSON part; None if its numbers are in it."""
    data: bytes | Raw


class _Request(NamedTuple):
    """A JSON part of a request that has been found right."""

    inputs: tuple[_Part, ...]
    outputs: tuple[RequestedOutput, ...]
    id: str
    parameters: Parameters
    binary_output: bool
    notes: dict[Any, Any]


class _Response(NamedTuple):
    """The same of a response."""

    outputs: tuple[_Part, ...]
    model_name: str
    model_version: str
    id: str
    parameters: Parameters


_REQUEST_HEAD = msgspec.json.Decoder(_RequestHead)
_RESPONSE_HEAD = msgspec.json.Decoder(_ResponseHead)


class Limits(Struct, frozen=True, kw_only=True):
    """Most that a message may cost its reader."""

    max_body_bytes: int = 64 * 2**20
    max_json_bytes: int = 640 * 2**10
    """Limit of the JSON part only, about 50 images of 32 x 32 pixels. Reading JSON delays everything else in the
    process, even in a thread, and parsed JSON takes up to about thirty times its length."""
    max_tensors: int = 64


_DEFAULT_LIMITS = Limits()


def parse_header_length(value: str | None) -> int | None:
    """The value of the HTTP header `BINARY_HEADER`; None (no such header) means that the whole body is JSON.

    Raises:
        MalformedMessage: not a plain non-negative decimal number.
    """
    if value is None:
        return None
    # isdigit alone accepts other scripts' digits; int() alone accepts signs, blanks and underscores.
    if not (value.isascii() and value.isdigit() and len(value) <= 19):
        raise MalformedMessage(f"{BINARY_HEADER} must be a number of bytes, not {value[:32]!r}")
    return int(value)


def decode_request(
    body: Body, header_length: int | None, *, limits: Limits = _DEFAULT_LIMITS, raw_input: TensorSpec | None = None
) -> InferRequest:
    """Read a request.

    Args:
        body: the whole HTTP body. Tensors of the result view it, so it must not change afterwards.
        header_length: `parse_header_length` of the HTTP header.
        limits: bounds on size.
        raw_input: the model's only input. With it, a header length of 0 means that the body is just this tensor's
            bytes, in as many rows as they fill; all outputs are then returned as binary.

    Raises:
        TooLarge: beyond `limits`.
        MalformedMessage: anything else that is wrong with it.
    """
    if header_length == 0 and raw_input is not None:
        _check_size(body, limits)
        return InferRequest(inputs=(Tensor(raw_input.name, _rows(body, raw_input)),))
    text, payload = _split(body, header_length, limits)
    said = (_request if len(text) > _MAX_REMEMBERED_BYTES else _remembered_request)(text, limits)
    return InferRequest(_tensors(said[0], payload), *said[1:])


def decode_response(body: Body, header_length: int | None, *, limits: Limits = _DEFAULT_LIMITS) -> InferResponse:
    """Read a response; arguments and errors as for `decode_request`."""
    text, payload = _split(body, header_length, limits)
    said = (_response if len(text) > _MAX_REMEMBERED_BYTES else _remembered_response)(text, limits)
    return InferResponse(said.model_name, said.model_version, _tensors(said.outputs, payload), said.id, said.parameters)


# --- the JSON part ---


def _request(text: bytes, limits: Limits) -> _Request:
    _check_counts(text)
    head = _read(_REQUEST_HEAD, text)
    parameters = _checked(head.parameters, "the request")
    binary_output = _take(parameters, "binary_data_output", bool, False)
    _check_names(head.outputs, "outputs", limits)
    return _Request(
        inputs=_parts(head.inputs, "inputs", limits),
        outputs=tuple(_requested_output(output) for output in head.outputs),
        id=head.id,
        parameters=MappingProxyType(parameters),
        binary_output=binary_output,
        notes={},
    )


def _response(text: bytes, limits: Limits) -> _Response:
    _check_counts(text)
    head = _read(_RESPONSE_HEAD, text)
    return _Response(
        outputs=_parts(head.outputs, "outputs", limits),
        model_name=head.model_name,
        model_version=head.model_version,
        id=head.id,
        parameters=MappingProxyType(_checked(head.parameters, "the response")),
    )


_remembered_request = lru_cache(_MAX_REMEMBERED)(_request)
_remembered_response = lru_cache(_MAX_REMEMBERED)(_response)


def _check_size(body: Body, limits: Limits) -> None:
    if len(body) > limits.max_body_bytes:
        raise TooLarge(f"a body of {len(body)} bytes; at most {limits.max_body_bytes} are accepted")


def _split(body: Body, header_length: int | None, limits: Limits) -> tuple[bytes, memoryview]:
    """The JSON part and what follows it."""
    _check_size(body, limits)
    length = len(body) if header_length is None else header_length
    if not 0 <= length <= len(body):
        raise MalformedMessage(f"{BINARY_HEADER} is {length}, but the body has {len(body)} bytes")
    if length > limits.max_json_bytes:
        raise TooLarge(f"{length} bytes of JSON; at most {limits.max_json_bytes} are accepted: send tensors as binary")
    view = memoryview(body)
    return bytes(view[:length]), view[length:]


def _check_counts(text: bytes) -> None:
    if len(text) > _MAX_LISTS and text.count(b"[") + text.count(b"{") > _MAX_LISTS:
        raise TooLarge(f"more than {_MAX_LISTS} lists and objects in the JSON part: send tensors flat or as binary")
    if text.count(b",") > _MAX_NUMBERS:
        raise TooLarge(f"more than {_MAX_NUMBERS} numbers in the JSON part: send tensors as binary")


def _read(decoder: msgspec.json.Decoder[T], text: bytes | Raw) -> T:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as exc:
        raise MalformedMessage(f"the JSON part: {exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise MalformedMessage(
            f"the JSON part cannot be read: {exc}; where tensors follow the JSON, {BINARY_HEADER} must be its length"
        ) from exc
    except RecursionError as exc:
        raise MalformedMessage("the JSON part cannot be read: its lists or objects are nested too deeply") from exc


def _checked(parameters: Plain | None, what: str) -> Plain:
    for name, value in (parameters or {}).items():
        for beginning, feature in _UNSUPPORTED.items():
            if value and name.startswith(beginning):
                raise MalformedMessage(f"{what} has the parameter {name[:64]!r}: {feature} are not supported")
    return parameters or {}


def _take(parameters: Plain, name: str, kind: Any, default: Any) -> Any:
    """Remove a parameter that the protocol defines."""
    try:
        return msgspec.convert(parameters.pop(name, default), kind)
    except msgspec.ValidationError as exc:
        raise MalformedMessage(f"the parameter {name}: {exc}") from exc


def _check_names(heads: Sequence[_TensorHead | _OutputHead], key: str, limits: Limits) -> None:
    if len(heads) > limits.max_tensors:
        raise TooLarge(f"{len(heads)} {key}; at most {limits.max_tensors} are accepted")
    names = [head.name for head in heads]
    if twice := {name for name in names if names.count(name) > 1}:
        raise MalformedMessage(f"{min(twice)!r} stands twice among the {key}")


def _requested_output(head: _OutputHead) -> RequestedOutput:
    parameters = _checked(head.parameters, f"output {head.name!r}")
    return RequestedOutput(
        head.name,
        binary=_take(parameters, "binary_data", bool | None, None),
        classification=_take(parameters, "classification", Count, 0),
        parameters=MappingProxyType(parameters),
    )


def _parts(heads: Sequence[_TensorHead], key: str, limits: Limits) -> tuple[_Part, ...]:
    _check_names(heads, key, limits)
    parts = []
    for head in heads:
        parameters = _checked(head.parameters, f"tensor {head.name!r}")
        size = _take(parameters, "binary_data_size", Count | None, None)
        if (size is None) == (head.data is UNSET):
            raise MalformedMessage(f"tensor {head.name!r} needs either 'data' or a binary_data_size")
        data = head.data if isinstance(head.data, Raw) else b""
        parts.append(_Part(head.name, head.shape, head.datatype, MappingProxyType(parameters), size, data))
    return tuple(parts)


# --- tensors ---


def _tensors(parts: Sequence[_Part], payload: memoryview) -> tuple[Tensor, ...]:
    tensors = []
    start = 0
    for part in parts:
        if part.size is None:
            data = _from_json(part.data, part.shape, part.datatype, part.name)
        else:
            end = start + part.size
            if end > len(payload):
                raise MalformedMessage(
                    f"tensor {part.name!r} claims {part.size} bytes where {len(payload) - start} follow the JSON part"
                )
            data = _from_bytes(payload[start:end], part.shape, part.datatype, part.name)
            start = end
        tensors.append(Tensor(part.name, data, part.parameters))
    if start != len(payload):
        raise MalformedMessage(f"{len(payload) - start} bytes follow the last tensor")
    return tuple(tensors)


def _from_bytes(view: memoryview, shape: tuple[int, ...], datatype: str, name: str) -> Array:
    """The binary tensor `name`; a view of `view` where its type allows that.

    Raises:
        TooLarge: too many strings.
        MalformedMessage: `view` is not a tensor of this shape and datatype.
    """
    dtype = dtype_of(datatype)
    # Python's own integers: a product of lies cannot overflow, and nothing is allocated before it is checked.
    count = math.prod(shape)
    if datatype == BYTES:
        return _string_array(_split_strings(view, count, name), shape)
    if count * dtype.itemsize != len(view):
        raise MalformedMessage(
            f"tensor {name!r}: {datatype} {list(shape)} takes {count * dtype.itemsize} bytes, {len(view)} are given"
        )
    array: Array = np.frombuffer(view, dtype)
    if datatype == "BOOL" and array.view(np.uint8).max() > 1:
        raise MalformedMessage(f"tensor {name!r}: a BOOL is one byte, 0 or 1")
    if not array.flags.aligned:
        array = array.copy()
    return array.reshape(shape)


def _rows(body: Body, spec: TensorSpec) -> Array:
    """The body as rows of a tensor whose first axis is free."""
    row_bytes = math.prod(spec.shape[1:]) * dtype_of(spec.datatype).itemsize
    if spec.datatype == BYTES or spec.shape[0] != -1 or -1 in spec.shape[1:]:
        raise MalformedMessage(f"input {spec.name!r} cannot be sent raw: its shape does not follow from its length")
    rows, rest = divmod(len(body), row_bytes)
    if rest or not rows:
        raise MalformedMessage(f"a raw body of {len(body)} bytes is not a whole number of rows of {row_bytes} bytes")
    return _from_bytes(memoryview(body), (rows, *spec.shape[1:]), spec.datatype, spec.name)


def _split_strings(view: memoryview, count: int, name: str) -> list[bytes]:
    """BYTES on the wire: each element a 4-byte length, then as many bytes."""
    _check_strings(count, name)
    items: list[bytes] = []
    start = 0
    while start < len(view) and len(items) <= count:
        end = start + 4
        length = int.from_bytes(view[start:end], "little")
        if end + length > len(view):
            raise MalformedMessage(f"tensor {name!r}: string {len(items)} is longer than the tensor")
        items.append(bytes(view[end : end + length]))
        start = end + length
    if len(items) != count:
        raise MalformedMessage(f"tensor {name!r}: its strings are not the {count} that its shape says")
    return items


def _check_strings(count: int, name: str) -> None:
    if count > _MAX_STRINGS:
        raise TooLarge(f"tensor {name!r} has {count} strings; at most {_MAX_STRINGS} are accepted")


def _string_array(items: Sequence[bytes], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(shape)


@cache
def _data_decoder(datatype: str, rank: int) -> msgspec.json.Decoder[list[Any]]:
    """Reads the JSON of a tensor as lists of numbers that its datatype can hold, nested `rank` deep."""
    dtype = dtype_of(datatype)
    kind: Any = {"b": bool, "f": float, "O": str}.get(dtype.kind)
    if kind is None:
        bounds = np.iinfo(dtype)
        # msgspec takes no bound above 2^63: numpy checks the upper one of UINT64.
        kind = Annotated[int, Meta(ge=int(bounds.min), le=None if datatype == "UINT64" else int(bounds.max))]
    for _ in range(rank):
        kind = list[kind]
    return msgspec.json.Decoder(kind)


def _from_json(data: bytes | Raw, shape: tuple[int, ...], datatype: str, name: str) -> Array:
    """A tensor's JSON is either one flat list in row-major order or lists nested as its shape says."""
    dtype = dtype_of(datatype)
    nested = len(shape) > 1 and _NESTED.match(data) is not None
    try:
        values = _read(_data_decoder(datatype, len(shape) if nested else 1), data)
    except MalformedMessage as exc:
        raise MalformedMessage(f"tensor {name!r} ({datatype}): {exc}") from exc
    try:
        with np.errstate(over="ignore"):
            array: Array = np.array(values, dtype)
    except OverflowError as exc:
        raise MalformedMessage(f"tensor {name!r}: a number is too large for {datatype}") from exc
    except ValueError as exc:  # lists of different lengths
        raise MalformedMessage(f"tensor {name!r}: its lists are not nested as its shape {list(shape)} says") from exc
    if array.shape != (shape if nested else (math.prod(shape),)):
        raise MalformedMessage(f"tensor {name!r}: its data are {list(array.shape)}, and its shape says {list(shape)}")
    if datatype == BYTES:
        _check_strings(array.size, name)
        return _string_array([item.encode() for item in array.reshape(-1)], shape)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise MalformedMessage(f"tensor {name!r}: a number is too large for {datatype}")
    return array.reshape(shape)
