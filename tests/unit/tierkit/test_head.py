"""Requests that are refused for their head alone."""

import pytest

from tierkit.http.head import refusal_of, without_upgrade
from tierkit.wire.messages import BUDGET_HEADER, ESCALATION_HEADER, PRIORITY_HEADER, STAGE_HEADER, UPSTREAM_HEADER

HOST = (b"host", b"x")


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        ("1.1", [HOST], None),
        ("1.1", [HOST, (b"a", b"b"), (b"a", b"c")], None),
        ("1.1", [(b"host", b"")], None),
        ("1.1", [], 400),
        ("1.1", [HOST, HOST], 400),
        ("1.0", [], None),
        ("1.0", [HOST, HOST], 400),
        ("1.1", [HOST, (b"transfer-encoding", b"Chunked")], None),
        ("1.1", [HOST, (b"transfer-encoding", b"gzip, chunked")], 501),
        ("1.1", [HOST, (b"transfer-encoding", b"gzip"), (b"transfer-encoding", b"chunked")], 501),
        ("1.1", [HOST, (b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")], 501),
        ("1.0", [(b"transfer-encoding", b"gzip, chunked")], 501),
    ],
)
def test_refusals(version: str, headers: list[tuple[bytes, bytes]], status: int | None) -> None:
    refusal = refusal_of(version, headers, dict(headers))
    assert (refusal and refusal[0]) == status


@pytest.mark.parametrize(
    ("name", "once"),
    [
        ("Accept", False),
        ("X-Request-Id", False),
        ("Authorization", True),
        ("Content-Encoding", True),
        ("Content-Type", True),
        ("Idempotency-Key", True),
        ("Last-Event-Id", True),
        ("Inference-Header-Content-Length", True),
        *((name, True) for name in (BUDGET_HEADER, ESCALATION_HEADER, PRIORITY_HEADER, STAGE_HEADER, UPSTREAM_HEADER)),
    ],
)
@pytest.mark.parametrize("second", [b"1", b"2"])
def test_a_header_of_one_value_stands_once(name: str, once: bool, second: bytes) -> None:
    raw = name.lower().encode()
    headers = [HOST, (raw, b"1"), (b"accept", b"*/*"), (raw, second)]
    refusal = refusal_of("1.1", headers, dict(headers))
    assert refusal == ((400, f"the header {name} stands twice; it has one value, so send it once") if once else None)


def test_an_offer_of_another_protocol_is_left_out() -> None:
    headers = [HOST, (b"connection", b"upgrade, close"), (b"upgrade", b"h2c"), (b"content-length", b"3")]
    assert without_upgrade(b"POST", b"/a?b", "1.1", headers) == (
        b"POST /a?b HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\ncontent-length: 3\r\n\r\n"
    )
