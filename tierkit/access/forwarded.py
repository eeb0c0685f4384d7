"""The public address of a service as reverse proxies report it: the path, the scheme and the host. Pure.

A proxy that serves the service below a path of its site passes the rest of the path on, and names the path in
`X-Forwarded-Prefix`. A proxy at which TLS ends names the scheme and the host in `X-Forwarded-Proto` and
`X-Forwarded-Host`. Any client could send these headers, so they count only from addresses that the operator trusts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

__all__ = ["Forwarded", "Network", "Proxies", "checked_network", "checked_root_path"]

Network = IPv4Network | IPv6Network

_ROOT_PATH = re.compile(r"(/(?!\.+(/|$))[A-Za-z0-9._~-]+){0,16}", re.ASCII)
"""Goes into links as it is."""
_OWN_PATH = re.compile(r"/(v1|v2|ui)(/.*)?|/(docs|openapi\.json|metrics|livez|readyz|healthz)", re.ASCII)
"""Paths of the services: a root path that begins like one of them would be ambiguous."""
_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.ASCII)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_LONGEST = 256


def checked_root_path(value: str) -> str:
    """The path without the slash at its end; "" for the root of the site. Raises ValueError with the rule in words."""
    path = value.rstrip("/")
    if len(path) > _LONGEST or not _ROOT_PATH.fullmatch(path):
        raise ValueError("must be a path such as /terrace, of letters, digits, dots, dashes, underscores and tildes")
    if _OWN_PATH.fullmatch(path):
        raise ValueError(f"must not be {path[:64]}, which is a path of the service itself")
    return path


def checked_network(value: str) -> str:
    """An address, or a network such as 10.0.0.0/8. Raises ValueError with the rule in words."""
    try:
        ip_network(value, strict=False)
    except ValueError:
        raise ValueError(f"must be an IP address or a network such as 10.0.0.0/8, not {value[:64]!r}") from None
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """The address that a browser has used."""

    root_path: str
    """Root path of the service on its site; "" for none."""
    scheme: str | None
    """http or https; None if no proxy has said."""
    hosts: tuple[str, ...]
    """Names by which the site is known, in lower case, with the port if it is not the scheme's own; empty if no proxy
    gave any."""


class Proxies:
    """Reads what trusted proxies say.

    Args:
        root_path: below which the service is served, where a request does not say.
        trusted: addresses and networks of the proxies.
    """

    def __init__(self, root_path: str = "", trusted: Sequence[str] = ()) -> None:
        self._root_path = root_path
        self._trusted: tuple[Network, ...] = tuple(ip_network(network, strict=False) for network in trusted)

    def read(self, client: str | None, headers: Iterable[tuple[bytes, bytes]]) -> Forwarded:
        """Return the address that a browser has used.

        Args:
            client: address of the peer.
            headers: names in lower case.
        """
        said: dict[bytes, str] = {}
        for name, value in headers:
            if name.startswith(b"x-forwarded-"):
                # Each proxy may have added its own; the first is that of the outermost, which the browser has asked.
                said.setdefault(name[12:], value.decode("latin-1").partition(",")[0].strip())
        if not said or not self._is_trusted(client):
            return Forwarded(root_path=self._root_path, scheme=None, hosts=())
        root_path = self._root_path
        if b"prefix" in said:
            try:
                root_path = checked_root_path(said[b"prefix"])
            except ValueError:
                root_path = self._root_path
        scheme = said.get(b"proto", "").lower()
        hosts = _hosts(said.get(b"host", "").lower(), scheme, said.get(b"port", ""))
        return Forwarded(root_path=root_path, scheme=scheme if scheme in _DEFAULT_PORTS else None, hosts=hosts)

    def _is_trusted(self, client: str | None) -> bool:
        try:
            address = ip_address(client or "")
        except ValueError:
            return False  # a Unix socket has none
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._trusted)


def _hosts(host: str, scheme: str, port: str) -> tuple[str, ...]:
    found = _HOST.fullmatch(host)
    if len(host) > _LONGEST or found is None:
        return ()
    name, own_port = found[1], found[2] or ""
    if own_port == f":{_DEFAULT_PORTS.get(scheme)}":
        own_port = ""  # as browsers write it
    if not own_port and port.isascii() and port.isdigit() and port != _DEFAULT_PORTS.get(scheme):
        return name, f"{name}:{port[:5]}"  # many proxies name the host without its port
    return (f"{name}{own_port}",)
