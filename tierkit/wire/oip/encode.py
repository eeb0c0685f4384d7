"""From messages to bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tierkit.errors import MalformedMessage
from tierkit.inference.model import Array
from tierkit.wire.oip.datatypes import BYTES, DATATYPES
from tierkit.wire.oip.messages import InferRequest, InferResponse, RequestedOutput, Tensor

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
    if binary and _is_usual(request, request.inputs):
        outputs = request.outputs
        if not any(output.parameters for output in outputs):
            wanted = tuple([(output.name, output.binary, output.classification) for output in outputs])
            (tensor,) = request.inputs
            head = _usual_request_head(wanted, request.binary_output, tensor.name, tensor.data.shape, tensor.data.dtype)
            return head.before(tensor.data)
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
    if binary is True and _is_usual(response, response.outputs):
        (tensor,) = response.outputs
        return _usual_response_head(
            response.model_name, response.model_version, tensor.name, tensor.data.shape, tensor.data.dtype
        ).before(tensor.data)
    head: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        head["id"] = response.id
    if response.parameters:
        head["parameters"] = dict(response.parameters)
    choose = (lambda _name: binary) if isinstance(binary, bool) else binary.__contains__
    return _encode(head, "outputs", response.outputs, choose)


def _is_usual(message: InferRequest | InferResponse, tensors: Collection[Tensor]) -> bool:
    """Whether it has one tensor of numbers, and nothing else to say."""
    if len(tensors) != 1 or message.id or message.parameters:
        return False
    (tensor,) = tensors
    return not tensor.parameters and tensor.data.dtype.kind != "O"


class _Head(NamedTuple):
    """What comes before the numbers of a message with one tensor: the same for all batches of one size. Writing it
    takes longer than all else that sending does."""

    text: bytes
    headers: dict[str, str]
    dtype: np.dtype[Any]
    """In which the numbers follow."""

    @classmethod
    def of(cls, head: dict[str, Any], key: str, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Head:
        blank = Tensor(name, np.broadcast_to(np.zeros((), dtype), shape))
        chunks, headers = _encode(head, key, [blank], lambda _name: True)
        return cls(bytes(chunks[0]), headers, DATATYPES[blank.datatype])

    def before(self, data: Array) -> tuple[Chunks, dict[str, str]]:
        return [self.text, np.ascontiguousarray(data, self.dtype).data.cast("B")], self.headers.copy()


@lru_cache(maxsize=256)
def _usual_response_head(model: str, version: str, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Head:
    return _Head.of({"model_name": model, "model_version": version}, "outputs", name, shape, dtype)


@lru_cache(maxsize=256)
def _usual_request_head(
    outputs: tuple[tuple[str, bool | None, int], ...],
    binary_output: bool,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> _Head:
    wanted = tuple(RequestedOutput(output, binary, best) for output, binary, best in outputs)
    head = _request_head(InferRequest((), wanted, binary_output=binary_output))
    return _Head.of(head, "inputs", name, shape, dtype)


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
