"""What is decided from the head of a request before anybody answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["refusal_of", "without_upgrade"]

Headers = Sequence[tuple[bytes, bytes]]


def refusal_of(version: str, headers: Headers, by_name: Mapping[bytes, bytes]) -> tuple[int, str] | None:
    """Why a request cannot be served, whatever it asks for: status and sentence; None where it can.

    Args:
        version: of HTTP, as `1.1`.
        headers: with their names in lower case.
        by_name: the same; the last one where a name stands twice.
    """
    if b"transfer-encoding" in by_name:
        codings = b",".join(value for name, value in headers if name == b"transfer-encoding")
        if codings.strip().lower() != b"chunked":
            return 501, f"transfer encoding {codings.decode('latin-1')[:32]!r}: only 'chunked' is known here"
    if version != "1.1":
        return None
    if b"host" not in by_name:
        return 400, "the request has no header Host"
    if len(headers) != len(by_name) and sum(name == b"host" for name, _ in headers) > 1:
        return 400, "the header Host stands twice"
    return None


def without_upgrade(method: bytes, target: bytes, version: str, headers: Headers) -> bytes:
    """The head of the same request without its offer to go on in another protocol, which a server may ignore
    (RFC 9110, 7.8)."""
    lines = [b"%b: %b\r\n" % pair for pair in headers if pair[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version.encode(), b"".join(lines))
