"""Encodes messages to bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec
import numpy as np

from tierkit.errors import MalformedMessage
from tierkit.wire.oip.datatypes import BYTES, DATATYPES
from tierkit.wire.oip.messages import InferRequest, InferResponse, RequestedOutput, Tensor

__all__ = ["BINARY_HEADER", "Chunks", "encode_request", "encode_response", "tensor_bytes"]

BINARY_HEADER = "Inference-Header-Content-Length"
"""HTTP header: length in bytes of the JSON in front of the tensors; absent when the whole body is JSON."""

Chunks = list[bytes | memoryview]
"""A body in pieces, to be sent one after the other. Views stay valid as long as they are referenced, but they show
later changes of the arrays: send before you change those."""

_ALIGNMENT = 8
"""The JSON is padded with blanks to a multiple of this, so that the receiver can read tensors of any type in place."""


def encode_request(request: InferRequest, *, binary: bool = True) -> tuple[Chunks, dict[str, str]]:
    """Write a request.

    Args:
        request: the message; its arrays are not copied if they are C-contiguous and little-endian.
        binary: True if the inputs go as binary (else as JSON).

    Returns:
        The body in pieces and its HTTP headers: Content-Type, Content-Length and, where a tensor follows the JSON,
        `BINARY_HEADER`.

    Raises:
        MalformedMessage: a tensor that the protocol, or JSON, cannot carry.
    """
    head: dict[str, Any] = {}
    if request.outputs:
        head["outputs"] = [_requested(output) for output in request.outputs]
    parameters = dict(request.parameters)
    if request.binary_output:
        parameters["binary_data_output"] = True
    return _encode(head, request.id, parameters, "inputs", request.inputs, lambda _name: binary)


def encode_response(response: InferResponse, *, binary: bool | Collection[str] = True) -> tuple[Chunks, dict[str, str]]:
    """Write a response: see `encode_request`. `binary` may also be the names of the outputs to send as binary."""
    head = {"model_name": response.model_name, "model_version": response.model_version}
    choose = (lambda _name: binary) if isinstance(binary, bool) else binary.__contains__
    return _encode(head, response.id, dict(response.parameters), "outputs", response.outputs, choose)


def _requested(output: RequestedOutput) -> dict[str, Any]:
    parameters = dict(output.parameters)
    if output.binary is not None:
        parameters["binary_data"] = output.binary
    if output.classification:
        parameters["classification"] = output.classification
    return {"name": output.name, "parameters": parameters} if parameters else {"name": output.name}


def _encode(
    head: dict[str, Any],
    message_id: str,
    parameters: dict[str, Any],
    key: str,
    tensors: Iterable[Tensor],
    binary: Callable[[str], bool],
) -> tuple[Chunks, dict[str, str]]:
    if message_id:
        head["id"] = message_id
    if parameters:
        head["parameters"] = parameters
    entries: list[dict[str, Any]] = []
    payload: Chunks = []
    for tensor in tensors:
        datatype, shape = tensor.datatype, tensor.data.shape
        if not shape or 0 in shape:
            raise MalformedMessage(f"tensor {tensor.name!r} of shape {list(shape)} holds nothing")
        entry: dict[str, Any] = {"name": tensor.name, "shape": shape, "datatype": datatype}
        about = dict(tensor.parameters)
        if binary(tensor.name):
            view = _raw(tensor, datatype)
            about["binary_data_size"] = len(view)
            payload.append(view)
        else:
            entry["data"] = _plain(tensor, datatype)
        if about:
            entry["parameters"] = about
        entries.append(entry)
    head[key] = entries
    text = msgspec.json.encode(head)
    if not payload:
        return [text], {"Content-Type": "application/json", "Content-Length": str(len(text))}
    text += b" " * (-len(text) % _ALIGNMENT)
    headers = {
        "Content-Type": "application/octet-stream",
        BINARY_HEADER: str(len(text)),
        "Content-Length": str(len(text) + sum(map(len, payload))),
    }
    return [text, *payload], headers


def tensor_bytes(tensor: Tensor) -> bytes | memoryview:
    """The bytes of a tensor that is written as binary: a view of its array, where that can be."""
    return _raw(tensor, tensor.datatype)


def _raw(tensor: Tensor, datatype: str) -> bytes | memoryview:
    if datatype == BYTES:
        return b"".join(struct.pack("<I", len(item)) + item for item in _strings(tensor))
    array = np.ascontiguousarray(tensor.data, dtype=DATATYPES[datatype])
    return array.reshape(-1).view(np.uint8).data


def _plain(tensor: Tensor, datatype: str) -> list[Any]:
    if datatype != BYTES:
        if tensor.data.dtype.kind == "f" and not np.isfinite(tensor.data).all():
            raise MalformedMessage("JSON carries neither NaN nor infinity: ask for binary tensors")
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
