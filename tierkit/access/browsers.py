"""Requests that a page of another site has a browser send. Pure.

A browser sends requests for any page that is open in it. They may go to services that only this machine or this network
can reach, and carry the cookie of a service. `Origin` names the page, and `Host` the name by which it found the
service; the page can choose neither.
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

    Programs other than browsers send no `Origin`, and pass. An https origin of the same host counts as the service's
    own: there TLS ends in front of the service.

    Args:
        scheme: scheme of the request, http or https.
        headers: names in lower case.
        by_cookie: a cookie identifies the caller. Browsers add it to the requests of any page, so such a request must
            name its origin.
        hosts: names by which browsers know the service, given by a trusted proxy in front of it, in lower case.

    Raises:
        Forbidden: the request is one of those.
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
                "the request comes from a page of another origin, which may change nothing here; behind a reverse "
                "proxy, let the proxy send X-Forwarded-Host and X-Forwarded-Proto, and name its address with "
                "--trusted-proxies"
            )
    if by_cookie and found.get(b"sec-fetch-site", b"none") not in _SAME_SITE:
        raise Forbidden("the request comes from a page of another site, which may change nothing here")


@lru_cache(64)
def _is_local(host: bytes) -> bool:
    return _LOCAL.fullmatch(host.decode("latin-1").lower()) is not None


def check_host(headers: Headers, own: Collection[str]) -> None:
    """Refuse a request whose header Host gives a name that does not belong to this machine. For services without
    tokens.

    The owner of a public name can point it at 127.0.0.1, so that their page has the same origin as the service (DNS
    rebinding). Addresses are accepted, and so are names without a dot, which cannot be registered.

    Args:
        headers: names in lower case.
        own: further names of the machine, in lower case.

    Raises:
        Forbidden: the name is not one of this machine.
    """
    for name, value in headers:
        if name != b"host":
            continue
        if not _is_local(value) and value.decode("latin-1").lower().partition(":")[0].rstrip(".") not in own:
            raise Forbidden(
                "the name in the header Host is not this machine's: use 127.0.0.1 or localhost, or start the service "
                "with --tokens FILE, and it can be called by any name"
            )
