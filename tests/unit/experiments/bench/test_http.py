"""Addresses and messages; connections are tested on real sockets."""

import pytest

from experiments.bench.http import Origin, encode_http
from tierkit.errors import InvalidInput


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("localhost:8000", Origin("localhost", 8000)),
        ("http://10.0.0.1", Origin("10.0.0.1", 80)),
        ("https://host/behind/proxy/", Origin("host", 443, tls=True, prefix="/behind/proxy")),
        ("http://[::1]:81", Origin("::1", 81)),
    ],
)
def test_addresses(url: str, origin: Origin) -> None:
    assert Origin.parse(url) == origin
    assert Origin.parse(str(origin)) == origin


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://h/?q=1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidInput):
        Origin.parse(url)


def test_a_message_is_whole() -> None:
    message = encode_http("POST", Origin("host", 80, prefix="/p"), "/x", {"A": "b"}, b"body")
    assert message == b"POST /p/x HTTP/1.1\r\nHost: host:80\r\nA: b\r\nContent-Length: 4\r\n\r\nbody"


def test_a_given_header_takes_the_place_of_ours_whatever_its_case() -> None:
    origin = Origin("host", 80, token="t")
    message = encode_http("GET", origin, "/", {"host": "other", "AUTHORIZATION": "Basic x"})
    assert message == b"GET / HTTP/1.1\r\nhost: other\r\nAUTHORIZATION: Basic x\r\n\r\n"


def test_a_header_cannot_smuggle_another_request() -> None:
    with pytest.raises(InvalidInput, match="line break"):
        encode_http("GET", Origin("host", 80), "/", {"A": "b\r\n\r\nGET /admin"})
