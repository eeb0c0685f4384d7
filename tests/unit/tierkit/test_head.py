"""Requests that are refused for their head alone."""

import pytest

from tierkit.service.head import refusal_of, without_upgrade

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


def test_an_offer_of_another_protocol_is_left_out() -> None:
    headers = [HOST, (b"connection", b"upgrade, close"), (b"upgrade", b"h2c"), (b"content-length", b"3")]
    assert without_upgrade(b"POST", b"/a?b", "1.1", headers) == (
        b"POST /a?b HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\ncontent-length: 3\r\n\r\n"
    )
