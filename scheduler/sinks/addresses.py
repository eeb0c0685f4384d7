"""The addresses that a sink may connect to. A name is resolved once, and what was checked is what is connected to."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from aiohttp.abc import AbstractResolver, ResolveResult

from tierkit.errors import Forbidden

__all__ = ["CheckedResolver", "Resolve", "addresses_of", "check_host", "refusal"]

Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a name as text. Takes a name and a port."""

_METADATA = {
    ip_address(each)
    for each in (
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure
        "192.0.0.192",  # Oracle
        "fd00:ec2::254",  # AWS
        "fd20:ce::254",  # Google
    )
}
"""Metadata services of clouds that are not link-local: they give away the machine's credentials."""
_TRANSLATED = tuple(ip_network(each) for each in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96"))
"""IPv6 addresses that end with an IPv4 address: of translators (RFC 6052, RFC 8215), and IPv4-compatible ones."""
_ALSO_PRIVATE = tuple(ip_network(each) for each in ("64:ff9b:1::/48", "fec0::/10"))
"""Private networks that Python counts as global: of local translators, and site-local addresses (RFC 3879)."""
_MOST_ADDRESSES = 32


def refusal(address: str, *, allow_private: bool) -> str | None:
    """Return why a sink may not connect to an IP address; None if it may.

    Args:
        allow_private: an admin allows private networks and this machine.
    """
    for each in _meant(ip_address(address.partition("%")[0])):
        if each in _METADATA or each.is_link_local:
            return f"{address} is a link-local address or the metadata service of a cloud"
        if each.is_multicast or each.is_unspecified:
            return f"{address} is not the address of one machine"
        is_private = not each.is_global or any(each in network for network in _ALSO_PRIVATE)
        if is_private and not allow_private:
            return (
                f"{address} is a private address: set sink_allow_private (--sink-allow-private) if sinks of this "
                "scheduler may use those"
            )
    return None


def _meant(address: Address) -> Iterator[Address]:
    """An address, and the IPv4 address that is reached through it."""
    yield address
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        # :: and ::1 are addresses of IPv6 itself.
        if inner is None and int(address) > 1 and any(address in network for network in _TRANSLATED):
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            yield inner


def addresses_of(host: str, port: int) -> list[str]:
    """The addresses of a name by the system's resolver; blocks. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as exc:  # an empty label, or one with more than 63 characters
        raise OSError(f"{host[:64]!r} is not the name of a machine") from exc
    return [str(address[0]) for *_, address in found]


async def check_host(host: str, port: int, *, allow_private: bool, resolve: Resolve) -> list[str]:
    """The addresses of a name or of an IP address, all of them checked.

    Raises:
        Forbidden: a sink may not connect to one of them.
        OSError: the name has no address.
    """
    try:
        found: Sequence[str] = [str(ip_address(host.strip("[]")))]
    except ValueError:
        found = list(dict.fromkeys(await resolve(host, port)))[:_MOST_ADDRESSES]
    for address in found:
        if (why := refusal(address, allow_private=allow_private)) is not None:
            raise Forbidden(f"{host} cannot be a receiver: {why}")
    if not found:
        raise OSError(f"{host} has no address")
    return list(found)


class CheckedResolver(AbstractResolver):
    """Gives aiohttp the addresses of a name, all of them checked. aiohttp asks about names only."""

    def __init__(self, *, allow_private: bool, resolve: Resolve) -> None:
        self._allow_private = allow_private
        self._resolve = resolve

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises Forbidden, OSError."""
        found = await check_host(host, port, allow_private=self._allow_private, resolve=self._resolve)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in found
        ]

    async def close(self) -> None:
        """Nothing is open."""
