"""Options that several commands have in common."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tierkit.client import DEFAULT_URL, Backoff, Client
from tierkit.types import Tier

__all__ = ["DEFAULT_PORT", "DEFAULT_URL", "Json", "SchedulerUrl", "Untrusted", "UpperTier", "connect"]

DEFAULT_PORT = 8070
"""Where `terrace up` puts the scheduler, and so where the other commands look for it."""

_PATIENCE_S = 10.0

SchedulerUrl = Annotated[
    str, typer.Option("--scheduler", envvar="TERRACE_SCHEDULER", metavar="URL", help="Where the scheduler listens.")
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else on standard output.")]


class UpperTier(StrEnum):
    """A tier that may be kept from pixels; end devices hold them anyway."""

    EDGE = Tier.EDGE
    CLOUD = Tier.CLOUD


Untrusted = Annotated[
    list[UpperTier] | None,
    typer.Option("--untrusted", help="A tier that must not see pixels; may be given more than once."),
]


def connect(url: str) -> Client:
    """A client for one command: a person waits, so it gives up early. What takes long (an upload, following a job) is
    bounded by other means."""
    return Client(url, timeout_s=_PATIENCE_S, backoff=Backoff(attempts=2))
