"""Check that a URL does not lead back to this service, under any name of the machine."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

__all__ = ["OwnAddress"]

_LOOKUP_S = 1.0
"""Budget for a lookup. A name that takes longer is not ours, because this machine knows its own names."""
_DEFAULT_PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class OwnAddress:
    """Args: host: the name or address that the service listens on."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lookups = asyncio.Semaphore(2)
        """Names that are looked up at a time: unknown names keep a thread busy for long."""

    async def is_at(self, url: str, *, port: int) -> bool:
        """True if `url` leads here.

        Args:
            port: that the service listens on.
        """
        parts = urlsplit(url)
        if (parts.port or _DEFAULT_PORTS[parts.scheme]) != port or parts.hostname is None:
            return False
        found = await self._addresses(parts.hostname)
        listening = await self._addresses(self._host) if found else set()
        if any(_is_any(address) for address in listening):
            return any(map(_is_local, found))
        # What is sent to "any address" goes to this machine.
        return not found.isdisjoint(listening) or (
            any(map(_is_any, found)) and any(address.is_loopback for address in listening)
        )

    async def _addresses(self, host: str) -> set[Address]:
        """The addresses of a name; none if it has none, or they are not known in time."""
        try:
            async with asyncio.timeout(_LOOKUP_S):
                await self._lookups.acquire()
        except TimeoutError:
            return set()
        lookup = asyncio.ensure_future(asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM))
        lookup.add_done_callback(self._looked_up)
        await asyncio.wait((lookup,), timeout=_LOOKUP_S)
        if not lookup.done() or lookup.exception() is not None:
            return set()
        return {_plain(str(address[0])) for *_, address in lookup.result()}

    def _looked_up(self, lookup: asyncio.Future[Any]) -> None:
        self._lookups.release()
        if not lookup.cancelled():
            lookup.exception()  # has been looked at, also if no caller waits for it any more


def _plain(text: str) -> Address:
    address = ipaddress.ip_address(text.partition("%")[0])
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def _is_any(address: Address) -> bool:
    return address.is_unspecified


def _is_local(address: Address) -> bool:
    """True if it is an address of this machine: a socket can be bound to no other."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
