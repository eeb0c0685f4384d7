"""The installed distribution: its name, its version, and the command that adds an extra to it."""

from __future__ import annotations

import json
import shlex
from urllib.parse import urlsplit
from urllib.request import url2pathname

__all__ = ["DISTRIBUTION", "install_command", "installed_version"]

DISTRIBUTION = "terrace-inference"
"""Name on a package index. The distribution called `terrace` there is another project."""


def installed_version() -> str:
    """Version of the installed distribution."""
    from importlib.metadata import version  # takes time that a start without it saves

    return version(DISTRIBUTION)


def install_command(*extras: str) -> str:
    """The command that installs these extras from where the distribution came: a checkout, a wheel or an index."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    return command_for(origin, extras)


def command_for(origin: str | None, extras: tuple[str, ...]) -> str:
    """The same for an origin.

    Args:
        origin: content of `direct_url.json` (PEP 610), which pip writes unless the distribution came from an index.
    """
    wanted = f"[{','.join(extras)}]" if extras else ""
    what, flag = DISTRIBUTION, ""
    if origin is not None:
        facts = json.loads(origin)
        parts = urlsplit(facts["url"])
        what = url2pathname(parts.path) if parts.scheme == "file" else f"{DISTRIBUTION}{wanted} @ {facts['url']}"
        wanted = wanted if parts.scheme == "file" else ""
        flag = "-e " if facts.get("dir_info", {}).get("editable") else ""
    return f"pip install {flag}{shlex.quote(what + wanted)}"
