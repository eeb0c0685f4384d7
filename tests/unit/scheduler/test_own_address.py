"""Which URLs lead back to the scheduler, by the names of this machine and by its addresses."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from scheduler.api.own_address import OwnAddress


@pytest.mark.parametrize(
    ("listening", "url", "own"),
    [
        ("127.0.0.1", "http://127.0.0.1:8070", True),
        ("127.0.0.1", "https://127.0.0.1:8070/path", True),
        ("127.0.0.1", "http://localhost:8070", True),
        ("127.0.0.1", "http://LOCALHOST:8070", True),
        ("127.0.0.1", "http://127.1:8070", True),
        ("127.0.0.1", "http://2130706433:8070", True),
        ("127.0.0.1", "http://[::ffff:127.0.0.1]:8070", True),
        ("127.0.0.1", "http://0.0.0.0:8070", True),
        ("localhost", "http://127.0.0.1:8070", True),
        ("0.0.0.0", "http://127.0.0.2:8070", True),
        ("0.0.0.0", "http://localhost:8070", True),
        ("::", "http://127.0.0.1:8070", True),
        ("127.0.0.1", "http://127.0.0.1:8071", False),
        ("127.0.0.1", "http://localhost", False),
        ("127.0.0.1", "http://127.0.0.2:8070", False),
        ("127.0.0.1", "http://192.0.2.1:8070", False),
        ("192.0.2.1", "http://127.0.0.1:8070", False),
        ("0.0.0.0", "http://192.0.2.1:8070", False),
        ("0.0.0.0", "http://127.0.0.1:8071", False),
        ("0.0.0.0", "http://a..b:8070", False),
    ],
)
async def test_urls_that_lead_back(listening: str, url: str, own: bool) -> None:
    assert await OwnAddress(listening).is_at(url, port=8070) is own


async def test_a_url_without_a_port_has_that_of_its_scheme() -> None:
    assert await OwnAddress("127.0.0.1").is_at("http://localhost", port=80)
    assert await OwnAddress("127.0.0.1").is_at("https://localhost", port=443)
    assert not await OwnAddress("127.0.0.1").is_at("https://localhost", port=80)


async def test_names_that_take_long_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over, asked = threading.Event(), 0
    known = socket.getaddrinfo

    def slow(host: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        if host == "slow.example":
            asked += 1
            assert over.wait(20)
        return known("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr("scheduler.api.own_address._LOOKUP_S", 0.02)
    own = OwnAddress("127.0.0.1")
    try:
        for _ in range(5):
            assert not await own.is_at("http://slow.example:8070", port=8070)
        assert asked == 2
    finally:
        over.set()
