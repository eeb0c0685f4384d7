"""What an inference request and its response say, apart from how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from tierkit.tensors import Array
from tierkit.wire.oip.datatypes import datatype_of

__all__ = ["InferRequest", "InferResponse", "Parameters", "RequestedOutput", "Tensor"]

Parameters = Mapping[str, str | int | float | bool]
"""The protocol's open place for facts beside the tensors; values are plain."""


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
    """True if it shall come as binary; None: as `InferRequest.binary_output` says for all."""
    classification: int = 0
    """If k > 0, the k best classes as strings "value:index[:label]" (datatype BYTES) in place of the tensor."""
    parameters: Parameters = {}


class InferRequest(Struct, frozen=True, eq=False):
    """One batch for one model. No `outputs` asks for all outputs."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    id: str = ""
    """The client's own id, echoed in the response."""
    parameters: Parameters = {}
    binary_output: bool = True
    """True if outputs shall come as binary where `RequestedOutput.binary` does not say; a message received without a
    word about it means False."""
    notes: dict[Any, Any] = {}
    """Notes of the reader about the JSON part, shared by all requests with the same JSON part."""


class Timing(Struct, frozen=True, kw_only=True):
    """How long a request waited in a server, and how long its batch was computed there."""

    queue_s: float
    compute_s: float
    """Of the whole batch."""
    batch_images: int


class InferResponse(Struct, frozen=True, eq=False):
    """The answer to an `InferRequest`."""

    model_name: str
    model_version: str
    outputs: tuple[Tensor, ...]
    id: str = ""
    parameters: Parameters = {}
    timing: Timing | None = None
    """What the server says of its own time, where it does."""
    request_bytes: int = 0
    """Body of the request, as it was sent; 0 where this is no answer that came over a network."""
    headers: Mapping[str, str] = {}
    """HTTP headers that it came with."""

    def output(self, name: str) -> Array | None:
        """The array of the output of this name, None where there is none."""
        return next((tensor.data for tensor in self.outputs if tensor.name == name), None)
