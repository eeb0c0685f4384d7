"""From messages to bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from tierkit.errors import MalformedMessage
from tierkit.oip.datatypes import BYTES, DATATYPES
from tierkit.oip.messages import InferRequest, InferResponse, RequestedOutput, Tensor

__all__ = ["BINARY_HEADER", "Chunks", "encode_request", "encode_response"]

BINARY_HEADER = "Inference-Header-Content-Length"
"""HTTP header: length in bytes of the JSON in front of the tensors; absent when the whole body is JSON."""

Chunks = list[bytes | memoryview]
"""A body in pieces, to be sent one after the other. Views stay valid as long as they are referenced, but they show
later changes of the arrays: send before you change those."""

_ALIGNMENT = 8
"""The JSON is padded with blanks to a multiple of this, so that the receiver can read tensors of any type in place."""

# Made once: `json.dumps` with these arguments makes an encoder for each call.
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def encode_request(request: InferRequest, *, binary: bool = True) -> tuple[Chunks, dict[str, str]]:
    """Write a request.

    Args:
        request: the message; its arrays are not copied if they are C-contiguous and little-endian.
        binary: whether the inputs go as binary (else as JSON).

    Returns:
        The body in pieces and its HTTP headers: Content-Type, Content-Length and, where a tensor follows the JSON,
        `BINARY_HEADER`.

    Raises:
        MalformedMessage: a tensor that the protocol, or JSON, cannot carry.
    """
    if binary and not (request.id or request.parameters):
        datatypes = [tensor.datatype for tensor in request.inputs]
        if _is_usual(request.inputs, datatypes) and not any(output.parameters for output in request.outputs):
            outputs = tuple((output.name, output.binary, output.classification) for output in request.outputs)
            text, headers = _usual_request_head(outputs, request.binary_output, _shapes(request.inputs, datatypes))
            return [text, *map(_raw, request.inputs, datatypes)], headers.copy()
    return _encode(_request_head(request), "inputs", request.inputs, lambda _name: binary)


def _request_head(request: InferRequest) -> dict[str, Any]:
    head: dict[str, Any] = {"id": request.id} if request.id else {}
    parameters = dict(request.parameters)
    if request.binary_output:
        parameters["binary_data_output"] = True
    if parameters:
        head["parameters"] = parameters
    if request.outputs:
        head["outputs"] = [_requested(output) for output in request.outputs]
    return head


def encode_response(response: InferResponse, *, binary: bool | Collection[str] = True) -> tuple[Chunks, dict[str, str]]:
    """Write a response; as `encode_request`, where `binary` may also be the names of the outputs to send as binary."""
    if binary is True and not (response.id or response.parameters):
        datatypes = [tensor.datatype for tensor in response.outputs]
        if _is_usual(response.outputs, datatypes):
            text, headers = _usual_head(
                response.model_name, response.model_version, _shapes(response.outputs, datatypes)
            )
            return [text, *map(_raw, response.outputs, datatypes)], headers.copy()
    head: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        head["id"] = response.id
    if response.parameters:
        head["parameters"] = dict(response.parameters)
    choose = (lambda _name: binary) if isinstance(binary, bool) else binary.__contains__
    return _encode(head, "outputs", response.outputs, choose)


_Shapes = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and datatype of tensors."""


def _is_usual(tensors: Iterable[Tensor], datatypes: Collection[str]) -> bool:
    """Whether these are numbers, with nothing else to say of them."""
    return BYTES not in datatypes and not any(tensor.parameters for tensor in tensors)


def _shapes(tensors: Iterable[Tensor], datatypes: Iterable[str]) -> _Shapes:
    return tuple((tensor.name, tensor.data.shape, kind) for tensor, kind in zip(tensors, datatypes, strict=True))


@lru_cache(maxsize=256)
def _usual_head(name: str, version: str, tensors: _Shapes) -> tuple[bytes, dict[str, str]]:
    """The JSON part and the HTTP headers of such a response, all binary: the same for all batches of one size. Writing
    them costs more than the rest of the answer."""
    return _head({"model_name": name, "model_version": version}, "outputs", tensors)


@lru_cache(maxsize=256)
def _usual_request_head(
    outputs: tuple[tuple[str, bool | None, int], ...], binary_output: bool, tensors: _Shapes
) -> tuple[bytes, dict[str, str]]:
    """The same for a request."""
    wanted = tuple(RequestedOutput(name, binary, best) for name, binary, best in outputs)
    return _head(_request_head(InferRequest((), wanted, binary_output=binary_output)), "inputs", tensors)


def _head(head: dict[str, Any], key: str, tensors: _Shapes) -> tuple[bytes, dict[str, str]]:
    blanks = (Tensor(tensor, np.broadcast_to(np.zeros((), DATATYPES[kind]), shape)) for tensor, shape, kind in tensors)
    chunks, headers = _encode(head, key, blanks, lambda _name: True)
    return bytes(chunks[0]), headers


def _requested(output: RequestedOutput) -> dict[str, Any]:
    parameters = dict(output.parameters)
    if output.binary is not None:
        parameters["binary_data"] = output.binary
    if output.classification:
        parameters["classification"] = output.classification
    return {"name": output.name, "parameters": parameters} if parameters else {"name": output.name}


def _encode(
    head: dict[str, Any], key: str, tensors: Iterable[Tensor], binary: Callable[[str], bool]
) -> tuple[Chunks, dict[str, str]]:
    entries: list[dict[str, Any]] = []
    payload: Chunks = []
    payload_bytes = 0
    for tensor in tensors:
        datatype = tensor.datatype
        shape = list(tensor.data.shape)
        if not shape or 0 in shape:
            raise MalformedMessage(f"tensor {tensor.name!r} of shape {shape} holds nothing")
        entry: dict[str, Any] = {"name": tensor.name, "shape": shape, "datatype": datatype}
        parameters = dict(tensor.parameters)
        if binary(tensor.name):
            view = _raw(tensor, datatype)
            parameters["binary_data_size"] = len(view)
            payload.append(view)
            payload_bytes += len(view)
        else:
            entry["data"] = _plain(tensor, datatype)
        if parameters:
            entry["parameters"] = parameters
        entries.append(entry)
    head[key] = entries
    try:
        text = _JSON.encode(head).encode()
    except ValueError as exc:
        raise MalformedMessage("JSON carries neither NaN nor infinity: ask for binary tensors") from exc
    if not payload:
        return [text], {"Content-Type": "application/json", "Content-Length": str(len(text))}
    text += b" " * (-len(text) % _ALIGNMENT)
    headers = {
        "Content-Type": "application/octet-stream",
        BINARY_HEADER: str(len(text)),
        "Content-Length": str(len(text) + payload_bytes),
    }
    return [text, *payload], headers


def _raw(tensor: Tensor, datatype: str) -> bytes | memoryview:
    if datatype == BYTES:
        return b"".join(struct.pack("<I", len(item)) + item for item in _strings(tensor))
    array = np.ascontiguousarray(tensor.data, dtype=DATATYPES[datatype])
    return array.reshape(-1).view(np.uint8).data


def _plain(tensor: Tensor, datatype: str) -> list[Any]:
    if datatype != BYTES:
        flat: list[Any] = tensor.data.reshape(-1).tolist()
        return flat
    try:
        return [item.decode() for item in _strings(tensor)]
    except UnicodeDecodeError as exc:
        raise MalformedMessage(f"tensor {tensor.name!r} is not UTF-8 text: ask for binary tensors") from exc


def _strings(tensor: Tensor) -> list[bytes]:
    items: list[Any] = tensor.data.reshape(-1).tolist()
    if not all(type(item) is bytes for item in items):
        raise MalformedMessage(f"tensor {tensor.name!r} of type object holds something else than bytes")
    return items
