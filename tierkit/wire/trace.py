"""W3C Trace Context: the headers `traceparent` and `tracestate`, read and written. Pure.

https://www.w3.org/TR/trace-context/ describes them. A `traceparent` that is not as it must be is as good as none, and
takes its `tracestate` with it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

__all__ = ["STATE_HEADER", "TRACE_HEADER", "Trace", "new_span_id", "new_trace", "read_trace", "read_traceparent"]

TRACE_HEADER = "traceparent"
STATE_HEADER = "tracestate"

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_INVALID_VERSION = "ff"
_SAMPLED, _RANDOM = 1, 2
"""Flags: the caller may have recorded the trace; the trace id was drawn at random. Others are not passed on."""

_MEMBER = re.compile(
    r"[ \t]*([a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])?[ \t]*"
)
_MAX_MEMBERS = 32
_MAX_STATE = 1024
"""Characters of a `tracestate` that is passed on. A longer one is left out, because it is sent with each task."""

_ids = random.Random()


class Trace(Struct, frozen=True):
    """The place in a trace at which something happens."""

    trace_id: str
    """32 hex digits, of the whole trace."""
    span_id: str
    """16 hex digits, of the span below which it happens."""
    flags: int = _RANDOM
    state: str = ""
    """Trace state that other services set; passed on unchanged."""

    @property
    def sampled(self) -> bool:
        """True if spans are recorded."""
        return bool(self.flags & _SAMPLED)

    @property
    def traceparent(self) -> str:
        """The value of the header."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers that a request carries."""
        return {TRACE_HEADER: self.traceparent, **({STATE_HEADER: self.state} if self.state else {})}

    @property
    def begins(self) -> bool:
        """True if `new_trace` has made it, so that there is no span of this id."""
        return self.trace_id.startswith(self.span_id)

    def below(self, span_id: str) -> Trace:
        """The same trace, below this span."""
        return replace(self, span_id=span_id)

    def with_sampled(self, sampled: bool) -> Trace:
        """The same, with another flag."""
        return replace(self, flags=self.flags & ~_SAMPLED | (_SAMPLED if sampled else 0))


def new_span_id() -> str:
    """An id that no other span of the trace has."""
    return f"{_ids.getrandbits(64) or 1:016x}"


def new_trace() -> Trace:
    """A trace that begins here, not sampled."""
    span_id = new_span_id()
    return Trace(f"{span_id}{_ids.getrandbits(64):016x}", span_id)


def read_trace(headers: Iterable[tuple[bytes, bytes]]) -> Trace | None:
    """The trace that a request belongs to; None if it names none in the proper form.

    Args:
        headers: of the request, names in lower case.
    """
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(parents) != 1:
        return None
    trace = read_traceparent(parents[0].decode("latin-1"))
    if trace is None or not states:
        return trace
    return replace(trace, state=_checked_state(b",".join(states).decode("latin-1")))


def read_traceparent(value: str) -> Trace | None:
    """The trace that this value of the header names; None if it is not in the proper form."""
    found = _PARENT.fullmatch(value)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    # What a later version adds stands behind, and means nothing here.
    if version == _INVALID_VERSION or (version == "00" and more is not None):
        return None
    if not (trace_id.strip("0") and span_id.strip("0")):
        return None
    return Trace(trace_id, span_id, int(flags, 16) & (_SAMPLED | _RANDOM))


def _checked_state(state: str) -> str:
    """The state as it came, or "" for one that is not as it must be."""
    members = state.split(",")
    if len(state) > _MAX_STATE or not all(map(_MEMBER.fullmatch, members)):
        return ""
    said = sum(bool(member.strip()) for member in members)
    return state if 0 < said <= _MAX_MEMBERS else ""
