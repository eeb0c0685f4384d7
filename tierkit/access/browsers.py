"""Requests that a page of another site has a browser send. Pure.

A browser sends requests for any page that is open in it, also to services that only this machine or this network can
reach, and with the cookie of a service. It says in `Origin` which page asks, and in `Host` by which name it has found
the service; neither can be chosen by the page.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache

from tierkit.errors import Forbidden

__all__ = ["READS", "check_host", "check_origin"]

READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing. A page can send them anywhere, but cannot read the answers of other origins."""

_SAME_SITE = (b"same-origin", b"none")
"""Values of Sec-Fetch-Site for a page of the service itself, and for what a person has typed in."""

_LOCAL = re.compile(
    r"""([0-9.]+                # an address: no name ends in a number, and browsers take it for none
      | \[[0-9a-f:.]+\]
      | [^.:\[\]]*\.?
      | .*\.localhost\.?
      )(:[0-9]*)?""",
    re.VERBOSE | re.DOTALL,
)
"""Values of Host that no owner of a public name can have lead here."""

Headers = Iterable[tuple[bytes, bytes]]


def check_origin(
    method: str, scheme: str, headers: Headers, *, by_cookie: bool = False, hosts: Collection[str] = ()
) -> None:
    """Refuse a request that changes something and comes from a page of another origin.

    Programs other than browsers send no `Origin`, and pass. An https origin of the same host is taken for the own one:
    there TLS ends in front of the service.

    Args:
        scheme: of the request, http or https.
        headers: names in lower case.
        by_cookie: the caller is known by a cookie, which browsers add to a request whoever has asked for it: then the
            request must say where it comes from.
        hosts: by which browsers know the service, as a trusted proxy in front of it says, in lower case.

    Raises:
        Forbidden: it does.
    """
    if method in READS:
        return
    found = {name: value for name, value in headers if name in (b"origin", b"host", b"sec-fetch-site")}
    origin = found.get(b"origin")
    if origin is None and by_cookie:
        raise Forbidden("with a session cookie, a request that changes something needs the header Origin")
    if origin is not None:
        names = (found.get(b"host", b"").lower(), *(host.encode() for host in hosts))
        own = {b"%b://%b" % (kind, name) for kind in (scheme.encode(), b"https") for name in names}
        if origin.lower() not in own:
            raise Forbidden(
                "the request comes from a page of another origin, which may change nothing here; if this is the "
                "service's own page behind a reverse proxy, let the proxy send X-Forwarded-Host and X-Forwarded-Proto, "
                "and name its address with --trusted-proxies"
            )
    if by_cookie and found.get(b"sec-fetch-site", b"none") not in _SAME_SITE:
        raise Forbidden("the request comes from a page of another site, which may change nothing here")


@lru_cache(64)
def _is_local(host: bytes) -> bool:
    return _LOCAL.fullmatch(host.decode("latin-1").lower()) is not None


def check_host(headers: Headers, own: Collection[str]) -> None:
    """Refuse a request that has found an open service under a name that is not its machine's.

    The owner of a public name can let it lead to 127.0.0.1, and their page would be of the same origin as the service
    then (DNS rebinding). Addresses, and names without a dot, which nobody can register, are no such names.

    Args:
        headers: names in lower case.
        own: further names of the machine, in lower case.

    Raises:
        Forbidden: it has.
    """
    for name, value in headers:
        if name != b"host":
            continue
        if not _is_local(value) and value.decode("latin-1").lower().partition(":")[0].rstrip(".") not in own:
            raise Forbidden(
                "the name in the header Host is not this machine's: use 127.0.0.1 or localhost, or start the service "
                "with --tokens FILE, and it can be called by any name"
            )
