"""The name of a node that nobody has named: the same at each start, and another one on each machine."""

from __future__ import annotations

import hashlib
import re
import socket
from pathlib import Path

__all__ = ["lasting_name"]

_MACHINE_ID = Path("/etc/machine-id")
_LONGEST_HOST = 40
"""A node id has 63 characters at most."""


def lasting_name(service: str, port: int, *, host: str | None = None, machine_id: Path = _MACHINE_ID) -> str:
    """Such as "pi-end-8071-3fa9". It begins with the machine's name, so that a token of that name is for it.

    Args:
        service: the tier.
        port: where the node listens; on one machine that tells it from others.
        host: the machine's name. Default: what the system says.
        machine_id: a file that tells machines of the same name apart. Where it cannot be read, they are not.
    """
    host = socket.gethostname() if host is None else host
    short = re.sub("[^a-z0-9]+", "-", host.partition(".")[0].lower())[:_LONGEST_HOST].strip("-")
    try:
        identity = machine_id.read_bytes().strip()
    except OSError:
        identity = b""
    # Not the identity itself, which is not for strangers: see machine-id(5).
    digits = hashlib.sha256(b"terrace node\n" + identity).hexdigest()[:4]
    return "-".join(part for part in (short, service, str(port), digits) if part)
