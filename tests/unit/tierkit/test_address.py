"""Addresses of services."""

import errno
import socket

import pytest

from tierkit.errors import AddressUnavailable, PortInUse, SetupError, Unavailable
from tierkit.http.address import bind, free_port, leads_to, reachable_url, url_of


@pytest.mark.parametrize(
    ("url", "peer", "reachable"),
    [
        ("http://127.0.0.1:7401", "http://127.0.0.1:8070", "http://127.0.0.1:7401"),
        ("http://10.0.0.7:7401", "http://127.0.0.1:8070", "http://10.0.0.7:7401"),
        # Every interface: the one that leads to the peer.
        ("http://0.0.0.0:7401", "http://127.0.0.1:8070", "http://127.0.0.1:7401"),
        ("http://0.0.0.0:7401", "http://127.0.0.1", "http://127.0.0.1:7401"),
    ],
)
def test_the_url_under_which_a_peer_reaches_us(url: str, peer: str, reachable: str) -> None:
    assert reachable_url(url, peer=peer) == reachable


@pytest.mark.parametrize(
    ("url", "listening", "same"),
    [
        ("http://localhost:7401", "http://127.0.0.1:7401", True),
        ("https://127.0.0.1:7401/x", "http://127.0.0.1:7401", True),
        ("http://127.0.0.1:7402", "http://127.0.0.1:7401", False),
        ("http://127.0.0.1:7401", "http://0.0.0.0:7401", True),
        ("http://192.0.2.77:7401", "http://0.0.0.0:7401", False),
        ("http://127.0.0.1", "http://127.0.0.1:80", True),
        ("http://no.such.host.invalid:7401", "http://127.0.0.1:7401", False),
    ],
)
def test_whether_a_url_leads_to_a_service_of_this_machine(url: str, listening: str, same: bool) -> None:
    assert leads_to(url, listening) is same


def test_a_peer_of_unknown_name_may_be_found_later() -> None:
    with pytest.raises(Unavailable, match="--advertise-url"):
        reachable_url("http://0.0.0.0:7401", peer="http://no.such.host.invalid:8070")


def test_a_port_of_ones_own_choice_and_of_the_systems() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
    with bind("localhost", port) as again:
        assert again.getsockname()[1] == port


def test_a_port_to_use_later_is_none_that_the_system_gives_away() -> None:
    port = free_port()
    assert 1024 <= port < 32_768
    with bind("127.0.0.1", port) as sock:
        assert sock.getsockname()[1] == port
    with pytest.raises(AddressUnavailable, match=r"cannot listen on 192\.0\.2\.1"):
        free_port("192.0.2.1")


def test_an_address_that_no_later_start_can_have_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(SetupError, match="Permission denied") as caught:
        bind("127.0.0.1", 80)
    assert not isinstance(caught.value, AddressUnavailable)


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_ipv6_address_is_bracketed() -> None:
    with bind("::1", 0) as sock:
        assert url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"
