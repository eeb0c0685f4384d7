"""Content of an inference request and its response, independent of how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from tierkit.tensors import Array
from tierkit.wire.oip.datatypes import datatype_of

__all__ = ["InferRequest", "InferResponse", "Parameters", "RequestedOutput", "Tensor"]

Parameters = Mapping[str, str | int | float | bool]
"""The protocol's open place for facts about the tensors; values are plain."""


# eq=False: the truth of comparing arrays is an array, so equality of messages has no useful meaning.
class Tensor(Struct, frozen=True, eq=False):
    """A named array of at least one dimension, each dimension at least 1.

    `data` is read-only where it views a received body. `parameters` excludes the keys that say how the tensor is
    written (`binary_data_size`).
    """

    name: str
    data: Array
    parameters: Parameters = {}

    @property
    def datatype(self) -> str:
        """Protocol name of `data.dtype`, for example "UINT8"."""
        return datatype_of(self.data)


class RequestedOutput(Struct, frozen=True):
    """An output that the client asks for."""

    name: str
    binary: bool | None = None
    """True if it must come as binary; None: `InferRequest.binary_output` decides."""
    classification: int = 0
    """If k > 0, the k best classes as strings "value:index[:label]" (datatype BYTES) instead of the tensor."""
    parameters: Parameters = {}


class InferRequest(Struct, frozen=True, eq=False):
    """One batch for one model. No `outputs` asks for all outputs."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    id: str = ""
    """The client's own id, echoed in the response."""
    parameters: Parameters = {}
    binary_output: bool = True
    """True if outputs must come as binary by default. False in a received message that does
    not set it."""
    notes: dict[Any, Any] = {}
    """Notes of the reader about the JSON part, shared by all requests with the same JSON part."""


class Timing(Struct, frozen=True, kw_only=True):
    """Seconds that a request waited in a server, and that its batch was computed there."""

    queue_s: float
    compute_s: float
    """Compute time of the whole batch."""
    batch_images: int


class InferResponse(Struct, frozen=True, eq=False):
    """The answer to an `InferRequest`."""

    model_name: str
    model_version: str
    outputs: tuple[Tensor, ...]
    id: str = ""
    parameters: Parameters = {}
    timing: Timing | None = None
    """Times that the server reports; None if it reports none."""
    request_bytes: int = 0
    """Bytes of the request body as it was sent; 0 for an answer that did not come over a network."""
    headers: Mapping[str, str] = {}
    """HTTP headers that it came with."""

    def output(self, name: str) -> Array | None:
        """The array of the output of this name, None if there is none."""
        return next((tensor.data for tensor in self.outputs if tensor.name == name), None)
