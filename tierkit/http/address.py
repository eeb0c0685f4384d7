"""Listening sockets and the URLs that lead to them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
from urllib.parse import urlsplit

from tierkit.errors import AddressUnavailable, PortInUse, SetupError, UpstreamUnavailable

__all__ = ["bind", "free_port", "is_loopback", "leads_to", "reachable_url", "url_of"]

_OWN_PORTS = range(20_000, 32_768)
"""Ports below the range that Linux gives to port 0 and to the near end of every connection."""


def bind(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket; for port 0 the system chooses a port.

    Raises:
        PortInUse: another process listens there.
        AddressUnavailable: this machine does not have the address, or the name is unknown. Either may come later.
        SetupError: the port needs privileges.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as exc:
        raise AddressUnavailable(
            f"the host '{host}' is unknown ({exc.strerror}); use an address of this machine"
        ) from exc
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Linux lets two sockets bind with SO_REUSEADDR; only listening tells that the port is taken.
        sock.listen(2048)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use by another process; stop it, or choose another port with --port "
                "(0 takes a free one)"
            ) from exc
        error = AddressUnavailable if exc.errno == errno.EADDRNOTAVAIL else SetupError
        raise error(f"cannot listen on {host} port {port}: {exc.strerror}") from exc
    sock.setblocking(False)
    return sock


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of `host` on which no process listens: a service may need one before it starts, or again later.

    A port chosen by the system would soon belong to another program: a busy machine assigns hundreds a second.

    Raises:
        AddressUnavailable: this machine does not have the address.
    """
    dice = random.SystemRandom()
    while True:
        port = dice.choice(_OWN_PORTS)
        with contextlib.suppress(PortInUse), bind(host, port):
            return port


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """http or https URL of a bound socket."""
    return _url("https" if tls else "http", *sock.getsockname()[:2])


def is_loopback(sock: socket.socket) -> bool:
    """True if a bound socket can be reached only from this machine."""
    address = ipaddress.ip_address(sock.getsockname()[0].partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def reachable_url(url: str, *, peer: str) -> str:
    """Return a URL at which `peer` reaches `url`: a wildcard host becomes the address of the interface towards `peer`.

    Nothing is sent: the route is looked up by connecting a datagram socket.

    Raises:
        UpstreamUnavailable: the host of `peer` cannot be resolved now, or no route leads there.
    """
    parts = urlsplit(url)
    if not ipaddress.ip_address(parts.hostname or "").is_unspecified:
        return url
    there = urlsplit(peer)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            there.hostname, there.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            here = probe.getsockname()[0]
    except OSError as exc:
        raise UpstreamUnavailable(
            f"no route to {peer} ({exc.strerror}); name this node's own address with --advertise-url"
        ) from exc
    return _url(parts.scheme, here, parts.port)


def leads_to(url: str, listening: str) -> bool:
    """True if `url` leads to the service that listens at the URL `listening` on this machine; may block."""
    there, here = urlsplit(url), urlsplit(listening)
    if (there.port or {"http": 80, "https": 443}.get(there.scheme)) != here.port:
        return False
    try:
        found = socket.getaddrinfo(there.hostname, here.port, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    everywhere = ipaddress.ip_address(here.hostname or "").is_unspecified
    return any(
        address[0] == here.hostname or (everywhere and _is_own(family, str(address[0])))
        for family, *_, address in found
    )


def _is_own(family: int, address: str) -> bool:
    """True if it is an address of this machine: only then a socket can be bound to it."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _url(scheme: str, host: str, port: int | None) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
