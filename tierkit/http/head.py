"""Checks on the head of a request, before it is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkit.wire.oip import BINARY_HEADER

__all__ = ["refusal_of", "without_upgrade"]

Headers = Sequence[tuple[bytes, bytes]]

_OWN = b"terrace-"
_ONCE = frozenset(
    {
        b"host",
        b"authorization",
        b"content-encoding",  # may be a list, but of the codings that are known here one is all that a body has
        b"content-type",
        b"idempotency-key",
        b"last-event-id",
        BINARY_HEADER.lower().encode(),
    }
)
"""Headers that have one value, and so stand once (RFC 9110, 5.3), as all of Terrace's own do: of two, each reader on
the way might take another. The parser looks after Content-Length; of request ids the first that is one counts."""


def refusal_of(version: str, headers: Headers, by_name: Mapping[bytes, bytes]) -> tuple[int, str] | None:
    """Return status and sentence if no route can serve the request; None if it can be served.

    Args:
        version: HTTP version (`1.1`).
        headers: names in lower case.
        by_name: the same headers; if a name is repeated, its last value.
    """
    # Cheap, for it is done for each request; hardly any repeats a header.
    if len(headers) != len(by_name) and (name := _twice(headers)):
        return 400, f"the header {name.decode('latin-1').title()} stands twice; it has one value, so send it once"
    if b"transfer-encoding" in by_name:
        codings = b",".join(value for name, value in headers if name == b"transfer-encoding")
        if codings.strip().lower() != b"chunked":
            return 501, f"transfer encoding {codings.decode('latin-1')[:32]!r}: only 'chunked' is known here"
    if version == "1.1" and b"host" not in by_name:
        return 400, "the request has no header Host"
    return None


def _twice(headers: Headers) -> bytes | None:
    """Return the first header that is repeated and must not be."""
    seen = set()
    for name, _ in headers:
        if name in _ONCE or name.startswith(_OWN):
            if name in seen:
                return name
            seen.add(name)
    return None


def without_upgrade(method: bytes, target: bytes, version: str, headers: Headers) -> bytes:
    """Return the head of the same request without its offer to change the protocol, which a server may ignore (RFC
    9110, 7.8)."""
    lines = [b"%b: %b\r\n" % pair for pair in headers if pair[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version.encode(), b"".join(lines))
