"""Addresses of services, as people and nodes write them."""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["checked_url"]


def checked_url(value: str) -> str:
    """An http or https URL with a host, without the slash at its end. Raises ValueError with the rule in words."""
    if not value.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    try:
        # urlsplit drops line breaks and keeps backslashes; other parsers see another host behind those.
        if not value.isprintable() or " " in value or "\\" in value:
            raise ValueError
        parts = urlsplit(value)
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("must name a host, and a port from 1 to 65535, such as http://10.0.0.1:8070")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must hold no user name and no password")
    if parts.query or parts.fragment:
        raise ValueError("must end before ? or #")
    return value.rstrip("/")
