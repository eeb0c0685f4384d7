"""An inference request as HTTP carries it: a body, and the headers about it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

from starlette.types import Receive

from tierkit.errors import InvalidInput, TooLarge
from tierkit.http.asgi import BodyRoom, read_body
from tierkit.tensors import TensorSpec
from tierkit.wire.messages import BUDGET_HEADER, INTERACTIVE, PRIORITY_HEADER
from tierkit.wire.oip import BINARY_HEADER, InferRequest, Limits, decode_request, parse_header_length
from tierkit.wire.oip.compression import decompress
from tierkit.wire.oip.datatypes import dtype_of

__all__ = ["LARGE_JSON_BYTES", "RequestReader", "announced_images", "budget_s", "is_small", "is_urgent"]

_BINARY = BINARY_HEADER.lower().encode()
_BUDGET = BUDGET_HEADER.lower().encode()

_PRIORITY = PRIORITY_HEADER.lower().encode()
_URGENT = INTERACTIVE.encode()

LARGE_JSON_BYTES = 64 * 1024
"""Reading this much JSON takes about a millisecond."""

_LONGEST_S = 1e9
"""Some thirty years; a larger number means no end."""

_PAUSE_S = 0.002
"""Time for other work before a large JSON is read."""


class RequestReader:
    """Reads the requests of a route. Large JSON is read one at a time, with a pause before each.

    Reading JSON stops the event loop. Without the pauses, clients that send large JSON at the same time would hold up
    the health checks until all of it is read. A thread would not help: the parser does not release Python's lock.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._turn = asyncio.Lock()

    async def body(self, headers: Mapping[bytes, bytes], receive: Receive, room: BodyRoom) -> bytes:
        """Return the body of a request.

        Args:
            headers: see `read`.
            room: counts the bytes of the body.

        Raises:
            TooLarge: the body is only JSON and too long; raised as soon as too much has arrived.
            ClientDisconnect: the client hung up before the end.
        """
        if _BINARY in headers:
            return await read_body(receive, room)
        most_bytes = self._limits.max_json_bytes
        try:
            return await read_body(receive, room, most_bytes=most_bytes)
        except TooLarge as exc:
            raise TooLarge(f"more than {most_bytes} bytes of JSON: send tensors as binary") from exc

    async def read(
        self,
        headers: Mapping[bytes, bytes],
        body: bytes,
        room: BodyRoom,
        *,
        raw_input: TensorSpec | None = None,
        check_room: Callable[[int], object] | None = None,
    ) -> InferRequest:
        """Decode a body. For the other arguments and errors, see `tierkit.wire.oip.decode_request`.

        Args:
            headers: of the HTTP request, names in lower case.
            room: also counts the bytes that a compressed body unpacks to.
            check_room: raises an error if there is no room for this number of images. Only with `raw_input`: called
                while a compressed body is unpacked, as soon as its length is known.

        Raises:
            UnsupportedMedia: the coding is not one of `tierkit.wire.oip.compression`.
        """
        length = headers.get(_BINARY)
        header_length = parse_header_length(None if length is None else length.decode("latin-1"))
        coding = headers.get(b"content-encoding", b"identity").lower().decode("latin-1")
        if coding != "identity":
            packed_bytes = len(body)

            def hold(size: int) -> None:
                room.grow(packed_bytes + size)
                if raw_input is not None and check_room is not None:
                    check_room(announced_images({**headers, b"content-length": b"%d" % size}, raw_input))

            most_bytes = self._limits.max_json_bytes if header_length is None else self._limits.max_body_bytes
            body = await decompress(body, most_bytes, coding, hold=hold)
        json_bytes = len(body) if header_length is None else header_length
        # More than the limit is refused unread.
        if LARGE_JSON_BYTES < json_bytes <= self._limits.max_json_bytes:
            async with self._turn:
                await asyncio.sleep(_PAUSE_S)
                return decode_request(body, header_length, limits=self._limits, raw_input=raw_input)
        return decode_request(body, header_length, limits=self._limits, raw_input=raw_input)


def is_small(headers: Mapping[bytes, bytes]) -> bool:
    """True if a body announces that it is small enough to be read ahead; arguments as for `announced_images`."""
    length = headers.get(b"content-length", b"")
    return length.isdigit() and int(length[:19]) <= LARGE_JSON_BYTES


def announced_images(headers: Mapping[bytes, bytes], spec: TensorSpec) -> int:
    """Return the least number of images in a body that has not been read yet, from its headers; 1 if they do not show
    it.

    A full server refuses by this number, without spending time on a body for which it has no room.

    Args:
        headers: of the HTTP request, names in lower case.
        spec: the model's only input.
    """
    length, json_length = headers.get(b"content-length", b""), headers.get(_BINARY, b"")
    if spec.decode is not None or -1 in spec.shape[1:] or not (length.isdigit() and json_length.isdigit()):
        return 1
    widest = dtype_of(spec.datatype).itemsize
    for datatype in spec.also:
        widest = max(widest, dtype_of(datatype).itemsize)
    row_bytes = math.prod(spec.shape[1:]) * widest
    return max(1, (int(length[:19]) - int(json_length[:19])) // row_bytes)


def budget_s(headers: Mapping[bytes, bytes], request: InferRequest) -> float | None:
    """Seconds within which the answer is of use: the header `BUDGET_HEADER` (milliseconds) or the request parameter
    `timeout` of Triton's clients (microseconds), the shorter where both are given, `_LONGEST_S` at most; None without
    either.

    Raises:
        InvalidInput: not a number, or negative.
    """
    budgets: list[float] = []
    if (header := headers.get(_BUDGET)) is not None:
        budgets.append(_number(header.decode("latin-1"), BUDGET_HEADER) / 1e3)
    if (timeout := request.parameters.get("timeout", 0)) != 0:  # 0 is what Triton's clients send for "none"
        budgets.append(_number(timeout, "the parameter timeout") / 1e6)
    return min(*budgets, _LONGEST_S) if budgets else None


def is_urgent(headers: Mapping[bytes, bytes]) -> bool:
    """True if the request overtakes those that wait. Raises InvalidInput for a priority that there is not."""
    priority = headers.get(_PRIORITY)
    if priority not in (None, _URGENT):
        raise InvalidInput(f"{PRIORITY_HEADER} is '{INTERACTIVE}' or absent, not {priority.decode('latin-1')[:32]!r}")
    return priority is not None


def _number(value: str | float | bool, what: str) -> float:
    try:
        number = math.nan if isinstance(value, str) and "_" in value else float(value)  # 1_000 is Python
    except (ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf or isinstance(value, bool):
        raise InvalidInput(f"{what} must be a number of at least 0, not {str(value)[:32]!r}")
    return number
