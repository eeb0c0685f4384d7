"""From bytes to messages. Nothing that a peer writes is believed before it is compared with the bytes that came."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import orjson

from tierkit.errors import MalformedMessage, TooLarge
from tierkit.inference.model import Array, TensorSpec
from tierkit.wire.oip.datatypes import BYTES, dtype_of
from tierkit.wire.oip.encode import BINARY_HEADER
from tierkit.wire.oip.messages import InferRequest, InferResponse, Parameters, RequestedOutput, Tensor

__all__ = ["Limits", "decode_request", "decode_response", "parse_header_length", "tensor_from_bytes"]

_MAX_RANK = 16
_MAX_DIMENSION = 2**63 - 1
_MAX_NAME = 256
_MAX_LISTS = 2**15
"""Lists and objects in a JSON part: reading one of them takes as long as reading several numbers."""
_MAX_NUMBERS = 200_000
"""Numbers in a JSON part, 65 images of 32 x 32 pixels: short ones take longer for their length."""
_MAX_STRINGS = 2**16
"""Elements of a BYTES tensor, each of which becomes a Python object; class names are the only strings here."""

_REMEMBERED_BYTES = 1024
"""JSON parts up to this length are remembered, the last 256 of requests and of responses: a client sends the same one
with all its requests of one size, and reading it costs several times what reading the tensors behind it does."""

_UNSUPPORTED = {"sequence_": "sequences", "shared_memory_": "tensors in shared memory"}
"""By the beginning of their parameters' names: who asks for them would take an answer for something that it is not."""

_JSON_TYPES: dict[str, set[type]] = {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}}
"""What may stand in the JSON of a tensor, by numpy's kind of its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a message may cost its reader."""

    max_body_bytes: int = 64 * 2**20
    max_json_bytes: int = 640 * 2**10
    """For the JSON part alone, some 50 images of 32 x 32 pixels: reading so much (about 8 ms) holds up everything else
    in the process, in a thread of its own as well, and once parsed it takes up to some thirty times its length."""
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
    body: bytes | bytearray | memoryview,
    header_length: int | None,
    *,
    limits: Limits = _DEFAULT_LIMITS,
    raw_input: TensorSpec | None = None,
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
    read = _remembered_request_head if len(payload) and len(text) <= _REMEMBERED_BYTES else _request_head
    head = read(text, limits.max_tensors)
    return InferRequest(
        inputs=_tensors(head.inputs, payload),
        outputs=head.outputs,
        id=head.id,
        parameters=head.parameters,
        binary_output=head.binary_output,
    )


def decode_response(
    body: bytes | bytearray | memoryview, header_length: int | None, *, limits: Limits = _DEFAULT_LIMITS
) -> InferResponse:
    """Read a response; arguments and errors as for `decode_request`."""
    text, payload = _split(body, header_length, limits)
    read = _remembered_response_head if len(payload) and len(text) <= _REMEMBERED_BYTES else _response_head
    head = read(text, limits.max_tensors)
    return InferResponse(
        model_name=head.model_name,
        model_version=head.model_version,
        outputs=_tensors(head.outputs, payload),
        id=head.id,
        parameters=head.parameters,
    )


# --- the two parts of a body ---


def _check_size(body: bytes | bytearray | memoryview, limits: Limits) -> None:
    if len(body) > limits.max_body_bytes:
        raise TooLarge(f"a body of {len(body)} bytes; at most {limits.max_body_bytes} are accepted")


def _split(body: bytes | bytearray | memoryview, header_length: int | None, limits: Limits) -> tuple[bytes, memoryview]:
    """The JSON part and what follows it."""
    _check_size(body, limits)
    length = len(body) if header_length is None else header_length
    if not 0 <= length <= len(body):
        raise MalformedMessage(f"{BINARY_HEADER} is {length}, but the body has {len(body)} bytes")
    if length > limits.max_json_bytes:
        raise TooLarge(f"{length} bytes of JSON; at most {limits.max_json_bytes} are accepted: send tensors as binary")
    view = memoryview(body)
    text = bytes(view[:length])
    if length > _MAX_LISTS and text.count(b"[") + text.count(b"{") > _MAX_LISTS:
        raise TooLarge(f"more than {_MAX_LISTS} lists and objects in the JSON part: send tensors flat or as binary")
    if text.count(b",") > _MAX_NUMBERS:
        raise TooLarge(f"more than {_MAX_NUMBERS} numbers in the JSON part: send tensors as binary")
    return text, view[length:]


_LENGTH_HINT = f"where tensors follow the JSON, {BINARY_HEADER} must be its length"


def _json_object(text: bytes) -> dict[str, Any]:
    """The JSON part. Whatever is not beyond doubt is read by Python's own parser, which says what is wrong."""
    try:
        head = orjson.loads(text)
    except orjson.JSONDecodeError:
        return _strict_json_object(text)
    # orjson takes the last of several equal keys. Each key has a colon: as many keys as colons, and none was lost.
    if not isinstance(head, dict) or text.count(b":") != _keys(head):
        return _strict_json_object(text)
    return head


def _keys(head: dict[str, Any]) -> int:
    """Keys in an object and in those within it; lists are looked into if they begin with an object."""
    count, left = 0, [head]  # no recursion: how deep they are is the sender's choice
    while left:
        found = left.pop()
        count += len(found)
        for item in found.values():
            if isinstance(item, dict):
                left.append(item)
            elif isinstance(item, list) and item and isinstance(item[0], dict):
                left += [entry for entry in item if isinstance(entry, dict)]
    return count


def _strict_json_object(text: bytes) -> dict[str, Any]:
    try:
        head = _JSON.decode(text.decode())
    except UnicodeDecodeError as exc:
        raise _unreadable(f"no text from byte {exc.start} on; {_LENGTH_HINT}") from exc
    except json.JSONDecodeError as exc:
        raise _unreadable(f"{exc}; {_LENGTH_HINT}" if exc.msg == "Extra data" else str(exc)) from exc
    except RecursionError as exc:
        raise _unreadable("its lists or objects are nested too deeply") from exc
    except ValueError as exc:  # Python's bound on the digits of a number
        raise _unreadable("one of its numbers has too many digits") from exc
    if not isinstance(head, dict):
        raise MalformedMessage("the JSON part must be an object")
    return head


def _unreadable(why: str) -> MalformedMessage:
    return MalformedMessage(f"the JSON part cannot be read: {why}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedMessage("the JSON part names a key twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedMessage(f"{name} is not JSON: send the tensor as binary")


# Made once: `json.loads` with these arguments makes a decoder for each call.
_JSON = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


@dataclass(frozen=True, slots=True)
class _RequestHead:
    """The JSON part of a request. Shared by all requests that have the same one."""

    inputs: tuple[_TensorHead, ...]
    outputs: tuple[RequestedOutput, ...]
    id: str
    parameters: Parameters
    binary_output: bool


def _request_head(text: bytes, max_tensors: int) -> _RequestHead:
    head = _json_object(text)
    parameters = _parameters(head, "the request")
    binary_output = _flag(parameters.pop("binary_data_output", False), "binary_data_output")
    return _RequestHead(
        inputs=_tensor_heads(head, "inputs", max_tensors),
        outputs=_requested_outputs(head, max_tensors),
        id=_text(head.get("id", ""), "id"),
        parameters=parameters,
        binary_output=binary_output,
    )


_remembered_request_head = lru_cache(maxsize=256)(_request_head)


@dataclass(frozen=True, slots=True)
class _ResponseHead:
    """The JSON part of a response. Shared as that of requests is."""

    model_name: str
    model_version: str
    outputs: tuple[_TensorHead, ...]
    id: str
    parameters: Parameters


def _response_head(text: bytes, max_tensors: int) -> _ResponseHead:
    head = _json_object(text)
    return _ResponseHead(
        model_name=_text(head.get("model_name", ""), "model_name"),
        model_version=_text(head.get("model_version", ""), "model_version"),
        outputs=_tensor_heads(head, "outputs", max_tensors),
        id=_text(head.get("id", ""), "id"),
        parameters=_parameters(head, "the response"),
    )


_remembered_response_head = lru_cache(maxsize=256)(_response_head)


# --- small values ---


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise MalformedMessage(f"{what} must be a string")
    return value


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise MalformedMessage(f"{what} must be true or false")
    return value


def _name(entry: dict[str, Any], key: str, seen: set[str]) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise MalformedMessage(f"each of the {key} needs a name of 1 to {_MAX_NAME} characters")
    if name in seen:
        raise MalformedMessage(f"{name!r} stands twice among the {key}")
    seen.add(name)
    return name


def _entries(head: dict[str, Any], key: str, max_tensors: int) -> list[dict[str, Any]]:
    entries = head.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise MalformedMessage(f"{key!r} must be a list of objects")
    if len(entries) > max_tensors:
        raise TooLarge(f"{len(entries)} {key}; at most {max_tensors} are accepted")
    return entries


def _parameters(entry: dict[str, Any], what: str) -> dict[str, str | int | float | bool]:
    parameters = entry.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or not all(isinstance(v, str | int | float) for v in parameters.values()):
        raise MalformedMessage(f"the parameters of {what} must be an object of strings, numbers and booleans")
    for name, value in parameters.items():
        if value in (math.inf, -math.inf):
            raise MalformedMessage(f"the parameter {name[:64]!r} of {what} is a number that is too large")
        for beginning, feature in _UNSUPPORTED.items():
            if value and name.startswith(beginning):
                raise MalformedMessage(f"{what} has the parameter {name[:64]!r}: {feature} are not supported")
    return parameters


def _requested_outputs(head: dict[str, Any], max_tensors: int) -> tuple[RequestedOutput, ...]:
    if "outputs" not in head:
        return ()
    seen: set[str] = set()
    outputs = []
    for entry in _entries(head, "outputs", max_tensors):
        name = _name(entry, "outputs", seen)
        parameters = _parameters(entry, f"output {name!r}")
        binary = parameters.pop("binary_data", None)
        if binary is not None:
            _flag(binary, "binary_data")
        top = parameters.pop("classification", 0)
        if type(top) is not int or top < 0:
            raise MalformedMessage("classification must be a number of classes")
        outputs.append(
            RequestedOutput(
                name, binary=None if binary is None else bool(binary), classification=top, parameters=parameters
            )
        )
    return tuple(outputs)


# --- tensors ---


@dataclass(frozen=True, slots=True)
class _TensorHead:
    """What the JSON part says of a tensor."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    parameters: Parameters
    size: int | None
    """Bytes behind the JSON part; None: it is `data`."""
    data: Any


def _tensor_heads(head: dict[str, Any], key: str, max_tensors: int) -> tuple[_TensorHead, ...]:
    seen: set[str] = set()
    heads = []
    for entry in _entries(head, key, max_tensors):
        name = _name(entry, key, seen)
        shape = _shape(entry.get("shape"), name)
        datatype = _text(entry.get("datatype"), f"the datatype of {name!r}")
        parameters = _parameters(entry, f"tensor {name!r}")
        size = parameters.pop("binary_data_size", None)
        if (size is None) == ("data" not in entry):
            raise MalformedMessage(f"tensor {name!r} needs either 'data' or a binary_data_size")
        if size is not None and (type(size) is not int or size < 0):
            sent = f"the string {size[:32]!r}" if isinstance(size, str) else str(size)[:32]
            raise MalformedMessage(f"the binary_data_size of tensor {name!r} must be a number of bytes, not {sent}")
        heads.append(_TensorHead(name, shape, datatype, parameters, size, entry.get("data")))
    if not heads:
        raise MalformedMessage(f"{key!r} is empty")
    return tuple(heads)


def _tensors(heads: Sequence[_TensorHead], payload: memoryview) -> tuple[Tensor, ...]:
    tensors = []
    start = 0
    for head in heads:
        if head.size is None:
            data = _from_json(head.data, head.shape, head.datatype, head.name)
        else:
            end = start + head.size
            if end > len(payload):
                raise MalformedMessage(
                    f"tensor {head.name!r} claims {head.size} bytes where {len(payload) - start} follow the JSON part"
                )
            data = tensor_from_bytes(payload[start:end], head.shape, head.datatype, head.name)
            start = end
        tensors.append(Tensor(head.name, data, head.parameters))
    if start != len(payload):
        raise MalformedMessage(f"{len(payload) - start} bytes follow the last tensor")
    return tuple(tensors)


def _shape(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_RANK:
        raise MalformedMessage(f"the shape of {name!r} must be a list of 1 to {_MAX_RANK} numbers")
    for dim in value:
        if type(dim) is not int or not 0 < dim <= _MAX_DIMENSION:
            shown = str(dim)[:32] if isinstance(dim, int | float) else type(dim).__name__
            raise MalformedMessage(f"each dimension of {name!r} must be a whole number from 1 to 2^63 - 1, not {shown}")
    return tuple(value)


def tensor_from_bytes(view: memoryview, shape: tuple[int, ...], datatype: str, name: str) -> Array:
    """The binary tensor `name`; a view of `view` where its type allows that.

    Raises:
        TooLarge: too many strings.
        MalformedMessage: `view` is no tensor of this shape and datatype.
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


def _rows(body: bytes | bytearray | memoryview, spec: TensorSpec) -> Array:
    """The body as rows of a tensor whose first axis is free."""
    row_bytes = math.prod(spec.shape[1:]) * dtype_of(spec.datatype).itemsize
    if spec.datatype == BYTES or spec.shape[0] != -1 or -1 in spec.shape[1:]:
        raise MalformedMessage(f"input {spec.name!r} cannot be sent raw: its shape does not follow from its length")
    rows, rest = divmod(len(body), row_bytes)
    if rest or not rows:
        raise MalformedMessage(f"a raw body of {len(body)} bytes is no whole number of rows of {row_bytes} bytes")
    return tensor_from_bytes(memoryview(body), (rows, *spec.shape[1:]), spec.datatype, spec.name)


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


def _from_json(data: Any, shape: tuple[int, ...], datatype: str, name: str) -> Array:
    dtype = dtype_of(datatype)
    flat = _flatten(data, shape, name)
    types = set(map(type, flat))
    if datatype == BYTES:
        _check_strings(len(flat), name)
        if types != {str}:
            raise MalformedMessage(f"tensor {name!r}: BYTES as JSON are strings")
        try:
            return _string_array([item.encode() for item in flat], shape)
        except UnicodeEncodeError as exc:
            raise MalformedMessage(f"tensor {name!r}: a string holds a lone surrogate") from exc
    wanted = _JSON_TYPES[dtype.kind]
    if not types <= wanted:
        found = ", ".join(sorted(kind.__name__ for kind in types - wanted))
        raise MalformedMessage(f"tensor {name!r}: {datatype} cannot hold {found}")
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        try:
            numbers: Array = np.fromiter(flat, np.int64, len(flat))
        except OverflowError:
            numbers = np.array(flat, object)  # all that Python can hold
        if int(numbers.min()) < bounds.min or int(numbers.max()) > bounds.max:
            raise MalformedMessage(f"tensor {name!r}: {datatype} goes from {bounds.min} to {bounds.max}")
        return numbers.astype(dtype).reshape(shape)
    try:
        with np.errstate(over="ignore"):
            array: Array = np.array(flat, dtype)
    except OverflowError:  # an int beyond the largest double
        raise MalformedMessage(f"tensor {name!r}: a number is too large for {datatype}") from None
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise MalformedMessage(f"tensor {name!r}: a number is too large for {datatype}")
    return array.reshape(shape)


def _flatten(data: Any, shape: tuple[int, ...], name: str) -> list[Any]:
    """A tensor's JSON is either one flat list in row-major order or lists nested as its shape says."""
    if not isinstance(data, list):
        raise MalformedMessage(f"the data of {name!r} must be a list")
    rows: list[Any] = data
    if len(shape) > 1 and rows and isinstance(rows[0], list):
        if len(rows) != shape[0]:
            raise MalformedMessage(f"tensor {name!r}: {len(rows)} rows where its shape says {shape[0]}")
        for dim in shape[1:]:
            if set(map(type, rows)) != {list} or set(map(len, rows)) != {dim}:
                raise MalformedMessage(f"tensor {name!r}: its lists are not nested as its shape {list(shape)} says")
            rows = list(chain.from_iterable(rows))
    if len(rows) != math.prod(shape):
        raise MalformedMessage(f"tensor {name!r}: {len(rows)} elements where its shape says {math.prod(shape)}")
    return rows
