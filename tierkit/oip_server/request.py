"""An inference request as HTTP carries it: a body, and what its headers say of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tierkit.errors import InvalidInput, UnsupportedMedia
from tierkit.model import TensorSpec
from tierkit.oip import BINARY_HEADER, InferRequest, Limits, decode_request, parse_header_length
from tierkit.oip.datatypes import dtype_of
from tierkit.protocol import BUDGET_HEADER

__all__ = ["announced_images", "budget_s", "read_request"]

_BINARY = BINARY_HEADER.lower().encode()
_BUDGET = BUDGET_HEADER.lower().encode()


def read_request(
    headers: Mapping[bytes, bytes], body: bytes, *, limits: Limits, raw_input: TensorSpec | None = None
) -> InferRequest:
    """Decode a body; arguments and errors beside those below as for `tierkit.oip.decode_request`.

    Args:
        headers: of the HTTP request, names in lower case.

    Raises:
        UnsupportedMedia: the body is compressed.
    """
    coding = headers.get(b"content-encoding", b"identity")
    if coding != b"identity":
        raise UnsupportedMedia(f"content encoding {coding.decode('latin-1')[:32]!r}: send the body uncompressed")
    length = headers.get(_BINARY)
    return decode_request(
        body,
        parse_header_length(None if length is None else length.decode("latin-1")),
        limits=limits,
        raw_input=raw_input,
    )


def announced_images(headers: Mapping[bytes, bytes], spec: TensorSpec) -> int:
    """How many images a body that has not been read yet must hold, by its headers alone; 1 where they do not tell.

    Good enough to refuse by, when even so many have no room: a server that reads 150 kB only to say that it is full
    has less time for those whom it does serve.

    Args:
        headers: of the HTTP request, names in lower case.
        spec: the model's only input.
    """
    length, json_length = headers.get(b"content-length", b""), headers.get(_BINARY, b"")
    if -1 in spec.shape[1:] or not (length.isdigit() and json_length.isdigit()):
        return 1
    row_bytes = math.prod(spec.shape[1:]) * dtype_of(spec.datatype).itemsize
    return max(1, (int(length[:19]) - int(json_length[:19])) // row_bytes)


def budget_s(headers: Mapping[bytes, bytes], request: InferRequest) -> float | None:
    """Seconds within which the answer is of use: the header `BUDGET_HEADER` (milliseconds) or the request parameter
    `timeout` of Triton's clients (microseconds), the shorter where both are given; None without either.

    Raises:
        InvalidInput: not a number, or negative.
    """
    budgets: list[float] = []
    if (header := headers.get(_BUDGET)) is not None:
        budgets.append(_number(header.decode("latin-1"), BUDGET_HEADER) / 1e3)
    if (timeout := request.parameters.get("timeout", 0)) != 0:  # 0 is what Triton's clients send for "none"
        budgets.append(_number(timeout, "the parameter timeout") / 1e6)
    return min(budgets, default=None)


def _number(value: str | float | bool, what: str) -> float:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf or isinstance(value, bool):
        raise InvalidInput(f"{what} must be a number of at least 0, not {str(value)[:32]!r}")
    return number
